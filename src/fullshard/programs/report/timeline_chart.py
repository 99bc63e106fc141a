"""The timeline of a step: what compute did, when it waited, what was on the wire."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.chart import Chart, Table, figure, plain
from fullshard.programs.report.run_files import Run
from fullshard.programs.report.timeline import StepTimes
from fullshard.programs.report.units import duration, share, size
from fullshard.programs.report.views import MAX_BARS, Views
from fullshard.tracing.schema import COLLECTIVES

MAX_LABELS = 300
"""A view with more bars has no names in them."""

LEGEND = {
    "forward": "forward",
    "backward": "backward",
    "outside": "loss, optimizer, other",
    "wait": "waits",
    "gather": "all-gather",
    "reduce": "reduce-scatter",
    "all-reduce": "all-reduce",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar in a row of the timeline."""

    row: str
    kind: str
    """Names the colour and the entry of the legend."""
    group: str
    start_us: float
    end_us: float
    text: str
    """Text of the hover label."""


def timeline_chart(analysis: Analysis) -> Iterator[Chart]:
    """Yield the chart, if steps were recorded."""
    if not analysis.steps:
        return
    views = Views(analysis.steps)
    labels = short_names(list(analysis.groups))
    yield Chart(
        name="timeline",
        title="Timeline of one step",
        caption="What compute did, when it waited, and what was on the wire at the same time. A gather that overlaps "
        "with compute is hidden; a wait is exposed communication."
        + views.left_out
        + of_eager_steps(analysis.run),
        views=views.drawn(lambda step: _timeline(step, labels)),
        first=views.first,
        choices=views.choices,
        numbers=_longest_waits(analysis),
    )


def of_eager_steps(run: Run) -> str:
    """Return a sentence that says so, if the other steps of the run were replayed from a CUDA graph."""
    if run.setting("compute", "graph") is not True:
        return ""
    return (
        " With compute.graph, recorded steps run eagerly, because a replayed graph cannot be recorded. Times of the "
        "other steps are in the charts of the run."
    )


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Return names without their common prefix: `model.layers.3` is `3` if all names with a dot start with `model.layers`."""
    parts = [name.split(".") for name in names if "." in name]
    common = 0
    while parts and all(
        len(each) > common + 1 and each[common] == parts[0][common] for each in parts
    ):
        common += 1
    return {name: ".".join(name.split(".")[common:]) if "." in name else name for name in names}


def _timeline(step: StepTimes, labels: Mapping[str, str]) -> go.Figure:
    bars = sorted(_bars(step), key=lambda bar: bar.start_us - bar.end_us)
    omitted, bars = len(bars) - MAX_BARS, sorted(bars[:MAX_BARS], key=lambda bar: bar.start_us)
    rows = [
        row
        for row in ("compute", "waits", *COLLECTIVES.values())
        if any(b.row == row for b in bars)
    ]
    note = (
        f"{omitted} of {omitted + MAX_BARS} spans, the shortest, are not drawn"
        if omitted > 0
        else ""
    )
    if len(bars) > MAX_LABELS:
        labels = {}
    return figure(
        [
            _bar_trace([bar for bar in bars if bar.kind == kind], kind, step, labels)
            for kind in LEGEND
            if any(bar.kind == kind for bar in bars)
        ],
        height=64 + 52 * len(rows),
        barmode="overlay",
        bargap=0.18,
        hovermode="closest",
        uniformtext={"minsize": 9, "mode": "hide"},
        xaxis={
            "title": {"text": f"ms from the start of the step{f'; {note}' if note else ''}"},
            "range": [0, step.duration_us / 1e3],
        },
        yaxis={
            "categoryorder": "array",
            "categoryarray": rows[::-1],
            "range": [-0.5, len(rows) - 0.5],
            "fixedrange": True,
            "showgrid": False,
        },
    )


def _bars(step: StepTimes) -> Iterator[Bar]:
    for stretch in step.compute:
        is_outside = stretch.phase == "outside"
        yield Bar(
            row="compute",
            kind=stretch.phase if stretch.phase in LEGEND else "outside",
            group=stretch.group,
            start_us=stretch.start_us,
            end_us=stretch.end_us,
            text=LEGEND["outside"] if is_outside else f"{stretch.phase} of {stretch.group}",
        )
    for span in step.of("wait"):
        yield Bar(
            row="waits",
            kind="wait",
            group=span.group,
            start_us=span.start_us,
            end_us=span.end_us,
            text=f"wait for the {span.awaited} of {span.group}, {span.phase}",
        )
    for kind, row in COLLECTIVES.items():
        for span in step.of(kind):
            yield Bar(
                row=row,
                kind=kind,
                group=span.group,
                start_us=span.start_us,
                end_us=span.end_us,
                text=f"{row} of {span.group}, {span.phase}, {size(span.nbytes)}",
            )


def _bar_trace(
    bars: Sequence[Bar], kind: str, step: StepTimes, labels: Mapping[str, str]
) -> go.Bar:
    starts = [bar.start_us - step.start_us for bar in bars]
    return go.Bar(
        name=LEGEND[kind],
        orientation="h",
        base=[round(start / 1e3, 4) for start in starts],
        x=[round((bar.end_us - bar.start_us) / 1e3, 4) for bar in bars],
        y=[bar.row for bar in bars],
        marker={"color": f"var(--{kind})", "line": {"color": "var(--surface)", "width": 0.6}},
        text=[plain(labels.get(bar.group, "")) for bar in bars] if labels else None,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        insidetextfont={"color": f"var(--on-{kind})", "size": 11},
        hovertext=[
            f"<b>{plain(bar.text)}</b><br>{duration(bar.end_us - bar.start_us)}, from {duration(start)} on"
            for bar, start in zip(bars, starts, strict=True)
        ],
        hoverinfo="text",
    )


def _longest_waits(analysis: Analysis) -> Table:
    return Table(
        headings=["Group", "Phase", "Waits for", "Mean per step", "Part of the step"],
        rows=[
            [wait.group, wait.phase, wait.awaited, duration(wait.mean_us), share(part)]
            for wait in analysis.waits[:10]
            if (part := wait.mean_us / analysis.step_us) >= 0
        ],
        num_text=3,
    )
