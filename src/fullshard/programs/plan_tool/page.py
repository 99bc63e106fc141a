"""The page of a plan: timeline, memory, scaling and what-ifs, in the style of the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import plotly.graph_objects as go

from fullshard.errors import size_text
from fullshard.programs.plan_tool.answers import (
    About,
    batch_text,
    host_rows,
    limit_text,
    memory_rows,
    seconds_text,
    sharding_text,
    validation_text,
    verdict,
    waits,
)
from fullshard.programs.plan_tool.memory_chart import memory_chart
from fullshard.programs.plan_tool.planned_step import MICROBATCHES, PlannedStep
from fullshard.programs.plan_tool.planning import MOST_MICROBATCHES
from fullshard.programs.plan_tool.profile_file import assumptions
from fullshard.programs.plan_tool.question import Question, gpus_text
from fullshard.programs.plan_tool.scaling import (
    ScalePoint,
    Scaling,
    crossover_text,
    recommended_text,
)
from fullshard.programs.plan_tool.search import Search
from fullshard.programs.plan_tool.search_answers import (
    fewest_text,
    nothing_text,
    tried_rows,
    untried_text,
)
from fullshard.programs.plan_tool.validation import Bands, bands_of
from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.chart import Chart, Table, figure
from fullshard.programs.report.page import environment, frame
from fullshard.programs.report.run_files import Run
from fullshard.programs.report.tiles import Tile
from fullshard.programs.report.timeline_chart import timeline_chart
from fullshard.programs.train.config_file import to_short_toml


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """All that is on the page."""

    question: Question
    step: PlannedStep
    about: About
    found: Search
    fewest: PlannedStep | str | None
    """The plan for the smallest number of GPUs that fits; an error, or None if there is none."""
    scaling: Scaling


def render(plan: Planned) -> str:
    """Return the page about a plan."""
    step = plan.step
    assert step.trace is not None, "the step was planned with all layers"
    analysis = Analysis(Run(name="plan", config=_config(step), traces=(step.trace,)))
    of_steps = list(timeline_chart(analysis))
    of_memory = [memory_chart(step)]
    curve = scaling_chart(plan)
    bands = bands_of(step, plan.about.parameters)
    text = (files("fullshard.programs.plan_tool") / "page.html").read_text(encoding="utf-8")
    return (
        environment()
        .from_string(text)
        .render(
            **frame(
                "plan",
                plan.about.description,
                gpus_text(step.world, step.machine),
                [*of_steps, *of_memory, curve],
            ),
            tiles=list(_tiles(plan, bands)),
            sentences=[
                verdict(step, bands["reserved"]),
                fewest_text(step, plan.fewest),
                limit_text(step),
                validation_text(step, bands),
            ],
            fits=step.fits,
            better_title=_better_title(plan),
            nothing=None if plan.found.best else nothing_text(step, plan.found),
            untried=untried_text(plan.question, plan.found),
            facts=list(_facts(plan)),
            step_charts=of_steps,
            shown=_shown_text(step),
            memory_charts=of_memory,
            memory=Table(
                headings=["Memory of a GPU, at the peak", "Bytes"],
                rows=[
                    *([label, size_text(nbytes)] for label, nbytes in memory_rows(step)),
                    ["reserved in all", size_text(step.memory.reserved)],
                ],
            ),
            host_memory=Table(
                headings=["Host memory for a GPU", "Bytes"],
                rows=[[label, size_text(nbytes)] for label, nbytes in host_rows(step)],
            ),
            curve=curve,
            what_ifs=_what_ifs(plan),
            best=[(each, to_short_toml(each.step.config, each.reason)) for each in plan.found.best],
            larger=[
                (each, to_short_toml(each.step.config, each.reason))
                for each in plan.found.better_larger
            ],
            assumed=Table(
                headings=["Value", "Assumed", "Source"],
                rows=[[each.name, each.value, each.source] for each in assumptions(step.machine)],
                num_text=3,
            ),
        )
    )


def _shown_text(step: PlannedStep) -> str | None:
    """Say it if the timeline does not have all microbatches."""
    count = step.config.train.accumulate
    if count <= MOST_MICROBATCHES:
        return None
    return f"The timeline has {MICROBATCHES[1]} of the {count} microbatches. All between the first and the last are alike."


def _config(step: PlannedStep) -> dict[str, dict[str, object]]:
    return {
        section: {
            name: str(value) if isinstance(value, Path) else value for name, value in fields.items()
        }
        for section, fields in asdict(step.config).items()
    }


def _tiles(plan: Planned, bands: Bands) -> Iterator[Tile]:
    step = plan.step
    there = step.machine.usable_bytes
    yield Tile(
        label="Memory",
        value="Fits" if step.fits else "Does not fit",
        note=f"{size_text(step.memory.reserved)} of {size_text(there)}, {_unbroken(bands['reserved'].percent)}",
    )
    yield Tile(label="Step", value=seconds_text(step.seconds), note=str(bands["time"]))
    each = step.tokens_per_second
    yield Tile(
        label="Tokens/s of a GPU",
        value=f"{each:,.0f}",
        note=_unbroken(f"MFU {100 * step.mfu:.1f} %"),
    )
    exposed = sum(seconds for reason, seconds in waits(step) if reason in ("gather", "reduction"))
    yield Tile(
        label="Exposed communication",
        value=f"{100 * exposed / step.seconds:.1f} %",
        note=f"{seconds_text(exposed)} of a step" if exposed else "of a step",
    )


def _unbroken(text: str) -> str:
    """Return a text that stays on one line."""
    return text.replace(" ", "\u00a0")


def _facts(plan: Planned) -> Iterator[tuple[str, str]]:
    step = plan.step
    yield "Model", f"{plan.about.description}, {plan.about.parameters:,} parameters"
    yield "Batch", batch_text(step)
    yield "Sharding", sharding_text(step)
    if plan.about.chosen is not None:
        yield "Chosen", plan.about.chosen
    yield "Run", str(plan.about.cost_of(step))


def _better_title(plan: Planned) -> str:
    if plan.step.fits:
        return "Better configurations for the same batch"
    if plan.found.fits:
        return "What fits, for the same batch"
    return "What comes closest, for the same batch"


def _what_ifs(plan: Planned) -> Table:
    headings = [
        *("Change", "", "Tokens/s", "Relative", "Memory"),
        *("Waits: gathers", "Reductions", "Host"),
    ]
    rows = []
    for tried in tried_rows(plan.step, plan.found):
        idle = tried.step.playback.idle if tried.step else {}
        waited = [
            seconds_text(idle.get(reason, 0.0)) if tried.step else ""
            for reason in ("gather", "reduction", "host")
        ]
        rows.append([tried.name, tried.state, *tried.numbers, *waited])
    return Table(headings=headings, rows=rows, num_text=2)


def _numbers(step: PlannedStep) -> list[str]:
    fits = "" if step.fits else ", does not fit"
    return [f"{step.tokens_per_second:,.0f}", f"{size_text(step.memory.reserved)}{fits}"]


def scaling_chart(plan: Planned) -> Chart:
    """Return the throughput of a GPU over the number of GPUs. What does not fit is no point of a curve."""
    points = plan.scaling.points
    worlds = [point.world for point in points]
    full = [point.full for point in points]
    replicated = [point.replicated for point in points if point.replicated is not None]
    too_large = [step for step in (*full, *replicated) if not step.fits]
    traces = [
        _curve("full sharding", full, "forward"),
        _curve("a replica on each host (HSDP)", replicated, "reduce"),
        _crosses("does not fit", too_large),
    ]
    rows = [
        [
            f"{point.world:,}",
            *_numbers(point.full),
            *(_numbers(point.replicated) if point.replicated else ["", ""]),
        ]
        for point in points
    ]
    failed = "".join(f" Not planned: {each}." for each in plan.scaling.failed)
    return Chart(
        name="scaling",
        title="Throughput of a GPU, on more and more of them",
        caption=f"Each GPU has as many windows as in the plan. {crossover_text(points)} {recommended_text(plan.question, plan.found)} "
        f"{_first_gpus_text(points)}Estimated from few layers.{failed}",
        views={
            "": figure(
                [trace for trace in traces if len(trace.x)],
                height=320,
                hovermode="x unified",
                xaxis={
                    "title": {"text": "GPUs"},
                    "type": "log",
                    "tickvals": worlds,
                    "ticktext": [f"{world:,}" for world in worlds],
                },
                yaxis={"title": {"text": "tokens/s a GPU"}, "rangemode": "tozero"},
            )
        },
        numbers=Table(
            headings=["GPUs", "Full: tokens/s", "Memory", "HSDP: tokens/s", "Memory"], rows=rows
        ),
    )


def _first_gpus_text(points: Sequence[ScalePoint]) -> str:
    """Say why few GPUs may be slower than more of them; nothing if they are not."""
    speeds = [point.full.tokens_per_second for point in points]
    if all(before >= after for before, after in pairwise(speeds)):
        return ""
    return "A GPU is faster among more of them at first, since they share the update of the parameters. "


def _curve(name: str, steps: Sequence[PlannedStep], color: str) -> go.Scatter:
    """Return a line through what fits; it is broken where something does not."""
    return go.Scatter(
        name=name,
        x=[step.world for step in steps],
        y=[round(step.tokens_per_second, 1) if step.fits else None for step in steps],
        mode="lines+markers",
        connectgaps=False,
        line={"color": f"var(--{color})", "width": 2.2},
        hovertemplate=f"{name}: <b>%{{y:,.0f}}</b><extra></extra>",
    )


def _crosses(name: str, steps: Sequence[PlannedStep]) -> go.Scatter:
    return go.Scatter(
        name=name,
        x=[step.world for step in steps],
        y=[round(step.tokens_per_second, 1) for step in steps],
        mode="markers",
        marker={
            "symbol": "x-thin",
            "size": 9,
            "color": "var(--wait)",
            "line": {"width": 2, "color": "var(--wait)"},
        },
        hovertemplate=f"%{{y:,.0f}} if it fitted: <b>{name}</b><extra></extra>",
    )
