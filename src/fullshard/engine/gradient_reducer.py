"""Reducing a group's gradients: what outlasts one reduction, and what a backward calls.

    place_for_product   return where backward writes a gradient by itself: a slot of the reduce buffer
                        (`engine.fused_linear`)
    reduce              take `.grad` of the unsharded parameters, fill the reduce buffer, start a reduction
    accumulate          take it, and let it wait for a later backward (`unreduced_gradients`)
    drop                forget it: a step has failed

`reduce_buffer` decides how gradients lie in the buffer, and `reduce_scatter` what a reduction does. `.grad` of
unsharded parameters is taken here and nowhere else; that of sharded ones is written by `sharded_params`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fullshard import torch_border
from fullshard.engine.reduce_scatter import (
    ReducedGroup,
    ReduceEvents,
    ReduceScatterState,
    all_reduce_bytes,
)
from fullshard.engine.reduce_settings import ActiveRanks, ReduceSettings
from fullshard.engine.unreduced_gradients import UnreducedGradients
from fullshard.layout.placement import is_unsummed, local_gradient
from fullshard.layout.segments import Layout, has_large_pieces
from fullshard.mesh.axes import DataParallelAxes
from fullshard.policies import MixedPrecisionPolicy
from fullshard.storage.param import FSDPParam
from fullshard.storage.reduce_buffer import ReduceBuffer, lies_in_one_piece
from fullshard.storage.sharded_params import PlainShardedParam
from fullshard.transport.observer import Observed, StepObserver
from fullshard.transport.spans import Group
from fullshard.transport.streams import FSDPCommContext

COPIED_BESIDE = 64 * 2**20
"""Bytes of a reduce buffer up to which a captured step copies gradients beside compute."""


class ReduceTraffic(NamedTuple):
    """Bytes of one reduction of all trainable parameters, on this rank."""

    sent: int
    """Bytes sent to other ranks, by a reduce-scatter or all-to-all."""
    all_reduced: int
    """Bytes sent to other replicas."""


class GradientReducer:
    """Reduces one group's gradients; lives as long as the group.

    Holds what outlasts a reduction: the settings, dtypes, the reduce buffer with its views, and gradients that wait
    for a later backward.
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
        pinned: bool,
    ) -> None:
        """Begin without gradients; `derive_dtypes` and `connect` come before the first.

        Args:
            params: The group's parameters.
            layout: The layout of all of them.
            mesh_info: The ranks over which they are sharded and replicated.
            device: Where gradients are computed.
            by_segment: Whether all parameters of a segment get one sharded gradient.
            low_precision: Whether sharded gradients are in the compute dtype or, if nothing is sharded, in the
                reduce dtype.
            pinned: Whether gradients that go to host memory go to page-locked memory.
        """
        self.settings = ReduceSettings(process_group=mesh_info.shard_peers, pinned=pinned)
        self._params = params
        self._layout = layout
        self._mesh_info = mesh_info
        self._device = device
        self._by_segment = by_segment
        self._low_precision = low_precision
        self.reduce_dtypes: list[torch.dtype] = []
        """For each parameter, the dtype in which its gradients are summed over ranks."""
        self._unreduced_dtypes: list[torch.dtype] = []
        """For each parameter, the dtype in which gradients of several backwards are added up before that."""
        self.gradient_dtypes: list[torch.dtype] = []
        """For each parameter, the dtype of its sharded gradient."""
        self.wire_dtype: torch.dtype | None = None
        """The dtype in which gradients travel, if it is not the reduce dtype."""
        self._grad_dtypes: list[torch.dtype | None] = []
        """For each parameter, `grad_dtype` of its sharded parameter."""
        self._given_reduce_dtype: torch.dtype | None = None
        """The policy's."""
        self._compute_dtypes: list[torch.dtype] = []
        self._arrived: dict[int, torch.dtype] = {}
        """Dtypes in which gradients came last, of parameters that take them as they come (`grad_dtype` is None)."""
        self.unreduced = UnreducedGradients(params, layout)
        self._buffer: ReduceBuffer | None = None
        """None until there are gradients, and after its dtypes or trainable parameters have changed."""
        self._writes_products = False
        """Whether backward may write gradients into the reduce buffer: see `place_for_product`."""
        self._open: ReduceBuffer | None = None
        """The reduce buffer that backward writes gradients into now, until `reduce` sends it off."""
        self._written: set[int] = set()
        """Parameters whose slots in it are written."""
        self._context: FSDPCommContext
        self._reduced_group: ReducedGroup
        self._group: weakref.ref[Group]

    def connect(self, context: FSDPCommContext, group: Group, name: str) -> None:
        """Join a model's streams; spans of reductions are recorded as those of ``group``, tags have ``name``."""
        self._context = context
        self._group = weakref.ref(group)  # which holds us
        self.unreduced.connect(context)
        self._reduced_group = ReducedGroup(
            context,
            ReduceEvents.new(context),
            self._mesh_info,
            self._params,
            self.unreduced,
            name,
            self._by_segment,
        )

    def tell_apart(self, model: str, model_among_replicas: str) -> None:
        """Let tags say which model it is, of those over the same shards and over the same replicas."""
        self._reduced_group = replace(
            self._reduced_group, model=model, model_among_replicas=model_among_replicas, tags={}
        )

    def derive_dtypes(
        self, policy: MixedPrecisionPolicy, compute_dtypes: Sequence[torch.dtype]
    ) -> None:
        """Derive the dtypes of sums, messages and sharded gradients from the policy and the parameters' dtypes."""
        self._given_reduce_dtype, self._compute_dtypes = policy.reduce_dtype, [*compute_dtypes]
        # What stays on its rank is not rounded.
        wire_dtype = policy.wire_dtype if self._mesh_info.shard_mesh_size > 1 else None
        if wire_dtype is not self.wire_dtype:
            self.wire_dtype = wire_dtype
            self.forget_buffer()
        self._grad_dtypes = [param.sharded_param.grad_dtype for param in self._params]
        self._arrived = {
            index: dtype
            for index, dtype in enumerate(compute_dtypes)
            if self._grad_dtypes[index] is None
        }
        self._set_dtypes()

    def has_other_grad_dtypes(self) -> bool:
        """Return whether users have chosen other dtypes of gradients (`Tensor.grad_dtype`) since they were derived."""
        return self._grad_dtypes != [param.sharded_param.grad_dtype for param in self._params]

    def _set_dtypes(self) -> None:
        self._unreduced_dtypes = self._derived_dtypes()
        reduce_dtypes = self._summed_together(self._unreduced_dtypes)
        gradient_dtypes = [
            own or dtype for own, dtype in zip(self._grad_dtypes, reduce_dtypes, strict=True)
        ]
        if self._low_precision:
            sharded = self._mesh_info.shard_process_group is not None
            gradient_dtypes = [*self._compute_dtypes] if sharded else reduce_dtypes
        dtypes = reduce_dtypes, gradient_dtypes
        if dtypes != (self.reduce_dtypes, self.gradient_dtypes):
            self.reduce_dtypes, self.gradient_dtypes = dtypes
            self.forget_buffer()

    def _derived_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of sums: the policy's, or what torch's FSDP2 takes for the parameter if that has none."""
        given = self._given_reduce_dtype
        if given is not None:
            return [given if dtype.is_floating_point else dtype for dtype in self._compute_dtypes]
        if not torch_border.REDUCES_IN_GRAD_DTYPE:
            return self._compute_dtypes
        return [own or self._arrived[index] for index, own in enumerate(self._grad_dtypes)]

    def _summed_together(self, dtypes: list[torch.dtype]) -> list[torch.dtype]:
        """Return in which dtypes gradients are reduced that are added up in ``dtypes``.

        Parameters of one dtype whose gradients differ are reduced together, in the dtype that holds all of them.
        """
        if self._given_reduce_dtype is not None or not torch_border.REDUCES_IN_GRAD_DTYPE:
            return dtypes
        together: dict[torch.dtype, torch.dtype] = {}
        for param, own in zip(self._params, dtypes, strict=True):
            together[param.dtype] = torch.promote_types(together.get(param.dtype, own), own)
        return [together[param.dtype] for param in self._params]

    def choose_unreduced_dtypes(self) -> None:
        """Let autograd bring the gradients of unsharded parameters as torch's FSDP2 does; when these have been made.

        Narrower gradients are summed in a wider dtype: they stay as they come, also where a custom autograd function
        returns fp32 for a bf16 parameter. Wider ones are rounded at once, which takes less memory. Parameters that rest
        as plain tensors show unreduced gradients in `.grad`, in the compute dtype.
        """
        if not torch_border.REDUCES_IN_GRAD_DTYPE:
            return
        dtypes = zip(self._compute_dtypes, self._unreduced_dtypes, self._grad_dtypes, strict=True)
        for param, (compute, added_up, own) in zip(self._params, dtypes, strict=True):
            unsharded = param.unsharded_param
            assert unsharded is not None, "it has just been made"
            if isinstance(param.sharded_param, PlainShardedParam):
                continue
            if own is None and self._given_reduce_dtype is None:
                unsharded.grad_dtype = None
            elif compute is not added_up:
                is_wider = torch.promote_types(compute, added_up) is added_up
                unsharded.grad_dtype = None if is_wider else added_up

    def _note_arrived(self, gradients: dict[int, Tensor]) -> None:
        """Reduce gradients of parameters whose `grad_dtype` is None in the dtypes in which they have come."""
        arrived = {i: g.dtype for i, g in gradients.items() if i in self._arrived}
        if not arrived.items() <= self._arrived.items():
            self._arrived |= arrived
            self._set_dtypes()

    def forget_buffer(self) -> None:
        """Make the reduce buffer anew next time: dtypes, or which parameters are trainable, have changed."""
        self._buffer = None

    def set_active_ranks(self, active: ActiveRanks | None) -> None:
        """Choose whose gradients count from the next backward on; None for those of all ranks.

        Those that wait were added up when others counted. They are scaled, so that the next reduction divides
        the gradients of each backward by the number of ranks that were active then.
        """
        if active != self.settings.active:
            self.settings = replace(self.settings, active=active)
        self.unreduced.set_active_fraction(self.settings.active_fraction)

    # --- each backward ----------------------------------------------------------------------------

    def accumulate(self) -> None:
        """Take the unsharded parameters' gradients, to be reduced by a later backward.

        Before: gradients in `.grad` of unsharded parameters. After: those are None.
        """
        gradients = self._take_gradients()
        if self._open is not None:
            self._withdraw_products(gradients)
        self.unreduced.add(gradients, self._unreduced_dtypes)

    def reduce(self, *, include_unused: bool = False) -> None:
        """Take the unsharded parameters' gradients and all that wait, and start to reduce them.

        With ``include_unused``, and if the settings say so, trainable parameters without a gradient take part as
        zeros. Nothing happens if no parameter takes part.

        Before: gradients in `.grad` of unsharded parameters. After: those are None, and a reduction is in flight. The
        context waits for it when it needs room for another one, and at the latest when it is joined.
        """
        gradients = self._take_gradients()
        unreduced, settings, context = self.unreduced, self.settings, self._context
        if unreduced.held:
            # Sums over several backwards are rounded for the wire when they are complete.
            gradients = unreduced.take(gradients)
        zeros: set[int] = set()
        if unreduced.partial or settings.zero_unused:
            zeros = self._without_gradient(gradients, include_unused=include_unused)
        if self._open is not None and (
            self._open is not self._buffer or not self._open.targets.keys() >= {*gradients, *zeros}
        ):
            # Dtypes have changed, or parameters have become trainable since.
            self._withdraw_products(gradients)
        written, self._written = self._written, set()
        if not gradients and not zeros and not written:
            return
        buffer = self._buffer_for({*gradients, *zeros})
        observer = context.observer
        if observer is not None:
            observer.memory_of_reductions(buffer, buffer.nbytes)
        copy_in = None
        if context.in_capture and self._is_copied_beside(buffer):
            buckets = buffer.take_memory(gradients, zeros, written=written)
            copy_in = functools.partial(
                buffer.copy_in, gradients, sorted(zeros), buckets, written=written
            )
        else:
            buckets = buffer.fill(gradients, sorted(zeros), written=written)
        # They are copied, or `copy_in` holds them. Memory for the results is taken next, and can be that of gradients that
        # were copied: peak memory is often here.
        del gradients
        observed = None
        if observer is not None:
            group = self._group()
            assert group is not None, "a group outlives its reductions"
            observer.issues("reduce", group)
            observed = Observed(observer, group)
        ReduceScatterState.start(self._reduced_group, settings, buffer, buckets, observed, copy_in)

    def _is_copied_beside(self, buffer: ReduceBuffer) -> bool:
        """Return whether a captured step copies gradients beside compute: [Note: gradients copied beside].

        Messages of a comm object, and those of parts of a buffer that lies rank after rank, are copied once more, by compute.
        """
        return (
            buffer.nbytes <= COPIED_BESIDE
            and not buffer.rank_major
            and self.settings.custom is None
        )

    def _take_gradients(self) -> dict[int, Tensor]:
        """Take `.grad` of the unsharded parameters, by index of the parameter: zeros, if this rank's do not count."""
        gradients = {}
        for index, param in enumerate(self._params):
            unsharded = param.unsharded_param
            if unsharded is None:
                continue
            gradient = unsharded.grad
            if gradient is not None:
                unsharded.grad = None
                if param.placement.unsharded_mesh is not None:
                    if torch_border.REDUCES_IN_GRAD_DTYPE and is_unsummed(gradient):
                        gradient = gradient.to(self._unreduced_dtypes[index])
                    gradient = local_gradient(param.placement, gradient)
                gradients[index] = gradient
        active = self.settings.active
        if active is not None and not active.this_rank:
            # Zeros are written. A product with zero would keep NaN.
            for index, gradient in gradients.items():
                gradients[index] = torch.zeros_like(gradient, requires_grad=False)
        if self._arrived:
            self._note_arrived(gradients)
        return gradients

    def _without_gradient(self, gradients: Collection[int], *, include_unused: bool) -> set[int]:
        """Return the parameters that take part as zeros: those with partial sums, and unused ones.

        But not those of a group that has never been gathered: no rank has used them, as gathering is collective,
        and zeros would let weight decay shrink them.
        """
        settings, partial = self.settings, self.unreduced.partial
        missing = set(partial) if settings.all_reduce else set()
        if include_unused and settings.zero_unused:
            missing.update(
                index
                for index, param in enumerate(self._params)
                if param.trainable and param.unsharded_param is not None
            )
        return missing.difference(gradients, self._written)

    def _buffer_for(self, params: set[int]) -> ReduceBuffer:
        """Return a reduce buffer with room for parameters that no reduction in flight reads; the open one, if any is."""
        context = self._context
        context.make_room_for_reduction()
        if self._open is not None:
            buffer, self._open = self._open, None
            return buffer
        return self._free_buffer(params)

    def _free_buffer(self, params: set[int]) -> ReduceBuffer:
        """Return a reduce buffer that has no memory, with room for parameters."""
        context, buffer = self._context, self._buffer
        if buffer is None or not params <= buffer.targets.keys():
            buffer = self._buffer = self._new_buffer(self._device, params)
            buffer.release()  # it took memory to make its views
        elif context.reduce_inputs and buffer.allocated:
            # Several inputs may be in flight, and this group's previous reduction still reads its own.
            context.finish_inputs()
        return buffer

    def _new_buffer(self, device: torch.device, params: Collection[int] = ()) -> ReduceBuffer:
        """Return a reduce buffer for the parameters that are trainable now, and for ``params``."""
        indices = [i for i, param in enumerate(self._params) if param.trainable or i in params]
        return ReduceBuffer(
            self._layout,
            self._mesh_info.shard_mesh_rank,
            indices,
            self.reduce_dtypes,
            self.gradient_dtypes,
            device,
            by_segment=self._by_segment,
            rank_major=self._rank_major,
            wire_dtype=self.wire_dtype,
            replica=(self._mesh_info.replicate_mesh_rank, self._mesh_info.replicate_mesh_size),
        )

    @property
    def _rank_major(self) -> bool:
        """Whether gradients lie rank after rank in the reduce buffer."""
        if self.wire_dtype is not None:  # an exchange is a call for each message
            return not has_large_pieces(self._layout, [self.wire_dtype] * len(self._params))
        # gloo carries every message of a call by itself. But a product is written in one piece.
        return self._device.type == "cpu" and not self._writes_products

    # --- gradients that backward writes in place --------------------------------------------------

    def write_products(self) -> None:
        """From now on let backward write gradients into the reduce buffer; between steps."""
        if not self._writes_products:
            self._writes_products = True
            self.forget_buffer()

    def takes_product(self, index: int) -> bool:
        """Return whether backward may write a parameter's gradient: whether its slot is one piece."""
        return self._writes_products and lies_in_one_piece(
            self._layout.slots[index], rank_major=self._rank_major
        )

    def place_for_product(self, index: int, *, reduced: bool) -> tuple[Tensor, bool] | None:
        """Return where backward is to write a gradient now, and whether it adds to what is there; None for nowhere.

        On the compute stream, for a parameter that `takes_product`. With ``reduced``, this backward reduces the group;
        otherwise the gradient waits with those of other microbatches, and a sum that waits is added to there.

        The place is the slot in the buffer that this backward's `reduce` sends off. It has memory from the first
        gradient on, beside the inputs of reductions in flight: at most one more than `max_reductions` of them, and one for
        each group that backward will come back to. No reduction reads it, since an earlier one of this group is waited
        for here.
        """
        if self.settings.active is not None:
            return None
        if not reduced or self.unreduced.waits(index):
            return self.unreduced.place_for(index, self._unreduced_dtypes[index])
        if self._open is None:
            buffer = self._open = self._free_buffer({index})
            if self._context.observer is not None:
                self._context.observer.memory_of_reductions(buffer, buffer.nbytes)
            buffer.allocate()
        again = index in self._written
        self._written.add(index)
        return self._open.slot(index), again

    def give_ordinary(self, index: int, gradient: Tensor) -> None:
        """Add a gradient to the unsharded parameter's, as autograd does; its hook is still to run."""
        param = self._params[index].unsharded_param
        assert param is not None, "backward has come to it"
        param.grad = gradient if param.grad is None else param.grad + gradient

    @property
    def has_products(self) -> bool:
        """Whether backward has written gradients into a buffer that has not been sent off."""
        return self._open is not None

    def _withdraw_products(self, gradients: dict[int, Tensor]) -> None:
        """Add what was written into the open buffer to ``gradients``, and give its memory back."""
        buffer, self._open = self._open, None
        assert buffer is not None, "it was written into"
        for index in sorted(self._written):
            product = buffer.slot(index).clone()
            gradients[index] = product.add_(gradients[index]) if index in gradients else product
        self._written.clear()
        self._release(buffer)

    def _release(self, buffer: ReduceBuffer) -> None:
        buffer.release()
        if self._context.observer is not None:
            self._context.observer.memory_of_reductions(buffer, 0)

    # --- forget -----------------------------------------------------------------------------------

    def clear_sharded_gradients(self, unsharded: Collection[int], *, set_to_none: bool) -> None:
        """Clear `.grad` of sharded parameters: ``zero_grad`` found the unsharded ones, with these ids."""
        for param in self._params:
            if id(param.unsharded_param) in unsharded:
                param.sharded_param.clear_gradient(set_to_none=set_to_none)

    def drop(self) -> None:
        """Forget gradients that were not reduced: after a failed step, when no reduction is in flight."""
        for param in self._params:
            if param.unsharded_param is not None:
                param.unsharded_param.grad = None
        self.unreduced.drop()
        for buffer in (self._open, self._buffer):
            if buffer is not None and buffer.allocated:
                self._release(buffer)
        self._open = None
        self._written.clear()

    # --- for traces and plans ---------------------------------------------------------------------

    def tell_memory(self, observer: StepObserver) -> None:
        """Tell a new observer what memory is held for reductions now."""
        observer.memory_of_reductions(self.unreduced, self.unreduced.nbytes)
        if self._buffer is not None and self._buffer.allocated:
            observer.memory_of_reductions(self._buffer, self._buffer.nbytes)

    def reduce_buffers(self) -> list[ReduceBuffer]:
        """Return the buffers that reductions read, with memory or without."""
        return [buffer for buffer in (self._open, self._buffer) if buffer is not None]

    def traffic(self) -> ReduceTraffic:
        """Return what a reduction sends, on any device and before there is one.

        Read off a buffer without memory that is made as the real ones are.
        """
        sent = all_reduced = 0
        world, replicas = self._layout.world, self._mesh_info.replicate_mesh_size
        buffer = self._new_buffer(torch.device("meta"))
        for bucket in buffer.buckets(frozenset(buffer.targets)):
            reduced = bucket.numel * bucket.reduce_dtype.itemsize
            inputs = sum(tensor.nbytes for tensor in bucket.inputs)
            if self.settings.custom is not None:
                inputs = reduced * world  # rows are staged whole, with what lies between segments
            sent += inputs - inputs // world
            all_reduced += all_reduce_bytes(reduced, replicas)
        return ReduceTraffic(sent, all_reduced)
