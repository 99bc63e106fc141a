"""One reduction of a group's gradients: from the filled reduce buffer to `.grad` of the sharded parameters.

    prepare       compute stream          take memory for the results
    issue         reduce-scatter stream   reduce-scatter, or exchange and sum
                  all-reduce stream       all-reduce over replicas (HSDP)
    accumulate    the last of the two     division, cast, copy to host memory, `.grad` of the sharded parameters
    finish        compute stream          wait for the others, give memory back

`gradient_reducer` starts reductions; `streams` keeps those in flight and finishes them.

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

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from fullshard import torch_border
from fullshard.engine.reduce_settings import UNDIVIDED, DivideRule, ReduceSettings, divide_rule
from fullshard.engine.unreduced_gradients import UnreducedGradients
from fullshard.mesh.axes import DataParallelAxes
from fullshard.storage.param import FSDPParam
from fullshard.storage.reduce_buffer import OutputView, ReduceBucket, ReduceBuffer
from fullshard.storage.sharded_params import (
    DTensorShardedParam,
    ShardedParam,
    accumulate_gradients,
    reads_gradients,
)
from fullshard.transport import collectives
from fullshard.transport.comm_objects import ReduceScatter
from fullshard.transport.observer import Collective, Observed
from fullshard.transport.staged import Staged
from fullshard.transport.streams import Event, FSDPCommContext
from fullshard.transport.tags import Tag, tag
from fullshard.transport.transports import Coalesced, Exchanged, Transport
from fullshard.transport.works import as_real


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


class ReduceTags(NamedTuple):
    """Tags of the collectives that reduce one bucket of a group."""

    reduce: Tag
    """The reduce-scatter, or the exchange in its place."""
    all_reduce: Tag


@dataclass(frozen=True, slots=True)
class ReducedGroup:
    """What all reductions of one group share; made when the group joins a model's streams."""

    context: FSDPCommContext
    events: ReduceEvents
    mesh_info: DataParallelAxes
    """The ranks over which the parameters are sharded and replicated."""
    params: Sequence[FSDPParam]
    unreduced: UnreducedGradients
    """Where partial sums over shards are kept, and taken from."""
    name: str
    """For tags; no two groups of a model have the same."""
    by_segment: bool
    """Whether a segment gets one gradient. Then all parameters are always reduced."""
    model: str = ""
    """For tags: which model it is, of those that are sharded over the same ranks."""
    model_among_replicas: str = ""
    """... of those that are replicated over the same ranks."""
    tags: dict[tuple[tuple[int, ...], bool], ReduceTags] = field(default_factory=dict)
    """By the parameters in a bucket, and whether they have gradients already."""
    transports: dict[object, Transport] = field(default_factory=dict)
    """By process group, comm object, and whether gradients are exchanged: users may change them."""
    below_autograd: AbstractContextManager[Any] = field(default_factory=torch_border.below_autograd)
    """Made once, which takes longer than to enter it. Nobody enters it twice: only operators and collectives run within."""

    def transport(self, settings: ReduceSettings, *, exchanged: bool) -> Transport:
        """Return how messages travel over the process group of the settings."""
        group, custom = settings.process_group, settings.custom
        assert group is not None, "something is sharded"
        key = group, custom, exchanged
        found = self.transports.get(key)
        if found is None:
            device = self.context.device
            if custom is not None:
                found = Staged(custom, group, device)
            else:
                found = (Exchanged if exchanged else Coalesced)(group, device)
            self.transports[key] = found
        return found

    def tags_of(self, bucket: ReduceBucket) -> ReduceTags:
        """Return the tags of a bucket's collectives.

        They say which parameters are in it, if not all of the group are: ranks that reduce different parameters of equal
        sizes would otherwise add up what does not belong together. And they say whether the result is added to
        gradients: a rank that has not called `zero_grad` would otherwise train its shards with other gradients.
        """
        first = self.params[bucket.params[0]].sharded_param
        # Pieces of a wrapper's parameters may be empty on some ranks, and never get gradients there.
        added = isinstance(first, DTensorShardedParam) and first.param.grad is not None
        found = self.tags.get((bucket.params, added))
        if found is None:
            name = self.name
            if not self.by_segment and len(bucket.params) < len(self.params):
                names = ", ".join(self.params[index].name for index in bucket.params)
                name = f"{name} (only {names})"
            if added:
                name += ", to be added to gradients"
            found = ReduceTags(
                tag(f"reduce-scatter of {name}{self.model}"),
                tag(f"all-reduce of {name}{self.model_among_replicas}"),
            )
            self.tags[bucket.params, added] = found
        return found


@dataclass(slots=True)
class _BucketState:
    """One bucket in flight, and the memory that its collective reads and writes."""

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
    gradients: Sequence[Tensor] = ()
    """Views of `sharded_grads` for each parameter, if there are any yet."""
    sums: Sequence[Tensor] = ()
    """For an all-to-all, views of the reduce output: where the sums of `outputs` over ranks go."""
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

    @classmethod
    def start(
        cls,
        group: ReducedGroup,
        settings: ReduceSettings,
        buffer: ReduceBuffer,
        buckets: Sequence[ReduceBucket],
        observed: Observed | None,
        copy_in: Callable[[], None] | None = None,
    ) -> None:
        """Start a reduction on the compute stream, and leave it to the context to finish it.

        Args:
            group: The group whose gradients are reduced.
            settings: How they are reduced; what a user changes counts from the next reduction on.
            buffer: The reduce buffer, which has memory.
            buckets: What of it is reduced.
            observed: Who is told of it, if anybody is.
            copy_in: Fills the buffer, on the reduce-scatter stream; None if it has been filled.
        """
        reduction = cls(group, settings, buffer)
        reduction._copy_in = copy_in
        # The context knows it before anything can fail, and ends it after a failure, too: it may hold memory of a
        # comm object, and the collectives of its first buckets may be in flight.
        group.context.note_reduction(reduction)
        # All memory is taken before the first collective is called: a failure here leaves nothing in flight.
        for bucket in buckets:
            reduction._buckets.append(reduction._prepare(bucket))
        reduction.issue(observed)

    def __init__(self, group: ReducedGroup, settings: ReduceSettings, buffer: ReduceBuffer) -> None:
        self._context = group.context
        self._events = group.events
        self._mesh_info = group.mesh_info
        self._params = group.params
        self._unreduced = group.unreduced
        self._group = group
        self._settings = settings
        self._custom = settings.custom if settings.process_group is not None else None
        self._marks_end = (
            group.mesh_info.replicate_process_group is not None or settings.hook is not None
        )
        """Whether the end has an event of its own, behind an all-reduce or a user's hook. Every event costs the host time.

        A copy to the host needs none. It is on the reduce-scatter stream, before the next reduction, whose input is waited for
        before this one is finished; behind the last one the host waits for all streams (`FSDPCommContext.join`)."""
        self._is_followed = self._marks_end or group.context.host_reads_results
        """Whether something long may follow the reduce-scatter, for which the input must not wait: an all-reduce, a user's
        hook, a copy to the host. Hooks of parameters do not count: what they issue has the time of the next group's backward."""
        self._buffer = buffer
        self._copy_in: Callable[[], None] | None = None
        """Holds the gradients, if the reduce-scatter stream copies them: [Note: gradients copied beside]."""
        self._buckets: list[_BucketState] = []
        self._works: list[Work | None] = []
        self._brings_out = False
        """Whether results are in memory that is given back with the input: see `_BucketState.bring_out`."""
        self._kept: list[Tensor] = []
        """Memory that the last steps use besides that of the buckets."""
        self._issued = False
        """Whether all collectives were called, so that there are results."""
        self._accumulated = False
        self._observed: Observed | None = None
        """Who is told of the reduction."""

    # --- prepare, on the compute stream -----------------------------------------------------------

    def _prepare(self, bucket: ReduceBucket) -> _BucketState:
        settings, info = self._settings, self._mesh_info
        rule = UNDIVIDED
        if settings.replacement is None:
            num_ranks = info.shard_mesh_size * info.replicate_mesh_size
            force_sum = settings.force_sum or bucket.exchanged
            rule = divide_rule(bucket.reduce_dtype, num_ranks, settings.divide_by, force_sum)
        if settings.active is not None:
            rule = replace(rule, after=rule.after * settings.active_fraction)
        inputs = bucket.inputs or (bucket.join_messages(),)
        if self._custom is not None:
            self._brings_out = self._brings_out or self._custom.recycles
            return self._prepare_packed(bucket, rule, inputs, self._custom)
        device = self._context.device
        reduce_output = torch.empty(bucket.numel, dtype=bucket.reduce_dtype, device=device)
        same_dtype = bucket.gradient_dtype is bucket.reduce_dtype
        if same_dtype and bucket.shaped_inputs and settings.replacement is None:
            # The collective writes the gradients themselves, so one set of views is enough.
            with self._group.below_autograd:
                outputs = _views(reduce_output, bucket.gradients)
            shaped = bucket.shaped_inputs
            return _BucketState(
                bucket, rule, shaped, outputs, reduce_output, reduce_output, gradients=outputs
            )
        with self._group.below_autograd:
            outputs = bucket.outputs_in(reduce_output)
        sharded_grads = reduce_output
        if not same_dtype:
            sharded_grads = torch.empty(bucket.numel, dtype=bucket.gradient_dtype, device=device)
        state = _BucketState(bucket, rule, inputs, outputs, reduce_output, sharded_grads)
        if bucket.exchanged:
            self._brings_out = True
            state.outputs, state.sums = [torch.empty_like(tensor) for tensor in inputs], outputs
        return state

    def _prepare_packed(
        self,
        bucket: ReduceBucket,
        rule: DivideRule,
        inputs: Sequence[Tensor],
        custom: ReduceScatter,
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
        reduce_output = output
        if custom.recycles:
            reduce_output = torch.empty(bucket.numel, dtype=dtype, device=device)
        sharded_grads = reduce_output
        if bucket.gradient_dtype is not dtype:
            sharded_grads = torch.empty(bucket.numel, dtype=bucket.gradient_dtype, device=device)
        return _BucketState(
            bucket,
            rule,
            [packed],
            [output],
            reduce_output,
            sharded_grads,
            copied=custom.recycles,
            staged=[packed, output] if custom.recycles else [packed],
        )

    # --- issue ------------------------------------------------------------------------------------

    def issue(self, observed: Observed | None) -> None:
        """Start the reduction; on devices with streams, issue all of it.

        Called on the compute stream, which has taken all memory, and filled the input unless `_copy_in` does.
        """
        context, events, self._observed = self._context, self._events, observed
        if observed is not None:
            held = self._buffer.nbytes + sum(each.input_bytes for each in self._buckets)
            observed.observer.memory_of_reductions(self._buffer, held)
        replicated = self._mesh_info.replicate_process_group is not None
        events.ready.record()
        with context.reduce_scatter:
            # Compute fills the input, or has the gradients to fill it with. It may still use what was in the memory of
            # the outputs before.
            events.ready.wait()
            try:
                if self._copy_in is not None:
                    self._copy_in()
                self._call_collectives(observed)
                if context.asynchronous and self._brings_out:
                    # Before the event: behind it, compute may reuse what was received or staged.
                    self._bring_out()
                if context.asynchronous and not self._is_followed:
                    self._accumulate()
            except BaseException:
                events.done.record()  # nothing follows, but collectives of some buckets may be in flight
                raise
            finally:
                events.input_read.record()
            if context.asynchronous and self._is_followed and not replicated:
                self._accumulate_to_end()
        if context.asynchronous and replicated:
            # The all-reduce has a stream of its own, so that the next group's reduce-scatter does not queue
            # behind it. The reduce-scatter's last write is before `input_read`, too.
            with context.all_reduce:
                events.input_read.wait()
                self._accumulate_to_end()
        self._issued = True

    def _accumulate_to_end(self) -> None:
        """Accumulate, and mark the end; after an exception, too, as some of it may be in the stream."""
        try:
            self._accumulate()
        finally:
            if self._marks_end:
                self._events.done.record()

    def _accumulate(self) -> None:
        """Finish the arithmetic and give every sharded parameter its gradient.

        On the stream of the last collective; on the CPU once the host has waited for it.
        """
        # Only in a backward with ``create_graph``, and outside of backward.
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._accumulate_buckets()
        else:
            self._accumulate_buckets()

    def _call_collectives(self, observed: Observed | None) -> None:
        settings = self._settings
        if settings.process_group is None and settings.replacement is None:
            observed = None  # nothing goes to other ranks before replicas are summed
        if observed is not None:
            sent = sum(tensor.nbytes for each in self._buckets for tensor in each.inputs)
            nbytes = sent - sent // self._buffer.layout.world  # the rest stays here
            observed.observer.calls("reduce", observed.group, nbytes)
        for each in self._buckets:
            self._works.append(self._scatter(each))
        if observed is not None:
            observed.observer.called("reduce", observed.group, self._works)

    def _scatter(self, each: _BucketState) -> Work | None:
        async_op = not self._context.asynchronous
        outputs, inputs = each.outputs, each.inputs
        group = self._settings.process_group
        if each.rule.before != 1:
            torch._foreach_div_([*inputs], each.rule.before)
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
        tag = self._group.tags_of(each.bucket).reduce
        transport = self._group.transport(self._settings, exchanged=each.bucket.exchanged)
        with self._group.below_autograd:
            return transport.reduce(outputs, inputs, op, tag, async_op=async_op)

    def _bring_out(self) -> None:
        """Bring results out of memory that is given back with the input; after the collectives, on their stream."""
        for each in self._buckets:
            if each.sums or each.copied:
                each.bring_out(self._buffer.layout.world)

    # --- finish, on the compute stream ------------------------------------------------------------

    def finish_input(self) -> None:
        """See `InFlight`."""
        context = self._context
        observed, pending = self._observed, [work for work in self._works if work is not None]
        if pending:
            if observed is not None:
                observed.observer.waits("reduce", observed.group)
            for work in pending:
                work.wait()
            if observed is not None:
                observed.observer.waited("reduce", observed.group)
        if self._brings_out and not context.asynchronous and self._issued:
            self._bring_out()
        self._wait_for(self._events.input_read, "reduce")
        # The compute stream is behind the last read now, so the memory may go back to its pool.
        self._copy_in = None
        self._buffer.release()
        for each in self._buckets:
            if self._custom is not None:
                for tensor in each.staged:
                    self._custom.release(tensor)
            each.release_input()
        if context.observer is not None:
            context.observer.memory_of_reductions(self._buffer, 0)

    def _wait_for(self, event: Event, collective: Collective) -> None:
        """Order the compute stream after an event of the collective's stream."""
        observed = self._observed
        if observed is not None:
            observed.observer.waits(collective, observed.group, event)
        event.wait()
        if observed is not None:
            observed.observer.waited(collective, observed.group, event)

    def finish(self, *, accumulate: bool = True) -> None:
        """See `InFlight`."""
        if accumulate and self._issued and not self._accumulated:
            self._accumulate()
        if self._marks_end:
            if self._mesh_info.replicate_process_group is None:
                self._events.done.wait()
            else:
                self._wait_for(self._events.done, "all-reduce")
        self._buckets.clear()
        self._kept.clear()

    # --- from the reduce output to the sharded gradients ------------------------------------------

    def _accumulate_buckets(self) -> None:
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
                    self._all_reduce(reduced, info.replicate_process_group, each)
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
            views = each.gradients
            if sharded_params[0].param.device != gradients.device:
                gradients, views = self._download(gradients, sharded_params), ()
            if not views:
                with self._group.below_autograd:
                    views = _views(gradients, bucket.gradients)
            accumulate_gradients(sharded_params, views)

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

    def _all_reduce(self, reduced: Tensor, group: ProcessGroup, each: _BucketState) -> None:
        """Sum over replicas, on the current stream; the host waits where there are no streams."""
        observed = self._observed
        if observed is not None:
            observed.observer.issues("all-reduce", observed.group)
            nbytes = all_reduce_bytes(reduced.nbytes, group.size())
            observed.observer.calls("all-reduce", observed.group, nbytes)
        tag = self._group.tags_of(each.bucket).all_reduce
        collectives.all_reduce(reduced, group, each.rule.op, tag)
        if observed is not None:
            observed.observer.called("all-reduce", observed.group, ())

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
            torch_border.current_stream(gradients.device).synchronize()
        return on_host


def _views(output: Tensor, views: Sequence[OutputView]) -> list[Tensor]:
    """Return views of a reduce output."""
    begin = output.storage_offset()
    # Not narrow, split or view: this takes half of their time.
    if not begin:
        return [*itertools.starmap(output.as_strided, views)]
    # A comm object's memory may be part of a larger block.
    return [output.as_strided(shape, strides, begin + start) for shape, strides, start in views]


def all_reduce_bytes(nbytes: int, ranks: int) -> int:
    """Return what each of ``ranks`` sends to sum ``nbytes``: all shards but its own, and that once summed to all."""
    return 2 * (ranks - 1) * nbytes // ranks


def _call_replacement(
    replacement: Callable[[Tensor, Tensor | None], None],
    group: ProcessGroup | None,
    output: Tensor,
    tensor: Tensor,
) -> None:
    """Let the user's function reduce ``tensor`` into ``output``, or ``output`` itself if nothing is sharded."""
    output, tensor = as_real(output), as_real(tensor)
    result = output.detach()
    if group is None:
        replacement(result, None)
    else:
        replacement(tensor.detach(), result)
    # It may have given the tensor other data: of another dtype, say.
    if not torch_border.same_memory(result, output):
        output.copy_(result)
