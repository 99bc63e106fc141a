"""Charts of the whole run: loss, speed, learning rate and gradient norm, over the steps."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import isfinite
from statistics import median

import plotly.graph_objects as go

from fullshard.programs.report.chart import Chart, Table, figure, plain
from fullshard.programs.report.run_files import Mark, Metrics
from fullshard.programs.report.units import count, duration, loss_value
from fullshard.programs.run_events import Evaluation, Step

MAX_POINTS = 3000
"""Points of a curve: a screen has no more columns."""

FEWEST_OF_A_TREND = 3
"""Evaluations that are joined by a line."""

SMOOTHED_OVER = 0.02
"""Share of the run over which the smoothed loss is averaged."""

MARKS = {
    "checkpoint": ("triangle-up", "var(--muted)"),
    "resumed": ("diamond", "var(--reduce)"),
    "trouble": ("x", "var(--wait)"),
    "stall": ("hourglass", "var(--wait)"),
    "stopped": ("square", "var(--ink)"),
}

Point = tuple[int, float]


def run_charts(metrics: Metrics) -> Iterator[Chart]:
    """Yield the charts for which there are numbers."""
    steps = metrics.steps
    if any(isfinite(step.loss) for step in steps) or metrics.evaluations:
        yield _loss(metrics)
    speeds = throughput(metrics)
    times = points_of(steps, lambda step: step.step_s)
    if times:
        updates = points_of([each for each in steps if each.optimizer_s > 0], _optimizer_time)
        yield _speed(speeds, times, updates)
    rates = points_of(steps, lambda step: step.lr)
    norms = points_of(steps, lambda step: step.grad_norm)
    if rates or norms:
        yield _rate_and_norm(rates, norms)


def _loss(metrics: Metrics) -> Chart:
    points = points_of(metrics.steps, lambda step: step.loss)
    window = max(1, round(SMOOTHED_OVER * len(points)))
    if window == 1:
        traces = [curve("each step", points, color="var(--accent)", width=1.8)]
    else:
        traces = [curve("each step", points, color="var(--faint)", width=1)]
        smooth = _running_mean(points, window)
        traces.append(curve(f"mean of {window} steps", smooth, color="var(--accent)", width=2.2))
    if metrics.evaluations:
        traces.append(_evaluations(metrics.evaluations))
    traces += _marks(metrics.marks, points)
    listed = [("held-out", each.step, each.loss) for each in metrics.evaluations]
    if points:
        lowest = min(points, key=lambda point: point[1])
        listed += [("training, first", *points[0]), ("training, lowest", *lowest)]
    if metrics.steps:
        last = metrics.steps[-1]
        listed.append(("training, last", last.step, last.loss))
    rows = [[f"step {step}", name, loss_value(loss, digits=4)] for name, step, loss in listed]
    return Chart(
        name="loss",
        title="Loss",
        caption="Mean over the global batch, before the step's update; held-out data where it was evaluated."
        + _thinned(points),
        views={
            "": figure(
                traces,
                height=340,
                xaxis={"title": {"text": "step"}},
                yaxis={"title": {"text": "loss"}},
                hovermode="closest",
            )
        },
        numbers=Table(headings=["Step", "Of", "Loss"], rows=rows, num_text=2),
    )


def _evaluations(evaluations: Sequence[Evaluation]) -> go.Scatter:
    return go.Scatter(
        name="held-out",
        x=[each.step for each in evaluations],
        y=[each.loss if isfinite(each.loss) else None for each in evaluations],
        # Two points are no trend: before the first step and after the last.
        mode="markers" if len(evaluations) < FEWEST_OF_A_TREND else "lines+markers",
        line={"color": "var(--gather)", "width": 1.5, "dash": "dot"},
        marker={"size": 8, "color": "var(--gather)"},
        hovertemplate="held-out, step %{x}: <b>%{y:.4f}</b><extra></extra>",
    )


def _marks(marks: Sequence[Mark], points: Sequence[Point]) -> Iterator[go.Scatter]:
    """Yield markers on the curve, one trace for each kind of mark."""
    if not points:
        return
    for kind, (symbol, color) in MARKS.items():
        of_kind = [mark for mark in marks if mark.kind == kind]
        if of_kind:
            yield go.Scatter(
                name=kind,
                x=[mark.step for mark in of_kind],
                y=[_value_at(points, mark.step) for mark in of_kind],
                mode="markers",
                marker={
                    "symbol": symbol,
                    "size": 10,
                    "color": color,
                    "line": {"color": "var(--surface)", "width": 1},
                },
                hovertext=[f"step {mark.step}: {plain(mark.text)}" for mark in of_kind],
                hoverinfo="text",
            )


def _value_at(points: Sequence[Point], step: int) -> float:
    """Return the curve's value at a step, or the last value before it."""
    index = bisect.bisect_right(points, step, key=lambda point: point[0])
    return points[max(index - 1, 0)][1]


def _optimizer_time(step: Step) -> float:
    return step.optimizer_s


def _speed(speeds: Sequence[Point], times: Sequence[Point], updates: Sequence[Point]) -> Chart:
    curves = {"step time": (times, "var(--accent)"), "optimizer": (updates, "var(--outside)")}
    traces = [curve("tokens / s", speeds, color="var(--gather)", hover="%{y:.4s} tokens/s")]
    rows = []
    for name, (points, color) in curves.items():
        if not points:
            continue
        milliseconds = [(step, 1e3 * seconds) for step, seconds in points]
        traces.append(curve(name, milliseconds, color=color, yaxis="y2", hover="%{y:.4~g} ms"))
        seconds = [value for _, value in points]
        rows.append(
            [name.capitalize(), duration(1e6 * median(seconds)), duration(1e6 * max(seconds))]
        )
    if speeds:
        values = [value for _, value in speeds]
        rows.append(["Tokens per second", count(median(values)), count(max(values))])
    return Chart(
        name="speed",
        title="Speed",
        caption="Tokens per second of all ranks together, the time of each step, and that of the optimizer in it; the first "
        "steps allocate and warm up." + _thinned(times),
        views={"": _two_rows(traces, "tokens / s", "step, ms")},
        numbers=Table(headings=["", "Median", "Highest"], rows=rows),
    )


def _rate_and_norm(rates: Sequence[Point], norms: Sequence[Point]) -> Chart:
    traces = [
        curve("gradient norm", norms, color="var(--reduce)", hover="norm %{y:.4g}"),
        curve("learning rate", rates, color="var(--accent)", yaxis="y2", hover="rate %{y:.4g}"),
    ]
    named = {"Gradient norm": norms, "Learning rate": rates}
    rows = [
        [name, *(f"{pick([value for _, value in points]):.3g}" for pick in (min, median, max))]
        for name, points in named.items()
        if points
    ]
    return Chart(
        name="optimizer",
        title="Gradient norm and learning rate",
        caption="The norm is that of all gradients, before clipping." + _thinned(norms or rates),
        views={"": _two_rows(traces, "norm", "rate")},
        numbers=Table(headings=["", "Lowest", "Median", "Highest"], rows=rows),
    )


def _two_rows(traces: Sequence[go.Scatter], upper: str, lower: str) -> go.Figure:
    return figure(
        traces,
        height=340,
        xaxis={"title": {"text": "step"}, "anchor": "y2"},
        yaxis={"title": {"text": upper}, "domain": [0.56, 1], "rangemode": "tozero"},
        yaxis2={"title": {"text": lower}, "domain": [0, 0.44], "rangemode": "tozero"},
        hovermode="closest",
    )


def curve(
    name: str,
    points: Sequence[Point],
    *,
    color: str,
    width: float = 1.5,
    yaxis: str = "y",
    hover: str = "%{y:.4f}",
) -> go.Scatter:
    """Return the points as a line; one point as a marker."""
    drawn = _extremes(points)
    return go.Scatter(
        name=name,
        x=[step for step, _ in drawn],
        y=[value for _, value in drawn],
        mode="lines" if len(drawn) > 1 else "markers",
        line={"color": color, "width": width},
        marker={"color": color},
        yaxis=yaxis,
        hovertemplate=f"step %{{x}}: <b>{hover}</b><extra>{plain(name)}</extra>",
    )


def points_of(steps: Sequence[Step], value: Callable[[Step], float]) -> list[Point]:
    """Return a number of each step for which it is finite."""
    return [(step.step, found) for step in steps if isfinite(found := value(step))]


def throughput(metrics: Metrics) -> list[Point]:
    """Return tokens per second. Records may be several steps apart; each has the time of one step."""
    found: list[Point] = []
    before = (0, 0.0)
    for step in metrics.steps:
        if step.tokens > before[1] and step.step > before[0]:
            per_step = (step.tokens - before[1]) / (step.step - before[0])
            if step.step_s > 0:
                found.append((step.step, per_step / step.step_s))
            before = (step.step, step.tokens)
    return found


def _running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Return the mean of each point and those before it, ``window`` points in all."""
    sums = [0.0, *accumulate(value for _, value in points)]
    return [
        (step, (sums[i] - sums[max(0, i - window)]) / min(i, window))
        for i, (step, _) in enumerate(points, start=1)
    ]


def _extremes(points: Sequence[Point]) -> Sequence[Point]:
    """Return at most about `MAX_POINTS`: the lowest and the highest of each bucket of neighbours, so that spikes stay."""
    bucket = _bucket(points)
    if bucket == 1:
        return points
    kept: list[Point] = []
    for start in range(0, len(points), bucket):
        neighbours = points[start : start + bucket]
        low = min(neighbours, key=lambda point: point[1])
        high = max(neighbours, key=lambda point: point[1])
        kept += sorted({low, high})
    return kept


def _bucket(points: Sequence[Point]) -> int:
    return 1 if len(points) <= MAX_POINTS else -(-2 * len(points) // MAX_POINTS)


def _thinned(points: Sequence[Point]) -> str:
    bucket = _bucket(points)
    if bucket == 1:
        return ""
    return f" Of every {bucket} steps the lowest and the highest value are drawn."
