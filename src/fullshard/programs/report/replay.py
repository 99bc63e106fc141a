"""What waits would remain if gathers were issued further ahead: the measured step, played again.

Compute takes as long as it was measured to, without its waits for gathers. Every gather is on the wire as long as it was
measured to be, one at a time, in the measured order. At depth d it is issued when compute has what it needs of the
gather d places before; the first d of a phase are issued when the first one was.

    depth 1   compute | 0 |.....| 1 | 2         |      "....." is a wait: gather 1 is longer than compute 0
              wire    | gather 1| 2 |

    depth 2   compute   | 0 |   | 1 | 2         |      issued before compute 0 is there to hide it, gather 1
              wire    | gather 1| 2 |                  is waited for less

What this leaves out: that a wire with more on it is slower, that reductions share it, that ranks wait for each other. So
a replay at the depth that was used must come to about the waits that were measured (`used_depth`); otherwise it
promises nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from fullshard.programs.report.intervals import Interval, length, union
from fullshard.programs.report.timeline import StepTimes
from fullshard.tracing.schema import Span

MAX_DEPTH = 3
"""Each place further ahead costs the memory of a group, so nobody is advised to go beyond this."""

FAITHFUL_WITHIN = 0.25
"""Part of the measured waits by which a replay may be off and still be believed: a remedy that takes half of the waits away
is then told from one that takes none."""

FAITHFUL_SHARE = 0.005
"""Part of the step by which it may always be off: less than what any finding is about."""


@dataclass(frozen=True, slots=True)
class Need:
    """A gather, and the moment compute wants what it brings."""

    gather: Span
    clock_us: float
    """On the clock of compute, which stands still while compute waits for gathers."""
    first_start_us: float
    """On the same clock: when the first gather of the phase was on the wire."""


Waits = dict[tuple[str, str], float]
"""By group and phase, in microseconds."""


def measured_waits(step: StepTimes) -> Waits:
    """Waits for gathers, as they were."""
    waits: Waits = {}
    for wait in step.of("wait"):
        if wait.awaited == "gather":
            key = (wait.group, wait.phase)
            waits[key] = waits.get(key, 0.0) + wait.duration_us
    return waits


def replay(step: StepTimes, depth: int) -> Waits:
    """Waits for gathers, as they would be."""
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
    """The depth at which the replay comes to about the measured waits, or None if it does not.

    Where the configuration says the depth, only that one is tried.
    """
    depths = range(1, MAX_DEPTH + 1) if configured is None else [configured]
    return next((depth for depth in depths if _is_faithful(steps, depth)), None)


def _is_faithful(steps: list[StepTimes], depth: int) -> bool:
    measured = sum(sum(measured_waits(step).values()) for step in steps)
    replayed = sum(sum(replay(step, depth).values()) for step in steps)
    total = sum(step.duration_us for step in steps)
    return abs(replayed - measured) <= max(FAITHFUL_WITHIN * measured, FAITHFUL_SHARE * total)


def _phases(step: StepTimes) -> Iterator[list[Need]]:
    """The needs of each phase, in the order in which they are gathered.

    With gradient accumulation a step has several forwards and backwards; each is a phase.
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
            # Where compute waited for it or, if it was there in time, where it computed with it.
            needed = next((use for use in used_by if use.end_us >= gather.start_us), None)
            if needed is not None:
                start_us = needs[0].first_start_us if needs else _clock(gather.start_us, waits)
                needs.append(Need(gather, _clock(needed.start_us, waits), start_us))
        yield needs


def _clock(moment_us: float, waits: list[Interval]) -> float:
    before = ((start, min(end, moment_us)) for start, end in waits if start < moment_us)
    return moment_us - length(before)
