"""A run against its plan: what was predicted, what was measured, and where they part.

Both sides are traces, and the same arithmetic is done on both: the plan's trace is that of a step that was never taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from fullshard.programs.plan_tool.planned_step import PlannedStep
from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.chart import Table
from fullshard.programs.report.run_files import Run
from fullshard.programs.report.timeline import StepTimes
from fullshard.programs.report.units import duration, share, size

SAME = 0.05
"""Differences below this share of a step are not named."""

PHASES = {"forward": "compute, forward", "backward": "compute, backward", "outside": "the rest"}
"""Phases of compute. The rest is data, loss, optimizer, and time in which the host had not issued anything."""
AWAITED = {"gather": "waits for gathers", "reduction": "waits for reductions"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanComparison:
    """A run and its plan, for the page."""

    title: str
    """Title of the planned machine."""
    sentence: str
    """Sentence about where they part."""
    rows: Table


def compare(analysis: Analysis, planned: PlannedStep) -> PlanComparison | None:
    """Return the comparison; None if no step of the run was recorded."""
    if not analysis.steps or planned.trace is None:
        return None
    expected = Analysis(Run(name="plan", traces=(planned.trace,)))
    parts = [_parts(each.steps) for each in (expected, analysis)]
    steps = expected.step_us, analysis.step_us
    rows = [_row("step", *steps)]
    rows += [_row(name, parts[0][name], parts[1][name]) for name in parts[0]]
    peak = _peak_bytes(analysis)
    if peak:
        least = planned.memory.allocated
        rows.append(["peak memory, allocated", size(least), size(peak), _relative(least, peak)])
    return PlanComparison(
        title=planned.machine.title,
        sentence=_where_they_part(parts[0], parts[1], *steps) + _other_device(analysis),
        rows=Table(
            headings=["A step, means", "Planned", "Measured", "Measured / planned"], rows=rows
        ),
    )


def _other_device(analysis: Analysis) -> str:
    """Say that the run was on a CPU, and the plan is for a GPU; "" for a run on GPUs."""
    if any(trace.device != "cpu" for trace in analysis.run.traces):
        return ""
    return " The run was not on a GPU, which the plan is for, so the comparison says little."


def _parts(steps: list[StepTimes]) -> dict[str, float]:
    """Return mean microseconds of a step, by what compute did or waited for."""
    found = {
        label: fmean(step.compute_us(phase) for step in steps) for phase, label in PHASES.items()
    }
    for awaited, label in AWAITED.items():
        found[label] = fmean(_waits(step, awaited) for step in steps)
    return found


def _waits(step: StepTimes, awaited: str) -> float:
    return sum(span.duration_us for span in step.of("wait") if span.awaited == awaited)


def _row(label: str, planned_us: float, measured_us: float) -> list[str]:
    relative = _relative(planned_us, measured_us)
    return [label, duration(planned_us), duration(measured_us), relative]


def _relative(planned: float, measured: float) -> str:
    return f"{measured / planned:.2f} x" if planned > 0 else ""


def _where_they_part(
    planned: Mapping[str, float],
    measured: Mapping[str, float],
    planned_us: float,
    measured_us: float,
) -> str:
    """Name the largest part of the difference."""
    whole = (
        f"The plan predicted {duration(planned_us)} for a step, and it took {duration(measured_us)}"
    )
    most = max(planned, key=lambda name: abs(measured[name] - planned[name]))
    difference = measured[most] - planned[most]
    if abs(difference) < SAME * measured_us:
        return f"{whole}. No part of it differs by more than {share(SAME)} of the step."
    word = "longer" if difference > 0 else "shorter"
    return (
        f"{whole}. They differ most in {most}: {duration(abs(difference))} {word} than planned "
        f"({duration(planned[most])} planned, {duration(measured[most])} measured)."
    )


def _peak_bytes(analysis: Analysis) -> float:
    """Return the most that the allocator has given out; 0 where it is not known, as on a CPU."""
    start, steps = analysis.run.metrics.newest
    if start is None or start.device == "cpu":
        return 0.0
    return max((step.memory_bytes for step in steps), default=0.0)
