"""Where the time of recorded steps went: arithmetic on spans, nothing else.

    compute    | forward 0 |  wait  | forward 1 |          loss, optimizer: "outside"
    all-gather | gather 1 ..........|
                hidden      exposed

**Exposed communication** is the time in which compute stood still for a gather or a reduction: the union of the
waits. Time on the wire that falls into no wait was hidden. Compute spans of enclosing states contain those within; each
moment counts for the innermost, and never for compute while it waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

from fullshard.programs.report.intervals import Interval, length, union, without
from fullshard.tracing.schema import COLLECTIVES, Kind, MemorySample, Span, Trace


@dataclass(frozen=True, slots=True)
class Stretch:
    """Time in which compute was at one thing."""

    group: str
    phase: str
    """forward, backward, or outside: what is in no group, such as loss and optimizer."""
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """One kind of collective within a step."""

    wire_us: float
    hidden_us: float
    nbytes: float
    count: int


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """One step of one rank."""

    rank: int
    step: int
    start_us: float
    end_us: float
    spans: tuple[Span, ...]
    """By start, without the step's own."""
    host: Interval
    """When the host was at the step, whose clock memory is on."""
    memory: tuple[MemorySample, ...]
    """The samples of that time, the first one carried over from before."""

    @property
    def duration_us(self) -> float:
        """How long the step took."""
        return self.end_us - self.start_us

    def of(self, *kinds: Kind) -> list[Span]:
        """Its spans of these kinds."""
        return [span for span in self.spans if span.kind in kinds]

    @cached_property
    def waits(self) -> list[Interval]:
        """When compute stood still."""
        return union(map(_interval, self.of("wait")))

    @cached_property
    def exposed_us(self) -> float:
        """Exposed communication."""
        return length(self.waits)

    @property
    def exposed_share(self) -> float:
        """Exposed communication as part of the step."""
        return self.exposed_us / self.duration_us

    @cached_property
    def compute(self) -> list[Stretch]:
        """What compute did, in order; waits are left out."""
        pieces = list(_innermost(self.of("compute")))
        busy = union([*((start, end) for _, start, end in pieces), *self.waits])
        outside = without([(self.start_us, self.end_us)], busy)
        stretches = [Stretch("", "outside", start, end) for start, end in outside]
        for span, *piece in pieces:
            for start, end in without([(piece[0], piece[1])], self.waits):
                stretches.append(Stretch(span.group, span.phase, start, end))
        return sorted(stretches, key=lambda stretch: stretch.start_us)

    def compute_us(self, *phases: str) -> float:
        """Time of compute in these phases."""
        return sum(
            stretch.end_us - stretch.start_us for stretch in self.compute if stretch.phase in phases
        )

    def lane(self, kind: Kind) -> LaneTimes:
        """All collectives of a kind together."""
        spans = self.of(kind)
        wire = union(map(_interval, spans))
        return LaneTimes(
            wire_us=length(wire),
            hidden_us=length(without(wire, self.waits)),
            nbytes=sum(span.nbytes for span in spans),
            count=len(spans),
        )

    @property
    def idle_wire_us(self) -> float:
        """Time in which no collective was on the wire."""
        busy = union(map(_interval, self.of(*COLLECTIVES)))
        return length(without([(self.start_us, self.end_us)], busy))


@dataclass(frozen=True, slots=True)
class WaitTimes:
    """How long compute stood still for one group, in one phase, in the mean over steps and ranks."""

    group: str
    phase: str
    awaited: str
    """gather or reduction."""
    mean_us: float


def steps_of(trace: Trace) -> list[StepTimes]:
    """The steps that a trace has whole, in order."""
    wholes = [span for span in trace.spans if span.kind == "step" and span.duration_us > 0]
    return [
        StepTimes(
            rank=trace.rank,
            step=whole.step,
            start_us=whole.start_us,
            end_us=whole.end_us,
            spans=tuple(s for s in trace.spans if s.step == whole.step and s.kind != "step"),
            host=host,
            memory=tuple(_samples_within(trace.memory, host)),
        )
        for whole, host in zip(wholes, _host_times(trace, wholes), strict=True)
    ]


def _host_times(trace: Trace, wholes: list[Span]) -> list[Interval]:
    """When the host was at each step: from the first collective it asked for, to that of the next step.

    On the CPU that is the step itself. A GPU comes behind, by as much as is queued for it: up to a step, and more. The last
    step is taken to be as long for the host as for the GPU, or to the last that was recorded.
    """
    first: dict[int, float] = {}
    for span in trace.spans:
        if span.issued_us is not None:
            first[span.step] = min(span.issued_us, first.get(span.step, span.issued_us))
    if (
        trace.device == "cpu"
        or not (wholes and trace.memory)
        or any(w.step not in first for w in wholes)
    ):
        return [_interval(whole) for whole in wholes]
    starts = [first[whole.step] for whole in wholes]
    end = max(starts[-1] + wholes[-1].duration_us, trace.memory[-1].time_us)
    return list(zip(starts, [*starts[1:], end], strict=True))


def mean_waits(steps: list[StepTimes]) -> list[WaitTimes]:
    """The waits of all groups, longest first."""
    totals: dict[tuple[str, str, str], float] = {}
    for step in steps:
        for wait in step.of("wait"):
            key = (wait.group, wait.phase, wait.awaited)
            totals[key] = totals.get(key, 0.0) + wait.duration_us
    waits = [WaitTimes(*key, total / len(steps)) for key, total in totals.items()]
    return sorted(waits, key=lambda wait: -wait.mean_us)


def mean_exposed_share(steps: list[StepTimes]) -> float:
    """Exposed communication as part of all these steps together."""
    return sum(step.exposed_us for step in steps) / sum(step.duration_us for step in steps)


def typical(steps: list[StepTimes]) -> StepTimes:
    """The step to look at first: of the lowest rank, with the median duration."""
    of_rank = [step for step in steps if step.rank == min(each.rank for each in steps)]
    return sorted(of_rank, key=lambda step: step.duration_us)[(len(of_rank) - 1) // 2]


@dataclass(frozen=True, slots=True)
class Lateness:
    """One rank comes to collectives after the others, which stand on the wire until it is there."""

    rank: int
    waited_us: float
    """How long another rank waited for it in a step, in the mean."""
    part: float
    """Of all the time that ranks waited for each other."""
    steps: float
    """Part of the steps in which it was waited for most."""


def latest_rank(steps: list[StepTimes]) -> Lateness | None:
    """The rank that others wait for most; None with one rank.

    A collective ends on all ranks at about the same time, so who was on the wire shortest came last.
    This compares durations, not clocks.
    """
    by_step: list[dict[int, float]] = []
    for collectives in _shared_collectives(steps):
        waited = dict.fromkeys(collectives[0], 0.0)
        for durations in collectives:
            last = min(durations, key=lambda rank: durations[rank])
            others = [us for rank, us in durations.items() if rank != last]
            waited[last] += median(others) - durations[last]
        by_step.append(waited)
    if not by_step:
        return None
    total = {rank: sum(waited[rank] for waited in by_step) for rank in by_step[0]}
    rank = max(total, key=lambda each: total[each])
    most = sum(max(waited, key=lambda each: waited[each]) == rank for waited in by_step)
    return Lateness(
        rank=rank,
        waited_us=total[rank] / len(by_step),
        part=total[rank] / (sum(total.values()) or 1.0),
        steps=most / len(by_step),
    )


def _shared_collectives(steps: list[StepTimes]) -> Iterator[list[dict[int, float]]]:
    """For each step, its collectives that all recorded ranks took part in: how long each was on the wire."""
    ranks = {step.rank for step in steps}
    if len(ranks) < 2:
        return
    for number in sorted({step.step for step in steps}):
        found: dict[tuple[str, str, str, int], dict[int, float]] = {}
        for step in steps:
            seen: dict[tuple[str, str, str], int] = {}
            for span in step.of(*COLLECTIVES) if step.step == number else ():
                key = (span.kind, span.group, span.phase)
                seen[key] = seen.get(key, 0) + 1
                found.setdefault((*key, seen[key]), {})[step.rank] = span.duration_us
        together = [durations for durations in found.values() if set(durations) == ranks]
        if together:
            yield together


def group_bytes(steps: list[StepTimes], kind: Kind) -> dict[str, float]:
    """Bytes on the wire per group and step, in the mean."""
    totals: dict[str, float] = {}
    for step in steps:
        for span in step.of(kind):
            totals[span.group] = totals.get(span.group, 0.0) + span.nbytes
    return {group: total / len(steps) for group, total in totals.items()}


def mean_duration_us(spans: Iterable[Span]) -> float:
    """Of spans of which there is at least one."""
    return fmean(span.duration_us for span in spans)


def _interval(span: Span) -> Interval:
    return span.start_us, span.end_us


def _innermost(spans: list[Span]) -> Iterator[tuple[Span, float, float]]:
    """Cut nested spans, which come by start, into pieces that do not overlap, each of the span entered last."""
    entered: list[Span] = []
    at = 0.0

    def left_until(moment: float) -> Iterator[tuple[Span, float, float]]:
        nonlocal at
        while entered and entered[-1].end_us <= moment:
            span = entered.pop()
            if span.end_us > at:
                yield span, at, span.end_us
                at = span.end_us

    for span in spans:
        yield from left_until(span.start_us)
        if entered and span.start_us > at:
            yield entered[-1], at, span.start_us
        at = max(at, span.start_us)
        entered.append(span)
    yield from left_until(float("inf"))


def _samples_within(memory: tuple[MemorySample, ...], time: Interval) -> Iterator[MemorySample]:
    start_us, end_us = time
    before = None
    for sample in memory:
        if sample.time_us <= start_us:
            before = sample
        elif sample.time_us < end_us:
            if before is not None:
                yield before
                before = None
            yield sample
    if before is not None:
        yield before
