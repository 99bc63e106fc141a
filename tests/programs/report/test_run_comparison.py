"""Two runs on one page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("plotly")

from typer.testing import CliRunner

from fullshard.programs import cli
from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.run_comparison import compare_runs
from fullshard.programs.report.run_files import Run, read_run
from tests.helpers.run_folders import Machine, hostile_run, write_run


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Run, Run]:
    slow = read_run(write_run(tmp_path / "slow", Machine(), steps=30))
    fast = read_run(write_run(tmp_path / "fast", Machine(), steps=60))
    config = {**slow.config, "sharding": {**slow.config["sharding"], "prefetch": 2}}
    steps = tuple(replace(step, step_s=2.0) for step in slow.metrics.steps)
    slow = replace(slow, config=config, metrics=replace(slow.metrics, steps=steps))
    steps = tuple(replace(step, step_s=0.5) for step in fast.metrics.steps)
    return slow, replace(fast, metrics=replace(fast.metrics, steps=steps))


def test_numbers_stand_side_by_side_with_their_ratio(runs: tuple[Run, Run]) -> None:
    compared = compare_runs(*map(Analysis, runs))
    rows = {label: values for label, *values in compared.numbers.rows}
    assert compared.numbers.headings == ["", "slow", "fast", "ratio"]
    assert rows["Median step"] == ["2 s", "500 ms", "4"]
    assert rows["Steps"] == ["30", "60", "0.5"]
    assert rows["Last loss"][0] != rows["Last loss"][1]
    assert rows["Exposed communication, of a step"][2] == "1"


def test_only_settings_that_differ_are_listed(runs: tuple[Run, Run]) -> None:
    compared = compare_runs(*map(Analysis, runs))
    assert [[*row] for row in compared.settings.rows] == [
        ["train.steps", "30", "60"],
        ["sharding.prefetch", "2", "1"],
    ]
    same = compare_runs(Analysis(runs[0]), Analysis(runs[0]))
    assert not same.settings.rows and same.other == "slow (the other)"


def test_curves_of_both_are_in_one_chart(runs: tuple[Run, Run]) -> None:
    charts = {chart.name: chart for chart in compare_runs(*map(Analysis, runs)).charts}
    loss = charts["with-loss"].views[""]
    assert [trace.name for trace in loss.data] == [
        *("slow", "fast"),
        *("slow, held-out", "fast, held-out"),
    ]
    assert len(loss.data[0].x) == 30 and len(loss.data[1].x) == 60
    assert {trace.mode for trace in loss.data[2:]} == {"markers"}


def test_what_one_run_lacks_is_a_dash_and_what_both_lack_is_left_out(runs: tuple[Run, Run]) -> None:
    untraced = replace(runs[1], traces=())
    rows = {
        label: values
        for label, *values in compare_runs(Analysis(runs[0]), Analysis(untraced)).numbers.rows
    }
    assert rows["Exposed communication, of a step"][1:] == ["-", "-"]
    both = compare_runs(Analysis(untraced), Analysis(untraced)).numbers.rows
    assert all("Exposed" not in label for label, *_ in both)


def test_the_command_writes_one_page_with_both(tmp_path: Path) -> None:
    this, other = (write_run(tmp_path / name, Machine(), steps=9) for name in ("this", "other"))
    page = tmp_path / "page.html"
    words = ["report", str(this), "--with", str(other), "--output", str(page)]
    result = CliRunner().invoke(cli.build_app(), words)
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert "Beside other" in text and "Loss of both runs" in text
    missing = CliRunner().invoke(cli.build_app(), [*words[:3], str(tmp_path / "none")])
    assert missing.exit_code == 2 and "does not exist" in missing.output


def test_names_of_another_run_are_safe(tmp_path: Path) -> None:
    from fullshard.programs.report.page import render

    run = read_run(write_run(tmp_path / "this", Machine(), steps=9))
    other = read_run(hostile_run(tmp_path / "other"))
    assert "<script>window.hacked" not in render(run, other=other)
