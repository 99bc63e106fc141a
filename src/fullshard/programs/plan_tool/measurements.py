"""Measurements of a machine: matrix products, attention, copies, launches and collectives.

Each is the median of repetitions, which end when their share of the time is used up. Nothing is fitted here; `calibrate`
makes a profile of it.

A CPU is measured in processor time, for which other processes and other ranks on the same cores count nothing. A plan
adds the time that ranks take from each other (`playback`). Only collectives are measured by the clock, as ranks wait for
each other in them. Other processes make them slower at times, and never faster, so the faster half counts.
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
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh

from fullshard import fully_shard, torch_border
from fullshard.programs.plan_tool.machine import MIB
from fullshard.programs.plan_tool.program import Collective, CollectiveKind, Kernel
from fullshard.transport.collectives import all_reduce, values_of_all_ranks
from fullshard.transport.tags import tag
from fullshard.transport.transports import Coalesced

CALIBRATION = tag("plan calibrate", of_step=False)
NUM_CHAINED = 50
"""Operations of which the host's time is measured together."""
LEAST_REPETITIONS = 3
HOOKED_WIDTH = 8
COLLECTIVES_PER_SECOND = 80
"""Repetitions of a collective, for each second that another measurement takes: ranks must agree on their number."""
SPIN_SECONDS = 0.2
GAP_SECONDS = 0.0005
"""Least gap at which a loop that only looks at the clock had no core."""


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
    """Time of the collective; on a CPU from the end of the call."""
    call_seconds: float = 0.0
    """Time of the call on a CPU: ranks meet, and the backend's threads are woken up."""
    backend_seconds: float = 0.0
    """Processor time of the backend's threads of a rank, on a CPU."""


class Bench:
    """Measures on one device, for a given time per number."""

    def __init__(self, device: torch.device, *, seconds_each: float) -> None:
        self.device = device
        self._seconds_each = seconds_each
        self._is_cuda = device.type == "cuda"
        self._collective_repetitions = max(4, round(COLLECTIVES_PER_SECOND * seconds_each))
        self._host_clock = time.perf_counter if self._is_cuda else time.thread_time

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
        if not self._is_cuda:
            begin = time.thread_time()
            run()
            return time.thread_time() - begin
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3

    def wait(self) -> None:
        """Wait for the device."""
        if self._is_cuda:
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

    # --- the host

    def launch_seconds(self) -> float:
        """Measure the host's time to issue an operation, with autograd: forward and backward of a chain of them."""
        weight = torch.ones(8, device=self.device, requires_grad=True)

        def chain() -> None:
            value = weight
            for _ in range(NUM_CHAINED):
                value = value * weight
            torch.autograd.grad(value.sum(), weight)

        samples: list[float] = []
        chain()
        end = time.perf_counter() + self._seconds_each
        while len(samples) < LEAST_REPETITIONS or time.perf_counter() < end:
            self.wait()
            begin = self._host_clock()
            chain()
            samples.append(self._host_clock() - begin)
        # Backward multiplies twice for each product of forward, and adds the results.
        return statistics.median(samples) / (4 * NUM_CHAINED)

    def hook_seconds(self) -> float:
        """Measure the engine's part of one pass of a group of some small parameters, on this rank by itself."""
        own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        mesh = DeviceMesh.from_group(own, self.device.type)
        plain, sharded = (_blocks().to(self.device) for _ in range(2))
        for module in (*sharded, sharded):
            fully_shard(module, mesh=mesh)
        value = torch.ones(1, HOOKED_WIDTH, device=self.device)
        whole, without = (
            self.seconds_of(lambda model=model: model(value).sum().backward())  # type: ignore[misc]
            for model in (sharded, plain)
        )
        # Forward and backward.
        return max(0.0, whole - without) / len(plain) / 2

    def shortest_kernel_seconds(self) -> float:
        """Measure how fast small kernels follow each other when they are all in the queue."""
        if not self._is_cuda:
            return 0.0
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
            call = partial(_call, kind, whole, own, group, is_async=not self._is_cuda)
            work = Collective(kind, piece * ranks * 4, ranks, stride, "float32")
            if self._is_cuda:
                times: tuple[float, ...] = (self.seconds_together(call, group),)
            else:
                times = self._seconds_on_cpu(call, group)
            found.append(TimedCollective(work, *times))
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

    def _seconds_on_cpu(
        self, call: Callable[[], dist.Work | None], group: dist.ProcessGroup
    ) -> tuple[float, ...]:
        """Return the times of `TimedCollective`: of the slowest rank, and of the call those of the mean one."""
        _finish(call())
        samples = []
        for _ in range(self._collective_repetitions):
            all_reduce(torch.zeros(1), group, ReduceOp.SUM, CALIBRATION)
            samples.append(_once_on_cpu(call))
        # Work done before the call returns need not be waited for later, so they are chosen together.
        fast = sorted(samples, key=lambda sample: sum(sample[:2]))[: len(samples) // 2]
        seconds, *others = (
            values_of_all_ranks(statistics.fmean(each), group, CALIBRATION)
            for each in zip(*fast, strict=True)
        )
        return max(seconds), *map(statistics.fmean, others)

    def turn_seconds(self) -> float | None:
        """Measure how long a thread keeps a core that others want, too; None if it never lost its core."""
        turns: list[float] = []
        begin = last = time.perf_counter()
        end = begin + SPIN_SECONDS
        while last < end:
            now = time.perf_counter()
            if now - last > GAP_SECONDS:
                turns.append(last - begin)
                begin = now
            last = now
        # The first turn had begun before.
        return statistics.median(turns[1:]) if len(turns) > LEAST_REPETITIONS else None


def _once_on_cpu(call: Callable[[], dist.Work | None]) -> tuple[float, float, float]:
    """Return the seconds of a collective behind its call, of the call, and the processor time of other threads."""
    # Between collectives a rank computes, and its caches forget them.
    torch.ones(256, 256).mm(torch.ones(256, 256))
    begin, busy = time.perf_counter(), time.process_time() - time.thread_time()
    work = call()
    called = time.perf_counter() if work is not None else begin
    _finish(work)
    end = time.perf_counter()
    busy = time.process_time() - time.thread_time() - busy
    return end - called, called - begin, max(0.0, busy)


def _blocks() -> nn.Sequential:
    """Return a model of which nothing takes time but the operations themselves."""
    return nn.Sequential(
        *(
            nn.Sequential(*(nn.Linear(HOOKED_WIDTH, HOOKED_WIDTH) for _ in range(4)))
            for _ in range(6)
        )
    )


def _finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _call(
    kind: CollectiveKind, whole: Tensor, own: Tensor, group: dist.ProcessGroup, *, is_async: bool
) -> dist.Work | None:
    """Call a collective as the engine does: where the device has no streams, it goes on while the host computes."""
    match kind:
        case "all_gather":
            # Gathers move bytes.
            whole, own = whole.view(torch.uint8), own.view(torch.uint8)
            return Coalesced(group, own.device).gather(
                [whole], [own], CALIBRATION, async_op=is_async
            )
        case "reduce_scatter":
            return Coalesced(group, own.device).reduce(
                [own], [whole], ReduceOp.SUM, CALIBRATION, async_op=is_async
            )
        case "all_reduce":
            all_reduce(whole, group, ReduceOp.SUM, CALIBRATION)
            return None
    raise AssertionError(f"{kind} is not measured")


def local_ranks() -> int:
    """Return how many ranks of torchrun are on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
