"""Measurements of a GPU and its host: matrix products, attention, copies and collectives.

Each is the median of repetitions, which end when their share of the time is used up. Nothing is fitted here; `calibrate`
makes a profile of it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ReduceOp

from fullshard import torch_border
from fullshard.programs.plan_tool.machine import MIB
from fullshard.programs.plan_tool.program import Collective, CollectiveKind, Kernel
from fullshard.transport.collectives import all_reduce, values_of_all_ranks
from fullshard.transport.tags import tag
from fullshard.transport.transports import Coalesced

CALIBRATION = tag("plan calibrate", of_step=False)
NUM_CHAINED = 50
"""Kernels that are measured together."""
LEAST_REPETITIONS = 3


@dataclass(frozen=True, slots=True)
class Timed:
    """Work and how long it took."""

    work: Kernel
    seconds: float


@dataclass(frozen=True, slots=True)
class TimedCollective:
    """A collective and how long it took."""

    work: Collective
    seconds: float


class Bench:
    """Measures on one GPU, for a given time per number."""

    def __init__(self, device: torch.device, *, seconds_each: float) -> None:
        self.device = device
        self._seconds_each = seconds_each

    def seconds_of(self, run: Callable[[], object]) -> float:
        """Return the median of the device's seconds for a call; the first one is not counted."""
        run()
        self.wait()
        samples: list[float] = []
        end = time.perf_counter() + self._seconds_each
        while len(samples) < LEAST_REPETITIONS or time.perf_counter() < end:
            samples.append(self._once(run))
        return statistics.median(samples)

    def _once(self, run: Callable[[], object]) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3

    def wait(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    # --- kernels

    def products(self, sizes: Sequence[tuple[int, int, int]], dtype: torch.dtype) -> list[Timed]:
        """Measure products of matrices of rows x inner and inner x columns."""
        found = []
        for rows, columns, inner in sizes:
            left = torch.randn(rows, inner, device=self.device).to(dtype)
            right = torch.randn(inner, columns, device=self.device).to(dtype)
            seconds = self.seconds_of(lambda left=left, right=right: left @ right)  # type: ignore[misc]
            elements = rows * inner + inner * columns + rows * columns
            work = Kernel(
                name="aten.mm",
                kind="matmul",
                dtype=_name(dtype),
                flops=2 * rows * columns * inner,
                nbytes=elements * dtype.itemsize,
                shape=(1, rows, columns, inner),
            )
            found.append(Timed(work, seconds))
        return found

    def attention(
        self, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype
    ) -> tuple[list[Timed], list[Timed]]:
        """Measure causal attention of heads x length x width: forward, and backward."""
        forward, backward = [], []
        for heads, length, width in shapes:
            query, key, value = (
                torch.randn(1, heads, length, width, device=self.device).to(dtype).requires_grad_()
                for _ in range(3)
            )
            gradient = torch.randn_like(query)

            attend = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True)

            def both(
                attend: Callable[[], Tensor] = attend,
                inputs: tuple[Tensor, ...] = (query, key, value),
                gradient: Tensor = gradient,
            ) -> None:
                torch.autograd.grad(attend(), inputs, gradient)

            seconds = self.seconds_of(attend)
            flops = 2 * heads * length * length * width
            work = Kernel(
                name="attention",
                kind="attention",
                dtype=_name(dtype),
                flops=flops,
                nbytes=4 * query.numel() * dtype.itemsize,
                shape=(heads, length, length, width),
            )
            forward.append(Timed(work, seconds))
            back = Kernel(
                name="attention_backward",
                kind="attention",
                dtype=work.dtype,
                flops=flops * 5 // 2,
                nbytes=2 * work.nbytes,
                shape=work.shape,
            )
            backward.append(Timed(back, max(1e-9, self.seconds_of(both) - seconds)))
        return forward, backward

    def copies(self, mebibytes: Sequence[int]) -> list[Timed]:
        """Measure copies of so many MiB; each byte is read and written."""
        found = []
        for mib in mebibytes:
            source = torch.ones(mib * MIB // 4, device=self.device)
            target = torch.empty_like(source)
            seconds = self.seconds_of(lambda a=target, b=source: a.copy_(b))  # type: ignore[misc]
            work = Kernel("aten.copy_", "memory", "float32", 0, 2 * mib * MIB)
            found.append(Timed(work, seconds))
        return found

    def shortest_kernel_seconds(self) -> float:
        """Measure how fast small kernels follow each other when they are all in the queue."""
        small = torch.ones(8, device=self.device)

        def burst() -> float:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch_border.keep_gpu_busy(20_000_000)  # about 10 ms, in which the host gets ahead
            first.record()
            for _ in range(NUM_CHAINED):
                small.add_(1)
            last.record()
            last.synchronize()
            return float(first.elapsed_time(last)) * 1e-3 / NUM_CHAINED

        burst()
        return statistics.median(burst() for _ in range(LEAST_REPETITIONS))

    # --- collectives

    def collectives(
        self,
        kind: CollectiveKind,
        mebibytes: Sequence[float],
        group: dist.ProcessGroup,
        *,
        stride: int = 1,
    ) -> list[TimedCollective]:
        """Measure collectives of so many MiB in all, each as long as its slowest rank; every rank must call this."""
        ranks = group.size()
        found = []
        for mib in mebibytes:
            piece = max(1, int(mib * MIB) // 4 // ranks)
            own = torch.ones(piece, device=self.device)
            whole = torch.ones(piece * ranks, device=self.device)
            call = partial(_call, kind, whole, own, group)
            work = Collective(kind, piece * ranks * 4, ranks, stride, "float32")
            found.append(TimedCollective(work, self.seconds_together(call, group)))
        return found

    def seconds_together(self, run: Callable[[], object], group: dist.ProcessGroup) -> float:
        """Return the median of repetitions, as many on all ranks; of the slowest rank."""
        run()
        self.wait()
        samples = []
        for _ in range(2 * LEAST_REPETITIONS - 1):
            all_reduce(torch.zeros(1, device=self.device), group, ReduceOp.SUM, CALIBRATION)
            self.wait()
            samples.append(self._once(run))
        return max(values_of_all_ranks(statistics.median(samples), group, CALIBRATION))


def _call(kind: CollectiveKind, whole: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """Call a collective as the engine does."""
    match kind:
        case "all_gather":
            # Gathers move bytes.
            whole, own = whole.view(torch.uint8), own.view(torch.uint8)
            Coalesced(group, own.device).gather([whole], [own], CALIBRATION, async_op=False)
        case "reduce_scatter":
            Coalesced(group, own.device).reduce(
                [own], [whole], ReduceOp.SUM, CALIBRATION, async_op=False
            )
        case "all_reduce":
            all_reduce(whole, group, ReduceOp.SUM, CALIBRATION)
        case _:
            raise AssertionError(f"{kind} is not measured")


def local_ranks() -> int:
    """Return how many ranks of torchrun are on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
