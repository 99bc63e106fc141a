"""Memory over a step: what a rank holds between steps, the buffers on top, and what it would hold unsharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import plotly.graph_objects as go

from fullshard.errors import size_unit
from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.chart import Chart, Table, figure
from fullshard.programs.report.timeline import StepTimes
from fullshard.programs.report.units import size
from fullshard.programs.report.views import Views
from fullshard.tracing.schema import GroupFacts, MemorySample

OPTIMIZER_STATES = {"adamw": 2, "adam": 2, "adagrad": 1, "sgd": 1, "adamw8bit": 0.512}
"""Numbers of the parameters' dtype (float32) that an optimizer keeps for each element of a parameter."""


COLORS = {
    "parameters": "forward",
    "gradients": "backward",
    "optimizer state": "outside",
    "gathered": "gather",
    "reducing": "reduce",
}


def memory_chart(analysis: Analysis) -> Iterator[Chart]:
    """Yield the chart, if memory was recorded."""
    if not any(step.memory for step in analysis.steps):
        return
    views = Views(analysis.steps)
    levels = Levels.of(analysis)
    yield Chart(
        name="memory",
        title="Memory over the step",
        caption=levels.caption() + views.left_out,
        views=views.drawn(lambda step: _memory(step, levels)),
        first=views.first,
        choices=views.choices,
        numbers=_peaks(views.shown, levels),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Levels:
    """Bytes that stay the same over a step, of a rank and of a model that is not sharded."""

    at_rest: dict[str, float]
    """Bytes of one rank, by what they are for."""
    unsharded: float
    """Bytes of the same kinds for the whole model."""

    @classmethod
    def of(cls, analysis: Analysis) -> Levels:
        """Return the levels from the groups' facts and, for the optimizer, what was measured or the configuration."""
        groups = list(analysis.groups.values())
        shards = float(sum(group.shard_bytes for group in groups))
        whole = float(sum(_whole_bytes(group) for group in groups))
        trained = sum(group.shard_bytes * group.trained_share for group in groups)
        whole_trained = sum(_whole_bytes(group) * group.trained_share for group in groups)
        states: float | None = OPTIMIZER_STATES.get(str(analysis.run.setting("optimizer", "name")))
        _, steps = analysis.run.metrics.newest
        measured = float(max((step.optimizer_bytes for step in steps), default=0))
        if not states and trained:
            states = measured / trained
        at_rest = {"parameters": shards, "gradients": trained}
        if measured or states:
            at_rest["optimizer state"] = measured or (states or 0) * trained
        return cls(at_rest=at_rest, unsharded=whole + whole_trained * (1 + (states or 0)))

    def caption(self) -> str:
        """Return the chart's caption."""
        kinds = ", ".join(self.at_rest)
        return (
            f"What a rank holds of {kinds} (shards; gradients are drawn as if they were always allocated), with the "
            f"buffers of gathers and reductions on top. Unsharded, every rank would hold {size(self.unsharded)} of the "
            "same. "
            "Activations are only in the allocator's curve, which CUDA has. The host allocates and frees memory, so "
            "the time axis is host time: a GPU computes the same step later."
        )


def _whole_bytes(group: GroupFacts) -> float:
    """Return the bytes of the unsharded parameters, without padding."""
    part = group.numel / group.padded_numel if group.padded_numel else 1.0
    return group.shard_bytes * group.world * part


def _memory(step: StepTimes, levels: Levels) -> go.Figure:
    samples = _at_step_edges(step)
    x = [round((sample.time_us - step.host[0]) / 1e3, 4) for sample in samples]
    layers = {name: [nbytes] * len(x) for name, nbytes in levels.at_rest.items()}
    layers["gathered"] = [sample.gathered for sample in samples]
    layers["reducing"] = [sample.reducing for sample in samples]
    asked = [(at, s.allocated) for at, s in zip(x, samples, strict=True) if s.allocated is not None]
    stacked = map(sum, zip(*layers.values(), strict=True))
    most = max(levels.unsharded, *stacked, *(allocated for _, allocated in asked))
    unit, bytes_in_unit = size_unit(most)
    hover = f"<b>%{{y:.4g}} {unit}</b><extra></extra>"

    def in_unit(values: Iterable[float]) -> list[float]:
        return [round(value / bytes_in_unit, 4) for value in values]

    traces = [
        go.Scatter(
            name=name,
            x=x,
            y=in_unit(values),
            stackgroup="held",
            mode="lines",
            line={"shape": "hv", "width": 0.5, "color": f"var(--{COLORS[name]})"},
            fillcolor=f"var(--{COLORS[name]})",
            hovertemplate=f"{name}: {hover}",
        )
        for name, values in layers.items()
    ]
    if asked:
        traces.append(
            go.Scatter(
                name="allocated in all",
                x=[at for at, _ in asked],
                y=in_unit(allocated for _, allocated in asked),
                mode="lines",
                line={"shape": "hv", "width": 1.8, "color": "var(--ink)"},
                hovertemplate=f"allocated: {hover}",
            )
        )
    ends = [x[0], x[-1]]
    traces.append(
        go.Scatter(
            name="unsharded",
            x=ends,
            y=in_unit([levels.unsharded] * 2),
            mode="lines",
            line={"color": "var(--wait)", "width": 1.8, "dash": "dash"},
            hovertemplate=f"unsharded: {hover}",
        )
    )
    return figure(
        traces,
        height=340,
        hovermode="x unified",
        xaxis={"title": {"text": "ms from the start of the step, on the host"}, "range": ends},
        yaxis={"title": {"text": unit}, "rangemode": "tozero"},
    )


def _at_step_edges(step: StepTimes) -> list[MemorySample]:
    """Return the samples, with the levels at the step's start and end."""
    start_us, end_us = step.host
    nothing = MemorySample(time_us=start_us, gathered=0, reducing=0, allocated=None)
    samples = step.memory or (nothing,)
    inside = [sample for sample in samples if sample.time_us > start_us]
    return [replace(samples[0], time_us=start_us), *inside, replace(samples[-1], time_us=end_us)]


def _peaks(steps: Sequence[StepTimes], levels: Levels) -> Table:
    samples = [sample for step in steps for sample in step.memory]
    rows = [[f"{name}, shards", size(nbytes)] for name, nbytes in levels.at_rest.items()]
    rows.append(["gathered, peak", size(max(sample.gathered for sample in samples))])
    rows.append(["reducing, peak", size(max(sample.reducing for sample in samples))])
    allocated = [sample.allocated for sample in samples if sample.allocated is not None]
    if allocated:
        rows.append(["allocated in all, peak", size(max(allocated))])
    rows.append(["unsharded", size(levels.unsharded)])
    return Table(headings=["What", "Bytes of one rank"], rows=rows)
