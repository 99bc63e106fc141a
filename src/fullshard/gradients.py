"""Taking gradients from unsharded parameters, reducing them, landing them in sharded ones.

    take        .grad of the unsharded faces, cleared there
    fill        one fused cast-copy (or add, when accumulating) into the group's reduce buffer
    Reduction   reduce-scatter, all-reduce over replicas, division, cast, land in .grad of the sharded faces

This file is the only one that writes `.grad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ReduceOp, Work
from torch.distributed.tensor import DTensor

from . import comm, torch_border
from .buffers import ReduceBuffer, ReduceRun, strides
from .mesh import FSDPMeshInfo, HSDPMeshInfo
from .param import FSDPParam
from .streams import FSDPCommContext


@dataclass(frozen=True, slots=True)
class DivideRule:
    """How a sum over ranks becomes a mean without leaving the range of its dtype."""

    before: float
    """Divisor before the sum; 1 for none."""
    after: float
    """Divisor after the sum; 1 for none."""
    op: ReduceOp.RedOpType
    """What the collectives compute."""


def divide_rule(dtype: torch.dtype, num_ranks: int) -> DivideRule:
    """The rule for gradients reduced in ``dtype`` over ``num_ranks`` data-parallel ranks.

    Dtypes with the range of float32 let the collective average. float16 would overflow in the sum or underflow
    in the quotient, so about the square root of the ranks is divided out before, the rest after.
    """
    if num_ranks == 1:
        return DivideRule(1, 1, ReduceOp.SUM)
    if dtype.itemsize > 2 or dtype is torch.bfloat16:
        return DivideRule(1, 1, ReduceOp.AVG)
    before = 2 ** (num_ranks.bit_length() // 2)  # a power of two: exact
    return DivideRule(before, num_ranks / before, ReduceOp.SUM)


def take(params: Sequence[FSDPParam]) -> dict[int, Tensor]:
    """Remove the gradients of unsharded parameters and return them by position in ``params``."""
    gradients = {}
    for index, param in enumerate(params):
        unsharded = param.unsharded_param
        if unsharded is not None and unsharded.grad is not None:
            gradients[index] = unsharded.grad
            unsharded.grad = None
    return gradients


def fill(buffer: ReduceBuffer, gradients: dict[int, Tensor], held: set[int]) -> None:
    """Copy or add gradients into the reduce buffer; ``held`` says which it has already, and is updated."""
    for accumulate in (False, True):
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for index, gradient in gradients.items():
            if (index in held) is accumulate:
                targets += buffer.targets[index]
                sources += buffer.sources(index, gradient)
        if targets and accumulate:
            torch._foreach_add_(targets, sources)
        elif targets:
            torch._foreach_copy_(targets, sources)
    held.update(gradients)


class Reduction:
    """One reduction of one group's gradients, from the filled buffer to `.grad` of the sharded parameters.

    Lives while it is in flight. It owns the reduce buffer's memory and everything its streams touch until the
    compute stream has been ordered after them ([Note: memory and streams]).
    """

    def __init__(
        self,
        context: FSDPCommContext,
        mesh_info: FSDPMeshInfo,
        buffer: ReduceBuffer,
        params: Sequence[FSDPParam],
        used: set[int],
    ) -> None:
        """Prepare to reduce parameters ``used``, indices into ``params``; the others get no gradient."""
        self._context = context
        self._mesh_info = mesh_info
        self._buffer = buffer
        self._params = params
        self._used = sorted(used)
        self._works: list[Work | None] = []
        self._reduced: list[tuple[ReduceRun, Tensor, Tensor]] = []
        self._kept: list[Tensor] = []
        self._input_read = context.new_event()
        self._done = context.new_event()
        self._landed = False

    def issue(self, custom: comm.ReduceScatter | None = None) -> None:
        """Start the reduction; on devices with streams, all of it.

        On the compute stream, which allocates everything and whose gradients are in the buffer. The
        reduce-scatter stream waits for it.
        """
        context = self._context
        self._clear_unfilled()
        calls = [self._prepare(run, custom) for run in self._buffer.runs]
        ready = context.new_event()
        ready.record()
        with context.on(context.reduce_scatter):
            ready.wait()
            for call in calls:
                if call is not None:
                    self._works.append(self._scatter(*call, custom))
            self._input_read.record()
        if context.asynchronous:
            replicated = isinstance(self._mesh_info, HSDPMeshInfo)
            with context.on(context.all_reduce if replicated else context.reduce_scatter):
                if replicated:
                    self._input_read.wait()
                self._land()
                self._done.record()

    def finish_input(self) -> None:
        """See `InFlight`."""
        for work in self._works:
            if work is not None:
                work.wait()
        self._input_read.wait()
        self._buffer.release()

    def finish(self) -> None:
        """See `InFlight`."""
        if not self._landed:
            self._land()
        self._done.wait()
        self._reduced.clear()
        self._kept.clear()

    def _clear_unfilled(self) -> None:
        """A segment shared by several parameters travels whole: those without a gradient count as zero."""
        layout = self._buffer.layout
        segments = {layout.slots[index].segment for index in self._used}
        missing = [
            target
            for segment in segments
            for index in layout.segments[segment].params
            if index not in self._used
            for target in self._buffer.targets.get(index, ())
        ]
        if missing:
            torch._foreach_zero_(missing)

    def _prepare(
        self, run: ReduceRun, custom: comm.ReduceScatter | None
    ) -> tuple[list[Tensor], list[Tensor], ReduceOp.RedOpType] | None:
        """Allocate a run's outputs and divide its inputs; None if no parameter of it has a gradient."""
        layout = self._buffer.layout
        segments = {layout.slots[index].segment for index in self._used}
        chosen = [
            (i, start) for i, start in zip(run.segments, run.starts, strict=True) if i in segments
        ]
        if not chosen:
            return None
        inputs = [self._buffer.inputs[index] for index, _ in chosen]
        device, dtype = self._context.device, run.reduce_dtype
        rule = divide_rule(dtype, self._num_ranks)
        if rule.before != 1:
            torch._foreach_div_(inputs, rule.before)
        allocate = custom.allocate if custom is not None else torch.empty
        reduced = allocate((run.numel,), dtype=dtype, device=device)
        landed = (
            reduced
            if run.shard_dtype == dtype
            else torch.empty(run.numel, dtype=run.shard_dtype, device=device)
        )
        self._reduced.append((run, reduced, landed))
        outputs = [
            reduced[start : start + layout.segments[index].piece_numel] for index, start in chosen
        ]
        if custom is not None:
            packed = custom.allocate((run.numel * layout.world,), dtype=dtype, device=device)
            rows = packed.view(layout.world, run.numel)
            rows.zero_()
            pieces = [layout.segments[index].piece_numel for index, _ in chosen]
            torch._foreach_copy_(
                [rows[:, s : s + n] for (_, s), n in zip(chosen, pieces, strict=True)],
                [tensor.view(layout.world, -1) for tensor in inputs],
            )
            self._kept.append(packed)
            return [reduced], [packed], rule.op
        pairs = [(o, i) for o, i in zip(outputs, inputs, strict=True) if o.numel()]
        return [o for o, _ in pairs], [i for _, i in pairs], rule.op

    def _scatter(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        op: ReduceOp.RedOpType,
        custom: comm.ReduceScatter | None,
    ) -> Work | None:
        async_op = not self._context.asynchronous
        group = self._mesh_info.shard_process_group
        # Averaging over shards and then over replicas is averaging over all; a shard group of one has nothing
        # to average, and NCCL's AVG is not reliable there.
        if self._mesh_info.shard_mesh_size == 1:
            op = ReduceOp.SUM
        if custom is not None:
            return comm.packed_reduce_scatter(
                custom, outputs[0], inputs[0], group, op, async_op=async_op
            )
        return comm.reduce_scatter(outputs, inputs, group, op, async_op=async_op)

    @property
    def _num_ranks(self) -> int:
        info = self._mesh_info
        replicas = info.replicate_mesh_size if isinstance(info, HSDPMeshInfo) else 1
        return info.shard_mesh_size * replicas

    @torch.no_grad()
    def _land(self) -> None:
        """Finish the arithmetic and give every sharded parameter its gradient."""
        self._landed = True
        for run, reduced, landed in self._reduced:
            rule = divide_rule(run.reduce_dtype, self._num_ranks)
            if isinstance(self._mesh_info, HSDPMeshInfo):
                info = self._mesh_info
                op = ReduceOp.SUM if info.replicate_mesh_size == 1 else rule.op
                comm.all_reduce(reduced, info.replicate_process_group, op)
            if rule.after != 1:
                reduced.div_(rule.after)
            if landed is not reduced:
                landed.copy_(reduced)
            self._land_run(run, landed)

    def _land_run(self, run: ReduceRun, landed: Tensor) -> None:
        layout, rank = self._buffer.layout, self._mesh_info.shard_mesh_rank
        starts = dict(zip(run.segments, run.starts, strict=True))
        for index in self._used:
            segment = layout.slots[index].segment
            if segment in starts:
                piece = layout.piece(index, rank)
                start = landed.storage_offset() + starts[segment] + piece.offset
                local = torch.as_strided(landed, piece.shape, strides(piece.shape), start)
                _land(self._params[index], local)


def _land(param: FSDPParam, local: Tensor) -> None:
    """Give a sharded parameter its reduced gradient, or add to the one it has."""
    sharded = param.sharded_param
    if sharded.grad is None:
        spec = torch_border.spec_of(cast(DTensor, sharded))
        sharded.grad = torch_border.dtensor(local, spec)
    else:
        torch_border.local_of(sharded.grad).add_(local)
    for hook in torch_border.post_accumulate_grad_hooks(sharded):
        hook(sharded)
