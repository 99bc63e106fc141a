"""Waits that would remain if gathers were issued further ahead: the measured step, replayed.

Compute takes as long as measured, without its waits for gathers. Gathers are on the wire one at a time, in the measured
order and for the measured time. At depth d a gather is issued when compute starts on what the d-th gather before it
brought. The first d gathers of a phase are issued when the first one was.

    depth 1   compute | 0 |.....| 1 | 2         |      "....." is a wait: gather 1 is longer than compute 0
              wire    | gather 1| 2 |

    depth 2   compute   | 0 |   | 1 | 2         |      issued before compute 0 is there to hide it, gather 1
              wire    | gather 1| 2 |                  is waited for less

The replay leaves out that a busier wire is slower, that reductions share it, and that ranks wait for each other. So it is
trusted only if a replay at the depth that was used gives about the waits that were measured (`used_depth`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from fullshard.programs.report.intervals import Interval, length, union
from fullshard.programs.report.timeline import StepTimes
from fullshard.tracing.schema import Span

MAX_DEPTH = 3
"""The deepest prefetch that is recommended: each group further ahead costs its memory."""

FAITHFUL_WITHIN = 0.25
"""Share of the measured waits by which a faithful replay may be off. It still tells a remedy that halves the waits from
one that changes nothing."""

FAITHFUL_SHARE = 0.005
"""Share of the step by which it may always be off: less than any finding is about."""


@dataclass(frozen=True, slots=True)
class Need:
    """A gather, and the moment when compute needs its result."""

    gather: Span
    clock_us: float
    """That moment, on the clock of compute, which stops while compute waits for gathers."""
    first_start_us: float
    """Start of the first gather of the phase, on the same clock."""


Waits = dict[tuple[str, str], float]
"""Waits by group and phase, in microseconds."""


def measured_waits(step: StepTimes) -> Waits:
    """Return the waits for gathers that were recorded."""
    waits: Waits = {}
    for wait in step.of("wait"):
        if wait.awaited == "gather":
            key = (wait.group, wait.phase)
            waits[key] = waits.get(key, 0.0) + wait.duration_us
    return waits


def replay(step: StepTimes, depth: int) -> Waits:
    """Return the waits for gathers that remain at this prefetch depth."""
    waits: Waits = {}
    waited = 0.0
    wire_free_at = float("-inf")
    for needs in _phases(step):
        before_phase = waited
        met: list[float] = []
        for index, need in enumerate(needs):
            first = need.first_start_us + before_phase
            issued = met[index - depth] if index >= depth else first
            wire_free_at = max(issued, wire_free_at) + need.gather.duration_us
            arrives = need.clock_us + waited
            wait = max(0.0, wire_free_at - arrives)
            waited += wait
            met.append(arrives + wait)
            key = (need.gather.group, need.gather.phase)
            waits[key] = waits.get(key, 0.0) + wait
    return waits


def used_depth(steps: list[StepTimes], configured: int | None) -> int | None:
    """Return the depth at which the replay gives about the measured waits; None if there is none.

    If the configuration has a depth, only that one is tried.
    """
    depths = range(1, MAX_DEPTH + 1) if configured is None else [configured]
    return next((depth for depth in depths if _is_faithful(steps, depth)), None)


def _is_faithful(steps: list[StepTimes], depth: int) -> bool:
    measured = sum(sum(measured_waits(step).values()) for step in steps)
    replayed = sum(sum(replay(step, depth).values()) for step in steps)
    total = sum(step.duration_us for step in steps)
    return abs(replayed - measured) <= max(FAITHFUL_WITHIN * measured, FAITHFUL_SHARE * total)


def _phases(step: StepTimes) -> Iterator[list[Need]]:
    """Yield the needs of each phase, in the order of their gathers.

    With gradient accumulation a step has several forwards and backwards; each of them is a phase.
    """
    waits = union((w.start_us, w.end_us) for w in step.of("wait") if w.awaited == "gather")
    uses: dict[tuple[str, str], list[Span]] = {}
    for span in step.of("compute", "wait"):
        if span.awaited != "reduction":
            uses.setdefault((span.group, span.phase), []).append(span)
    for _, gathers in groupby(step.of("gather"), key=lambda gather: gather.phase):
        needs: list[Need] = []
        for gather in gathers:
            used_by = uses.get((gather.group, gather.phase), [])
            # Compute needs it where it waited for it or, if it did not wait, where it used it.
            needed = next((use for use in used_by if use.end_us >= gather.start_us), None)
            if needed is not None:
                start_us = needs[0].first_start_us if needs else _clock(gather.start_us, waits)
                needs.append(Need(gather, _clock(needed.start_us, waits), start_us))
        yield needs


def _clock(moment_us: float, waits: list[Interval]) -> float:
    before = ((start, min(end, moment_us)) for start, end in waits if start < moment_us)
    return moment_us - length(before)
