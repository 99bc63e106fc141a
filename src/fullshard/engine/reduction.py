"""One group's reductions: gradients are taken, laid into the reduce buffer, reduced over ranks and accumulated.

    reduce              take `.grad` of the unsharded parameters, fill the reduce buffer, issue the collectives
    accumulate          take it, and let it wait for a later backward (`unreduced_gradients`)
    place_for_product   where backward writes a gradient by itself (`fused_linear`): a slot of the reduce buffer
    drop                forget it: a step has failed

    compute stream          take gradients, fill the buffer, take memory for the results          `reduce`
    reduce-scatter stream   reduce-scatter, or exchange and sum
    all-reduce stream       sum over replicas (HSDP)
    the last of the two     division, cast, copy to host memory, `.grad` of sharded parameters    `ReductionInFlight`
    compute stream          wait for the others, give memory back

`.grad` of unsharded parameters is taken here and nowhere else. `reduce_buffer` decides how gradients lie, `transports` how
they travel; `streams` keeps reductions in flight and finishes them. What users have chosen is in `reduction_settings`.

[Note: narrow on the wire]
A reduce-scatter sums in the dtype it carries. To send bf16 and sum in fp32, an exchange (all-to-all)
brings each rank all ranks' gradients of its shard, and the rank adds them up by itself: in the same
order every time, whatever algorithm the backend chooses. As many elements travel as in a
reduce-scatter. What is received is as large as what is sent, so both together take the memory of one
fp32 input; they are kept and released together. Nothing can overflow before the sum, so all
division comes after it.

[Note: gradients copied beside]
Gradients are usually copied into the reduce buffer by the compute stream, which can give their memory to others at once.
In a step that is captured in a CUDA graph, gradients of small groups are copied by the reduce-scatter stream, while
compute goes on. Their memory is the compute stream's, so the reduction holds them until compute has waited for the
read of its input (`finish_input`).
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from fullshard import torch_border
from fullshard.divergence.journal import Tag, tag
from fullshard.engine.reduction_settings import (
    UNDIVIDED,
    ActiveRanks,
    DivideRule,
    GradientDtypes,
    ReduceSettings,
    call_replacement,
    divide_rule,
    download,
    run_hook,
)
from fullshard.engine.unreduced_gradients import UnreducedGradients
from fullshard.layout.placement import is_unsummed, local_gradient
from fullshard.layout.segments import Layout
from fullshard.mesh.axes import DataParallelAxes
from fullshard.policies import MixedPrecisionPolicy
from fullshard.storage.param import FSDPParam
from fullshard.storage.reduce_buffer import (
    Arrangement,
    Cut,
    Order,
    OutputView,
    ReduceBucket,
    ReduceBuffer,
    arrangement,
    lies_in_one_piece,
)
from fullshard.storage.sharded_params import DTensorShardedParam
from fullshard.transport import collectives
from fullshard.transport.observer import Collective, Observed, StepObserver
from fullshard.transport.spans import Group
from fullshard.transport.streams import Event, FSDPCommContext
from fullshard.transport.transports import Coalesced, Exchanged, Transport

COPIED_BESIDE = 64 * 2**20
"""Bytes of a reduce buffer up to which a captured step copies gradients beside compute."""

# Looked up once, as they are used for every parameter in every step.
_tensor_hooks = torch_border.tensor_hooks
_post_accumulate_grad_hooks = torch_border.post_accumulate_grad_hooks
_IN_BACKWARD_OPTIMIZERS = torch_border.IN_BACKWARD_OPTIMIZERS
_dtensor, _spec_of = torch_border.dtensor, torch_border.spec_of


class ReduceTraffic(NamedTuple):
    """Bytes of one reduction of all trainable parameters, on this rank."""

    sent: int
    """Bytes sent to other ranks, by a reduce-scatter or all-to-all."""
    all_reduced: int
    """Bytes sent to other replicas."""


@dataclass(frozen=True, slots=True)
class ReduceEvents:
    """Marks of one group's reductions in the streams; each reduction records them anew."""

    ready: Event
    """Compute has filled the input."""
    input_read: Event
    """The reduce-scatter has read it; the sharded gradients are final, too, unless something long follows."""
    done: Event
    """The sharded gradients are final; only behind an all-reduce or a user's hook."""

    @classmethod
    def new(cls, context: FSDPCommContext) -> ReduceEvents:
        """Return events of the context's device."""
        return cls(context.new_event(), context.new_event(), context.new_event())


class Reduction:
    """How one group's gradients are reduced, and what outlasts a reduction; lives as long as the group."""

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
            by_segment: Whether all parameters of a segment get one sharded gradient. Then all are always reduced.
            low_precision: Whether sharded gradients are in the compute dtype: see `GradientDtypes.gradient`.
            pinned: Whether gradients that go to host memory go to page-locked memory.
        """
        self.settings = ReduceSettings(process_group=mesh_info.shard_peers, pinned=pinned)
        self.dtypes = GradientDtypes(params, mesh_info, low_precision=low_precision)
        self.unreduced = UnreducedGradients(params, layout)
        self.params, self.mesh_info = params, mesh_info
        self._layout, self._device, self._by_segment = layout, device, by_segment
        self._buffer: ReduceBuffer | None = None
        """None until there are gradients, and after its dtypes or trainable parameters have changed."""
        self._writes_products = False
        """Whether backward may write gradients into the reduce buffer: see `place_for_product`."""
        self._open: ReduceBuffer | None = None
        """The reduce buffer that backward writes gradients into now, until `reduce` sends it off."""
        self._written: set[int] = set()
        """Parameters whose slots in it are written."""
        self._transports: dict[tuple[ProcessGroup, bool], Transport] = {}
        """The process groups' own collectives; by group, which users may change, and whether gradients are exchanged."""
        self._tags: dict[tuple[tuple[int, ...], bool], tuple[Tag, Tag]] = {}
        self._models = "", ""
        self.context: FSDPCommContext
        self.events: ReduceEvents
        self._group: weakref.ref[Group]
        self._name: str

    def connect(self, context: FSDPCommContext, group: Group, name: str) -> None:
        """Join a model's streams; observers are told of ``group``, tags have ``name``, which no other group of the model has."""
        self.context, self._name = context, name
        self._group = weakref.ref(group)  # which holds us
        self.unreduced.connect(context)
        self.events = ReduceEvents.new(context)
        self._transports.clear()
        self.tell_apart("", "")

    def tell_apart(self, model: str, model_among_replicas: str) -> None:
        """Let tags say which model it is, of those over the same shards and over the same replicas."""
        self._models = model, model_among_replicas
        self._tags.clear()

    def derive_dtypes(
        self, policy: MixedPrecisionPolicy, compute_dtypes: Sequence[torch.dtype]
    ) -> None:
        """Derive the dtypes of sums, messages and sharded gradients from the policy and the parameters' dtypes."""
        if self.dtypes.derive(policy, compute_dtypes):
            self.forget_buffer()

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
        self.unreduced.add(gradients, self.dtypes.unreduced)

    def reduce(self, *, include_unused: bool = False) -> None:
        """Take the unsharded parameters' gradients and all that wait, and start to reduce them.

        With ``include_unused``, and if the settings say so, trainable parameters without a gradient take part as
        zeros. Nothing happens if no parameter takes part.

        Before: gradients in `.grad` of unsharded parameters. After: those are None, and a reduction is in flight. The
        context waits for it when it needs room for another one, and at the latest when it is joined.
        """
        flight = self._filled(include_unused)
        if flight is None:
            return
        # All memory is taken before the first collective is called: a failure here leaves nothing in flight. It can be that
        # of gradients that were copied: peak memory is often here.
        for bucket in flight.buckets:
            flight.parts.append(self._prepare(bucket, flight))
        context, events, transport = self.context, self.events, flight.transport
        on_host, observed = not context.asynchronous, flight.observed
        if observed is not None:
            observed.observer.memory_of_reductions(flight.buffer, flight.held_bytes)
        events.ready.record()
        with context.reduce_scatter:
            # Compute fills the input, or has the gradients to fill it with. It may still use what was in the memory of
            # the outputs before.
            events.ready.wait()
            try:
                if flight.copy_in is not None:
                    flight.copy_in()
                if observed is not None:
                    flight.tell_calls(observed)
                for part in flight.parts:
                    rule, work = part.rule, None
                    if rule.before != 1:
                        torch._foreach_div_([*part.inputs], rule.before)
                    if transport is None:
                        flight.reduce_here(part)
                    else:
                        # Averaging over shards and then over replicas is averaging over all.
                        reduce_tag, _ = self.tags_of(part.bucket)
                        with flight.buffer.below_autograd:
                            work = transport.reduce(
                                part.outputs, part.inputs, rule.op, reduce_tag, async_op=on_host
                            )
                    flight.works.append(work)
                if observed is not None and flight.leaves_rank:
                    observed.observer.called("reduce", observed.group, flight.works)
                if not on_host and flight.brings_out:
                    # Before the event: behind it, compute may reuse what was received or staged.
                    flight.bring_out()
                if not on_host and not flight.is_followed:
                    flight.accumulate()
            except BaseException:
                events.done.record()  # nothing follows, but collectives of some buckets may be in flight
                raise
            finally:
                events.input_read.record()
            if not on_host and flight.is_followed and not flight.is_replicated:
                flight.accumulate_to_end()
        if not on_host and flight.is_replicated:
            # The all-reduce has a stream of its own, so that the next group's reduce-scatter does not queue
            # behind it. The reduce-scatter's last write is before `input_read`, too.
            with context.all_reduce:
                events.input_read.wait()
                flight.accumulate_to_end()
        flight.issued = True
        if observed is not None and not on_host:
            flight.tell_final(observed)

    def _filled(self, include_unused: bool) -> ReductionInFlight | None:
        """Take gradients, lay them into the buffer, and return a reduction that the context knows; None without gradients."""
        gradients = self._take_gradients()
        unreduced, settings, context = self.unreduced, self.settings, self.context
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
            return None
        context.make_room_for_reduction()
        buffer, self._open = self._open or self._free_buffer({*gradients, *zeros}), None
        observer = context.observer
        if observer is not None:
            observer.memory_of_reductions(buffer, buffer.nbytes)
        if not written:
            take_memory(buffer)
        used = frozenset((*gradients, *zeros, *written))
        buckets = buffer.planned.get(used) or buffer.buckets(used)
        flight = ReductionInFlight(self, self._transport(), buffer, buckets)
        if context.in_capture and flight.may_copy_beside:
            flight.copy_in = functools.partial(fill, buffer, gradients, zeros, buckets, written)
        else:
            fill(buffer, gradients, zeros, buckets, written)
        if observer is not None:
            group = self._group()
            assert group is not None, "a group outlives its reductions"
            observer.issues("reduce", group)
            flight.observed = Observed(observer, group)
        # The context knows it before anything can fail, and ends it after a failure, too: it may hold memory of a
        # transport, and the collectives of its first buckets may be in flight.
        context.note_reduction(flight)
        return flight

    def _take_gradients(self) -> dict[int, Tensor]:
        """Take `.grad` of the unsharded parameters, by index of the parameter: zeros, if this rank's do not count."""
        gradients = {}
        for index, param in enumerate(self.params):
            unsharded = param.unsharded_param
            if unsharded is None:
                continue
            gradient = unsharded.grad
            if gradient is not None:
                unsharded.grad = None
                if param.placement.unsharded_mesh is not None:
                    if torch_border.REDUCES_IN_GRAD_DTYPE and is_unsummed(gradient):
                        gradient = gradient.to(self.dtypes.unreduced[index])
                    gradient = local_gradient(param.placement, gradient)
                gradients[index] = gradient
        active = self.settings.active
        if active is not None and not active.this_rank:
            # Zeros are written. A product with zero would keep NaN.
            for index, gradient in gradients.items():
                gradients[index] = torch.zeros_like(gradient, requires_grad=False)
        if self.dtypes.arrived and self.dtypes.note_arrived(gradients):
            self.forget_buffer()
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
                for index, param in enumerate(self.params)
                if param.trainable and param.unsharded_param is not None
            )
        return missing.difference(gradients, self._written)

    def _transport(self) -> Transport | None:
        """Return how messages travel; None if they stay on this rank, or a user's function does the whole reduction."""
        settings = self.settings
        group = settings.process_group
        if group is None or settings.replacement is not None:
            return None
        if settings.transport is not None:
            return settings.transport
        key = group, self.dtypes.wire is not None
        found = self._transports.get(key)
        if found is None:
            made = (Exchanged if self.dtypes.wire is not None else Coalesced)(group, self._device)
            found = self._transports[key] = made
        return found

    def tags_of(self, bucket: ReduceBucket) -> tuple[Tag, Tag]:
        """Return the tags of a bucket's reduce-scatter, or the exchange in its place, and of its all-reduce.

        They say which parameters are in it, if not all of the group are: ranks that reduce different parameters of equal
        sizes would otherwise add up what does not belong together. And they say whether the result is added to
        gradients: a rank that has not called `zero_grad` would otherwise train its shards with other gradients.
        """
        first = self.params[bucket.params[0]].sharded_param
        # Pieces of a wrapper's parameters may be empty on some ranks, and never get gradients there.
        added = isinstance(first, DTensorShardedParam) and first.param.grad is not None
        found = self._tags.get((bucket.params, added))
        if found is None:
            name = self._name
            if not self._by_segment and len(bucket.params) < len(self.params):
                names = ", ".join(self.params[index].name for index in bucket.params)
                name = f"{name} (only {names})"
            if added:
                name += ", to be added to gradients"
            model, model_among_replicas = self._models
            found = self._tags[bucket.params, added] = (
                tag(f"reduce-scatter of {name}{model}"),
                tag(f"all-reduce of {name}{model_among_replicas}"),
            )
        return found

    # --- memory -----------------------------------------------------------------------------------

    def _free_buffer(self, params: set[int]) -> ReduceBuffer:
        """Return a reduce buffer that has no memory, with room for parameters; no reduction in flight reads it."""
        context, buffer = self.context, self._buffer
        if buffer is None or not params <= buffer.targets.keys():
            buffer = self._buffer = self._new_buffer(self._device, params)
            buffer.release()  # it took memory to make its views
        elif context.reduce_inputs and buffer.allocated:
            # Several inputs may be in flight, and this group's previous reduction still reads its own.
            context.finish_inputs()
        return buffer

    def _new_buffer(self, device: torch.device, params: Collection[int] = ()) -> ReduceBuffer:
        """Return a reduce buffer for the parameters that are trainable now, and for ``params``."""
        info = self.mesh_info
        return ReduceBuffer(
            self._layout,
            info.shard_mesh_rank,
            [i for i, param in enumerate(self.params) if param.trainable or i in params],
            self.dtypes.reduce,
            self.dtypes.gradient,
            device,
            by_segment=self._by_segment,
            rank_major=self.arrangement.order is Order.ROWS,
            wire_dtype=self.dtypes.wire,
            replica=(info.replicate_mesh_rank, info.replicate_mesh_size),
        )

    @property
    def arrangement(self) -> Arrangement:
        """How gradients lie from the next buffer on; a row of the table in `reduce_buffer`."""
        transport = self.settings.transport
        return arrangement(
            self._layout,
            self._device,
            wire_dtype=self.dtypes.wire,
            is_written=self._writes_products,
            is_staged=transport is not None and not transport.in_place,
        )

    def _prepare(self, bucket: ReduceBucket, flight: ReductionInFlight) -> _Part:
        """Take memory for what a bucket's collective brings, on the compute stream."""
        settings, transport, info = flight.settings, flight.transport, self.mesh_info
        receives = transport is not None and transport.sums_at_receiver
        rule = UNDIVIDED
        if settings.replacement is None:
            num_ranks = info.shard_mesh_size * info.replicate_mesh_size
            force_sum = settings.force_sum or receives
            rule = divide_rule(bucket.reduce_dtype, num_ranks, settings.divide_by, force_sum)
        if settings.active is not None:
            rule = replace(rule, after=rule.after * settings.active_fraction)
        inputs: Sequence[Tensor] = bucket.inputs or (bucket.join_messages(),)
        dtype, device = bucket.reduce_dtype, self.context.device
        same_dtype = bucket.gradient_dtype is dtype
        in_place = transport is None or transport.in_place
        if transport is not None and not in_place:
            part = _staged(bucket, rule, inputs, transport)
        else:
            reduced = torch.empty(bucket.numel, dtype=dtype, device=device)
            views: Sequence[Tensor] = ()
            with flight.buffer.below_autograd:
                if not (same_dtype and bucket.shaped_inputs) or receives or settings.replacement:
                    outputs = [reduced] if bucket.is_whole else bucket.outputs_in(reduced)
                else:
                    # The collective writes the gradients themselves, so one set of views is enough.
                    inputs, outputs = bucket.shaped_inputs, _views(reduced, bucket.gradients)
                    views = outputs
            part = _Part(bucket, rule, inputs, outputs, reduced, views)
        if not same_dtype:
            part.final = torch.empty(bucket.numel, dtype=bucket.gradient_dtype, device=device)
        if transport is not None and in_place and receives:
            part.totals = part.outputs
            part.lent = [transport.allocate(each.numel(), each.dtype) for each in inputs]
            part.outputs = part.lent
        flight.brings_out = flight.brings_out or bool(part.totals)
        return part

    # --- gradients that backward writes in place --------------------------------------------------

    def write_products(self) -> None:
        """From now on let backward write gradients into the reduce buffer; between steps."""
        if not self._writes_products:
            self._writes_products = True
            self.forget_buffer()

    def takes_product(self, index: int) -> bool:
        """Return whether backward may write a parameter's gradient: whether its slot is one piece."""
        rank_major = self.arrangement.order is Order.ROWS
        slot = self._layout.slots[index]
        return self._writes_products and lies_in_one_piece(slot, rank_major=rank_major)

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
            return self.unreduced.place_for(index, self.dtypes.unreduced[index])
        if self._open is None:
            buffer = self._open = self._free_buffer({index})
            if self.context.observer is not None:
                self.context.observer.memory_of_reductions(buffer, buffer.nbytes)
            take_memory(buffer)
        again = index in self._written
        self._written.add(index)
        return self._open.slot(index), again

    def give_ordinary(self, index: int, gradient: Tensor) -> None:
        """Add a gradient to the unsharded parameter's, as autograd does; its hook is still to run."""
        param = self.params[index].unsharded_param
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
        if self.context.observer is not None:
            self.context.observer.memory_of_reductions(buffer, 0)

    # --- forget -----------------------------------------------------------------------------------

    def clear_sharded_gradients(self, unsharded: Collection[int], *, set_to_none: bool) -> None:
        """Clear `.grad` of sharded parameters: ``zero_grad`` found the unsharded ones, with these ids."""
        for param in self.params:
            if id(param.unsharded_param) in unsharded:
                param.sharded_param.clear_gradient(set_to_none=set_to_none)

    def drop(self) -> None:
        """Forget gradients that were not reduced: after a failed step, when no reduction is in flight."""
        for param in self.params:
            if param.unsharded_param is not None:
                param.unsharded_param.grad = None
        self.unreduced.drop()
        for buffer in self.buffers():
            if buffer.allocated:
                self._release(buffer)
        self._open = None
        self._written.clear()

    # --- for traces and plans ---------------------------------------------------------------------

    def tell_memory(self, observer: StepObserver) -> None:
        """Tell a new observer what memory is held for reductions now."""
        observer.memory_of_reductions(self.unreduced, self.unreduced.nbytes)
        if self._buffer is not None and self._buffer.allocated:
            observer.memory_of_reductions(self._buffer, self._buffer.nbytes)

    def buffers(self) -> list[ReduceBuffer]:
        """Return the buffers that reductions read, with memory or without."""
        return [buffer for buffer in (self._open, self._buffer) if buffer is not None]

    def traffic(self) -> ReduceTraffic:
        """Return what a reduction sends, on any device and before there is one.

        Read off a buffer without memory that is made as the real ones are.
        """
        sent = all_reduced = 0
        buffer = self._new_buffer(torch.device("meta"))
        for bucket in buffer.buckets(frozenset(buffer.targets)):
            reduced = bucket.numel * bucket.reduce_dtype.itemsize
            inputs = sum(tensor.nbytes for tensor in bucket.inputs)
            if self.arrangement.is_staged:
                inputs = reduced * self._layout.world  # with what lies between segments
            sent += inputs - inputs // self._layout.world
            all_reduced += all_reduce_bytes(reduced, self.mesh_info.replicate_mesh_size)
        return ReduceTraffic(sent, all_reduced)


# --- one reduction in flight ----------------------------------------------------------------------


@dataclass(slots=True)
class _Part:
    """One bucket in flight, and the memory that its collective reads and writes."""

    bucket: ReduceBucket
    rule: DivideRule
    inputs: Sequence[Tensor]
    """What the collective reads."""
    outputs: Sequence[Tensor]
    """What the collective writes: views of `reduced`, or memory that is brought into `totals`."""
    reduced: Tensor
    """This rank's reduced gradients, in the reduce dtype."""
    views: Sequence[Tensor] = ()
    """Views of `final` for each parameter, if there are any yet."""
    totals: Sequence[Tensor] = ()
    """Views of `reduced` into which `outputs` are brought: summed over ranks, or copied out of memory that is taken back."""
    lent: Sequence[Tensor] = ()
    """Memory of the transport, to be released when the input has been read."""
    final: Tensor = field(init=False)
    """`reduced` in the dtype of the sharded gradients; the same tensor if the dtypes are equal."""

    def __post_init__(self) -> None:
        self.final = self.reduced


class ReductionInFlight:
    """One reduction of one group's gradients: what is in flight of it, until the compute stream has waited (`InFlight`).

    It owns the reduce buffer's memory and everything its streams touch until then ([Note: memory and streams], rule 2).
    On devices with streams, `Reduction.reduce` issues everything, and the rest only orders the compute stream. On the CPU,
    that starts the collectives, `finish_input` waits for them, and `finish` does the arithmetic.
    """

    def __init__(
        self,
        reduction: Reduction,
        transport: Transport | None,
        buffer: ReduceBuffer,
        buckets: Sequence[ReduceBucket],
    ) -> None:
        context, settings = reduction.context, reduction.settings
        self._reduction, self._context, self._events = reduction, context, reduction.events
        self.settings = settings
        """What a user changes counts from the next reduction on."""
        self.transport, self.buffer, self.buckets = transport, buffer, buckets
        self.is_replicated = reduction.mesh_info.replicate_process_group is not None
        self._marks_end = self.is_replicated or settings.hook is not None
        """Whether the end has an event of its own, behind an all-reduce or a user's hook. Every event costs the host time.

        A copy to the host needs none. It is on the reduce-scatter stream, before the next reduction, whose input is waited for
        before this one is finished; behind the last one the host waits for all streams (`FSDPCommContext.join`)."""
        self.is_followed = self._marks_end or context.host_reads_results
        """Whether something long may follow the reduce-scatter, for which the input must not wait: an all-reduce, a user's
        hook, a copy to the host. Hooks of parameters do not count: what they issue has the time of the next group's backward."""
        self.leaves_rank = settings.process_group is not None or settings.replacement is not None
        """Whether anything goes to other ranks before replicas are summed."""
        self.copy_in: Callable[[], None] | None = None
        """Holds the gradients, if the reduce-scatter stream copies them: [Note: gradients copied beside]."""
        self.parts: list[_Part] = []
        self.works: list[Work | None] = []
        self.brings_out = False
        """Whether results are in memory that is given back with the input: `_Part.totals`."""
        self.issued = False
        """Whether all collectives were called, so that there are results."""
        self._accumulated = False
        self._kept: list[Tensor] = []
        """Memory that the last steps use besides that of the parts."""
        self.observed: Observed | None = None
        """The observer of this reduction, if there is one."""

    @property
    def may_copy_beside(self) -> bool:
        """Whether a captured step copies gradients beside compute: [Note: gradients copied beside].

        Staged messages, and those of parts of a buffer that lies row after row, are copied once more, by compute.
        """
        in_place = self.transport is None or self.transport.in_place
        return self.buffer.nbytes <= COPIED_BESIDE and not self.buffer.rank_major and in_place

    # --- on the stream of the collective ------------------------------------------------------------

    def reduce_here(self, part: _Part) -> None:
        """Do without a transport: let the user's function reduce, or copy what stays on this rank."""
        replacement, is_sharded = self.settings.replacement, self.settings.process_group is not None
        if not is_sharded:
            torch._foreach_copy_(list(part.outputs), list(part.inputs))
        if replacement is not None:
            for output, tensor in zip(part.outputs, part.inputs, strict=True):
                call_replacement(replacement, output, tensor, is_sharded=is_sharded)

    def bring_out(self) -> None:
        """Bring results out of memory that is given back with the input; after the collectives."""
        assert self.transport is not None, "it has brought them"
        for part in self.parts:
            for received, total in zip(part.outputs, part.totals, strict=False):
                if self.transport.sums_at_receiver:
                    received = received.view(self.buffer.layout.world, -1)
                    torch.sum(received, 0, dtype=total.dtype, out=total)
                else:
                    total.copy_(received)

    def accumulate_to_end(self) -> None:
        """Accumulate, and mark the end; after an exception, too, as some of it may be in the stream."""
        try:
            self.accumulate()
        finally:
            if self._marks_end:
                self._events.done.record()

    def accumulate(self) -> None:
        """Finish the arithmetic and give every sharded parameter its gradient.

        On the stream of the last collective; on the CPU once the host has waited for it.
        """
        self._accumulated = True
        # Only in a backward with ``create_graph``, and outside of backward.
        if torch.is_grad_enabled():
            with torch.no_grad():
                for part in self.parts:
                    self._accumulate_part(part)
        else:
            for part in self.parts:
                self._accumulate_part(part)

    def _accumulate_part(self, part: _Part) -> None:
        settings, bucket, reduced, final = self.settings, part.bucket, part.reduced, part.final
        if (
            self.is_replicated
            and settings.replacement is None
            and not self._sum_over_replicas(part)
        ):
            return
        if bucket.has_copies:
            bucket.sum_copies(reduced)
        if settings.hook is not None:
            bucket.zero_gaps(reduced)
            run_hook(settings, self._context, reduced)
        if part.rule.after != 1:
            reduced.div_(part.rule.after)
        if final is not reduced:
            final.copy_(reduced)
        params, views = self._reduction.params, part.views
        sharded_params = [params[index].sharded_param for index in bucket.params]
        if sharded_params[0].param.device != final.device:
            final, views = download(final, sharded_params, pinned=settings.pinned), ()
            self._kept.append(final)
        if not views:
            with self.buffer.below_autograd:
                views = _views(final, bucket.gradients)
        in_dtensors = (
            type(sharded_params[0]) is DTensorShardedParam
        )  # those of a group are of one kind
        for sharded_param, gradient in zip(sharded_params, views, strict=True):
            param = sharded_param.param
            if (
                in_dtensors
                and param.grad is None
                and not _tensor_hooks(param)
                and not _post_accumulate_grad_hooks(param)
                and _IN_BACKWARD_OPTIMIZERS not in param.__dict__
            ):
                param.grad = _dtensor(gradient, _spec_of(param))  # as in most steps: without a call
            else:
                sharded_param.accumulate_gradient(gradient)

    def _sum_over_replicas(self, part: _Part) -> bool:
        """Sum over replicas, or keep a partial sum and return False; the host waits where there are no streams."""
        unreduced, bucket, reduced = self._reduction.unreduced, part.bucket, part.reduced
        if not self.settings.all_reduce:
            unreduced.keep_partial(bucket.params, _views(reduced, bucket.unsummed))
            return False
        if unreduced.partial:
            sums = _views(reduced, bucket.unsummed)
            self._kept += unreduced.add_partial_to(bucket.params, sums)
        group, observed = self._reduction.mesh_info.replicate_process_group, self.observed
        assert group is not None, "there are replicas"
        if self._reduction.mesh_info.replicate_mesh_size == 1:
            return True
        if observed is not None:
            observed.observer.issues("all-reduce", observed.group)
            nbytes = all_reduce_bytes(reduced.nbytes, group.size())
            observed.observer.calls("all-reduce", observed.group, nbytes)
        _, all_reduce_tag = self._reduction.tags_of(bucket)
        collectives.all_reduce(reduced, group, part.rule.op, all_reduce_tag)
        if observed is not None:
            observed.observer.called("all-reduce", observed.group, ())
        return True

    # --- finish, on the compute stream ------------------------------------------------------------

    def finish_input(self) -> None:
        """See `InFlight`."""
        context = self._context
        observed, pending = self.observed, [work for work in self.works if work is not None]
        if pending:
            if observed is not None:
                observed.observer.waits("reduce", observed.group)
            for work in pending:
                work.wait()
            if observed is not None:
                observed.observer.waited("reduce", observed.group)
        if self.brings_out and not context.asynchronous and self.issued:
            self.bring_out()
        self._wait_for(self._events.input_read, "reduce")
        # The compute stream is behind the last read now, so the memory may go back to its pool.
        self.copy_in = None
        self.buffer.release()
        for part in self.parts:
            for tensor in part.lent:
                assert self.transport is not None, "it has lent it"
                self.transport.release(tensor)
            part.inputs = part.outputs = part.totals = part.lent = ()
        if context.observer is not None:
            context.observer.memory_of_reductions(self.buffer, 0)

    def _wait_for(self, event: Event, collective: Collective) -> None:
        """Order the compute stream after an event of the collective's stream."""
        observed = self.observed
        if observed is not None:
            observed.observer.waits(collective, observed.group, event)
        event.wait()
        if observed is not None:
            observed.observer.waited(collective, observed.group, event)

    def finish(self, *, accumulate: bool = True) -> None:
        """See `InFlight`."""
        if accumulate and self.issued and not self._accumulated:
            self.accumulate()
            if self.observed is not None:
                self.tell_final(self.observed)
        if self._marks_end:
            if self.is_replicated:
                self._wait_for(self._events.done, "all-reduce")
            else:
                self._events.done.wait()
        self.parts.clear()
        self._kept.clear()

    # --- what observers are told ------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Bytes that are given back when the input has been read."""
        lent = (tensor.nbytes for part in self.parts for tensor in part.lent)
        return self.buffer.nbytes + sum(lent)

    def tell_calls(self, observed: Observed) -> None:
        """Tell that the collectives are called next."""
        if self.leaves_rank:
            sent = sum(tensor.nbytes for part in self.parts for tensor in part.inputs)
            nbytes = sent - sent // self.buffer.layout.world  # the rest stays here
            observed.observer.calls("reduce", observed.group, nbytes)

    def tell_final(self, observed: Observed) -> None:
        """Tell behind which event the sharded gradients are final, unless partial sums wait for replicas."""
        context, events, settings = self._context, self._events, self.settings
        if self.is_replicated and not settings.all_reduce and settings.replacement is None:
            return
        if not context.asynchronous:
            event = None
        elif self._marks_end or self.is_followed:
            event = events.done
            if (
                not self._marks_end
            ):  # behind copies to the host, which have no event in steps that are not observed
                with context.reduce_scatter:
                    event.record()
        else:
            event = events.input_read
        observed.observer.gradients_final(observed.group, event)


# --- copies and views -----------------------------------------------------------------------------


def take_memory(buffer: ReduceBuffer) -> None:
    """Take memory for a reduce buffer on the current stream (the compute stream) and zero the padding.

    Each time, since the memory may be other memory than before and hold anything. Padding is reduced with the
    gradients, and users' hooks see it.
    """
    buffer.allocate()
    if buffer.pads:
        torch._foreach_zero_(buffer.pads)


def fill(
    buffer: ReduceBuffer,
    gradients: Mapping[int, Tensor],
    zeros: Iterable[int],
    buckets: Sequence[ReduceBucket],
    written: Set[int] = frozenset(),
) -> None:
    """Copy gradients into memory that was taken, on the current stream: one fused cast-copy for all of them.

    Parameters ``zeros`` have no gradient and take part as zeros. If backward has ``written`` gradients into their
    slots, what else these parameters have is added.
    """
    if again := written and written & gradients.keys():
        for param in again:
            buffer.slot(param).add_(gradients[param])
        gradients = {i: gradient for i, gradient in gradients.items() if i not in again}
    if gradients:
        key = tuple(gradients)
        targets, cuts = buffer.copies.get(key) or buffer.plan_copy(key)
        with buffer.below_autograd:
            sources = [*gradients.values()]
            torch._foreach_copy_(targets, _pieces(sources, cuts) if cuts else sources)
    unfilled: list[Tensor] = []
    for param in zeros:
        unfilled += buffer.targets[param]
    for bucket in buckets:
        unfilled += bucket.unfilled
    if unfilled:
        torch._foreach_zero_(unfilled)


def _pieces(gradients: Sequence[Tensor], cuts: Sequence[Cut]) -> list[Tensor]:
    """Return gradients, cut to match their targets."""
    pieces: list[Tensor] = []
    for gradient, cut in zip(gradients, cuts, strict=True):
        if cut is None:
            pieces.append(gradient)
        elif callable(cut):
            pieces += cut(gradient)
        else:
            pieces += _views(gradient if gradient.is_contiguous() else gradient.contiguous(), cut)
    return pieces


def _staged(
    bucket: ReduceBucket, rule: DivideRule, inputs: Sequence[Tensor], transport: Transport
) -> _Part:
    """Copy inputs into one message, row after row, in memory of the transport, and take memory for what comes back."""
    world, receives = transport.group.size(), transport.sums_at_receiver
    dtype = inputs[0].dtype if receives else bucket.reduce_dtype
    output = transport.allocate(bucket.numel * (world if receives else 1), dtype)
    packed = transport.allocate(bucket.numel * world, dtype)
    rows = packed.view(world, bucket.numel).zero_()
    torch._foreach_copy_(
        [rows.narrow(1, start, numel) for start, numel in bucket.output_ranges],
        [tensor.view(world, -1) for tensor in inputs],
    )
    if not receives and not transport.recycles:
        return _Part(bucket, rule, [packed], [output], output, lent=[packed])
    reduced = torch.empty(bucket.numel, dtype=bucket.reduce_dtype, device=packed.device)
    return _Part(bucket, rule, [packed], [output], reduced, totals=[reduced], lent=[packed, output])


def _views(tensor: Tensor, views: Sequence[OutputView]) -> list[Tensor]:
    """Return views of a tensor that is contiguous."""
    begin = tensor.storage_offset()
    # Not narrow, split or view: this takes half of their time.
    if not begin:
        return [*itertools.starmap(tensor.as_strided, views)]
    # It may be part of a larger block.
    return [tensor.as_strided(shape, strides, begin + start) for shape, strides, start in views]


def all_reduce_bytes(nbytes: int, ranks: int) -> int:
    """Return what each of ``ranks`` sends to sum ``nbytes``: all shards but its own, and that once summed to all."""
    return 2 * (ranks - 1) * nbytes // ranks
