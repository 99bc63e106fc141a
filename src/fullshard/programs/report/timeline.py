"""Time of recorded steps, by where it went: arithmetic on spans.

    compute    | forward 0 |  wait  | forward 1 |          loss, optimizer: "outside"
    all-gather | gather 1 ..........|
                hidden      exposed

**Exposed communication** is the time in which compute waited for a gather or a reduction: the union of the waits. Time on
the wire outside of all waits was hidden. Compute spans nest as modules do. Each moment counts for the innermost span, and
while compute waits for none.
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
    """A time in which compute did one thing."""

    group: str
    phase: str
    """forward, backward, or outside of all groups: loss, optimizer and the like."""
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
    """Spans by start; the span of the step itself is not among them."""
    host: Interval
    """The host's time at the step. Memory is sampled on the host's clock."""
    memory: tuple[MemorySample, ...]
    """The samples of that time, and the last one before it."""

    @property
    def duration_us(self) -> float:
        """Duration of the step."""
        return self.end_us - self.start_us

    def of(self, *kinds: Kind) -> list[Span]:
        """Return the spans of these kinds."""
        return [span for span in self.spans if span.kind in kinds]

    @cached_property
    def waits(self) -> list[Interval]:
        """Times in which compute waited."""
        return union(map(_interval, self.of("wait")))

    @cached_property
    def exposed_us(self) -> float:
        """Exposed communication."""
        return length(self.waits)

    @property
    def exposed_share(self) -> float:
        """Exposed communication as a share of the step."""
        return self.exposed_us / self.duration_us

    @cached_property
    def compute(self) -> list[Stretch]:
        """Work of compute, in order, without waits."""
        innermost = list(_innermost(self.of("compute")))
        busy = union([*((start, end) for _, start, end in innermost), *self.waits])
        outside = without([(self.start_us, self.end_us)], busy)
        stretches = [Stretch("", "outside", start, end) for start, end in outside]
        for span, entered, left in innermost:
            for start, end in without([(entered, left)], self.waits):
                stretches.append(Stretch(span.group, span.phase, start, end))
        return sorted(stretches, key=lambda stretch: stretch.start_us)

    def compute_us(self, *phases: str) -> float:
        """Return the time of compute in these phases."""
        return sum(
            stretch.end_us - stretch.start_us for stretch in self.compute if stretch.phase in phases
        )

    def lane(self, kind: Kind) -> LaneTimes:
        """Return the times of all collectives of a kind together."""
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
    """Waits of compute for one group in one phase: the mean over steps and ranks."""

    group: str
    phase: str
    awaited: str
    """gather or reduction."""
    mean_us: float


def steps_of(trace: Trace) -> list[StepTimes]:
    """Return the steps that are complete in a trace, in order."""
    steps = [span for span in trace.spans if span.kind == "step" and span.duration_us > 0]
    return [
        StepTimes(
            rank=trace.rank,
            step=step.step,
            start_us=step.start_us,
            end_us=step.end_us,
            spans=tuple(s for s in trace.spans if s.step == step.step and s.kind != "step"),
            host=host,
            memory=tuple(_samples_within(trace.memory, host)),
        )
        for step, host in zip(steps, _host_times(trace, steps), strict=True)
    ]


def _host_times(trace: Trace, steps: list[Span]) -> list[Interval]:
    """Return when the host was at each step: from the first collective it issued to that of the next step.

    On the CPU that is the step itself. A GPU runs behind the host by what is queued for it, a step or more. The host's last
    step is taken to be as long as the GPU's, or to end with the last sample.
    """
    first: dict[int, float] = {}
    for span in trace.spans:
        if span.issued_us is not None:
            first[span.step] = min(span.issued_us, first.get(span.step, span.issued_us))
    if (
        trace.device == "cpu"
        or not (steps and trace.memory)
        or any(w.step not in first for w in steps)
    ):
        return [_interval(step) for step in steps]
    starts = [first[step.step] for step in steps]
    end = max(starts[-1] + steps[-1].duration_us, trace.memory[-1].time_us)
    return list(zip(starts, [*starts[1:], end], strict=True))


def mean_waits(steps: list[StepTimes]) -> list[WaitTimes]:
    """Return the waits of all groups, longest first."""
    totals: dict[tuple[str, str, str], float] = {}
    for step in steps:
        for wait in step.of("wait"):
            key = (wait.group, wait.phase, wait.awaited)
            totals[key] = totals.get(key, 0.0) + wait.duration_us
    waits = [WaitTimes(*key, total / len(steps)) for key, total in totals.items()]
    return sorted(waits, key=lambda wait: -wait.mean_us)


def mean_exposed_share(steps: list[StepTimes]) -> float:
    """Return exposed communication as a share of all these steps together."""
    return sum(step.exposed_us for step in steps) / sum(step.duration_us for step in steps)


def typical(steps: list[StepTimes]) -> StepTimes:
    """Return the step to show first: of the lowest rank, with the median duration."""
    of_rank = [step for step in steps if step.rank == min(each.rank for each in steps)]
    return sorted(of_rank, key=lambda step: step.duration_us)[(len(of_rank) - 1) // 2]


@dataclass(frozen=True, slots=True)
class Lateness:
    """A rank that comes to collectives after the others, which wait on the wire for it."""

    rank: int
    waited_us: float
    """Time that another rank waited for it in a step, on average."""
    share: float
    """Share of all the time that ranks waited for each other."""
    steps_share: float
    """Share of the steps in which it was waited for most."""


def latest_rank(steps: list[StepTimes]) -> Lateness | None:
    """Return the rank that others wait for most; None with one rank.

    A collective ends on all ranks at about the same time, so the rank that was on the wire for the shortest time came last.
    This compares durations, not clocks, which differ between machines.
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
        share=total[rank] / (sum(total.values()) or 1.0),
        steps_share=most / len(by_step),
    )


def _shared_collectives(steps: list[StepTimes]) -> Iterator[list[dict[int, float]]]:
    """Yield for each step the time on the wire, by rank, of each collective that all recorded ranks took part in."""
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
    """Return the mean bytes on the wire per group and step."""
    totals: dict[str, float] = {}
    for step in steps:
        for span in step.of(kind):
            totals[span.group] = totals.get(span.group, 0.0) + span.nbytes
    return {group: total / len(steps) for group, total in totals.items()}


def mean_duration_us(spans: Iterable[Span]) -> float:
    """Return the mean duration of at least one span."""
    return fmean(span.duration_us for span in spans)


def _interval(span: Span) -> Interval:
    return span.start_us, span.end_us


def _innermost(spans: list[Span]) -> Iterator[tuple[Span, float, float]]:
    """Yield intervals that do not overlap, each with the innermost of the nested spans at that time. Spans come by start."""
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
