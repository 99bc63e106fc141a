"""Taking gradients from unsharded parameters, reducing them, landing them in sharded ones.

    take        .grad of the unsharded faces, cleared there
    Reduction   reduce-scatter, or exchange and sum; all-reduce over replicas, division, cast, land in .grad of
                the sharded faces

`.grad` of unsharded faces is taken here and nowhere else; that of sharded ones is written by `faces`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from fullshard import torch_border
from fullshard.comm import collectives
from fullshard.comm.reduce_buffer import ReduceBucket, ReduceBuffer
from fullshard.comm.spans import CollectiveSpan
from fullshard.comm.streams import Event, FSDPCommContext
from fullshard.plan.mesh import DataParallelAxes
from fullshard.plan.placement import local_gradient
from fullshard.storage.param import FSDPParam
from fullshard.storage.sharded_params import reads_gradients


@dataclass(frozen=True, slots=True)
class DivideRule:
    """How a sum over ranks becomes a mean without leaving the range of its dtype."""

    before: float
    """Divisor before the sum; 1 for none."""
    after: float
    """Divisor after the sum; 1 for none."""
    op: ReduceOp.RedOpType
    """What the collectives compute."""


@functools.cache
def divide_rule(
    dtype: torch.dtype, num_ranks: int, divide_by: float | None = None, force_sum: bool = False
) -> DivideRule:
    """The rule for gradients reduced in ``dtype`` over ``num_ranks`` data-parallel ranks.

    The divisor is ``divide_by``, or the number of ranks. Collectives only ever sum with ``force_sum``.

    Dtypes with the range of float32 let the collective average. float16 would overflow in the sum
    or underflow in the quotient, so about the square root of the ranks is divided out before, the
    rest after.
    """
    divisor = num_ranks if divide_by is None else divide_by
    real = dtype.to_real()
    wide = real.itemsize > 2 or real is torch.bfloat16
    if wide and num_ranks > 1 and divisor == num_ranks and not force_sum:
        return DivideRule(1, 1, ReduceOp.AVG)
    before = 1 if wide else 2 ** (num_ranks.bit_length() // 2)  # a power of two: exact
    return DivideRule(before, divisor / before, ReduceOp.SUM)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionSettings:
    """How one group's gradients are combined across ranks; replaced whole when a user changes one."""

    process_group: ProcessGroup | None
    """Over which the reduce-scatter runs; None if nothing is sharded over several ranks."""
    divide_by: float | None = None
    """Total divisor; None means the number of data-parallel ranks."""
    force_sum: bool = False
    """Collectives only sum, and division is a step of its own."""
    all_reduce: bool = True
    """Whether reduced shards are summed over replicas now, or kept as partial sums for a later time."""
    zero_unused: bool = False
    """Whether trainable parameters without a gradient take part as zeros."""
    custom: collectives.ReduceScatter | None = None
    """Carries the reduce-scatter, if there is one."""
    replacement: Callable[[Tensor, Tensor | None], None] | None = None
    """Does all of the reduction: called with a segment's whole gradients, rank after rank, and where to leave
    this rank's; or, if nothing is sharded, with the gradients to be changed in place, and None."""
    hook: Callable[[Tensor], None] | None = None
    """Called with the reduced shards of a call, before they land."""
    hook_stream: Any = None
    pinned: bool = False
    """Whether gradients that go to host memory go to page-locked memory."""


def all_reduce_bytes(nbytes: int, ranks: int) -> int:
    """What each of ``ranks`` has to send to sum ``nbytes``: all but its own part, and that once summed to all others."""
    return 2 * (ranks - 1) * nbytes // ranks


def take(params: Sequence[FSDPParam]) -> dict[int, Tensor]:
    """Remove the gradients of unsharded parameters and return them by position in ``params``."""
    gradients = {}
    for index, param in enumerate(params):
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


@dataclass(frozen=True, slots=True)
class ReduceEvents:
    """Marks of one group's reductions in the streams; recorded anew by each of them."""

    ready: Event
    """Compute has filled the input."""
    input_read: Event
    """The reduce-scatter has read it."""
    done: Event
    """The gradients are final."""

    @classmethod
    def new(cls, context: FSDPCommContext) -> ReduceEvents:
        """Events of the context's device."""
        return cls(context.new_event(), context.new_event(), context.new_event())


class Reduction:
    """One reduction of one group's gradients, from the filled buffer to `.grad` of the sharded parameters.

    Lives while it is in flight. It owns the reduce buffer's memory and everything its streams touch
    until the compute stream has been ordered after them ([Note: memory and streams]).

    [Note: narrow on the wire]
    A reduce-scatter sums in the dtype it carries. To send bf16 and sum in fp32, an exchange (all-to-all)
    brings each rank all ranks' gradients of its shard, and the rank adds them up by itself: in the same
    order every time, whatever algorithm the backend chooses. As many elements travel as in a
    reduce-scatter. What is received is as large as what is sent, so both together take the memory of one
    fp32 input; they are kept and given back together. Nothing can overflow before the sum, so all
    division comes after it.
    """

    def __init__(
        self,
        context: FSDPCommContext,
        events: ReduceEvents,
        mesh_info: DataParallelAxes,
        settings: ReductionSettings,
        buffer: ReduceBuffer,
        params: Sequence[FSDPParam],
        used: set[int],
        partial: dict[int, Tensor],
    ) -> None:
        """Prepare to reduce parameters ``used``, indices into ``params``.

        Others of the same segments take part as zeros; the rest gets no gradient.

        ``partial`` holds reduced shards that were not summed over replicas yet; it is added to, or emptied.
        """
        self._context = context
        self._events = events
        self._mesh_info = mesh_info
        self._settings = settings
        self._custom = settings.custom if settings.process_group is not None else None
        self._buffer = buffer
        self._params = params
        self._partial = partial
        self._runs = buffer.runs(frozenset(used))
        self._works: list[Work | None] = []
        self._reduced: list[Tensor] = []
        self._landed: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._received: list[tuple[Tensor, Tensor]] = []
        """What exchanges bring of all ranks, and where its sum goes."""
        self._staged: list[Tensor] = []
        """Memory of the comm object that is free again once the input has been read."""
        self._copies: tuple[list[Tensor], list[Tensor]] = ([], [])
        """Own memory, and the staged outputs whose results must not stay where they are."""
        self._has_landed = False
        self._wire: CollectiveSpan | None = None
        """Of the reduce-scatter, if it is recorded."""
        self._rules = [
            divide_rule(
                run.reduce_dtype,
                mesh_info.shard_mesh_size * mesh_info.replicate_mesh_size,
                settings.divide_by,
                settings.force_sum or run.exchanged,
            )
            if settings.replacement is None
            else DivideRule(1, 1, ReduceOp.SUM)
            for run in self._runs
        ]

    def issue(self, wire: CollectiveSpan | None) -> None:
        """Start the reduction; on devices with streams, all of it.

        On the compute stream, which allocates everything and whose gradients are in the buffer. The
        reduce-scatter stream waits for it. ``wire`` is told when, if somebody records it.
        """
        context, events, self._wire = self._context, self._events, wire
        calls = [
            self._prepare(run, rule) for run, rule in zip(self._runs, self._rules, strict=True)
        ]
        if wire is not None:
            wire.recorder.note_reducing(self._buffer, self._input_bytes)
        events.ready.record()
        replicated = self._mesh_info.replicate_process_group is not None
        with context.reduce_scatter:
            events.ready.wait()
            if wire is not None and self._communicates:
                sent = sum(tensor.nbytes for _, inputs in calls for tensor in inputs)
                wire.begins(sent - sent // self._buffer.layout.world)  # the rest stays here
            for run, (outputs, inputs), rule in zip(self._runs, calls, self._rules, strict=True):
                if run.exchanged:
                    self._works += self._exchange(outputs, inputs)
                else:
                    self._works.append(self._scatter(outputs, inputs, rule))
            if wire is not None and self._communicates:
                wire.called(self._works)
            if context.asynchronous:
                self._unstage()
            events.input_read.record()
            if context.asynchronous and not replicated:
                self._land()
                events.done.record()
        if context.asynchronous and replicated:
            with context.all_reduce:
                events.input_read.wait()
                self._land()
                events.done.record()

    def finish_input(self) -> None:
        """See `InFlight`."""
        if self._wire is not None:
            self._wire.wait(self._works)
        else:
            for work in self._works:
                if work is not None:
                    work.wait()
        if not self._context.asynchronous:
            self._unstage()
        self._wait_for(self._events.input_read)
        self._buffer.release()
        self._received.clear()
        if self._custom is not None:
            for staged in self._staged:
                self._custom.release(staged)
            self._staged.clear()
        if self._context.recorder is not None:
            self._context.recorder.note_reducing(self._buffer, 0)

    def finish(self, *, land: bool = True) -> None:
        """See `InFlight`."""
        if land and not self._has_landed:
            self._land()
        if self._mesh_info.replicate_process_group is None:
            self._events.done.wait()  # right behind the read of the input, which has been waited for
        else:
            self._wait_for(self._events.done)
        for kept in (self._reduced, self._landed, self._kept):
            kept.clear()

    def _wait_for(self, event: Event) -> None:
        if self._wire is None:
            event.wait()
        else:
            self._wire.wait_for(event)

    @property
    def _communicates(self) -> bool:
        """Whether anything is called that goes to other ranks, before replicas are summed."""
        return self._settings.process_group is not None or self._settings.replacement is not None

    @property
    def _input_bytes(self) -> int:
        """Bytes held until the input has been read; the reduced gradients stay and are not among them."""
        received = sum(tensor.nbytes for tensor, _ in self._received)
        return self._buffer.nbytes + received + sum(tensor.nbytes for tensor in self._staged)

    def _prepare(
        self, run: ReduceBucket, rule: DivideRule
    ) -> tuple[list[Tensor], Sequence[Tensor]]:
        """Allocate a run's output, and return what its collective writes and reads."""
        if run.unfilled:
            torch._foreach_zero_(run.unfilled)
        inputs = run.inputs
        if rule.before != 1:
            torch._foreach_div_(inputs, rule.before)
        if self._custom is not None:
            return self._prepare_packed(run, inputs, self._custom)
        reduced = torch.empty(run.numel, dtype=run.reduce_dtype, device=self._context.device)
        self._keep_output(run, reduced)
        self._kept += inputs  # the buffer's, or copies
        outputs = run.cut_outputs(reduced)
        if run.exchanged:
            received = [torch.empty_like(tensor) for tensor in inputs]
            self._received += zip(received, outputs, strict=True)
            return received, inputs
        return outputs, inputs

    def _prepare_packed(
        self, run: ReduceBucket, inputs: Sequence[Tensor], custom: collectives.ReduceScatter
    ) -> tuple[list[Tensor], Sequence[Tensor]]:
        """Stage the inputs rank after rank in memory of the comm object."""
        world, device, dtype = self._buffer.layout.world, self._context.device, run.reduce_dtype
        output = custom.allocate((run.numel,), dtype=dtype, device=device)
        packed = custom.allocate((run.numel * world,), dtype=dtype, device=device)
        rows = packed.view(world, run.numel).zero_()
        torch._foreach_copy_(
            [rows.narrow(1, start, numel) for start, numel in run.outputs],
            [tensor.view(world, -1) for tensor in inputs],
        )
        self._staged.append(packed)
        if custom.recycles:
            reduced = torch.empty(run.numel, dtype=dtype, device=device)
            self._copies[0].append(reduced)
            self._copies[1].append(output)
            self._staged.append(output)
        else:
            reduced = output
        self._keep_output(run, reduced)
        return [output], [packed]

    def _unstage(self) -> None:
        """Bring results out of memory that is about to be given back; after the collectives, on their stream."""
        for received, output in self._received:
            rows = received.view(self._buffer.layout.world, -1)
            torch.sum(rows, 0, dtype=output.dtype, out=output)
        if self._copies[0]:
            torch._foreach_copy_(*self._copies)
            self._copies = ([], [])

    def _keep_output(self, run: ReduceBucket, reduced: Tensor) -> None:
        self._reduced.append(reduced)
        self._landed.append(
            reduced
            if run.gradient_dtype == run.reduce_dtype
            else torch.empty(run.numel, dtype=run.gradient_dtype, device=self._context.device)
        )

    def _exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> list[Work | None]:
        group = self._settings.process_group
        assert group is not None, "what stays on its rank is not in a dtype for the wire"
        return collectives.all_to_all(
            received, sent, group, async_op=not self._context.asynchronous
        )

    def _scatter(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        rule: DivideRule,
    ) -> Work | None:
        async_op = not self._context.asynchronous
        group, custom = self._settings.process_group, self._custom
        # Averaging over shards and then over replicas is averaging over all; a shard group of one
        # has nothing to average, and NCCL's AVG is not reliable there.
        op = rule.op if self._mesh_info.shard_mesh_size > 1 else ReduceOp.SUM
        if group is None:
            torch._foreach_copy_(list(outputs), list(inputs))
        if self._settings.replacement is not None:
            for output, tensor in zip(outputs, inputs, strict=True):
                _replaced_reduction(self._settings.replacement, group, output, tensor)
            return None
        if group is None:
            return None
        if custom is not None:
            return collectives.packed_reduce_scatter(
                custom, outputs[0], inputs[0], group, op, async_op=async_op
            )
        return collectives.reduce_scatter(outputs, inputs, group, op, async_op=async_op)

    @torch.no_grad()
    def _land(self) -> None:
        """Finish the arithmetic and give every sharded parameter its gradient."""
        self._has_landed = True
        info = self._mesh_info
        for run, rule, reduced, landed in zip(
            self._runs, self._rules, self._reduced, self._landed, strict=True
        ):
            if info.replicate_process_group is not None and self._settings.replacement is None:
                if not self._settings.all_reduce:
                    self._keep_partial(run, reduced)
                    continue
                self._add_partial(run, reduced)
                if info.replicate_mesh_size > 1:
                    self._all_reduce(reduced, info.replicate_process_group, rule)
            run.sum_copies(reduced)
            if self._settings.hook is not None:
                run.clear_gaps(reduced)
                self._run_hook(self._settings.hook, reduced)
            if rule.after != 1:
                reduced.div_(rule.after)
            if landed is not reduced:
                landed.copy_(reduced)
            if self._params[run.gradients[0].param].sharded_param.local.device != landed.device:
                landed = self._download(run, landed)
            for gradient, local in zip(run.gradients, run.cut(landed), strict=True):
                self._params[gradient.param].sharded_param.land(local)

    def _all_reduce(self, reduced: Tensor, group: ProcessGroup, rule: DivideRule) -> None:
        """Sum over replicas, on the current stream; the host waits where there are none."""
        wire = None if self._wire is None else self._wire.followed_by("all-reduce")
        if wire is not None:
            wire.begins(all_reduce_bytes(reduced.nbytes, group.size()))
        collectives.all_reduce(reduced, group, rule.op)
        if wire is not None:
            wire.called(())
            wire.host_waited()

    def _download(self, run: ReduceBucket, landed: Tensor) -> Tensor:
        """Copy gradients to host memory, where their parameters rest.

        The copy runs beside everything else, and the host waits for it at the end of backward
        (`FSDPCommContext.join`); but at once if the host is about to read it: to add it to a gradient, or in
        a hook of the user's.
        """
        pinned = self._settings.pinned
        on_host = torch.empty(landed.shape, dtype=landed.dtype, pin_memory=pinned)
        on_host.copy_(landed, non_blocking=True)
        self._kept.append(on_host)
        params = [self._params[gradient.param].sharded_param.param for gradient in run.gradients]
        if any(p.grad is not None or reads_gradients(p) for p in params):
            torch.accelerator.current_stream(landed.device).synchronize()
        return on_host

    def _keep_partial(self, run: ReduceBucket, reduced: Tensor) -> None:
        """Add to what will be summed over replicas later; always on the stream that does so."""
        for gradient, local in zip(run.gradients, run.cut_unsummed(reduced), strict=True):
            if gradient.param in self._partial:
                self._partial[gradient.param].add_(local)
            else:
                self._partial[gradient.param] = local

    def _add_partial(self, run: ReduceBucket, reduced: Tensor) -> None:
        if not self._partial:
            return
        for gradient, local in zip(run.gradients, run.cut_unsummed(reduced), strict=True):
            partial = self._partial.pop(gradient.param, None)
            if partial is not None:
                local.add_(partial)
                self._kept.append(partial)

    def _run_hook(self, hook: Callable[[Tensor], None], reduced: Tensor) -> None:
        """Run the user's hook in the current stream, or in the one it was given with."""
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


def _replaced_reduction(
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
