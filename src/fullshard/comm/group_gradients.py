"""The gradients of one group, from backward to their reduction.

    collect            unsharded gradients wait as they are, or are moved into a reduce buffer with all that waited
    prepare_reduction  ... and handed over to a reduction, which carries them to the sharded parameters
    clear, drop        ... or forgotten

Reduce buffers are reserved and given back here and by the reductions that read them, nowhere else.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor

from fullshard.comm import reductions
from fullshard.comm.reduce_buffer import ReduceBuffer
from fullshard.comm.spans import TraceRecorder
from fullshard.comm.streams import FSDPCommContext
from fullshard.comm.unreduced_gradients import UnreducedGradients
from fullshard.plan.layout import Layout, has_large_pieces
from fullshard.plan.mesh import DataParallelAxes
from fullshard.plan.policies import MixedPrecisionPolicy
from fullshard.storage.param import FSDPParam


class ReduceTraffic(NamedTuple):
    """Bytes of one reduction of all trainable parameters, on this rank."""

    sent: int
    """To other ranks, by a reduce-scatter or exchange."""
    all_reduced: int
    """To other replicas."""


class GroupGradients:
    """What of a group's gradients waits to be reduced, in which memory and dtypes."""

    def __init__(
        self,
        params: Sequence[FSDPParam],
        layout: Layout,
        mesh_info: DataParallelAxes,
        device: torch.device,
        *,
        by_segment: bool,
        low_precision: bool,
    ) -> None:
        """Of parameters that have no gradients yet; `derive_dtypes` and `connect` come before the first.

        Args:
            params: The group's parameters.
            layout: Of all of them.
            mesh_info: Over which ranks they are sharded and replicated.
            device: Where gradients are computed.
            by_segment: Whether one gradient lands for all parameters of a segment.
            low_precision: Whether gradients land in the compute dtype or, if nothing is sharded, as they were
                reduced.
        """
        self._params = params
        self._layout = layout
        self._mesh_info = mesh_info
        self._device = device
        self._by_segment = by_segment
        self._low_precision = low_precision
        self.reduce_dtypes: list[torch.dtype] = []
        self.gradient_dtypes: list[torch.dtype] = []
        """Of each parameter: in which gradients are summed over ranks, and in which they land."""
        self.wire_dtype: torch.dtype | None = None
        """In which gradients travel, if it is not the reduce dtype."""
        self._buffer: ReduceBuffer | None = None
        """For the gradients that are sent off; None until they are, or if it does not fit any longer."""
        self._filled: set[int] = set()
        """Parameters whose gradients are in it and not handed over yet."""
        self.unreduced = UnreducedGradients(params, layout)
        """Gradients of backwards without synchronisation."""
        self._partial: dict[int, Tensor] = {}
        """Reduced shards that wait to be summed over replicas."""

    def connect(self, context: FSDPCommContext, name: str) -> None:
        """Join a model's streams, under the group's full name in it."""
        self._context = context
        self._name = name
        self._events = reductions.ReduceEvents.new(context)

    def derive_dtypes(
        self, policy: MixedPrecisionPolicy, compute_dtypes: Sequence[torch.dtype]
    ) -> None:
        """Sum, send and land in the dtypes that follow from the policy, the compute dtypes and those at rest."""
        reduce_dtypes = [
            policy.reduce_dtype
            if policy.reduce_dtype is not None and dtype.is_floating_point
            else dtype
            for dtype in compute_dtypes
        ]
        gradient_dtypes = [param.dtype for param in self._params]
        if self._low_precision:
            sharded = self._mesh_info.shard_process_group is not None
            gradient_dtypes = [*compute_dtypes] if sharded else reduce_dtypes
        # What stays on its rank is not rounded.
        wire_dtype = policy.wire_dtype if self._mesh_info.shard_mesh_size > 1 else None
        dtypes = reduce_dtypes, gradient_dtypes, wire_dtype
        if dtypes != (self.reduce_dtypes, self.gradient_dtypes, self.wire_dtype):
            self.reduce_dtypes, self.gradient_dtypes, self.wire_dtype = dtypes
            self.forget_buffer()

    def forget_buffer(self) -> None:
        """Make the reduce buffer anew: dtypes, or which parameters are trainable, have changed."""
        self._buffer = None

    # --- collect ----------------------------------------------------------------------------------

    def collect(self, *, to_send: bool) -> None:
        """Take the unsharded parameters' gradients, to wait; or with ``to_send`` to be reduced with all that waited.

        `prepare_reduction` comes next then. What is added up over several backwards is rounded for the wire when
        the sum is complete.
        """
        taken = reductions.take(self._params)
        if not to_send:
            self.unreduced.add(taken, self.reduce_dtypes)
            self._note_waiting()
            return
        if self.unreduced:
            taken = self.unreduced.take(taken)
            self._note_waiting()
        if taken:
            self._reserve_buffer(taken.keys()).put(taken)
            self._filled = set(taken)

    def _note_waiting(self) -> None:
        """Let those who call, observe or record know whether and how much waits."""
        if self.unreduced or self._partial:
            _WAITING[id(self)] = self
        else:
            _WAITING.pop(id(self), None)
        if self._context.recorder is not None:
            self._context.recorder.note_reducing(self.unreduced, self.unreduced.nbytes)

    def _reserve_buffer(self, params: Set[int]) -> ReduceBuffer:
        """The reduce buffer, with room for parameters, its memory present and nobody else reading it."""
        self._context.make_room_for_reduction()
        buffer = self._buffer
        if buffer is None or not params <= buffer.targets.keys():
            buffer = self._buffer = self._buffer_on(self._device, params)
            buffer.release()
        if buffer.allocated:  # this very group's previous reduction still reads it
            self._context.finish_inputs()
        buffer.allocate()
        if self._context.recorder is not None:
            self._context.recorder.note_reducing(buffer, buffer.nbytes)
        return buffer

    def _buffer_on(self, device: torch.device, params: Collection[int] = ()) -> ReduceBuffer:
        """A reduce buffer for the parameters that are trainable now, and for ``params``."""
        indices = [i for i, param in enumerate(self._params) if param.trainable or i in params]
        # gloo carries every message of a call by itself; an exchange is a call each.
        rank_major, wire_dtype = self._device.type == "cpu", self.wire_dtype
        if wire_dtype is not None:
            rank_major = not has_large_pieces(self._layout, [wire_dtype] * len(self._params))
        return ReduceBuffer(
            self._layout,
            self._mesh_info.shard_mesh_rank,
            indices,
            self.reduce_dtypes,
            self.gradient_dtypes,
            device,
            by_segment=self._by_segment,
            rank_major=rank_major,
            wire_dtype=wire_dtype,
            replica=(self._mesh_info.replicate_mesh_rank, self._mesh_info.replicate_mesh_size),
        )

    # --- hand over, or drop -----------------------------------------------------------------------

    def prepare_reduction(
        self, settings: reductions.ReductionSettings, *, with_unused: bool
    ) -> reductions.Reduction | None:
        """Hand what is held over to a reduction, to be issued now; None if there is nothing to reduce.

        Parameters that have partial sums from earlier, and with ``with_unused`` all trainable ones, take part
        as zeros if they have no gradient now. But not those of a group that has never been gathered: no rank
        has used them, as gathering is collective, and zeros would let weight decay shrink them.
        """
        missing = set(self._partial) if self._partial and settings.all_reduce else set()
        if with_unused:
            missing.update(
                index
                for index, param in enumerate(self._params)
                if param.trainable and param.unsharded_param is not None
            )
        missing -= self._filled
        if not self._filled and not missing:
            return None
        used = self._filled | missing
        buffer = self._buffer if self._filled else self._reserve_buffer(missing)
        assert buffer is not None and buffer.targets.keys() >= used, "made for these"
        if missing:
            torch._foreach_zero_([t for index in sorted(missing) for t in buffer.targets[index]])
        reduction = reductions.Reduction(
            self._context,
            self._events,
            self._mesh_info,
            settings,
            buffer,
            self._params,
            used,
            self._partial,
        )
        self._filled = set()
        if not settings.all_reduce:
            _WAITING[id(self)] = self
        return reduction

    def clear(self, cleared: Collection[int]) -> None:
        """Forget what waits of parameters whose gradients somebody has cleared; ``cleared`` has ids of parameters."""
        indices = [
            index
            for index, param in enumerate(self._params)
            if id(param.sharded_param.param) in cleared or id(param.unsharded_param) in cleared
        ]
        self.unreduced.clear(indices)
        for index in indices:
            if index in self._partial:
                self._context.keep_until_joined(self._partial.pop(index))
        if indices:
            self._note_waiting()

    def drop(self) -> None:
        """Forget gradients that were not reduced: after a failed step, when no reduction is in flight."""
        reductions.take(self._params)
        self.unreduced.drop()
        self._filled.clear()
        self._partial.clear()
        self._note_waiting()
        if self._buffer is not None and self._buffer.allocated:
            self._buffer.release()
            if self._context.recorder is not None:
                self._context.recorder.note_reducing(self._buffer, 0)

    # --- what is said about them ------------------------------------------------------------------

    def note_memory(self, recorder: TraceRecorder) -> None:
        """Tell somebody who begins to record which reduce buffers have memory now."""
        recorder.note_reducing(self.unreduced, self.unreduced.nbytes)
        if self._buffer is not None and self._buffer.allocated:
            recorder.note_reducing(self._buffer, self._buffer.nbytes)

    def traffic(self, settings: reductions.ReductionSettings) -> ReduceTraffic:
        """What reducing with the settings takes, on any device and before anything has been reduced.

        Read off a buffer without memory that is made as the real ones are.
        """
        sent = all_reduced = 0
        world = self._layout.world
        buffer = self._buffer_on(torch.device("meta"))
        custom, replicas = settings.custom, self._mesh_info.replicate_mesh_size
        for run in buffer.runs(frozenset(buffer.targets)):
            reduced = run.numel * run.reduce_dtype.itemsize
            message = reduced * world if custom else sum(tensor.nbytes for tensor in run.inputs)
            sent += message - message // world
            all_reduced += reductions.all_reduce_bytes(reduced, replicas)
        return ReduceTraffic(sent, all_reduced)


_WAITING: weakref.WeakValueDictionary[int, GroupGradients] = weakref.WeakValueDictionary()
"""Those of whose gradients some wait, by their ids; usually none. Other threads may add theirs at any time."""


def _waiting() -> list[GroupGradients]:
    found = (reference() for reference in _WAITING.valuerefs())
    return [waiting for waiting in found if waiting is not None]


def gradients_were_cleared(params: Callable[[], Iterable[Tensor]]) -> None:
    """Let no gradients of parameters wait any longer: ``zero_grad`` was called for them."""
    if _WAITING:
        cleared = {id(param) for param in params()}
        for waiting in _waiting():
            waiting.clear(cleared)


def not_to_be_updated(params: Callable[[], Iterable[Tensor]]) -> list[str]:
    """Names of parameters that no optimizer can update now: see `UnreducedGradients.sharded_names`."""
    if not _WAITING:
        return []
    wanted = {id(param) for param in params()}
    return [name for waiting in _waiting() for name in waiting.unreduced.sharded_names(wanted)]
