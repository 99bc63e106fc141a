"""The page: findings, charts and tables in one HTML file that needs nothing else.

`page.html` is a template with autoescape on; `layout.html` has what it shares with pages of other programs, `macros.html` tables
and charts. `page.css`, `page.js` and plotly.js are inserted as they are. Figures are
JSON in a script element that is not run; `<` is escaped in it, so that no name can end the element.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import jinja2
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from fullshard import __version__
from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.chart import Chart, Table
from fullshard.programs.report.diagnosis import diagnose
from fullshard.programs.report.glossary import entries, explained
from fullshard.programs.report.group_charts import comparing_charts, group_table
from fullshard.programs.report.memory_chart import memory_chart
from fullshard.programs.report.replay import FAITHFUL_SHARE, MAX_DEPTH
from fullshard.programs.report.run_charts import run_charts
from fullshard.programs.report.run_comparison import compare_runs
from fullshard.programs.report.run_files import Run
from fullshard.programs.report.speed_settings import speed_settings
from fullshard.programs.report.tiles import tiles_of
from fullshard.programs.report.timeline_chart import timeline_chart
from fullshard.programs.report.units import count, duration, exact, share, size
from fullshard.programs.run_events import Start

if TYPE_CHECKING:
    from fullshard.programs.plan_tool.planned_step import PlannedStep
    from fullshard.programs.report.plan_comparison import PlanComparison


def render(run: Run, planned: PlannedStep | None = None, other: Run | None = None) -> str:
    """Return the page about ``run``, compared with its plan and with another run if there are any."""
    analysis = Analysis(run)
    of_run = list(run_charts(run.metrics))
    of_steps = [*timeline_chart(analysis), *comparing_charts(analysis)]
    of_memory = list(memory_chart(analysis))
    compared = None if other is None else compare_runs(analysis, Analysis(other))
    of_both = [] if compared is None else compared.charts
    template = environment().get_template("page.html")
    return template.render(
        **frame("report", run.name, _subtitle(run), [*of_run, *of_steps, *of_memory, *of_both]),
        run=run,
        tiles=list(tiles_of(analysis)),
        findings=diagnose(analysis),
        run_charts=of_run,
        step_charts=of_steps,
        memory_charts=of_memory,
        replay=_replay_table(analysis),
        plan=_compared(analysis, planned),
        settings=speed_settings(analysis),
        groups=group_table(analysis.groups) if analysis.groups else None,
        compared=compared,
        words=list(entries()),
        facts=list(_facts(run)),
        config={section: fields for section, fields in run.config.items() if fields},
    )


def _compared(analysis: Analysis, planned: PlannedStep | None) -> PlanComparison | None:
    if planned is None:
        return None
    from fullshard.programs.report.plan_comparison import compare  # imports torch

    return compare(analysis, planned)


def frame(kind: str, name: str, subtitle: str, charts: list[Chart]) -> dict[str, object]:
    """Return the values that `layout.html` needs of a page.

    Args:
        kind: The program that writes it.
        name: The heading.
        subtitle: Below the heading.
        charts: All that the page draws.
    """
    return {
        "kind": kind,
        "name": name,
        "subtitle": subtitle,
        "version": __version__,
        "figures": embedded(charts),
        "plotly": Markup(get_plotlyjs()),
        "style": Markup(_asset("page.css")),
        "script": Markup(_asset("page.js")),
    }


@cache
def environment() -> jinja2.Environment:
    """Return the environment that renders templates, those of other programs, too."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["code"] = with_code
    environment.filters["toml"] = _setting
    environment.filters["explained"] = explained
    environment.filters["share"] = share
    return environment


def _asset(name: str) -> str:
    return (files("fullshard.programs.report") / name).read_text(encoding="utf-8")


def with_code(text: str, terms: bool = False) -> Markup:
    """Return the text with what is in `backquotes` as code, and words of the glossary explained if ``terms``."""
    show = explained if terms else escape
    parts = re.split(r"`([^`]*)`", text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else show(part)
        for i, part in enumerate(parts)
    )


def _setting(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def embedded(charts: list[Chart]) -> Markup:
    """Return all figures as JSON that is safe in a script element."""
    figures = {
        chart.name: {
            "first": chart.first,
            "views": {key: view.to_plotly_json() for key, view in chart.views.items()},
        }
        for chart in charts
    }
    text = json.dumps(figures, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028"))


def _subtitle(run: Run) -> str:
    start = run.metrics.start
    parts = [text for text in (start.model, start.data) if text] if start else []
    described = [each for each in (start, *run.traces[:1]) if each is not None]
    if run.world:
        device = next((each.device for each in described if each.device), "")
        parts.append(f"{run.world} {device} {'rank' if run.world == 1 else 'ranks'}")
    return " \u00b7 ".join(parts)


def _replay_table(analysis: Analysis) -> Table | None:
    """Return the waits for gathers at other prefetch depths; None if the replay is not faithful or there are no waits."""
    if not analysis.steps or analysis.prefetch is None:
        return None
    measured = analysis.gather_wait_us
    if measured <= FAITHFUL_SHARE * analysis.step_us:  # a replay may be off by more
        return None
    rows = [
        ["measured", duration(measured), share(measured / analysis.step_us)],
    ]
    for depth in range(1, MAX_DEPTH + 1):
        left = sum(analysis.waits_at(depth).values())
        used = ", as it was" if depth == analysis.prefetch else ""
        rows.append([f"depth {depth}{used}", duration(left), share(left / analysis.step_us)])
    return Table(headings=["Prefetch", "Waits a step", "Of the step"], rows=rows)


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    start, steps = run.metrics.start, run.metrics.steps
    if start is not None:
        yield from _start_facts(start)
    if steps:
        done = "finished" if run.metrics.is_finished else "not finished"
        yield "Steps done", f"{steps[-1].step}, {done}"
    if run.traces:
        ranks = ", ".join(str(trace.rank) for trace in run.traces)
        yield "Ranks with a trace", f"{len(run.traces)} of {run.traces[0].world}: {ranks}"
    if start is not None and start.versions:
        versions = ", ".join(f"{name} {version}" for name, version in start.versions.items())
        yield "Versions", versions


def _start_facts(start: Start) -> Iterator[tuple[str, str]]:
    if start.left_out:
        yield "Data left out", start.left_out
    if start.device_name:
        yield "Device of a rank", start.device_name
    for label, value, show in (
        ("Parameters", start.parameters, count),
        ("Bytes of all parameters", start.unsharded_bytes, size),
        ("Tokens per step", start.tokens_per_step, exact),
        ("Steps", start.steps, exact),
    ):
        if value:
            yield label, show(value)
    if start.rank_bytes:
        low, high = min(start.rank_bytes), max(start.rank_bytes)
        text = f"{size(low)} to {size(high)}" if low != high else size(low)
        yield "Parameters held by a rank", text
