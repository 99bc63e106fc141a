"""The file: written whole, needs nothing else, and shows names as they are."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard.errors import ConfigurationError
from fullshard.programs.cli import build_app
from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.run_files import Metrics, Run
from fullshard.programs.report.units import count, duration, share, size
from fullshard.programs.run_events import Evaluation, Step
from fullshard.report import write_report
from fullshard.tracing.schema import Trace, parse_trace
from tests.helpers.run_folders import (
    Machine,
    hostile_run,
    metrics_records,
    simulated_trace,
    write_metrics,
    write_run,
    write_traces,
)

go = pytest.importorskip("plotly.graph_objects")
from fullshard.programs.report.chart import Chart, figure  # noqa: E402
from fullshard.programs.report.glossary import explained  # noqa: E402
from fullshard.programs.report.memory_chart import memory_chart  # noqa: E402
from fullshard.programs.report.page import embedded, with_code  # noqa: E402
from fullshard.programs.report.run_charts import MAX_POINTS, run_charts  # noqa: E402
from fullshard.programs.report.timeline_chart import short_names  # noqa: E402


class Elements(HTMLParser):
    """What a browser would make of a page: its elements, and the text of each kind."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self._within = [""]
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._within.append(tag)

    def handle_endtag(self, tag):
        if tag in self._within:
            while self._within.pop() != tag:
                pass

    def handle_data(self, data):
        self.text[self._within[-1]] = self.text.get(self._within[-1], "") + data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.found if found == tag]


def test_a_page_has_all_sections_and_no_choice_of_addresses(tmp_path: Path):
    folder = write_run(tmp_path / "demo", Machine(), steps=30)
    records = metrics_records(30)
    records[0]["left_out"] = "12 of 20 MB: data.max_bytes"
    write_metrics(folder, records)
    with (folder / "config.toml").open("a") as config:
        config.write("\n[compute]\ngraph = true\n")
    page = write_report(folder)
    assert page == tmp_path / "demo" / "report.html"
    elements = Elements(page.read_text())
    assert elements.text["title"] == "demo - fullshard report"
    charts = [each["data-chart"] for each in elements.all("div") if "data-chart" in each]
    assert charts == ["timeline", "breakdown", "groups", "memory", "loss", "speed", "optimizer"]
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert [a["href"] for a in elements.all("a") if a["href"].removeprefix("#") not in ids] == []
    assert len(elements.all("figcaption")) == len(charts)
    assert "With compute.graph, recorded steps run eagerly" in page.read_text()
    assert "Data left out" in elements.text["dt"]
    assert "12 of 20 MB: data.max_bytes" in elements.text["dd"]


def test_a_page_loads_nothing(tmp_path: Path):
    elements = Elements(write_report(write_run(tmp_path, Machine(), steps=12)).read_text())
    for tag, attributes in elements.found:
        for name in ("src", "srcset", "data", "action", "poster", "background"):
            assert name not in attributes, tag
    assert [link["href"] for link in elements.all("link")] == ["data:,"]
    assert not re.search(r"@import|url\(", elements.text["style"])
    (policy,) = [m["content"] for m in elements.all("meta") if "http-equiv" in m]
    assert policy.startswith("default-src 'none';") and "http" not in policy


def test_names_are_shown_and_not_obeyed(tmp_path: Path):
    elements = Elements(write_report(hostile_run(tmp_path)).read_text())
    # The theme, the figures, plotly, ours: no other script, and no image.
    assert len(elements.all("script")) == 4
    assert elements.all("img") == []
    shown = " ".join(elements.text[tag] for tag in ("code", "td", "dd", "pre", "p"))
    assert shown.count("<script>window.hacked=1</script>") >= 6


def test_no_text_in_a_figure_ends_the_script_that_carries_it():
    view = figure([go.Scatter(x=[1], y=[1], name="</script><script>")], height=100)
    chart = Chart(name="c", title="", caption="", views={"": view})
    text = embedded([chart])
    assert "<" not in text
    assert json.loads(text)["c"]["views"][""]["data"][0]["name"] == "</script><script>"


def test_the_allocator_s_curve_has_what_the_allocator_was_asked_for():
    trace = simulated_trace(Machine())
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    for event in counters[3::4]:
        event["args"]["allocated"] = 5e8
    run = Run(name="made up", traces=(parse_trace(trace),))
    (chart,) = memory_chart(Analysis(run))
    curves = {curve.name: curve for curve in chart.views[chart.first].data}
    assert set(curves["allocated in all"].y) == {round(5e8 / 2**20, 4)}
    assert len(curves["allocated in all"].y) < len(curves["gathered"].y)


@pytest.mark.parametrize("measured", [0, 7 << 20])
def test_optimizer_state_in_the_memory_chart_is_what_was_measured(measured: int):
    step = Step(step=1, loss=1, grad_norm=1, lr=1, tokens=1, step_s=1, memory_bytes=1)
    metrics = Metrics(steps=(replace(step, optimizer_bytes=measured),))
    traces = (parse_trace(simulated_trace(Machine())),)
    config = {"optimizer": {"name": "adamw"}}
    (chart,) = memory_chart(Analysis(Run(name="", traces=traces, metrics=metrics, config=config)))
    rows = dict(chart.numbers.rows)
    shards, state = (
        float(rows[f"{name}, shards"].removesuffix(" MiB"))
        for name in ("parameters", "optimizer state")
    )
    assert state == pytest.approx(7 if measured else 2 * shards, rel=0.01)


def test_frozen_parameters_have_no_gradients_and_no_state_in_the_memory_chart():
    trace = parse_trace(simulated_trace(Machine()))
    half = replace(trace, groups=tuple(replace(g, trained_share=0.5) for g in trace.groups))
    config = {"optimizer": {"name": "adamw"}}

    def numbers(trace: Trace) -> list[float]:
        (chart,) = memory_chart(Analysis(Run(name="", traces=(trace,), config=config)))
        rows = dict(chart.numbers.rows)
        kinds = "parameters, shards", "gradients, shards", "optimizer state, shards", "unsharded"
        return [float(rows[kind].removesuffix(" MiB")) for kind in kinds]

    all_trained, some = numbers(trace), numbers(half)
    shares = [a / b for a, b in zip(some, all_trained, strict=True)]
    assert shares == pytest.approx([1, 0.5, 0.5, (1 + 0.5 * 3) / 4], rel=0.01)


def test_code_in_findings_is_marked_and_the_rest_escaped():
    assert with_code("`a<b` waits <1 ms") == "<code>a&lt;b</code> waits &lt;1 ms"


def test_traces_alone_and_metrics_alone_make_a_page(tmp_path: Path):
    write_traces(tmp_path / "traces", Machine())
    page = write_report(tmp_path / "traces").read_text()
    assert 'data-chart="timeline"' in page and 'data-chart="loss"' not in page
    write_metrics(tmp_path / "metrics", metrics_records(12))
    page = write_report(tmp_path / "metrics").read_text()
    assert 'data-chart="loss"' in page and 'data-chart="timeline"' not in page
    assert "No step was recorded." in page


@pytest.mark.parametrize(("gather_us", "is_shown"), [(3000, True), (100, False)])
def test_waits_are_not_played_again_if_they_are_less_than_what_a_replay_is_off_by(
    tmp_path: Path, gather_us: int, is_shown: bool
):
    write_traces(tmp_path, Machine(layers=8, gather_us=gather_us))
    assert ("replayed</h3>" in write_report(tmp_path).read_text()) == is_shown


def test_ranks_with_a_trace_are_counted_and_named(tmp_path: Path):
    write_traces(tmp_path, Machine(world=2))
    (tmp_path / "rank_00001.json").unlink()
    assert "1 of 2: 0" in Elements(write_report(tmp_path).read_text()).text["dd"]


def test_what_could_not_be_read_is_on_the_page(tmp_path: Path):
    write_metrics(tmp_path, metrics_records(12))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind":')
    assert "the last line is cut off" in write_report(tmp_path).read_text()


def test_a_page_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_metrics(tmp_path, metrics_records(3))
    output = tmp_path / "page.html"
    output.write_text("old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(ConfigurationError, match=r"cannot be written to .*page\.html: full"):
        write_report(tmp_path, output)
    assert output.read_text() == "old"
    monkeypatch.undo()
    write_report(tmp_path, output)
    assert output.read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "page.html"]


def test_nowhere_to_write_is_an_error(tmp_path: Path):
    write_metrics(tmp_path, metrics_records(3))
    with pytest.raises(ConfigurationError, match="Name a file in an existing folder"):
        write_report(tmp_path, tmp_path / "no" / "such.html")


def test_without_plotly_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_metrics(tmp_path, metrics_records(3))
    for name in [
        name for name in sys.modules if name.startswith(("fullshard.programs.report.", "plotly"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'fullshard\[report\]'"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_long_run_is_thinned_without_losing_its_spikes_and_says_so():
    blank = {"tokens": 0, "memory_bytes": 0} | dict.fromkeys(
        ("grad_norm", "lr", "step_s"), math.nan
    )
    losses = {step: 9.0 if step == 5000 else 2.0 + step % 7 / 100 for step in range(1, 20_001)}
    steps = tuple(Step(step=step, loss=loss, **blank) for step, loss in losses.items())
    (chart,) = run_charts(Metrics(steps=steps))
    drawn = chart.views[""].data[0]
    assert len(drawn.x) <= MAX_POINTS
    assert (5000, 9.0) in zip(drawn.x, drawn.y, strict=True)
    assert list(drawn.x) == sorted(drawn.x)
    assert "Of every 14 steps the lowest and the highest value are drawn." in chart.caption


def test_the_last_loss_is_told_even_if_it_is_no_number(tmp_path: Path):
    start, *_ = metrics_records(3)
    losses = [5.5, 5.25, None]
    steps = [{"kind": "step", "step": i, "loss": loss} for i, loss in enumerate(losses, start=1)]
    write_metrics(tmp_path, [start, *steps, {"kind": "evaluation", "step": 3, "loss": None}])
    page = write_report(tmp_path).read_text()
    note = "step 3; last finite 5.250 at step 2; held-out not finite at step 3"
    assert f"<strong>not finite</strong><span>{explained(note)}</span>" in page
    rows = re.findall(r"<tr>\s*<td>(.*?)</td>\s*<td>(.*?)</td>\s*<td[^>]*>(.*?)</td>", page)
    assert ("step 3", "training, last", "not finite") in rows
    assert ("step 3", "held-out", "not finite") in rows


def test_numbers_are_written_for_people():
    assert [duration(us) for us in (0, 0.5, 999, 1234, 5.6e4, 2.5e6, 9e8, 9e9)] == [
        *("0 \u00b5s", "0.5 \u00b5s", "999 \u00b5s", "1.23 ms", "56 ms", "2.5 s", "15 min"),
        "2 h 30 min",
    ]
    assert [size(n) for n in (0, 999, 1000, 1023.9 * 1024, 12_345_678, 1 << 40)] == [
        *("0 B", "999 B", "0.977 KiB", "1 MiB", "11.8 MiB", "1 TiB")
    ]
    assert [count(n) for n in (7, 999, 27_000_000)] == ["7", "999", "27 M"]
    assert [share(part) for part in (0, 1e-5, 0.003, 0.12, 1)] == [
        *("0 %", "< 0.1 %", "0.3 %", "12 %", "100 %")
    ]


def test_bars_are_labelled_with_what_tells_groups_apart():
    names = ["root", "model.layers.0", "model.layers.1"]
    assert list(short_names(names).values()) == ["root", "0", "1"]
    assert short_names(["a.b", "c.d", "e"]) == {"a.b": "a.b", "c.d": "c.d", "e": "e"}
    assert short_names(["a.b"]) == {"a.b": "b"}
    assert short_names([]) == {}


def test_the_command_prints_where_the_page_is(tmp_path: Path):
    write_metrics(tmp_path, metrics_records(3))
    output = tmp_path / "here.html"
    result = CliRunner().invoke(build_app(), ["report", str(tmp_path), "--output", str(output)])
    assert result.exit_code == 0
    assert result.output == f"{output}\n"
    assert output.exists()


def test_the_command_answers_with_one_message_and_code_2(tmp_path: Path):
    result = CliRunner().invoke(build_app(), ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert result.output.startswith("Error: A report needs `metrics.jsonl`")
    assert result.output.count("\n") == 1


def test_two_evaluations_are_no_trend():
    def drawn(number: int) -> str:
        evaluations = tuple(Evaluation(step=step, loss=2.0) for step in range(number))
        [loss, *_] = run_charts(Metrics(evaluations=evaluations))
        [held_out] = [trace for trace in loss.views[""].data if trace.name == "held-out"]
        return str(held_out.mode)

    assert drawn(2) == "markers" and drawn(3) == "lines+markers"
