"""How one call is timed, how much memory one step takes, and how a comparison is interleaved.

    alone      every contestant by itself: build, warm up, peak memory over a few steps, delete
    together   build all, then rounds; in a round every contestant takes its turn of a few steps

    round 0    unsharded x k | fsdp2 x k     | fullshard x k
    round 1    fullshard x k | fsdp2 x k     | unsharded x k

So a drift of the machine hits all of them alike. The order is random: a GPU slows down under load, so it matters who
came before, and that must not be the same contestant every time. A turn starts with one step that is not timed,
which gives the allocator and the caches back to this contestant. With `isolate`
nobody stays: each turn builds, warms up, measures and deletes.
"""

import gc
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch

from benchmarks.clock import Clock, Part
from benchmarks.contestants import Contestant, Setting, Unavailable, adamw, build, plain_shards

__all__ = ["PLAIN_SHARDS", "Comparison", "Effort", "Memory", "Quantity", "Record"]

T = TypeVar("T")
PLAIN_SHARDS = "plain shards"
"""Name of the record with optimizer times only: AdamW over plain tensors of the shards' shapes."""

MEMORY_STEPS = 3
Quantity = Literal[
    "forward_backward_s",
    "host_s",
    "collective_s",
    "copy_s",
    "wall_s",
    "optimizer_s",
    "optimizer_host_s",
    "torch_optimizer_s",
    "step_s",
    "step_processor_s",
    "build_s",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How often things are repeated, and what is measured at all."""

    rounds: int
    steps: int
    warmup: int
    isolate: bool
    optimizer: bool
    parts: tuple[Part, ...] = ()
    """Parts of the host time that are measured, too: in further steps, as a clock takes time itself."""

    def __post_init__(self) -> None:
        for name in ("rounds", "steps", "warmup"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One timed call that started on an idle device."""

    device_s: float
    """Until the current stream had done it all (device events); wall time on the CPU."""
    host_s: float
    """Until the call returned, nothing awaited. On the CPU: processor time of all the process's
    threads, from which time lost to other programs is absent."""
    wall_s: float
    """Until every stream of the device was idle again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Device memory of forward and backward, beyond what the process held before the build."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    left_behind_bytes: int
    """Still allocated after the contestant was deleted."""


@dataclass(kw_only=True, slots=True)
class Record:
    """What is known about one contestant; filled as the comparison goes on."""

    name: str
    status: Literal["measured", "skipped", "failed"] = "measured"
    reason: str | None = None
    memory: Memory | None = None
    samples: dict[Quantity, list[float]] = field(default_factory=dict)
    compilations: int = 0
    """Frames that were compiled for it outside of the timed steps."""
    timed_compilations: int = 0
    """... and within them, where there should be none."""

    def add(self, quantity: Quantity, value: float) -> None:
        """Append one sample."""
        self.samples.setdefault(quantity, []).append(round(value, 7))  # tenths of microseconds


def timed(call: Callable[[], object], device: torch.device) -> Timing:
    """Run `call` once on an idle device and time it."""
    if device.type != "cuda":
        start, start_cpu = time.perf_counter(), time.process_time()
        call()
        host_s, wall_s = time.process_time() - start_cpu, time.perf_counter() - start
        return Timing(device_s=wall_s, host_s=host_s, wall_s=wall_s)
    event: Any = torch.cuda.Event  # its constructor has no types
    begin, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    start = time.perf_counter()
    call()
    host_s = time.perf_counter() - start
    end.record()
    torch.cuda.synchronize(device)
    wall_s = time.perf_counter() - start
    return Timing(device_s=begin.elapsed_time(end) / 1000, host_s=host_s, wall_s=wall_s)


def in_some_order(items: Sequence[T], turn: int) -> list[T]:
    """Return the items in a random order, which is the same in every run."""
    return random.Random(turn).sample(items, len(items))


def compilations() -> int:
    """Count the frames that torch's compiler has compiled in this process."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["frames"]["total"])


def release_memory(device: torch.device) -> None:
    """Collect cycles and hand cached blocks back, after the last reference to a model is gone."""
    gc.collect()
    if device.type != "cuda":
        return
    torch.cuda.synchronize(device)
    # Workspaces of the matrix library stay allocated for ever; without this only the first
    # contestant of a process would be charged for them.
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    torch.cuda.empty_cache()


def peaks_of(contestant: Contestant, device: torch.device) -> tuple[int, int]:
    """Find the peaks of allocated and reserved memory, in bytes, over a few steps on a GPU."""
    contestant.zero_grad()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(MEMORY_STEPS):
        contestant.zero_grad()
        contestant.forward_backward()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def peak_of(step: Callable[[], object], device: torch.device) -> float:
    """Return how many GiB a step takes beyond what is there before it; on the CPU it is not known."""
    if device.type != "cuda":
        return float("nan")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / (1 << 30)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's cycle collector out of the timed region."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Comparison:
    """All contestants at one setting, from the first build to the last sample."""

    def __init__(self, names: tuple[str, ...], setting: Setting, effort: Effort) -> None:
        self.names = names
        self.setting = setting
        self.effort = effort
        self.records = {name: Record(name=name) for name in names}
        self._present: dict[str, Contestant] = {}
        self._plain: torch.optim.Optimizer | None = None

    def run(self) -> None:
        """Measure everything; a contestant that fails is recorded as such and then left out."""
        self.prepare()
        for turn in range(self.effort.rounds):
            self.take_round(turn)

    def prepare(self) -> None:
        """Do what comes before the rounds: memory of each alone, then all are built."""
        if self.setting.device.type == "cuda":
            for name in self._standing():
                with self._blamed_on(name):
                    self._measure_memory(name)
        if not self.effort.isolate:
            for name in self._standing():
                with self._blamed_on(name), self._admitted(name):
                    pass
        if self.effort.optimizer:
            self.records[PLAIN_SHARDS] = Record(name=PLAIN_SHARDS)
            self._plain = adamw(plain_shards(self.setting))

    def take_round(self, turn: int) -> None:
        """Let everyone have their turn."""
        for name in in_some_order(self.names, turn):
            if self.records[name].status == "measured":
                with self._blamed_on(name), self._admitted(name) as contestant:
                    self._take_turn(contestant)
        if self._plain is not None:
            with collector_paused():
                self._time_optimizer(self.records[PLAIN_SHARDS], self._plain)
                self._time_torch_optimizer(self.records[PLAIN_SHARDS], self._plain)

    def visit(self, look: Callable[[Contestant], None]) -> None:
        """Show every contestant still standing, warmed up, to `look`."""
        for name in self._standing():
            with self._blamed_on(name), self._admitted(name) as contestant:
                look(contestant)

    def close(self) -> None:
        """Delete the contestants and give their memory back."""
        self._present.clear()
        release_memory(self.setting.device)

    def _standing(self) -> list[str]:
        return [name for name in self.names if self.records[name].status == "measured"]

    @contextmanager
    def _blamed_on(self, name: str) -> Iterator[None]:
        """Turn an exception into the verdict on one contestant; the others go on."""
        record = self.records[name]
        try:
            yield
        except Unavailable as error:
            record.status, record.reason = "skipped", str(error)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            first_line = (str(error).splitlines() or [""])[0]
            record.status, record.reason = "failed", f"{type(error).__name__}: {first_line}"
        if record.status != "measured":
            self._present.pop(name, None)
            release_memory(self.setting.device)

    @contextmanager
    def _admitted(self, name: str) -> Iterator[Contestant]:
        """Have a contestant built, checked and warmed up; with `isolate` only for this block."""
        if name not in self._present:
            print(f"  building {name}", file=sys.stderr, flush=True)
            before, start = compilations(), time.process_time()
            contestant = build(name, self.setting)
            self.records[name].add("build_s", time.process_time() - start)
            contestant.check()
            for _ in range(self.effort.warmup):
                contestant.zero_grad()
                contestant.forward_backward()
            self.records[name].compilations += compilations() - before
            self._present[name] = contestant
            del contestant
        try:
            yield self._present[name]
        finally:
            if self.effort.isolate:
                self._present.pop(name, None)
                release_memory(self.setting.device)

    def _measure_memory(self, name: str) -> None:
        """Find the peak of forward and backward while no other contestant exists."""
        device = self.setting.device
        release_memory(device)
        allocated, reserved = (
            torch.cuda.memory_allocated(device),
            torch.cuda.memory_reserved(device),
        )
        with self._admitted(name) as contestant:
            peaks = peaks_of(contestant, device)
        del contestant
        self._present.pop(name, None)
        release_memory(device)
        self.records[name].memory = Memory(
            peak_allocated_bytes=peaks[0] - allocated,
            peak_reserved_bytes=peaks[1] - reserved,
            left_behind_bytes=torch.cuda.memory_allocated(device) - allocated,
        )

    def _take_turn(self, contestant: Contestant) -> None:
        """Time one contestant's steps of one round."""
        record, device = self.records[contestant.name], self.setting.device
        with collector_paused():
            contestant.zero_grad()
            contestant.forward_backward()
            before = compilations()
            for _ in range(self.effort.steps):
                contestant.zero_grad()
                timing = timed(contestant.forward_backward, device)
                record.add("forward_backward_s", timing.device_s)
                record.add("host_s", timing.host_s)
                record.add("wall_s", timing.wall_s)
            record.timed_compilations += compilations() - before
            if self.effort.parts:
                self._time_parts(record, contestant)
            if self.effort.optimizer:
                contestant.fill_gradients()
                self._time_optimizer(record, contestant.optimizer)
                self._time_torch_optimizer(record, contestant.torch_optimizer)
        contestant.zero_grad()

    def _time_parts(self, record: Record, contestant: Contestant) -> None:
        """Time parts of the host time, with the clocks of all parts running."""
        clocks = {part: Clock(part, self.setting.device) for part in self.effort.parts}
        with ExitStack() as running:
            for clock in clocks.values():
                running.enter_context(clock.running())
            for _ in range(self.effort.steps):
                contestant.zero_grad()
                timed(contestant.forward_backward, self.setting.device)
                for part, clock in clocks.items():
                    record.add(part, clock.take_s())

    def _time_optimizer(self, record: Record, optimizer: torch.optim.Optimizer) -> None:
        """Time steps on the gradients that are there; the first one is not timed."""
        optimizer.step()
        for _ in range(self.effort.steps):
            timing = timed(optimizer.step, self.setting.device)
            record.add("optimizer_s", timing.device_s)
            record.add("optimizer_host_s", timing.host_s)

    def _time_torch_optimizer(self, record: Record, optimizer: torch.optim.Optimizer) -> None:
        """The same for torch's own class, which users may know alone."""
        optimizer.step()
        for _ in range(self.effort.steps):
            record.add("torch_optimizer_s", timed(optimizer.step, self.setting.device).device_s)
