"""A run with the numbers that several findings and charts are made of, each computed once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from fullshard.programs.report.replay import measured_waits, replay, used_depth
from fullshard.programs.report.run_files import Run
from fullshard.programs.report.timeline import (
    Lateness,
    StepTimes,
    WaitTimes,
    latest_rank,
    mean_exposed_share,
    mean_waits,
    steps_of,
)
from fullshard.tracing.schema import GroupFacts

LATE_PART = 0.7
"""Of the time that ranks wait for each other, what one of them must be waited for to be a straggler and not noise."""

LATE_STEPS = 0.6
"""Part of the steps in which it must be the one that is waited for most: once is an accident."""

LATE_BY = 0.01
"""Part of the step that others wait for it, from which on it is told."""


@dataclass(frozen=True)
class Analysis:
    """One run, analysed. Means of nothing are errors: ask only if there are `steps`."""

    run: Run

    @cached_property
    def steps(self) -> list[StepTimes]:
        """All recorded steps of all ranks."""
        return [step for trace in self.run.traces for step in steps_of(trace)]

    @cached_property
    def groups(self) -> dict[str, GroupFacts]:
        """By name, in order of forward."""
        return {group.name: group for group in self.run.traces[0].groups} if self.run.traces else {}

    @cached_property
    def step_us(self) -> float:
        """Mean duration of the recorded steps."""
        return fmean(step.duration_us for step in self.steps)

    @cached_property
    def exposed_share(self) -> float:
        """Exposed communication as part of the recorded steps."""
        return mean_exposed_share(self.steps)

    @cached_property
    def straggler(self) -> Lateness | None:
        """A rank that the others wait for, if there is one."""
        late = latest_rank(self.steps)
        if late is None or late.part < LATE_PART or late.steps < LATE_STEPS:
            return None
        return late if late.waited_us >= LATE_BY * self.step_us else None

    @cached_property
    def judged(self) -> list[StepTimes]:
        """The steps whose times on the wire are the wire's own.

        Where others wait for a straggler, only the straggler's are.
        """
        if self.straggler is None:
            return self.steps
        return [step for step in self.steps if step.rank == self.straggler.rank]

    @cached_property
    def waits(self) -> list[WaitTimes]:
        """Of all recorded steps, longest first."""
        return mean_waits(self.steps)

    @cached_property
    def judged_waits(self) -> list[WaitTimes]:
        """Of the judged steps, longest first."""
        return mean_waits(self.judged)

    @cached_property
    def gather_wait_us(self) -> float:
        """Measured waits for gathers, per judged step."""
        return fmean(sum(measured_waits(step).values()) for step in self.judged)

    @cached_property
    def prefetch(self) -> int | None:
        """The prefetch depth whose replay comes to the measured waits; None where none does."""
        return used_depth(self.judged, self.run.setting("sharding", "prefetch"))

    def waits_at(self, depth: int) -> dict[tuple[str, str], float]:
        """Waits for gathers that a replay comes to at a depth, by group and phase, per judged step."""
        total: dict[tuple[str, str], float] = {}
        for step in self.judged:
            for key, wait in replay(step, depth).items():
                total[key] = total.get(key, 0.0) + wait / len(self.judged)
        return total
