"""The gradients of one group, from backward to their reduction.

    collect            unsharded gradients are moved into a reduce buffer, or added to what waits there
    prepare_reduction  ... and handed over to a reduction, which carries them to the sharded parameters
    drop               ... or forgotten

Reduce buffers are reserved and given back here and by the reductions that read them, nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import gradients
from .errors import ConfigurationError
from .layout import Layout, has_large_pieces
from .mesh import DataParallelAxes
from .param import FSDPParam
from .policies import MixedPrecisionPolicy
from .recording import Recorder
from .reduce_buffer import ReduceBuffer
from .streams import FSDPCommContext


class ReduceTraffic(NamedTuple):
    """Bytes of one reduction of all trainable parameters, on this rank."""

    sent: int
    """To other ranks, by a reduce-scatter or exchange."""
    all_reduced: int
    """To other replicas."""


class GroupGradients:
    """What of a group's gradients waits to be reduced, in which memory and dtypes.

    Invariant: gradients that wait are all in one buffer, whose memory is present.
    """

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
        self._buffers: dict[torch.dtype | None, ReduceBuffer] = {}
        """By wire dtype; None is for accumulating, and for sending if gradients have no other."""
        self._held: set[int] = set()
        """Parameters whose gradients wait in a reduce buffer."""
        self._held_in: ReduceBuffer | None = None
        """Which buffer that is; None if there are none."""
        self._partial: dict[int, Tensor] = {}
        """Reduced shards that wait to be summed over replicas."""

    def connect(self, context: FSDPCommContext, name: str) -> None:
        """Join a model's streams, under the group's full name in it."""
        self._context = context
        self._name = name
        self._events = gradients.ReduceEvents.new(context)

    def derive_dtypes(
        self, policy: MixedPrecisionPolicy, compute_dtypes: Sequence[torch.dtype]
    ) -> None:
        """Sum, send and land in the dtypes that follow from the policy, the compute dtypes and those at rest."""
        reduce_dtypes = [policy.reduce_dtype or dtype for dtype in compute_dtypes]
        gradient_dtypes = [param.dtype for param in self._params]
        if self._low_precision:
            sharded = self._mesh_info.shard_process_group is not None
            gradient_dtypes = [*compute_dtypes] if sharded else reduce_dtypes
        if (reduce_dtypes, gradient_dtypes) != (self.reduce_dtypes, self.gradient_dtypes):
            self.reduce_dtypes, self.gradient_dtypes = reduce_dtypes, gradient_dtypes
            self.forget_buffers()
        # What stays on its rank is not rounded.
        self.wire_dtype = policy.wire_dtype if self._mesh_info.shard_mesh_size > 1 else None

    def forget_buffers(self) -> None:
        """Make reduce buffers anew: their dtypes, or which parameters are trainable, have changed."""
        self._buffers.clear()

    # --- collect ----------------------------------------------------------------------------------

    def collect(self, *, to_send: bool) -> None:
        """Move the unsharded parameters' gradients into a reduce buffer, adding to what is held.

        With ``to_send``, `prepare_reduction` comes next, and what comes alone may be rounded for the
        wire at once. What is added up over several backwards is rounded when the sum is complete.
        """
        taken = gradients.take(self._params)
        if not taken:
            return
        alone = to_send and self._held_in is None
        self._held_in = self._reserve_buffer(self.wire_dtype if alone else None)
        gradients.fill(self._held_in, taken, self._held)

    def _reserve_buffer(self, wire_dtype: torch.dtype | None) -> ReduceBuffer:
        """A reduce buffer with its memory present, and nobody else reading it."""
        buffer = self._buffers.get(wire_dtype) or self._new_buffer(wire_dtype)
        if buffer is not self._held_in:
            self._context.make_room_for_reduction()
            if buffer.allocated:  # this very group's previous reduction still reads it
                self._context.finish_inputs()
            buffer.allocate()
            if self._context.recorder is not None:
                self._context.recorder.note_reducing(buffer, buffer.nbytes)
        return buffer

    def _new_buffer(self, wire_dtype: torch.dtype | None) -> ReduceBuffer:
        """Make a reduce buffer for the parameters that are trainable now or have gradients."""
        if self._held and not self._buffers:
            raise ConfigurationError(
                f"requires_grad of parameters in group {self._name!r} changed while gradients were accumulated "
                "without synchronisation. Change it after a step that synchronises, or call "
                "reset_iter_state() to drop what was accumulated."
            )
        self._context.make_room_for_reduction()
        buffer = self._buffer_on(self._device, wire_dtype)
        buffer.release()
        self._buffers[wire_dtype] = buffer
        return buffer

    def _buffer_on(self, device: torch.device, wire_dtype: torch.dtype | None) -> ReduceBuffer:
        trainable = [index for index, param in enumerate(self._params) if param.trainable]
        # gloo carries every message of a call by itself; an exchange is a call each.
        rank_major = self._device.type == "cpu"
        if wire_dtype is not None:
            rank_major = not has_large_pieces(self._layout, [wire_dtype] * len(self._params))
        return ReduceBuffer(
            self._layout,
            self._mesh_info.shard_mesh_rank,
            trainable,
            self.reduce_dtypes,
            self.gradient_dtypes,
            device,
            by_segment=self._by_segment,
            rank_major=rank_major,
            wire_dtype=wire_dtype,
        )

    # --- hand over, or drop -----------------------------------------------------------------------

    def prepare_reduction(
        self, settings: gradients.ReductionSettings, *, with_unused: bool
    ) -> gradients.Reduction | None:
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
        missing -= self._held
        if not self._held and not missing:
            return None
        context, buffer = self._context, self._reserve_buffer(self.wire_dtype)
        if self._held_in is not None and self._held_in is not buffer:
            buffer.copy_from(self._held_in, self._held)
            self._held_in.release()
            if context.recorder is not None:
                context.recorder.note_reducing(self._held_in, 0)
        if missing:
            torch._foreach_zero_([t for index in sorted(missing) for t in buffer.targets[index]])
        reduction = gradients.Reduction(
            context,
            self._events,
            self._mesh_info,
            settings,
            buffer,
            self._params,
            self._held | missing,
            self._partial,
        )
        self._held, self._held_in = set(), None
        return reduction

    def drop(self) -> None:
        """Forget gradients that were not reduced: after a failed step, when no reduction is in flight."""
        gradients.take(self._params)
        self._held.clear()
        self._held_in = None
        self._partial.clear()
        for buffer in self._buffers.values():
            if buffer.allocated:
                buffer.release()
                if self._context.recorder is not None:
                    self._context.recorder.note_reducing(buffer, 0)

    # --- what is said about them ------------------------------------------------------------------

    def note_memory(self, recorder: Recorder) -> None:
        """Tell somebody who begins to record which reduce buffers have memory now."""
        for buffer in self._buffers.values():
            recorder.note_reducing(buffer, buffer.nbytes if buffer.allocated else 0)

    def traffic(self, settings: gradients.ReductionSettings) -> ReduceTraffic:
        """What reducing with the settings takes, on any device and before anything has been reduced.

        Read off a buffer without memory that is made as the real ones are.
        """
        sent = all_reduced = 0
        world = self._layout.world
        buffer = self._buffer_on(torch.device("meta"), self.wire_dtype)
        custom, replicas = settings.custom, self._mesh_info.replicate_mesh_size
        for run in buffer.runs(frozenset(buffer.targets)):
            reduced = run.numel * run.reduce_dtype.itemsize
            message = reduced * world if custom else sum(tensor.nbytes for tensor in run.inputs)
            sent += message - message // world
            all_reduced += gradients.all_reduce_bytes(reduced, replicas)
        return ReduceTraffic(sent, all_reduced)
