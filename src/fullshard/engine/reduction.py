"""One group's reductions: gradients are taken, laid into the reduce buffer, reduced over ranks and accumulated.

    compute stream          take gradients, fill the buffer, take memory for the results          `reduce`
    reduce-scatter stream   reduce-scatter, or exchange and sum
    all-reduce stream       sum over replicas (HSDP)
    the last of the two     division, cast, copy to host memory, `.grad` of sharded parameters    `ReductionInFlight`
    compute stream          wait for the others, give memory back

`.grad` of unsharded parameters is taken here and nowhere else. `reduce_buffer` decides how gradients lie, `transports` how
they travel; `streams` keeps reductions in flight and finishes them. Gradients that wait for a later backward are in
`unreduced_gradients`, users' choices and code that only runs then in `reduction_state`.

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
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import Work

from fullshard import torch_border
from fullshard.engine.reduction_state import (
    UNDIVIDED,
    Part,
    ReductionState,
    all_reduce_bytes,
    bring_out,
    divide_rule,
    download,
    joined,
    reduce_here,
    run_hook,
    staged,
)
from fullshard.layout.placement import is_unsummed, local_gradient
from fullshard.storage.reduce_buffer import (
    Cut,
    OutputView,
    ReduceBucket,
    ReduceBuffer,
)
from fullshard.storage.sharded_params import DTensorShardedParam
from fullshard.transport import collectives
from fullshard.transport.observer import Collective, Observed
from fullshard.transport.streams import Event
from fullshard.transport.tags import Tag, tag
from fullshard.transport.transports import Coalesced, Exchanged, Transport

COPIED_BESIDE = 64 * 2**20
"""Bytes of a reduce buffer up to which a captured step copies gradients beside compute."""

# Looked up once, as they are used for every parameter in every step.
_tensor_hooks = torch_border.tensor_hooks
_post_accumulate_grad_hooks = torch_border.post_accumulate_grad_hooks
_IN_BACKWARD_OPTIMIZERS = torch_border.IN_BACKWARD_OPTIMIZERS
_dtensor, _spec_of = torch_border.dtensor, torch_border.spec_of


class Reduction(ReductionState):
    """The reductions of one group's gradients; lives as long as the group."""

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

        Before: gradients in `.grad` of unsharded parameters. After: those are None, and the context has a reduction in flight.
        """
        flight = self._filled(include_unused)
        if flight is None:
            return
        # All memory is taken before the first collective is called: a failure here leaves nothing in flight. Often the peak.
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
                        reduce_here(flight.settings, part.outputs, part.inputs)
                    else:
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
                    bring_out(transport, flight.parts)
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
            flight.accumulate_beside()
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
        buffer, self._open = self._open, None
        if buffer is None:
            buffer, needed = self._buffer, {*gradients, *zeros}
            if buffer is None or context.reduce_inputs or not needed <= buffer.targets.keys():
                buffer = self._free_buffer(needed)
        observer = context.observer
        if observer is not None:
            observer.memory_of_reductions(buffer, buffer.nbytes)
        if not written:
            buffer.allocate()
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

    def _transport(self) -> Transport | None:
        """Return the transport of messages; None if they stay on this rank, or a user's function does the whole reduction."""
        settings = self.settings
        group = settings.process_group
        if group is None or settings.replacement is not None:
            return None
        if settings.transport is not None:
            return settings.transport
        exchanges = self.dtypes.wire is not None
        found = self._transports.get((group, exchanges))
        if found is None:
            found = (Exchanged if exchanges else Coalesced)(group, self._device)
            self._transports[group, exchanges] = found
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

    def _prepare(self, bucket: ReduceBucket, flight: ReductionInFlight) -> Part:
        """Take memory for the outputs of a bucket's collective, on the compute stream."""
        settings, transport, info = flight.settings, flight.transport, self.mesh_info
        receives = transport is not None and transport.sums_at_receiver
        rule = UNDIVIDED
        if settings.replacement is None:
            num_ranks = info.shard_mesh_size * info.replicate_mesh_size
            force_sum = settings.force_sum or receives
            # Averaging over shards and then over replicas is averaging over all.
            rule = divide_rule(bucket.reduce_dtype, num_ranks, settings.divide_by, force_sum)
        if settings.active is not None:
            rule = replace(rule, after=rule.after * settings.active_fraction)
        dtype, device = bucket.reduce_dtype, self.context.device
        same_dtype = bucket.gradient_dtype is dtype
        in_place = transport is None or transport.in_place
        if transport is not None and not in_place:
            part = staged(bucket, rule, transport, self._layout.world)
        else:
            inputs = bucket.inputs or [joined(bucket)]
            reduced = torch.empty(bucket.numel, dtype=dtype, device=device)
            views: Sequence[Tensor] = ()
            with flight.buffer.below_autograd:
                if not (same_dtype and bucket.shaped_inputs) or receives or settings.replacement:
                    outputs = [reduced] if bucket.is_whole else bucket.outputs_in(reduced)
                else:
                    # The collective writes the gradients themselves, so one set of views is enough.
                    inputs, outputs = bucket.shaped_inputs, _views(reduced, bucket.gradients)
                    views = outputs
            part = Part(bucket, rule, inputs, outputs, reduced, views=views)
        part.final = part.reduced
        if not same_dtype:
            part.final = torch.empty(bucket.numel, dtype=bucket.gradient_dtype, device=device)
        if transport is not None and in_place and receives:
            part.totals = part.outputs
            part.lent = [transport.allocate(each.numel(), each.dtype) for each in inputs]
            part.outputs = part.lent
        flight.brings_out = flight.brings_out or bool(part.totals)
        return part


# --- one reduction in flight ----------------------------------------------------------------------


class ReductionInFlight:
    """One reduction of one group's gradients, in flight until the compute stream has waited for it (`InFlight`).

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
        """The settings of this reduction; a user's changes count from the next one on."""
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
        self.parts: list[Part] = []
        self.works: list[Work | None] = []
        self.brings_out = False
        """Whether results are in memory that is given back with the input: `Part.totals`."""
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

    def accumulate_to_end(self) -> None:
        """Accumulate, and mark the end; after an exception, too, as some of it may be in the stream."""
        try:
            self.accumulate()
        finally:
            if self._marks_end:
                self._events.done.record()

    def accumulate_beside(self) -> None:
        """Accumulate on the all-reduce's own stream, so that the next group's reduce-scatter does not queue behind it."""
        with self._context.all_reduce:
            self._events.input_read.wait()  # the reduce-scatter's last write is before it, too
            self.accumulate_to_end()

    def accumulate(self) -> None:
        """Finish the arithmetic and give every sharded parameter its gradient.

        On the stream of the last collective; on the CPU once the host has waited for it.
        """
        if (
            torch.is_grad_enabled()
        ):  # only in a backward with ``create_graph``, and outside of backward
            with torch.no_grad():
                self.accumulate()
            return
        self._accumulated = True
        for part in self.parts:
            self._accumulate_part(part)

    def _accumulate_part(self, part: Part) -> None:
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
        # Those of a group are of one kind.
        in_dtensors = type(sharded_params[0]) is DTensorShardedParam
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

    def _sum_over_replicas(self, part: Part) -> bool:
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
            bring_out(self.transport, self.parts)
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
        elif self.is_followed:
            event = events.done
            if not self._marks_end:  # behind a copy to the host, which has no event otherwise
                with context.reduce_scatter:
                    event.record()
        else:
            event = events.input_read
        observed.observer.gradients_final(observed.group, event)


# --- copies and views -----------------------------------------------------------------------------


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
    if buffer.pads:
        # They are reduced with the gradients, and users' hooks see them. The memory may hold anything.
        torch._foreach_zero_(buffer.pads)
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


def _views(tensor: Tensor, views: Sequence[OutputView]) -> list[Tensor]:
    """Return views of a tensor that is contiguous."""
    begin = tensor.storage_offset()
    # Not narrow, split or view: this takes half of their time.
    if not begin:
        return [*itertools.starmap(tensor.as_strided, views)]
    # It may be part of a larger block.
    return [tensor.as_strided(shape, strides, begin + start) for shape, strides, start in views]
