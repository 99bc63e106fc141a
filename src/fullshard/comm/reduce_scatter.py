"""Reducing a group's gradients: from `.grad` of the unsharded parameters to `.grad` of the sharded ones.

    GradientReducer      one group's; `reduce` takes the gradients, fills the reduce buffer and starts a reduction,
                         `accumulate` lets them wait for a later backward
    ReduceScatterState   one reduction in flight: reduce-scatter (or exchange and sum), all-reduce over replicas,
                         division, cast, and accumulation into the sharded gradients

How gradients lie in the buffer is `reduce_buffer`'s, what waits for a later backward `unreduced_gradients`', how many
reductions may be in flight `streams`'. `.grad` of unsharded parameters is taken here and nowhere else; that of sharded
ones is written by `sharded_params`.

[Note: narrow on the wire]
A reduce-scatter sums in the dtype it carries. To send bf16 and sum in fp32, an exchange (all-to-all)
brings each rank all ranks' gradients of its shard, and the rank adds them up by itself: in the same
order every time, whatever algorithm the backend chooses. As many elements travel as in a
reduce-scatter. What is received is as large as what is sent, so both together take the memory of one
fp32 input; they are kept and given back together. Nothing can overflow before the sum, so all
division comes after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from fullshard import torch_border
from fullshard.comm import collectives
from fullshard.comm.reduce_buffer import OutputView, ReduceBucket, ReduceBuffer
from fullshard.comm.reduce_settings import UNDIVIDED, DivideRule, ReduceSettings, divide_rule
from fullshard.comm.spans import CollectiveSpan, Group, TraceRecorder
from fullshard.comm.streams import Event, FSDPCommContext
from fullshard.comm.unreduced_gradients import UnreducedGradients
from fullshard.plan.layout import Layout, has_large_pieces
from fullshard.plan.mesh import DataParallelAxes
from fullshard.plan.placement import local_gradient
from fullshard.plan.policies import MixedPrecisionPolicy
from fullshard.storage.param import FSDPParam
from fullshard.storage.sharded_params import (
    ShardedParam,
    accumulate_gradients,
    reads_gradients,
)


class ReduceTraffic(NamedTuple):
    """Bytes of one reduction of all trainable parameters, on this rank."""

    sent: int
    """To other ranks, by a reduce-scatter or exchange."""
    all_reduced: int
    """To other replicas."""


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
        """Of each parameter, the dtype in which its gradients are summed over ranks."""
        self.gradient_dtypes: list[torch.dtype] = []
        """Of each parameter, the dtype of its sharded gradient."""
        self.wire_dtype: torch.dtype | None = None
        """The dtype in which gradients travel, if it is not the reduce dtype."""
        self.unreduced = UnreducedGradients(params, layout)
        self._buffer: ReduceBuffer | None = None
        """None until there are gradients, and after its dtypes or trainable parameters have changed."""
        self._context: FSDPCommContext
        self._events: ReduceEvents
        self._group: weakref.ref[Group]

    def connect(self, context: FSDPCommContext, group: Group) -> None:
        """Join a model's streams; spans of reductions are recorded as those of ``group``."""
        self._context = context
        self._group = weakref.ref(group)  # which holds us
        self._events = ReduceEvents.new(context)
        self.unreduced.connect(context)

    def derive_dtypes(
        self, policy: MixedPrecisionPolicy, compute_dtypes: Sequence[torch.dtype]
    ) -> None:
        """Derive the dtypes of sums, messages and sharded gradients from the policy and the parameters' dtypes."""
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
        """Make the reduce buffer anew next time: dtypes, or which parameters are trainable, have changed."""
        self._buffer = None

    # --- each backward ----------------------------------------------------------------------------

    def accumulate(self) -> None:
        """Take the unsharded parameters' gradients, to be reduced by a later backward.

        Before: gradients in `.grad` of unsharded parameters. After: those are None.
        """
        self.unreduced.add(self._take_unsharded_gradients(), self.reduce_dtypes)

    def reduce(self, *, include_unused: bool = False) -> None:
        """Take the unsharded parameters' gradients and all that wait, and start to reduce them.

        With ``include_unused``, and if the settings say so, trainable parameters without a gradient take part as
        zeros. Nothing happens if no parameter takes part.

        Before: gradients in `.grad` of unsharded parameters. After: those are None, and a reduction is in flight. The
        context waits for it when it needs room for another one, and at the latest when it is joined.
        """
        gradients = self._take_unsharded_gradients()
        unreduced, settings, context = self.unreduced, self.settings, self._context
        if unreduced.held:
            # Sums over several backwards are rounded for the wire when they are complete.
            gradients = unreduced.take(gradients)
        zeros: set[int] = set()
        if unreduced.partial or settings.zero_unused:
            zeros = self._without_gradient(gradients, include_unused=include_unused)
        if not gradients and not zeros:
            return
        buffer = self._buffer_for({*gradients, *zeros})
        recorder = context.recorder
        if recorder is not None:
            recorder.note_reducing(buffer, buffer.nbytes)
        buckets = buffer.fill(gradients, sorted(zeros))
        span = None
        if recorder is not None:
            group = self._group()
            assert group is not None, "a group outlives its reductions"
            span = recorder.transfer("reduce", group)
        state = ReduceScatterState(
            context,
            self._events,
            self._mesh_info,
            settings,
            buffer,
            buckets,
            self._params,
            unreduced,
        )
        state.issue(span)
        context.note_reduction(state)

    def _take_unsharded_gradients(self) -> dict[int, Tensor]:
        """Take `.grad` of the unsharded parameters; by index of the parameter."""
        gradients = {}
        for index, param in enumerate(self._params):
            unsharded = param.unsharded_param
            if unsharded is None:
                continue
            gradient = unsharded.grad
            if gradient is not None:
                unsharded.grad = None
                if param.placement.unsharded_mesh is not None:
                    gradient = local_gradient(param.placement, gradient)
                gradients[index] = gradient
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
        return missing.difference(gradients)

    def _buffer_for(self, params: set[int]) -> ReduceBuffer:
        """Return a reduce buffer with room for parameters that no reduction in flight reads."""
        context = self._context
        context.make_room_for_reduction()
        buffer = self._buffer
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

    # --- forget -----------------------------------------------------------------------------------

    def clear_sharded_gradients(self, unsharded: Collection[int], *, set_to_none: bool) -> None:
        """Clear `.grad` of sharded parameters: ``zero_grad`` found the unsharded ones, with these ids."""
        for param in self._params:
            if id(param.unsharded_param) in unsharded:
                param.sharded_param.clear_gradient(set_to_none=set_to_none)

    def drop(self) -> None:
        """Forget gradients that were not reduced: after a failed step, when no reduction is in flight."""
        self._take_unsharded_gradients()
        self.unreduced.drop()
        if self._buffer is not None and self._buffer.allocated:
            self._buffer.release()
            if self._context.recorder is not None:
                self._context.recorder.note_reducing(self._buffer, 0)

    # --- for traces and plans ---------------------------------------------------------------------

    def note_memory(self, recorder: TraceRecorder) -> None:
        """Tell a recorder that begins to record what memory is held for reductions now."""
        recorder.note_reducing(self.unreduced, self.unreduced.nbytes)
        if self._buffer is not None and self._buffer.allocated:
            recorder.note_reducing(self._buffer, self._buffer.nbytes)

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
            all_reduced += _all_reduce_bytes(reduced, replicas)
        return ReduceTraffic(sent, all_reduced)


@dataclass(frozen=True, slots=True)
class ReduceEvents:
    """Marks of one group's reductions in the streams; each reduction records them anew."""

    ready: Event
    """Compute has filled the input."""
    input_read: Event
    """The reduce-scatter has read it."""
    done: Event
    """The sharded gradients are final."""

    @classmethod
    def new(cls, context: FSDPCommContext) -> ReduceEvents:
        """Return events of the context's device."""
        return cls(context.new_event(), context.new_event(), context.new_event())


@dataclass(slots=True)
class _BucketState:
    """One bucket on its way, and the memory that its collective reads and writes."""

    bucket: ReduceBucket
    rule: DivideRule
    inputs: Sequence[Tensor]
    """What the collective reads."""
    outputs: Sequence[Tensor]
    """What the collective writes: views of the reduce output, or memory to be brought into it (`bring_out`)."""
    reduce_output: Tensor
    """This rank's reduced gradients, in the reduce dtype."""
    sharded_grads: Tensor
    """The same in the dtype of the sharded gradients; the same tensor if the dtypes are equal."""
    sums: Sequence[Tensor] = ()
    """Of an exchange, views of the reduce output: where the sums of `outputs` over ranks go."""
    copied: bool = False
    """Whether the comm object takes its output back, so that results are copied from there."""
    staged: Sequence[Tensor] = ()
    """Memory of the comm object, to be released when the input has been read."""

    def bring_out(self, world: int) -> None:
        """Bring results into the reduce output, on the stream of the collective and after it."""
        for received, total in zip(self.outputs, self.sums, strict=False):
            torch.sum(received.view(world, -1), 0, dtype=total.dtype, out=total)
        if self.copied:
            self.reduce_output.copy_(self.outputs[0])

    @property
    def input_bytes(self) -> int:
        """Bytes besides the buffer that are given back when the input has been read."""
        received = self.outputs if self.sums else ()
        return sum(tensor.nbytes for tensor in (*received, *self.staged))

    def release_input(self) -> None:
        """Drop what only the collective needs; the compute stream is ordered after it."""
        self.inputs = self.outputs = self.sums = self.staged = ()


class ReduceScatterState:
    """One reduction of one group's gradients, from the filled buffer to `.grad` of the sharded parameters.

    Lives while it is in flight. It owns the reduce buffer's memory and everything its streams touch
    until the compute stream has been ordered after them ([Note: memory and streams], rule 2).

    On devices with streams, `issue` issues everything, and the rest only orders the compute stream. On the CPU,
    `issue` starts the collectives, `finish_input` waits for them, and `finish` does the arithmetic.
    """

    def __init__(
        self,
        context: FSDPCommContext,
        events: ReduceEvents,
        mesh_info: DataParallelAxes,
        settings: ReduceSettings,
        buffer: ReduceBuffer,
        buckets: Sequence[ReduceBucket],
        params: Sequence[FSDPParam],
        unreduced: UnreducedGradients,
    ) -> None:
        """Take memory for the results of ``buckets``, whose input is in ``buffer``; on the compute stream.

        Partial sums over shards are added to ``unreduced``, or taken from there.
        """
        self._context = context
        self._events = events
        self._mesh_info = mesh_info
        self._settings = settings
        self._custom = settings.custom if settings.process_group is not None else None
        self._buffer = buffer
        self._params = params
        self._unreduced = unreduced
        self._works: list[Work | None] = []
        self._kept: list[Tensor] = []
        """Memory that the last steps use besides that of the buckets."""
        self._accumulated = False
        self._span: CollectiveSpan | None = None
        """The span of the reduce-scatter, if it is recorded."""
        self._buckets = [self._prepare(bucket) for bucket in buckets]

    # --- prepare, on the compute stream -----------------------------------------------------------

    def _prepare(self, bucket: ReduceBucket) -> _BucketState:
        settings, info = self._settings, self._mesh_info
        rule = UNDIVIDED
        if settings.replacement is None:
            num_ranks = info.shard_mesh_size * info.replicate_mesh_size
            force_sum = settings.force_sum or bucket.exchanged
            rule = divide_rule(bucket.reduce_dtype, num_ranks, settings.divide_by, force_sum)
        inputs = bucket.inputs or (bucket.join_messages(),)
        if rule.before != 1:
            torch._foreach_div_(inputs, rule.before)
        if self._custom is not None:
            return self._prepare_packed(bucket, rule, inputs, self._custom)
        reduce_output = self._empty(bucket, bucket.reduce_dtype)
        outputs = _views(reduce_output, bucket.outputs)
        state = _BucketState(
            bucket, rule, inputs, outputs, reduce_output, self._sharded_grads(bucket, reduce_output)
        )
        if bucket.exchanged:
            state.outputs, state.sums = [torch.empty_like(tensor) for tensor in inputs], outputs
        return state

    def _prepare_packed(
        self,
        bucket: ReduceBucket,
        rule: DivideRule,
        inputs: Sequence[Tensor],
        custom: collectives.ReduceScatter,
    ) -> _BucketState:
        """Stage the inputs rank after rank in memory of the comm object."""
        world, device, dtype = self._buffer.layout.world, self._context.device, bucket.reduce_dtype
        output = custom.allocate((bucket.numel,), dtype=dtype, device=device)
        packed = custom.allocate((bucket.numel * world,), dtype=dtype, device=device)
        rows = packed.view(world, bucket.numel).zero_()
        torch._foreach_copy_(
            [rows.narrow(1, start, numel) for start, numel in bucket.output_ranges],
            [tensor.view(world, -1) for tensor in inputs],
        )
        reduce_output = self._empty(bucket, dtype) if custom.recycles else output
        return _BucketState(
            bucket,
            rule,
            [packed],
            [output],
            reduce_output,
            self._sharded_grads(bucket, reduce_output),
            copied=custom.recycles,
            staged=[packed, output] if custom.recycles else [packed],
        )

    def _empty(self, bucket: ReduceBucket, dtype: torch.dtype) -> Tensor:
        return torch.empty(bucket.numel, dtype=dtype, device=self._context.device)

    def _sharded_grads(self, bucket: ReduceBucket, reduce_output: Tensor) -> Tensor:
        if bucket.gradient_dtype == bucket.reduce_dtype:
            return reduce_output
        return self._empty(bucket, bucket.gradient_dtype)

    # --- issue ------------------------------------------------------------------------------------

    def issue(self, span: CollectiveSpan | None) -> None:
        """Start the reduction; on devices with streams, issue all of it.

        Called on the compute stream, which has taken all memory and filled the input. ``span`` is told when the
        collective begins and ends, if somebody records it.
        """
        context, events, self._span = self._context, self._events, span
        if span is not None:
            held = self._buffer.nbytes + sum(each.input_bytes for each in self._buckets)
            span.recorder.note_reducing(self._buffer, held)
        replicated = self._mesh_info.replicate_process_group is not None
        events.ready.record()
        with context.reduce_scatter:
            # Without this wait the collective would read the input before compute has filled it, and write
            # to memory that compute, its owner before, may still use.
            events.ready.wait()
            self._call_collectives(span)
            if context.asynchronous:
                self._bring_out()
            events.input_read.record()
            if context.asynchronous and not replicated:
                self._accumulate()
                events.done.record()
        if context.asynchronous and replicated:
            # The all-reduce has a stream of its own, so that the next group's reduce-scatter does not queue
            # behind it. `input_read` stands behind the reduce-scatter's last write, too.
            with context.all_reduce:
                events.input_read.wait()
                self._accumulate()
                events.done.record()

    def _call_collectives(self, span: CollectiveSpan | None) -> None:
        settings = self._settings
        if settings.process_group is None and settings.replacement is None:
            span = None  # nothing goes to other ranks before replicas are summed
        if span is not None:
            sent = sum(tensor.nbytes for each in self._buckets for tensor in each.inputs)
            span.begins(sent - sent // self._buffer.layout.world)  # the rest stays here
        for each in self._buckets:
            if each.bucket.exchanged:
                self._works += self._exchange(each)
            else:
                self._works.append(self._scatter(each))
        if span is not None:
            span.called(self._works)

    def _exchange(self, each: _BucketState) -> list[Work | None]:
        group = self._settings.process_group
        assert group is not None, "what stays on its rank is not in a dtype for the wire"
        async_op = not self._context.asynchronous
        return collectives.all_to_all(each.outputs, each.inputs, group, async_op=async_op)

    def _scatter(self, each: _BucketState) -> Work | None:
        async_op = not self._context.asynchronous
        outputs, inputs = each.outputs, each.inputs
        group, custom = self._settings.process_group, self._custom
        # Averaging over shards and then over replicas is averaging over all; a shard group of one
        # has nothing to average, and NCCL's AVG is not reliable there.
        op = each.rule.op if self._mesh_info.shard_mesh_size > 1 else ReduceOp.SUM
        if group is None:
            torch._foreach_copy_(list(outputs), list(inputs))
        if self._settings.replacement is not None:
            for output, tensor in zip(outputs, inputs, strict=True):
                _call_replacement(self._settings.replacement, group, output, tensor)
            return None
        if group is None:
            return None
        if custom is not None:
            return collectives.packed_reduce_scatter(
                custom, outputs[0], inputs[0], group, op, async_op=async_op
            )
        return collectives.reduce_scatter(outputs, inputs, group, op, async_op=async_op)

    def _bring_out(self) -> None:
        """Bring results out of memory that is given back with the input; after the collectives, on their stream."""
        for each in self._buckets:
            if each.sums or each.copied:
                each.bring_out(self._buffer.layout.world)

    # --- finish, on the compute stream ------------------------------------------------------------

    def finish_input(self) -> None:
        """See `InFlight`."""
        context = self._context
        if self._span is not None:
            self._span.wait(self._works)
        else:
            for work in self._works:
                if work is not None:
                    work.wait()
        if not context.asynchronous:
            self._bring_out()
        self._wait_for(self._events.input_read)
        # From here on the compute stream is behind the last read, so what it allocated may go back to it.
        self._buffer.release()
        for each in self._buckets:
            if self._custom is not None:
                for tensor in each.staged:
                    self._custom.release(tensor)
            each.release_input()
        if context.recorder is not None:
            context.recorder.note_reducing(self._buffer, 0)

    def finish(self, *, accumulate: bool = True) -> None:
        """See `InFlight`."""
        if accumulate and not self._accumulated:
            self._accumulate()
        if self._mesh_info.replicate_process_group is None:
            self._events.done.wait()  # right behind the read of the input, which has been waited for
        else:
            self._wait_for(self._events.done)
        self._buckets.clear()
        self._kept.clear()

    def _wait_for(self, event: Event) -> None:
        if self._span is None:
            event.wait()
        else:
            self._span.wait_for(event)

    # --- from the reduce output to the sharded gradients ------------------------------------------

    @torch.no_grad()
    def _accumulate(self) -> None:
        """Finish the arithmetic and give every sharded parameter its gradient.

        On the stream of the last collective; on the CPU once the host has waited for it.
        """
        self._accumulated = True
        info, settings = self._mesh_info, self._settings
        for each in self._buckets:
            bucket, reduced, gradients = each.bucket, each.reduce_output, each.sharded_grads
            if info.replicate_process_group is not None and settings.replacement is None:
                if not settings.all_reduce:
                    self._keep_partial(bucket, reduced)
                    continue
                self._add_partial(bucket, reduced)
                if info.replicate_mesh_size > 1:
                    self._all_reduce(reduced, info.replicate_process_group, each.rule)
            if bucket.has_copies:
                bucket.sum_copies(reduced)
            if settings.hook is not None:
                bucket.zero_gaps(reduced)
                self._run_hook(settings.hook, reduced)
            if each.rule.after != 1:
                reduced.div_(each.rule.after)
            if gradients is not reduced:
                gradients.copy_(reduced)
            sharded_params = [self._params[index].sharded_param for index in bucket.params]
            if sharded_params[0].param.device != gradients.device:
                gradients = self._download(gradients, sharded_params)
            accumulate_gradients(sharded_params, _views(gradients, bucket.gradients))

    def _keep_partial(self, bucket: ReduceBucket, reduced: Tensor) -> None:
        """Add to what is summed over replicas later; always on the stream of the all-reduce."""
        partial = self._unreduced.partial
        for param, local in zip(bucket.params, _views(reduced, bucket.unsummed), strict=True):
            if param in partial:
                partial[param].add_(local)
            else:
                partial[param] = local
        self._unreduced.changed()

    def _add_partial(self, bucket: ReduceBucket, reduced: Tensor) -> None:
        partial = self._unreduced.partial
        if not partial:
            return
        for param, local in zip(bucket.params, _views(reduced, bucket.unsummed), strict=True):
            kept = partial.pop(param, None)
            if kept is not None:
                local.add_(kept)
                self._kept.append(kept)

    def _all_reduce(self, reduced: Tensor, group: ProcessGroup, rule: DivideRule) -> None:
        """Sum over replicas, on the current stream; the host waits where there are no streams."""
        span = None if self._span is None else self._span.followed_by("all-reduce")
        if span is not None:
            span.begins(_all_reduce_bytes(reduced.nbytes, group.size()))
        collectives.all_reduce(reduced, group, rule.op)
        if span is not None:
            span.called(())
            span.host_waited()

    def _run_hook(self, hook: Callable[[Tensor], None], reduced: Tensor) -> None:
        """Run the user's hook in the current stream, or in the stream it was given with."""
        stream = self._settings.hook_stream
        if stream is None:
            hook(reduced)
            return
        before, after = self._context.new_event(), self._context.new_event()
        before.record()
        with stream:
            before.wait()
            hook(reduced)
            after.record()
        after.wait()

    def _download(self, gradients: Tensor, sharded_params: Sequence[ShardedParam]) -> Tensor:
        """Copy gradients to host memory, where their parameters rest.

        The copy runs beside everything else, and the host waits for it at the end of backward
        (`FSDPCommContext.join`); but at once if the host is about to read it: to add it to a gradient, or in
        a user's hook.
        """
        pinned = self._settings.pinned
        on_host = torch.empty(gradients.shape, dtype=gradients.dtype, pin_memory=pinned)
        on_host.copy_(gradients, non_blocking=True)
        self._kept.append(on_host)
        params = [sharded_param.param for sharded_param in sharded_params]
        if any(param.grad is not None or reads_gradients(param) for param in params):
            torch.accelerator.current_stream(gradients.device).synchronize()
        return on_host


def _views(output: Tensor, views: Sequence[OutputView]) -> list[Tensor]:
    """Return views of a reduce output."""
    begin = output.storage_offset()  # a comm object's memory may be part of a larger block
    # Not narrow, split or view: this takes half of their time.
    return [output.as_strided(shape, strides, begin + start) for shape, strides, start in views]


def _all_reduce_bytes(nbytes: int, ranks: int) -> int:
    """Return what each of ``ranks`` sends to sum ``nbytes``: all shards but its own, and that once summed to all."""
    return 2 * (ranks - 1) * nbytes // ranks


def _call_replacement(
    replacement: Callable[[Tensor, Tensor | None], None],
    group: ProcessGroup | None,
    output: Tensor,
    tensor: Tensor,
) -> None:
    """Let the user's function reduce ``tensor`` into ``output``, or ``output`` itself if nothing is sharded."""
    output, tensor = collectives.as_real(output), collectives.as_real(tensor)
    result = output.detach()
    if group is None:
        replacement(result, None)
    else:
        replacement(tensor.detach(), result)
    # It may have given the tensor other data: of another dtype, say.
    if not torch_border.same_memory(result, output):
        output.copy_(result)
