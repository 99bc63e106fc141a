"""Two runs on one page: their numbers side by side, what differs in their configurations, and their curves in one chart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median

from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.chart import Chart, Table, figure
from fullshard.programs.report.run_charts import Point, curve, points_of, throughput
from fullshard.programs.report.run_files import Run
from fullshard.programs.report.units import count, duration, loss_value, share, size
from fullshard.programs.run_events import Step

COLORS = ("var(--accent)", "var(--reduce)")
"""Colours of this run, and of the other."""

NAMED_BY_RUN = {("run", "folder")}
"""Fields in which two runs always differ."""

NOT_KNOWN = "-"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison:
    """A run beside another one."""

    other: str
    """The name of the other run."""
    numbers: Table
    settings: Table
    """Fields with different values; empty if there are none."""
    charts: tuple[Chart, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Number:
    """A number of both runs."""

    label: str
    values: tuple[float | None, float | None]
    """None where it is not known."""
    show: Callable[[float], str]

    def row(self) -> list[str]:
        """Return the row of the table; the ratio is that of this run to the other."""
        mine, others = self.values
        ratio = f"{mine / others:.3g}" if mine is not None and others else NOT_KNOWN
        return [self.label, *map(self._shown, self.values), ratio]

    def _shown(self, value: float | None) -> str:
        return NOT_KNOWN if value is None else self.show(value)


def compare_runs(this: Analysis, other: Analysis) -> RunComparison:
    """Return a run beside another one; numbers that neither has are left out."""
    names = _names(this.run, other.run)
    numbers = [number for number in _numbers(this, other) if number.values != (None, None)]
    return RunComparison(
        other=names[1],
        numbers=Table(
            headings=["", *names, "ratio"], rows=[number.row() for number in numbers], num_text=1
        ),
        settings=Table(
            headings=["Setting", *names], rows=list(_differences(this.run, other.run)), num_text=3
        ),
        charts=tuple(_charts((this.run, other.run), names)),
    )


def _names(this: Run, other: Run) -> tuple[str, str]:
    same = this.name == other.name
    return this.name, f"{other.name} (the other)" if same else other.name


def _numbers(this: Analysis, other: Analysis) -> Iterator[_Number]:
    def both(
        label: str, of: Callable[[Analysis], float | None], show: Callable[[float], str]
    ) -> _Number:
        return _Number(label=label, values=(of(this), of(other)), show=show)

    yield both("Last loss", _last_loss, lambda loss: loss_value(loss, digits=4))
    yield both("Lowest held-out loss", _lowest_held_out, lambda loss: loss_value(loss, digits=4))
    yield both("Steps", lambda each: _of_steps(each, lambda steps: steps[-1].step), count)
    yield both("Median step", _step_us, duration)
    yield both("Tokens per second", _tokens_per_s, count)
    yield both("Peak memory of rank 0", _peak_memory, size)
    yield both("Optimizer state of rank 0", _state_bytes, size)
    yield both("Exposed communication, of a step", _if_traced("exposed_share"), share)
    yield both("Most gathered at once", lambda each: each.gathered_peak or None, size)
    yield both("Ranks", lambda each: each.run.world or None, count)


def _of_steps(analysis: Analysis, pick: Callable[[Sequence[Step]], float | None]) -> float | None:
    steps = analysis.run.metrics.steps
    return pick(steps) if steps else None


def _last_loss(analysis: Analysis) -> float | None:
    return _of_steps(analysis, lambda steps: steps[-1].loss)


def _lowest_held_out(analysis: Analysis) -> float | None:
    found = [each.loss for each in analysis.run.metrics.evaluations if isfinite(each.loss)]
    return min(found, default=None)


def _step_us(analysis: Analysis) -> float | None:
    times = [step.step_s for step in analysis.run.metrics.newest[1] if step.step_s > 0]
    return 1e6 * median(times) if times else None


def _tokens_per_s(analysis: Analysis) -> float | None:
    start, step_us = analysis.run.metrics.newest[0], _step_us(analysis)
    if start is None or not start.tokens_per_step or not step_us:
        return None
    return 1e6 * start.tokens_per_step / step_us


def _peak_memory(analysis: Analysis) -> float | None:
    return max((step.memory_bytes for step in analysis.run.metrics.newest[1]), default=0) or None


def _state_bytes(analysis: Analysis) -> float | None:
    return max((step.optimizer_bytes for step in analysis.run.metrics.newest[1]), default=0) or None


def _if_traced(name: str) -> Callable[[Analysis], float | None]:
    return lambda analysis: getattr(analysis, name) if analysis.steps else None


def _differences(this: Run, other: Run) -> Iterator[list[str]]:
    keys = dict.fromkeys(
        (section, name)
        for run in (this, other)
        for section, fields in run.config.items()
        for name in fields
    )
    for section, name in keys:
        values = [run.setting(section, name) for run in (this, other)]
        if values[0] != values[1] and (section, name) not in NAMED_BY_RUN:
            yield [
                f"{section}.{name}",
                *("not set" if value is None else _as_in_toml(value) for value in values),
            ]


def _as_in_toml(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _charts(runs: tuple[Run, Run], names: tuple[str, str]) -> Iterator[Chart]:
    losses = [points_of(run.metrics.steps, lambda step: step.loss) for run in runs]
    held_out = [
        [(each.step, each.loss) for each in run.metrics.evaluations if isfinite(each.loss)]
        for run in runs
    ]
    if any(losses) or any(held_out):
        yield _chart("with-loss", "Loss of both runs", "loss", losses, names, held_out)
    speeds = [throughput(run.metrics) for run in runs]
    if any(speeds):
        yield _chart("with-speed", "Speed of both runs", "tokens / s", speeds, names)


def _chart(
    name: str,
    title: str,
    unit: str,
    curves: Sequence[Sequence[Point]],
    names: tuple[str, str],
    held_out: Sequence[Sequence[Point]] = ((), ()),
) -> Chart:
    traces = [
        curve(run, points, color=color, hover="%{y:.5g}")
        for run, points, color in zip(names, curves, COLORS, strict=True)
        if points
    ]
    for run, points, color in zip(names, held_out, COLORS, strict=True):
        if points:
            dots = curve(f"{run}, held-out", points, color=color, hover="%{y:.5g}")
            traces.append(dots.update(mode="markers", marker={"color": color, "size": 8}))
    rows = [
        [run, count(points[-1][0]), f"{min(y for _, y in points):.5g}", f"{points[-1][1]:.5g}"]
        for run, points in zip(names, curves, strict=True)
        if points
    ]
    return Chart(
        name=name,
        title=title,
        caption=f"By the number of the step: {names[0]}, and {names[1]}."
        + (" Dots are held-out losses." if any(held_out) else ""),
        views={
            "": figure(
                traces,
                height=340,
                xaxis={"title": {"text": "step"}},
                yaxis={"title": {"text": unit}},
                hovermode="closest",
            )
        },
        numbers=Table(headings=["Run", "Last step", "Lowest", "Last"], rows=rows),
    )
