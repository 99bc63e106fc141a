"""A run against its plan."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("plotly")

from typer.testing import CliRunner

from fullshard.programs import cli
from fullshard.programs.plan_tool.planned_step import PlannedStep, plan_step
from fullshard.programs.plan_tool.profile_file import load_profile
from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.plan_comparison import compare
from fullshard.programs.report.run_files import Run
from fullshard.programs.train.config_file import read_config, to_toml
from fullshard.tracing.schema import Trace
from tests.helpers.run_folders import Machine, write_run

SMALL = ("model.layers=2", "model.width=32", "model.heads=2", "data.context=16", "train.batch=4")


@pytest.fixture(scope="module")
def planned() -> PlannedStep:
    """A small step on 2 GPUs."""
    return plan_step(read_config(None, SMALL), 2, load_profile("h100"))


def measured(planned: PlannedStep, *, slower_backward: float = 1.0) -> Analysis:
    """Return a run that did as planned, but for its backward."""
    trace = planned.trace
    assert isinstance(trace, Trace)
    starts = [s.start_us for s in trace.spans if s.phase == "backward" and s.kind == "compute"]
    begin, late = min(starts), 0.0
    spans = []
    for span in trace.spans:
        is_last = span.kind == "compute" and span.phase == "backward" and span.start_us == begin
        if is_last:
            late = span.duration_us * (slower_backward - 1)
            span = replace(span, duration_us=span.duration_us * slower_backward)
        spans.append(span)
    step = [replace(s, duration_us=s.duration_us + late) if s.kind == "step" else s for s in spans]
    return Analysis(Run(name="run", traces=(replace(trace, spans=tuple(step)),)))


def test_a_run_that_did_as_planned_parts_nowhere(planned: PlannedStep) -> None:
    found = compare(measured(planned), planned)
    assert found is not None
    assert {row[-1] for row in found.rows.rows} <= {"1.00 x", ""}
    assert "No part of it differs by more than 5.0 % of the step" in found.sentence


def test_the_part_that_differs_most_is_named(planned: PlannedStep) -> None:
    found = compare(measured(planned, slower_backward=50.0), planned)
    assert found is not None
    assert "They differ most in compute, backward: " in found.sentence
    assert " longer than planned" in found.sentence


def test_a_plan_for_another_kind_of_device_says_so(planned: PlannedStep) -> None:
    run = measured(planned).run
    of_cpu = Run(name="run", traces=tuple(replace(each, device="cpu") for each in run.traces))
    on_gpu, on_cpu = (compare(Analysis(each), planned) for each in (run, of_cpu))
    assert on_gpu is not None and "was not on" not in on_gpu.sentence
    assert on_cpu is not None and on_cpu.sentence.count("The run was not on a GPU") == 1


def test_without_recorded_steps_there_is_nothing_to_compare(planned: PlannedStep) -> None:
    assert compare(Analysis(Run(name="run")), planned) is None


def report(folder: Path, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.build_app(), ["report", str(folder), *words])
    return result.exit_code, result.output


def test_the_page_has_the_comparison_if_it_is_asked_for(tmp_path: Path) -> None:
    write_run(tmp_path, Machine())
    (tmp_path / "config.toml").write_text(to_toml(read_config(None, SMALL)))
    assert report(tmp_path)[0] == 0
    assert "Against the plan" not in (tmp_path / "report.html").read_text()
    code, output = report(tmp_path, "--plan", "h200")
    assert code == 0, output
    text = (tmp_path / "report.html").read_text()
    assert re.search(r"They differ most in .* than planned", text)
    assert "Planned for NVIDIA H200" in text and "waits for gathers" in text


def test_a_run_without_a_plan_is_one_message(tmp_path: Path) -> None:
    write_run(tmp_path, Machine())
    code, output = report(tmp_path, "--plan", "h1000")
    assert code == 2 and "There is no profile of a GPU named 'h1000'" in output
    (tmp_path / "config.toml").unlink(missing_ok=True)
    code, output = report(tmp_path, "--plan", "h100")
    assert code == 2 and "A plan needs the configuration of the run" in output
