"""Memory of a GPU over the planned step, by what it is for, on the clock of compute.

The host allocates, and is far ahead of the GPU in a large model. So what is allocated has the time of the kernel that is
issued next, as in the order in which the host issues. The chart of a real run's report is on the host's clock.
"""

from __future__ import annotations

import plotly.graph_objects as go

from fullshard.errors import size_text, size_unit
from fullshard.programs.plan_tool.answers import MEMORY
from fullshard.programs.plan_tool.memory_use import MemoryMoment
from fullshard.programs.plan_tool.planned_step import MICROBATCHES, PlannedStep
from fullshard.programs.plan_tool.planning import MOST_MICROBATCHES
from fullshard.programs.plan_tool.program import MemoryKind
from fullshard.programs.report.chart import Chart, Table, figure

COLORS: dict[MemoryKind, str] = {
    "parameters": "forward",
    "gradients": "backward",
    "accumulated": "wait-backward",
    "optimizer": "outside",
    "activations": "accent",
    "gathered": "gather",
    "reducing": "reduce",
    "temporary": "all-reduce",
    "workspace": "faint",
}


def memory_chart(step: PlannedStep) -> Chart:
    """Return the chart of a step that was planned with all layers."""
    moments, there = step.memory_moments, step.machine.usable_bytes
    most = max((moment.total for moment in moments), default=0)
    unit, bytes_in_unit = size_unit(max(most, there))
    kinds = [kind for kind in MEMORY if any(moment.by_kind.get(kind) for moment in moments)]
    traces = [_layer(kind, moments, unit, bytes_in_unit) for kind in kinds]
    # Not until the end of the step, if few of its microbatches are drawn.
    ends = [0.0, round(1e3 * max((moment.seconds for moment in moments), default=0.0), 4)]
    traces.append(
        go.Scatter(
            name="usable",
            x=ends,
            y=[round(there / bytes_in_unit, 4)] * 2,
            mode="lines",
            line={"color": "var(--wait)", "width": 1.8, "dash": "dash"},
            hovertemplate=f"usable: <b>%{{y:.4g}} {unit}</b><extra></extra>",
        )
    )
    peak = step.memory.allocated
    return Chart(
        name="memory",
        title="Memory over the step",
        caption=f"What is allocated when the GPU computes, {size_text(peak)} at the peak. The allocator reserves up to "
        f"{size_text(step.memory.reserved)} for it, of {size_text(there)} that it can use (dashed).{_shown_text(step)}",
        views={
            "": figure(
                traces,
                height=340,
                hovermode="x unified",
                xaxis={"title": {"text": "ms from the start of the step"}, "range": ends},
                yaxis={"title": {"text": unit}, "rangemode": "tozero"},
            )
        },
        numbers=Table(
            headings=["What", "Most bytes in the step"],
            rows=[
                [MEMORY[kind], size_text(max(moment.by_kind.get(kind, 0) for moment in moments))]
                for kind in kinds
            ],
        ),
    )


def _shown_text(step: PlannedStep) -> str:
    """Say it if the chart does not have all microbatches."""
    count = step.config.train.accumulate
    if count <= MOST_MICROBATCHES:
        return ""
    return f" It has {MICROBATCHES[1]} of the {count} microbatches."


def _layer(
    kind: MemoryKind, moments: tuple[MemoryMoment, ...], unit: str, bytes_in_unit: int
) -> go.Scatter:
    color = f"var(--{COLORS[kind]})"
    return go.Scatter(
        name=MEMORY[kind],
        x=[round(1e3 * moment.seconds, 4) for moment in moments],
        y=[round(moment.by_kind.get(kind, 0) / bytes_in_unit, 4) for moment in moments],
        stackgroup="held",
        mode="lines",
        line={"shape": "hv", "width": 0.5, "color": color},
        fillcolor=color,
        hovertemplate=f"{MEMORY[kind]}: <b>%{{y:.4g}} {unit}</b><extra></extra>",
    )
