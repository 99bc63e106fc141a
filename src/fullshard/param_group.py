"""The parameters that communicate together: one group, its buffers and its life in a training step.

The hub of the engine: it calls storage, communication and parameters in turn; those do not call
each other. Its verbs stand in the order in which one step uses them:

    unshard            start gathering
    wait               the gathered parameters are on their modules, ready for compute
    hide               the sharded parameters are back on their modules, the gathered memory is kept
    reshard            ... and the gathered memory is given back
    collect_gradients  unsharded gradients are moved into the reduce buffer
    reduce_gradients   ... and on their way to the sharded parameters
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import Work

from . import comm, gradients, torch_border
from .buffers import GatherBuffer, ReduceBuffer, ShardBuffer, UploadBuffer
from .errors import ConfigurationError
from .layout import gathers_in_place, per_row_layout
from .mesh import FSDPMeshInfo
from .param import FaceSwitch, FSDPParam
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .streams import FSDPCommContext


class ShardedState(enum.Enum):
    """Which face of a group's parameters is on the modules."""

    SHARDED = enum.auto()
    UNSHARDED = enum.auto()


class _Memory(enum.Enum):
    """Whether the gathered parameters are there."""

    ABSENT = enum.auto()
    IN_FLIGHT = enum.auto()
    PRESENT = enum.auto()


class FSDPParamGroup:
    """Parameters that are gathered and reduced together; lives as long as their modules.

    Invariant: the unsharded face is on the modules only while the memory is PRESENT.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        mesh_info: FSDPMeshInfo,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        name: str,
    ) -> None:
        """Shard the parameters: from here on each rank keeps its piece only."""
        self.params = tuple(params)
        self.mesh_info = mesh_info
        self.device = device
        self.mp_policy = mp_policy
        self.shard_device, self._pins = device, False
        """Where the shards rest, and whether in page-locked memory."""
        if isinstance(offload_policy, CPUOffloadPolicy) and device.type != "cpu":
            self.shard_device, self._pins = torch.device("cpu"), offload_policy.pin_memory
        self.name = name
        self.layout = per_row_layout(
            [param.shape for param in params],
            world=mesh_info.shard_mesh_size,
            dims=[param.shard_dim for param in params],
        )
        self.custom_all_gather: comm.AllGather | None = None
        self.reduction = gradients.ReductionSettings(process_group=mesh_info.shard_process_group)
        self.sharded_state = ShardedState.SHARDED

        self._context: FSDPCommContext | None = None
        self._memory = _Memory.ABSENT
        self._gather: GatherBuffer | None = None
        self._faces: FaceSwitch | None = None
        """None until the unsharded faces have been made of the present gather buffer."""
        self._gather_work: Work | None = None
        self._custom_output: Tensor | None = None
        self._shard_versions: int | None = None
        self.unwatched: list[FSDPParam] = []
        """Trainable parameters of whose gradients nobody is told yet."""
        self._reduce: ReduceBuffer | None = None
        self._held: set[int] = set()
        self._partial: dict[int, Tensor] = {}
        """Reduced shards that wait to be summed over replicas."""
        self._shard_originals()

    # --- at rest ----------------------------------------------------------------------------------

    @torch.no_grad()
    def _shard_originals(self) -> None:
        """Copy this rank's pieces into one shard buffer and put DTensor faces on the modules."""
        originals = [param.original for param in self.params]
        rank = self.mesh_info.shard_mesh_rank
        on_meta = originals[0] is not None and originals[0].is_meta  # all of them, or none
        device = torch.device("meta") if on_meta else self.shard_device
        self._shards = self._new_shard_buffer(device)
        for index, (param, original) in enumerate(zip(self.params, originals, strict=True)):
            assert original is not None, "a group shards each parameter once"
            local = self._shards.locals[index]
            if device.type != "meta":
                slot, piece = self.layout.slots[index], self.layout.piece(index, rank)
                whole = original.detach()
                local.copy_(
                    whole
                    if whole.ndim == 0
                    else whole.narrow(slot.dim, piece.start, piece.shape[slot.dim])
                )
            param.make_sharded_face(local, self.layout.slots[index], self.mesh_info, self.name)
        self._prepare_dtypes()

    def _prepare_dtypes(self) -> None:
        """Derive compute and reduce dtypes from the shards' dtypes, and drop what was built on older ones."""
        policy = self.mp_policy
        self._compute_dtypes = [
            policy.param_dtype
            if policy.param_dtype is not None and param.dtype.is_floating_point
            else param.dtype
            for param in self.params
        ]
        self._reduce_dtypes = [policy.reduce_dtype or dtype for dtype in self._compute_dtypes]
        self._gather = None
        self._faces = None
        self._reduce = None
        self._upload: UploadBuffer | None = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def repack(self) -> None:
        """Read the sharded parameters anew from the modules, and pack them if anything was replaced.

        Users move, cast, re-materialise and assign parameters; afterwards the objects on the
        modules are the truth, and their data is copied into a new shard buffer.
        """
        self.hide()
        faces = [param.owners[0].current() for param in self.params]
        if all(self._is_packed(index, face) for index, face in enumerate(faces)):
            return
        faults = [
            param.replacement_fault(face) for param, face in zip(self.params, faces, strict=True)
        ]
        if any(faults):
            raise ConfigurationError(
                "Sharded parameters may be replaced by DTensors of the same shape and placements only:\n  "
                + "\n  ".join(fault for fault in faults if fault)
                + "\nConvert full tensors with torch.distributed.tensor.distribute_tensor, or load them with "
                "torch.distributed.checkpoint.state_dict.set_model_state_dict."
            )
        self.reshard()
        for param, face in zip(self.params, faces, strict=True):
            assert face is not None, "replacement_fault refuses None"
            param.adopt(face, self.name)
        locals_ = [param.local for param in self.params]
        devices = {local.device for local in locals_}
        if len(devices) > 1:
            raise ConfigurationError(
                f"All parameters of a group must be on one device; group {self.name!r} has them on "
                f"{sorted(map(str, devices))}. Move the whole module."
            )
        self._shards = self._new_shard_buffer(devices.pop())
        for param, old, new in zip(self.params, locals_, self._shards.locals, strict=True):
            if not old.is_meta:
                new.copy_(old)
            torch_border.replace_local(param.sharded_param, new)
        self._prepare_dtypes()

    def _new_shard_buffer(self, device: torch.device) -> ShardBuffer:
        return ShardBuffer(
            self.layout,
            self.mesh_info.shard_mesh_rank,
            [param.dtype for param in self.params],
            device,
            pinned=self._pins and device.type == "cpu",
        )

    @property
    def offloaded(self) -> bool:
        """Whether the shards rest elsewhere than compute happens."""
        return self._shards.device != self.device

    def _is_packed(self, index: int, face: Tensor | None) -> bool:
        param = self.params[index]
        return (
            face is param.sharded_param
            and torch_border.local_of(face) is self._shards.locals[index]
            and all(owner.current() is face for owner in param.owners)
        )

    def misplaced(self) -> list[str]:
        """Names of parameters that are not where the group's shards rest, with where they are."""
        device = self.shard_device
        return [
            f"{param.name} is on {param.local.device}"
            for param in self.params
            if param.local.device != device
        ]

    def connect(self, context: FSDPCommContext, name: str) -> None:
        """Join a model's streams, under the group's full name in it."""
        self._wait_for_gather()  # one issued before, on streams of its own
        self._context = context
        self.name = name
        context.host_reads_results = context.host_reads_results or self.offloaded
        self._gathered = context.new_event()
        self._released = context.new_event()
        self._reduce_events = gradients.ReduceEvents.new(context)

    @property
    def context(self) -> FSDPCommContext:
        """The model's streams; streams of its own for a group used before the model's first forward."""
        if self._context is None:
            self.connect(FSDPCommContext(self.device), self.name)
            assert self._context is not None
        return self._context

    # --- unshard ----------------------------------------------------------------------------------

    @property
    def gathered(self) -> bool:
        """Whether the whole parameters are in memory or on their way."""
        return self._memory is not _Memory.ABSENT

    def unshard(self) -> None:
        """Start gathering the parameters, unless that has been done.

        Before: any state. After: memory IN_FLIGHT or PRESENT; the faces are unchanged.
        """
        if self._memory is not _Memory.ABSENT:
            return
        context = self.context
        with context.all_gather:
            context.wait_for_releases()  # before the allocation: [Note: memory and streams], rule 1
            async_op = not context.asynchronous
            if self.custom_all_gather is not None:
                self._gather_work = self._custom_gather(self.custom_all_gather, async_op)
            else:
                buffer = self._gather_buffer()
                buffer.allocate()
                self._copy_in(buffer.own_pieces)
                self._gather_work = comm.all_gather(
                    buffer.outputs,
                    buffer.inputs,
                    self.mesh_info.shard_process_group,
                    async_op=async_op,
                )
                if context.asynchronous and not buffer.packed:
                    buffer.copy_out()
            self._gathered.record()
        self._memory = _Memory.IN_FLIGHT
        self._shard_versions = None

    def _copy_in(self, own_pieces: list[Tensor]) -> None:
        """Cast and copy this rank's shard to where it is sent from, on the current (all-gather) stream."""
        if not self.offloaded:
            torch._foreach_copy_(own_pieces, self._shards.pieces)
            return
        if self._upload is None:
            dtypes = [param.dtype for param in self.params]
            rank = self.mesh_info.shard_mesh_rank
            self._upload = UploadBuffer(self.layout, rank, dtypes, self.device)
        torch._foreach_copy_(own_pieces, self._upload.upload(self._shards))
        self._upload.release()

    def _gather_buffer(self) -> GatherBuffer:
        if self._gather is None:
            # Made under inference_mode, the faces could never be trained.
            with torch.inference_mode(False):
                self._gather = GatherBuffer(
                    self.layout,
                    self.mesh_info.shard_mesh_rank,
                    self._compute_dtypes,
                    self.device,
                    packed=self.custom_all_gather is not None
                    or not gathers_in_place(self.layout, self._compute_dtypes),
                )
        return self._gather

    def set_custom_all_gather(self, all_gather: comm.AllGather | None) -> None:
        """Gather with a comm object from now on; None for the default."""
        if all_gather is self.custom_all_gather:
            return
        self.reshard()
        self.custom_all_gather = all_gather
        self._gather = self._faces = None

    def _custom_gather(self, all_gather: comm.AllGather, async_op: bool) -> Work | None:
        """Stage this rank's message in memory of the comm object, and gather with it."""
        buffer = self._gather_buffer()
        world, rank = self.layout.world, self.mesh_info.shard_mesh_rank
        dtypes = set(self._compute_dtypes)
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        numel = buffer.packed_nbytes // dtype.itemsize
        output = all_gather.allocate((numel * world,), dtype=dtype, device=self.device)
        self._custom_output = output.view(torch.uint8).view(world, -1)
        self._copy_in(buffer.own_pieces_in(self._custom_output))
        group, own = self.mesh_info.shard_process_group, output.view(world, -1)[rank]
        return comm.packed_all_gather(all_gather, output, own, group, async_op=async_op)

    def _wait_for_gather(self) -> None:
        """Order the compute stream after the gather; what was packed is distributed first."""
        if self._memory is not _Memory.IN_FLIGHT:
            return
        buffer, context = self._gather_buffer(), self.context
        if buffer.packed or not context.asynchronous:
            with context.all_gather:
                self._copy_out(buffer)
                self._gathered.record()
        self._gathered.wait()
        self._memory = _Memory.PRESENT

    def _copy_out(self, buffer: GatherBuffer) -> None:
        if self._gather_work is not None:
            self._gather_work.wait()
            self._gather_work = None
        if buffer.packed:
            self.context.wait_for_releases()
            buffer.allocate_params()
        if self._custom_output is None:
            buffer.copy_out()
        else:
            assert self.custom_all_gather is not None, "it changes between gathers only"
            buffer.copy_out_of(self._custom_output)
            self.custom_all_gather.release(self._custom_output)  # on the stream that allocated it
            self._custom_output = None

    def wait(self) -> None:
        """Wait for the gather and put the unsharded parameters on their modules.

        Before: memory IN_FLIGHT or PRESENT. After: UNSHARDED.
        """
        assert self._memory is not _Memory.ABSENT, "unshard comes before wait"
        self._wait_for_gather()
        faces = self._faces or self._make_unsharded_faces()
        for param in self.params:
            trainable = param.sharded_param.requires_grad
            if trainable is not param.trainable:
                param.set_trainable(trainable)
                self._reduce = None
                self._find_unwatched()
        if self.sharded_state is ShardedState.SHARDED:
            faces.to_unsharded()
            self.sharded_state = ShardedState.UNSHARDED

    def _make_unsharded_faces(self) -> FaceSwitch:
        assert self._gather is not None, "faces are made of gathered memory"
        with torch.inference_mode(False):
            for param, whole in zip(self.params, self._gather.params, strict=True):
                param.make_unsharded_face(whole)
        self._find_unwatched()
        self._faces = FaceSwitch(self.params)
        return self._faces

    def _find_unwatched(self) -> None:
        self.unwatched = [p for p in self.params if p.trainable and not p.watched]

    # --- release ----------------------------------------------------------------------------------

    def hide(self) -> None:
        """Put the sharded parameters back on their modules and keep the gathered memory.

        Before: any state. After: SHARDED; the memory is as it was.
        """
        if self.sharded_state is ShardedState.UNSHARDED:
            assert self._faces is not None, "both faces exist once a group has been unsharded"
            self._faces.to_sharded()
            self.sharded_state = ShardedState.SHARDED

    def reshard(self) -> None:
        """Put the sharded parameters back on their modules and give the gathered memory back.

        Before: any state. After: SHARDED, memory ABSENT; tensors that autograd saved stay valid
        objects and see the data again after the next gather.
        """
        self.hide()
        if self._memory is _Memory.ABSENT:
            return
        assert self._gather is not None, "present memory has a buffer"
        self._wait_for_gather()  # used or not: [Note: memory and streams], rule 3
        self._released.record()
        self._gather.release()
        self.context.note_release(self._released)
        self._memory = _Memory.ABSENT

    def remember_shards(self) -> None:
        """Note the state of the shards that are being gathered, for a group that may stay gathered.

        Right after `unshard`; see `outdated`.
        """
        self._shard_versions = self._versions()

    @property
    def outdated(self) -> bool:
        """Whether the shards were, or may have been, changed in place after they were gathered.

        By an optimizer, say. Nothing is known of a group whose shards were not remembered.
        """
        return self.gathered and self._shard_versions != self._versions()

    def _versions(self) -> int:
        # An operator on the DTensor counts there, one on its local tensor here.
        return sum(
            torch_border.version_of(param.sharded_param) + torch_border.version_of(param.local)
            for param in self.params
        )

    # --- gradients --------------------------------------------------------------------------------

    def collect_gradients(self) -> None:
        """Move the unsharded parameters' gradients into the reduce buffer, adding to what it holds.

        Before: gradients in `.grad` of unsharded parameters. After: those are None.
        """
        taken = gradients.take(self.params)
        if not taken:
            return
        gradients.fill(self._reserve_reduce_buffer(), taken, self._held)

    def _reserve_reduce_buffer(self) -> ReduceBuffer:
        """The reduce buffer with its memory present, and nobody else reading it."""
        buffer = self._reduce or self._rebuild_reduce_buffer()
        if not self._held:
            self.context.make_room_for_reduction()
            if buffer.allocated:  # this very group's previous reduction still reads it
                self.context.finish_inputs()
            buffer.allocate()
        return buffer

    def _rebuild_reduce_buffer(self) -> ReduceBuffer:
        """Make the reduce buffer for the parameters that are trainable now or have gradients."""
        if self._held:
            raise ConfigurationError(
                f"requires_grad of parameters in group {self.name!r} changed while gradients were accumulated "
                "without synchronisation. Change it after a step that synchronises, or call "
                "reset_iter_state() to drop what was accumulated."
            )
        self.context.make_room_for_reduction()
        trainable = [index for index, param in enumerate(self.params) if param.trainable]
        self._reduce = ReduceBuffer(
            self.layout,
            self.mesh_info.shard_mesh_rank,
            trainable,
            self._reduce_dtypes,
            [param.dtype for param in self.params],
            self.device,
        )
        self._reduce.release()
        return self._reduce

    def reduce_gradients(self, *, with_unused: bool = False) -> None:
        """Send the collected gradients on their way to the sharded parameters; nothing without gradients.

        Parameters that have partial sums from earlier, and with ``with_unused`` all trainable ones, take part
        as zeros if they have no gradient now.

        Before: gradients collected. After: a reduction is in flight; `join` on the context, at the
        latest, waits for it.
        """
        missing = set(self._partial) if self.reduction.all_reduce else set()
        if with_unused:
            missing.update(index for index, param in enumerate(self.params) if param.trainable)
        missing -= self._held
        if not self._held and not missing:
            return
        context, buffer = self.context, self._reserve_reduce_buffer()
        if missing:
            torch._foreach_zero_([t for index in sorted(missing) for t in buffer.targets[index]])
        reduction = gradients.Reduction(
            context,
            self._reduce_events,
            self.mesh_info,
            self.reduction,
            buffer,
            self.params,
            self._held | missing,
            self._partial,
        )
        self._held = set()
        reduction.issue()
        context.note_reduction(reduction)

    def drop_gradients(self) -> None:
        """Forget gradients that were not reduced: after a failed step."""
        gradients.take(self.params)
        self._held.clear()
        self._partial.clear()
        if self._reduce is not None and self._reduce.allocated:
            self._reduce.release()

    # --- names ------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"FSDPParamGroup({self.name!r}, {len(self.params)} parameters)"
