"""A run with the numbers that several findings and charts use, each computed once."""

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
from fullshard.tracing.schema import GroupFacts, PlannedFacts

LATE_SHARE = 0.7
"""A rank is a straggler if at least this share of the time that ranks wait for each other is spent on it."""

LATE_STEPS = 0.6
"""And if it is the rank that is waited for most in at least this share of the steps: once is an accident."""

LATE_BY = 0.01
"""And if others wait for it for at least this share of a step."""


@dataclass(frozen=True)
class Analysis:
    """One run, analysed. Ask for means only if there are `steps`; a mean of nothing is an error."""

    run: Run

    @cached_property
    def steps(self) -> list[StepTimes]:
        """All recorded steps of all ranks."""
        return [step for trace in self.run.traces for step in steps_of(trace)]

    @cached_property
    def groups(self) -> dict[str, GroupFacts]:
        """The groups by name, in order of forward."""
        return {group.name: group for group in self.run.traces[0].groups} if self.run.traces else {}

    @property
    def planned(self) -> tuple[PlannedFacts, ...]:
        """The groups that a plan would make, the outermost first; empty if they are not known."""
        return self.run.traces[0].planned if self.run.traces else ()

    @cached_property
    def gathers_again(self) -> bool:
        """Whether groups are gathered in backward, too."""
        return any(
            gather.phase == "backward" for step in self.steps for gather in step.of("gather")
        )

    @cached_property
    def gathered_bytes(self) -> int:
        """Bytes of all parameters, gathered."""
        return sum(group.gathered_bytes for group in self.groups.values())

    @cached_property
    def gathered_peak(self) -> float:
        """The most bytes that were gathered at the same time."""
        return max((s.gathered for step in self.steps for s in step.memory), default=0.0)

    @cached_property
    def step_us(self) -> float:
        """Mean duration of the recorded steps."""
        return fmean(step.duration_us for step in self.steps)

    @cached_property
    def exposed_share(self) -> float:
        """Exposed communication as a share of the recorded steps."""
        return mean_exposed_share(self.steps)

    @cached_property
    def straggler(self) -> Lateness | None:
        """The rank that the others wait for, if there is one."""
        late = latest_rank(self.steps)
        if late is None or late.share < LATE_SHARE or late.steps_share < LATE_STEPS:
            return None
        return late if late.waited_us >= LATE_BY * self.step_us else None

    @cached_property
    def judged(self) -> list[StepTimes]:
        """The steps whose wire times do not include waiting for other ranks: the straggler's, if there is one, or all."""
        if self.straggler is None:
            return self.steps
        return [step for step in self.steps if step.rank == self.straggler.rank]

    @cached_property
    def waits(self) -> list[WaitTimes]:
        """Waits of all recorded steps, longest first."""
        return mean_waits(self.steps)

    @cached_property
    def judged_waits(self) -> list[WaitTimes]:
        """Waits of the judged steps, longest first."""
        return mean_waits(self.judged)

    @cached_property
    def gather_wait_us(self) -> float:
        """Measured waits for gathers, per judged step."""
        return fmean(sum(measured_waits(step).values()) for step in self.judged)

    @cached_property
    def prefetch(self) -> int | None:
        """The prefetch depth whose replay gives about the measured waits; None if no depth does."""
        return used_depth(self.judged, self.run.setting("sharding", "prefetch"))

    def waits_at(self, depth: int) -> dict[tuple[str, str], float]:
        """Return the waits for gathers in a replay at this depth, by group and phase, per judged step."""
        total: dict[tuple[str, str], float] = {}
        for step in self.judged:
            for key, wait in replay(step, depth).items():
                total[key] = total.get(key, 0.0) + wait / len(self.judged)
        return total
