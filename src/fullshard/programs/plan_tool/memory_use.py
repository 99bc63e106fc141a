"""The memory of a program: how much is allocated when, for what, and what the allocator reserves for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from fullshard.programs.plan_tool.allocator import CachingAllocator
from fullshard.programs.plan_tool.machine import Machine
from fullshard.programs.plan_tool.program import (
    COMPUTE,
    HOST,
    Allocate,
    Free,
    Kernel,
    Launch,
    MemoryKind,
    Phase,
    Program,
)

_WORKSPACE = -1
"""The number of the memory that the matrix library holds from the first product on; forward and backward run on one thread.

When it is taken matters: it may lie in the middle of what was a large free block, which large tensors then no longer fit into."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Bytes of one device."""

    allocated: int
    """Most that tensors have at the same time, within the step."""
    reserved: int
    """Most that the allocator has taken from the device for them, until the end of the step."""
    at_peak: dict[MemoryKind, int]
    """Bytes at the peak, by purpose."""
    at_rest: int
    """Bytes between steps."""
    peak_entry: int
    """The entry of the program at which the most is allocated."""
    peak_phase: Phase
    host_allocated: int = 0
    """Most bytes of host memory that tensors of one rank have at the same time; 0 without offload."""
    host_at_peak: dict[MemoryKind, int] = field(default_factory=dict)
    """The same bytes, by purpose."""


@dataclass(frozen=True, slots=True)
class MemoryMoment:
    """Allocated memory at a time of the step."""

    seconds: float
    by_kind: dict[MemoryKind, int]

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.by_kind.values())


MOST_MOMENTS = 400
"""Moments of a step: the width of a chart."""


def memory_moments(
    program: Program,
    launches: Sequence[tuple[int, float]],
    seconds: float,
    *,
    kept: float,
    workspace: int,
) -> tuple[MemoryMoment, ...]:
    """Return the memory of a device over a step.

    Args:
        program: The step.
        launches: Entries that compute has worked on, and when it began with them.
        seconds: Seconds of the step.
        kept: As for `memory_use`.
        workspace: Memory that is there all the time beside tensors.

    Returns:
        The most that is allocated in each of `MOST_MOMENTS` equal parts of the step, and what is at its end.
    """
    times = {program.begin: 0.0, **dict(launches)}
    live: dict[int, tuple[MemoryKind, int]] = {}
    now: Counter[MemoryKind] = Counter({"workspace": workspace})
    found: dict[int, MemoryMoment] = {}
    most: dict[MemoryKind, int] = {}
    total = highest = 0
    for index, entry in enumerate(program.entries):
        if isinstance(entry, Allocate) and entry.stream != HOST:
            kind, nbytes = program.kinds[entry.memory], _nbytes(program, entry, kept)
            live[entry.memory] = kind, nbytes
            now[kind] += nbytes
            total += nbytes
        elif isinstance(entry, Free) and entry.memory in live:
            kind, nbytes = live.pop(entry.memory)
            now[kind] -= nbytes
            total -= nbytes
        if index < program.begin:
            continue
        if index == program.begin or total > highest:
            most, highest = dict(now), total
        time = times.get(index)
        if time is not None:
            part = min(int(time / seconds * MOST_MOMENTS), MOST_MOMENTS - 1)
            moment = MemoryMoment(time, most)
            if part not in found or found[part].total < moment.total:
                found[part] = moment
            most, highest = dict(now), total
    end = MemoryMoment(seconds, dict(now))
    return (*(found[part] for part in sorted(found)), end)


def memory_use(program: Program, machine: Machine, *, kept: float = 1.0) -> MemoryUse:
    """Return the memory of a program's step on a machine, as torch's caching allocator counts it.

    Args:
        program: The step.
        machine: The machine that it runs on.
        kept: The share of the recorded activations that is kept for backward; less than 1 if a compiler recomputes some.
    """
    allocator = CachingAllocator()
    has_multiplied = False
    host = _HostUse(program)
    at_rest = peak = 0
    peak_entry = program.begin
    phase: Phase = "between"
    peak_phase: Phase = "between"
    for index, entry in enumerate(program.entries):
        if index == program.begin:
            at_rest = peak = allocator.allocated
        if isinstance(entry, Allocate):
            if entry.stream == HOST:
                host.take(index, entry)
                continue
            nbytes = _nbytes(program, entry, kept)
            allocator.allocate(entry.memory, nbytes, entry.stream)
            if index >= program.begin and allocator.allocated > peak:
                peak, peak_entry, peak_phase = allocator.allocated, index, phase
        elif isinstance(entry, Free):
            if not host.give_back(entry.memory):
                allocator.free(entry.memory)
        elif isinstance(entry, Launch):
            phase = entry.phase
            if (
                not has_multiplied
                and isinstance(entry.work, Kernel)
                and entry.work.kind == "matmul"
            ):
                has_multiplied = True
                allocator.allocate(_WORKSPACE, machine.workspace_bytes, COMPUTE)
    by_kind = _live_by_kind(program, peak_entry, kept)
    by_kind["workspace"] = peak - by_kind.total()
    return MemoryUse(
        allocated=peak,
        reserved=allocator.peak_reserved,
        at_peak=dict(by_kind),
        at_rest=at_rest,
        peak_entry=peak_entry,
        peak_phase=peak_phase,
        host_allocated=host.peak,
        host_at_peak=dict(host.at_peak),
    )


class _HostUse:
    """Memory of the host that is taken now, and the most that was taken within the step."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._live: dict[int, int] = {}
        self._now = 0
        self.peak = 0
        self.at_peak: Counter[MemoryKind] = Counter()

    def take(self, index: int, entry: Allocate) -> None:
        self._live[entry.memory] = entry.nbytes
        self._now += entry.nbytes
        if index >= self._program.begin and self._now > self.peak:
            self.peak = self._now
            self.at_peak = Counter()
            for memory, nbytes in self._live.items():
                self.at_peak[self._program.kinds[memory]] += nbytes

    def give_back(self, memory: int) -> bool:
        """Return whether the memory is the host's."""
        nbytes = self._live.pop(memory, None)
        self._now -= nbytes or 0
        return nbytes is not None


def _nbytes(program: Program, entry: Allocate, kept: float) -> int:
    is_activation = program.kinds.get(entry.memory) == "activations"
    return int(entry.nbytes * kept) if is_activation else entry.nbytes


def _live_by_kind(program: Program, until: int, kept: float) -> Counter[MemoryKind]:
    """Return the bytes that are allocated after an entry, by what they are for."""
    live: dict[int, int] = {}
    for entry in program.entries[: until + 1]:
        if isinstance(entry, Allocate) and entry.stream != HOST:
            live[entry.memory] = _nbytes(program, entry, kept)
        elif isinstance(entry, Free):
            live.pop(entry.memory, None)
    found: Counter[MemoryKind] = Counter()
    for memory, nbytes in live.items():
        found[program.kinds[memory]] += nbytes
    return found
