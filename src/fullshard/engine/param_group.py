"""The parameters that communicate together: one group, its buffers and its life in a training step.

The hub of the engine: it calls storage, communication and parameters in turn; those do not call
each other. Its verbs stand in the order in which one step uses them:

    unshard            start gathering
    wait               the gathered parameters are on their modules, ready for compute
    use_sharded_params the sharded parameters are back on their modules, the gathered memory is kept
    reshard            ... and the gathered memory is given back

Gradients are the reducer's (`reducer`, a `GradientReducer`).
"""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fullshard import torch_border
from fullshard.comm import collectives
from fullshard.comm.all_gather import GroupAllGather, Messages, UnshardedInPlace
from fullshard.comm.all_gather_extensions import (
    ExtensionAllGather,
    SubclassAllGather,
    UnbufferedAllGather,
    agree_on_sizes,
)
from fullshard.comm.gradient_reducer import GradientReducer
from fullshard.comm.post_forward_shard import PostForwardShard
from fullshard.comm.spans import TraceRecorder
from fullshard.comm.streams import FSDPCommContext
from fullshard.errors import ConfigurationError
from fullshard.plan.mesh import DataParallelAxes, DataParallelMeshInfo, block_group
from fullshard.plan.placement import local_tensor
from fullshard.plan.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.storage.buffers import FlatShard, UploadBuffer
from fullshard.storage.param import (
    FSDPParam,
    ParamSwap,
    VersionGuard,
    fits_in_buffers,
    has_all_gather_extension,
)
from fullshard.storage.shard_formats import ShardFormat
from fullshard.storage.shard_storage import ShardStorage
from fullshard.storage.sharded_params import ShardedParam

_SERIAL_NUMBERS = itertools.count()


class ShardedState(enum.Enum):
    """Which face of a group's parameters is on the modules."""

    SHARDED = enum.auto()
    UNSHARDED = enum.auto()


class _Memory(enum.Enum):
    """Whether the gathered parameters are there."""

    ABSENT = enum.auto()
    IN_FLIGHT = enum.auto()
    PRESENT = enum.auto()


class _Labels(NamedTuple):
    """Names of a group's ranges in a profiler's trace."""

    gather: str
    copy_out: str


class GatherTraffic(NamedTuple):
    """Bytes of one gather, on this rank."""

    memory: int
    """Of the whole parameters in the compute dtypes, with padding; 0 if the shards themselves are used."""
    received: int
    """From other ranks. Parameters that gather themselves are counted once they have done so."""


class FSDPParamGroup:
    """Parameters that are gathered and reduced together; lives as long as their modules.

    Invariant: the unsharded face is on the modules only while the memory is PRESENT.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        mesh_info: DataParallelAxes,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        name: str,
        *,
        shard_format: ShardFormat,
        post_forward_size: int | None = None,
        low_precision_gradients: bool = False,
    ) -> None:
        """Shard the parameters, in the given form: from here on each rank keeps its piece only.

        With ``post_forward_size``, they are kept after forward in parts over so many ranks. With
        ``low_precision_gradients``, sharded gradients are in the compute dtype or, if nothing is sharded,
        in the reduce dtype.
        """
        self.params = tuple(params)
        self.serial_number = next(_SERIAL_NUMBERS)
        """Larger than that of all groups made before, as on every rank."""
        self.mesh_info = mesh_info
        self.device = device
        self.mp_policy = mp_policy
        self.shard_device, pinned = device, False
        """Where the shards rest."""
        if isinstance(offload_policy, CPUOffloadPolicy) and device.type != "cpu":
            self.shard_device, pinned = torch.device("cpu"), offload_policy.pin_memory
        self.name = name
        self._plain = [p for p in params if fits_in_buffers(local_tensor(p.the_original))]
        """Those that lie in the shard and gather buffers; the others are gathered apart."""
        self._part: PostForwardShard | None = None
        if post_forward_size is not None:
            assert mesh_info.shard_process_group is not None, "there is nothing to divide otherwise"
            block = block_group(mesh_info.shard_process_group, post_forward_size)
            self._part = PostForwardShard(
                block, shard_format.layout(self._plain, post_forward_size)
            )
        self.shards = ShardStorage(
            self.params,
            self._plain,
            shard_format,
            mesh_info,
            self.shard_device,
            name,
            pinned=pinned,
        )
        self.sharded_params = self.shards.sharded_params
        self.layout = self.shards.layout
        """Of all parameters; gradients are reduced by it."""
        self.custom_all_gather: collectives.AllGather | None = None
        self.reducer = GradientReducer(
            self.params,
            self.layout,
            mesh_info,
            device,
            by_segment=shard_format.by_segment,
            low_precision=low_precision_gradients,
            pinned=pinned,
        )
        self.sharded_state = ShardedState.SHARDED
        self.full_params_installed = False
        """Whether the modules have other parameters for a while: see `full_params`."""

        self._context: FSDPCommContext | None = None
        self._memory = _Memory.ABSENT
        self._gathering: GroupAllGather | UnshardedInPlace | None = None
        self._param_swap: ParamSwap | None = None
        """None until the unsharded faces have been made of the present gather buffer."""
        self._guard: VersionGuard | None = None
        """Of those faces; None also where they are aliases of the shards, whose memory stays."""
        self._in_use: GroupAllGather | UnshardedInPlace | None = None
        """How the parameters that are in memory, or on their way, are gathered."""
        self._finishes_late = False
        """Whether that gather is finished when it is waited for, not right after it was issued: the host must
        wait for it, or it takes more memory then, which others have given back by that time."""
        self._shard_version: int | None = None
        self._gathered_version = 0
        self.watch_gradient: Callable[[FSDPParam], None] | None = None
        """Called once for each new unsharded parameter that is trainable, to put a hook on it."""
        self._register_params()
        self._prepare_dtypes()
        _ALIVE[self.serial_number] = self  # last: other threads ask all there are for their state

    # --- at rest ----------------------------------------------------------------------------------

    def _prepare_dtypes(self) -> None:
        """Derive compute and reduce dtypes from the shards' dtypes, and drop what was built on older ones."""
        policy = self.mp_policy
        compute_dtypes = {
            param: policy.param_dtype
            if policy.param_dtype is not None and param.dtype.is_floating_point
            else param.dtype
            for param in self.params
        }
        self.compute_dtypes = [compute_dtypes[param] for param in self._plain]
        """Of the parameters that lie in the gather buffer."""
        self.reducer.derive_dtypes(policy, [*compute_dtypes.values()])
        self._self_gathered = [
            self._gathered_apart(param)
            for param in self.params
            if param.sharded_param not in self.shards.shard_views
        ]
        self._message_sizes: list[list[int]] | None = None
        self._upload: UploadBuffer | None = None
        self._drop_gatherings()

    def _gathered_apart(self, param: FSDPParam) -> UnbufferedAllGather:
        if not has_all_gather_extension(param.sharded_param.local):
            return SubclassAllGather(param, self.mp_policy, self.layout.world)
        assert isinstance(self.mesh_info, DataParallelMeshInfo), "the protocol is told of a mesh"
        return ExtensionAllGather(param, self.mp_policy, self.mesh_info.shard_mesh)

    @torch.no_grad()
    def _notice_protocols(self) -> None:
        """Let shards that were given an all-gather protocol after sharding gather themselves.

        Before: any state. After: if there are such shards, SHARDED and memory ABSENT.
        """
        late = [
            param for param in self._plain if has_all_gather_extension(param.sharded_param.local)
        ]
        as_plain = [
            each.param for each in self._self_gathered if isinstance(each, SubclassAllGather)
        ]
        if not late and not any(
            has_all_gather_extension(param.sharded_param.local) for param in as_plain
        ):
            return
        if self._part is not None:
            raise ConfigurationError(
                "reshard_after_forward as an int keeps plain tensors, but the shards of these got an all-gather protocol: "
                f"{[param.name for param in late]}. Use True or False."
            )
        self.reshard()
        self._plain = [param for param in self._plain if param not in late]
        self.shards.move_out_of_buffer(late)
        self._prepare_dtypes()

    def set_mp_policy(self, policy: MixedPrecisionPolicy) -> None:
        """Compute and reduce in other dtypes from now on."""
        if policy != self.mp_policy:
            self.reshard()
            self.mp_policy = policy
            self._prepare_dtypes()

    def _drop_gatherings(self) -> None:
        """Build anew what depends on how parameters are gathered."""
        self._gathering = None
        self._param_swap = None
        self._guard = None
        if self._part is not None:
            self._part.forget_memory()

    @torch.inference_mode(False)
    @torch.no_grad()
    def repack(self) -> None:
        """Read the sharded parameters anew from the modules, and pack them if anything was replaced.

        Before: any state. After: SHARDED and, if something was, memory ABSENT.
        """
        self.use_sharded_params()
        replacements = self.shards.replacements(self.name)
        if not replacements:
            return
        self.reshard()
        self.shards.adopt(replacements, self.name)
        self._register_params()
        self._prepare_dtypes()

    def _register_params(self) -> None:
        """Let `groups_of` know the sharded parameters, which may be others than before."""
        _GROUPS.update((id(sharded_param.param), self) for sharded_param in self.sharded_params)

    def notice_replacements(self) -> None:
        """Read the shards anew if a parameter, or its data, was replaced behind our back: ``param.data = ...``."""
        self._notice_sharded_put_back()
        on_modules = self.sharded_state is ShardedState.SHARDED
        if not self.full_params_installed and self.shards.disturbed(on_modules=on_modules):
            self.repack()

    def _notice_sharded_put_back(self) -> None:
        """`torch.func.functional_call` puts back what was there before: sharded parameters, if it was given these."""
        if self.sharded_state is ShardedState.UNSHARDED and self.shards.on_modules:
            self.sharded_state = ShardedState.SHARDED

    @property
    def resting(self) -> bool:
        """Whether the sharded parameters should be on the modules now."""
        return self.sharded_state is ShardedState.SHARDED and not self.full_params_installed

    def refresh_shards(self) -> None:
        """Let the shards be what users see and have made of them, for all who read or write them outside of a step.

        Before: any state, but nothing is shown. After: SHARDED, memory ABSENT; the sharded parameters are those
        on the modules, and lie in the shard buffer.
        """
        self.check_nothing_assigned()
        self.notice_replacements()
        self.reshard()

    def check_nothing_assigned(self) -> None:
        """Refuse what users assigned while the unsharded parameters were on the modules: it would be lost.

        Data that were assigned to an unsharded parameter would also keep it from seeing what is gathered next. So
        the parameters are made anew after the error.
        """
        self._notice_sharded_put_back()
        if self.sharded_state is ShardedState.SHARDED or self._param_swap is None:
            return
        assigned = self._param_swap.replaced()
        if assigned:
            self.reshard()
            self._param_swap = None
            raise ConfigurationError(
                "Parameters are replaced while they are sharded; these were replaced while they were gathered, and what "
                f"was assigned is not kept: {assigned} of group {self.name!r}. Assign them after reshard(), or, with "
                "FullyShardedDataParallel, within summon_full_params."
            )

    @property
    def offloaded(self) -> bool:
        """Whether the shards rest elsewhere than compute happens."""
        return self.shards.buffer.device != self.device

    def connect(self, context: FSDPCommContext, name: str) -> None:
        """Join a model's streams, under the group's full name in it."""
        self._wait_for_gather()  # one issued before, on streams of its own
        self._notice_protocols()
        self._context = context
        self.name = name
        self._labels = _Labels(f"FSDP::all_gather ({name})", f"FSDP::all_gather_copy_out ({name})")
        context.host_reads_results = context.host_reads_results or self.offloaded
        self._gathered = context.new_event()
        self._released = context.new_event()
        self.reducer.connect(context, self)

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

    def ensure_unsharded(self, *, may_stay: bool = False) -> int:
        """Put the unsharded parameters on their modules, whatever is missing for it; return their weight version.

        Before: any state. After: UNSHARDED.
        """
        self.unshard(may_stay=may_stay)
        self.wait()
        return self.weight_version

    def unshard(self, *, may_stay: bool = False) -> None:
        """Start gathering the parameters, unless that has been done.

        With ``may_stay``, the parameters may outlive this step, so that writes to the shards must be noticed.

        Before: any state. After: memory IN_FLIGHT or PRESENT; the faces are unchanged.
        """
        if self._memory is not _Memory.ABSENT:
            return
        context = self.context
        recorder = context.recorder
        wire = None if recorder is None else recorder.transfer("gather", self)
        with torch_border.profiler_range(self._labels.gather), context.all_gather:
            context.wait_for_releases()  # before the allocation: [Note: memory and streams], rule 1
            gathering: GroupAllGather | UnshardedInPlace
            if self._part is not None and self._part.held:
                gathering, copy_in, extra = self._part.gathering, self._part.copy_in, None
            else:
                gathering, copy_in = self._gathering or self._own_gathering(), self._copy_in
                self._gathered_version = self.shards.version
                extra = self._messages() if self._self_gathered else None
            gathering.start(copy_in, extra, async_op=not context.asynchronous, wire=wire)
            self._in_use = gathering
            self._finishes_late = (
                not context.asynchronous or gathering.takes_memory_late or bool(self._self_gathered)
            )
            if not self._finishes_late:
                gathering.finish()
            self._gathered.record()
        if recorder is not None:
            recorder.note_gathered(self)
        self._memory = _Memory.IN_FLIGHT
        self._shard_version = self.shards.version if may_stay else None

    def _copy_in(self, own: FlatShard) -> None:
        """Cast and copy this rank's shard to where it is sent from, on the current (all-gather) stream."""
        if not self._plain:
            return
        if not self.offloaded:
            own.copy_from(self.shards.buffer.own)
            return
        if self._upload is None:
            dtypes = [param.dtype for param in self._plain]
            rank = self.mesh_info.shard_mesh_rank
            self._upload = UploadBuffer(self.shards.packed_layout, rank, dtypes, self.device)
        own.copy_from(self._upload.upload(self.shards.buffer))
        self._upload.release()

    def _messages(self) -> Messages:
        """What the parameters that gather themselves send, on the current (all-gather) stream."""
        result = Messages()
        for member in self._self_gathered:
            member.prepare(self.device)
        group = self.mesh_info.shard_peers
        if self._message_sizes is None and self._self_gathered and group is not None:
            self._message_sizes = agree_on_sizes(self._self_gathered, group)
        for index, member in enumerate(self._self_gathered):
            if self._message_sizes is not None:
                member.pad(self._message_sizes[index])
            theirs = member.messages(self.mesh_info.shard_mesh_size)
            result.outputs.extend(theirs.outputs)
            result.inputs.extend(theirs.inputs)
        return result

    def _own_gathering(self) -> GroupAllGather | UnshardedInPlace:
        if self._gathering is None:
            # Made under inference_mode, the faces could never be trained.
            with torch.inference_mode(False):
                self._gathering = (
                    UnshardedInPlace(self.shards.buffer)
                    if self._is_resident
                    else self._gathering_on(self.device)
                )
        return self._gathering

    @property
    def _is_resident(self) -> bool:
        """Whether compute can use the shards themselves: they are whole, in its dtypes and on its device."""
        return self._rests_whole and not self.offloaded

    @property
    def _rests_whole(self) -> bool:
        return self.layout.world == 1 and self.compute_dtypes == [
            param.dtype for param in self._plain
        ]

    def _gathering_on(self, device: torch.device) -> GroupAllGather:
        return GroupAllGather(
            self.shards.packed_layout,
            self.mesh_info.shard_mesh_rank,
            self.mesh_info.shard_peers,
            self.compute_dtypes,
            device,
            self.custom_all_gather if self.mesh_info.shard_peers is not None else None,
        )

    def set_custom_all_gather(self, all_gather: collectives.AllGather | None) -> None:
        """Gather with a comm object from now on; None for the default."""
        if all_gather is self.custom_all_gather:
            return
        self.reshard()
        self.custom_all_gather = all_gather
        self._drop_gatherings()

    def _wait_for_gather(self) -> None:
        """Order the compute stream after the gather; what was packed is distributed first."""
        if self._memory is not _Memory.IN_FLIGHT:
            return
        assert self._in_use is not None, "a gather is in flight"
        context = self.context
        recorder = context.recorder
        if self._finishes_late:
            with torch_border.profiler_range(self._labels.copy_out), context.all_gather:
                context.wait_for_releases()  # memory is taken here, too: rule 1
                self._in_use.finish()
                for member in self._self_gathered:
                    member.finish()
                self._gathered.record()
            if recorder is not None:
                recorder.note_gathered(self)  # staging is given back, other memory was taken
        if recorder is None:
            self._gathered.wait()
        else:
            recorder.wait(self._gathered, self, "gather")
        self._memory = _Memory.PRESENT
        if self._guard is not None:
            self._guard.memory_is_there()
        self.drop_post_forward_shard()  # has been read

    def wait(self) -> None:
        """Wait for the gather and put the unsharded parameters on their modules.

        Before: memory IN_FLIGHT or PRESENT. After: UNSHARDED.
        """
        assert self._memory is not _Memory.ABSENT, "unshard comes before wait"
        self._wait_for_gather()
        sharded_params = self._param_swap or self._make_unsharded_params()
        for sharded_param in self.sharded_params:
            trainable = sharded_param.param.requires_grad
            if trainable is not sharded_param.trainable:
                self._set_trainable(sharded_param, trainable)
        if self.sharded_state is ShardedState.SHARDED:
            sharded_params.to_unsharded()
            self.sharded_state = ShardedState.UNSHARDED

    def _make_unsharded_params(self) -> ParamSwap:
        assert self._gathering is not None, "faces are made of gathered memory"
        with torch.inference_mode(False):
            for param, whole in zip(self._plain, self._gathering.params, strict=True):
                param.make_unsharded_param(whole)
            for member in self._self_gathered:
                assert member.whole is not None, "the gather has been finished"
                member.param.make_unsharded_param(member.whole)
        self._watch_gradients()
        self._param_swap = ParamSwap(self.params)
        if isinstance(self._gathering, GroupAllGather):
            self._guard = VersionGuard(self._plain)
            _GUARDED[self._guard.absent_version] = self
        return self._param_swap

    def _set_trainable(self, sharded_param: ShardedParam, trainable: bool) -> None:
        sharded_param.trainable = trainable
        for param in self.params:
            if param.sharded_param is sharded_param:
                param.set_trainable(trainable)
        self.reducer.forget_buffer()
        self._watch_gradients()

    def _watch_gradients(self) -> None:
        for param in self.params:
            if param.trainable and not param.watched and self.watch_gradient is not None:
                self.watch_gradient(param)

    # --- release ----------------------------------------------------------------------------------

    def use_sharded_params(self) -> None:
        """Put the sharded parameters back on their modules and keep the gathered memory.

        Before: any state. After: SHARDED; the memory is as it was.
        """
        if self.sharded_state is ShardedState.UNSHARDED:
            assert self._param_swap is not None, "both faces exist once a group has been unsharded"
            self._param_swap.to_sharded()
            self.sharded_state = ShardedState.SHARDED

    def reshard(self) -> None:
        """Put the sharded parameters back on their modules and give the gathered memory back.

        Before: any state. After: SHARDED, memory ABSENT; tensors that autograd saved stay valid
        objects and see the data again after the next gather.
        """
        self._give_memory_back()
        self.drop_post_forward_shard()

    def reshard_after_forward(self) -> None:
        """The same, but with a part kept for backward to gather from, if the group was told to."""
        if self._part is None or self._memory is _Memory.ABSENT or not torch.is_grad_enabled():
            self.reshard()
            return
        self._wait_for_gather()
        whole = self._own_gathering()
        assert isinstance(whole, GroupAllGather), "a part is kept of what several ranks hold"
        self._part.keep(whole, self.compute_dtypes, self.custom_all_gather, self.context)
        if self.context.recorder is not None:
            self.context.recorder.note_gathered(self)  # the part and the whole, both
        self._give_memory_back()

    def disable_post_forward_shard(self) -> None:
        """After forward, keep the whole parameters or nothing from now on."""
        self._wait_for_gather()  # it may be reading the part
        self.drop_post_forward_shard()
        self._part = None

    def drop_post_forward_shard(self) -> None:
        """Forget what was kept for backward to gather from, unless it is being gathered."""
        if self._part is not None and self._part.held and self._memory is not _Memory.IN_FLIGHT:
            self._part.drop()
            if self.context.recorder is not None:
                self.context.recorder.note_gathered(self)

    def _give_memory_back(self) -> None:
        self.use_sharded_params()
        if self._memory is _Memory.ABSENT:
            return
        assert self._in_use is not None, "present memory was gathered"
        self._wait_for_gather()  # used or not: [Note: memory and streams], rule 3
        self._released.record()
        self._in_use.release()
        if self._guard is not None:
            self._guard.memory_is_absent()
        for member in self._self_gathered:
            member.release()
        self.context.note_release(self._released)
        self._memory = _Memory.ABSENT
        if self.context.recorder is not None and isinstance(self._in_use, GroupAllGather):
            self.context.recorder.released(self)

    def lends(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in gathered memory, and so is lost when that is given back."""
        return isinstance(self._in_use, GroupAllGather) and self._in_use.buffer.contains(tensor)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory for gathering that the group has now: whole parameters, staging, a part that is kept.

        Not what is taken and given back within one call: shards on their way up from host memory.
        """
        held = 0 if self._gathering is None else self._gathering.held_bytes
        if self._part is not None:
            held += self._part.held_bytes
        for member in self._self_gathered:
            held += member.held_bytes
        return held

    def note_memory(self, recorder: TraceRecorder) -> None:
        """Tell somebody who begins to record what the group holds now."""
        recorder.note_gathered(self)
        self.reducer.note_memory(recorder)

    @property
    def weight_version(self) -> int:
        """Tells whether weights changed: of those in memory or kept for backward, or else of the shards.

        A write to the shards changes what a later gather brings, not what has been gathered. Parameters that
        are never gathered are the shards.
        """
        held = self.gathered or (self._part is not None and self._part.held)
        if held and not isinstance(self._in_use, UnshardedInPlace):
            return self._gathered_version
        return self.shards.version

    def remember_shards(self) -> None:
        """Note the state of the shards that are being gathered, for a group that may stay gathered.

        Right after `unshard`; see `outdated`.
        """
        self._shard_version = self.shards.version

    @property
    def outdated(self) -> bool:
        """Whether the shards were, or may have been, changed in place after they were gathered.

        By an optimizer, say. Nothing is known of a group whose shards were not remembered.
        """
        return self.gathered and self._shard_version != self.shards.version

    # --- what is said about it ---------------------------------------------------------------------

    def gather_traffic(self) -> GatherTraffic:
        """What gathering takes, on any device and before anything has been gathered.

        Read off a buffer without memory that is made as the real one is.
        """
        memory = received = 0
        if not self._rests_whole or self.shard_device != self.device:
            gathering = self._gathering_on(torch.device("meta"))
            memory, received = gathering.buffer.nbytes, gathering.received_bytes
        for sizes in self._message_sizes or ():
            received += sum(sizes) * (self.layout.world - 1)
        return GatherTraffic(memory, received)

    def __repr__(self) -> str:
        return f"FSDPParamGroup({self.name!r}, {len(self.params)} parameters)"


_GROUPS: weakref.WeakValueDictionary[int, FSDPParamGroup] = weakref.WeakValueDictionary()
"""By the ids of their sharded parameters; of one that is gone, its id may have been given to another tensor."""
_ALIVE: weakref.WeakValueDictionary[int, FSDPParamGroup] = weakref.WeakValueDictionary()
"""All there are, by their serial numbers."""
_GUARDED: weakref.WeakValueDictionary[int, FSDPParamGroup] = weakref.WeakValueDictionary()
"""By the versions that their unsharded parameters have while these have no memory."""


def group_without_memory(version: int) -> FSDPParamGroup | None:
    """The group whose unsharded parameters are at ``version`` because they have no memory; see `VersionGuard`."""
    return _GUARDED.get(version)


def groups_of(params: Iterable[Tensor]) -> list[FSDPParamGroup]:
    """The groups to which some of the parameters belong, and maybe others."""
    found = (_GROUPS.get(id(param)) for param in params)
    return list(dict.fromkeys(group for group in found if group is not None))


def unsharded_groups() -> list[FSDPParamGroup]:
    """All groups of this process whose unsharded parameters are on the modules; between steps usually none."""
    alive = (reference() for reference in _ALIVE.valuerefs())
    return [group for group in alive if group and group.sharded_state is ShardedState.UNSHARDED]
