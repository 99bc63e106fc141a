"""The benchmarks of plans, with models that take no time: published_runs, plan_steps and plan_ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import plan_ranks, plan_steps, published_models, published_runs
from fullshard.programs.plan_tool.planned_step import plan_step
from fullshard.programs.plan_tool.planning import parameters_of
from fullshard.programs.plan_tool.validation import band_of
from fullshard.programs.train.model_source import open_model

MEASURED = Path(plan_steps.__file__).parent / "results" / "plan-steps-h200.json"


def test_a_published_run_is_planned_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(row for row in published_runs.ROWS if row.model == "Llama 2 7B" and row.is_compiled)
    whole = published_models.ARCHITECTURES[row.model]
    small = replace(whole, layers=1, width=64, heads=2, hidden=128, vocabulary=256)
    monkeypatch.setitem(published_models.ARCHITECTURES, row.model, small)
    planned = published_runs.plan_of(replace(row, length=64))
    assert planned.world == row.gpus
    assert planned.config.compute.checkpoint_activations == row.recompute
    assert planned.tokens == row.batch * 64
    assert planned.tokens_per_second > row.tokens_per_second
    assert "compiled" in published_runs.describe(row)


def test_memory_and_time_are_predicted_for_a_configuration() -> None:
    tiny = ("model.layers=2", "model.width=64", "model.heads=2", "data.context=32")
    machine = plan_steps.load_profile("h200")
    few, more = (
        plan_steps.predicted(plan_steps.Configuration("medium", (*tiny, *options)), machine)
        for options in ((plan_steps.RECOMPUTED,), ())
    )
    assert few["allocated"] < more["allocated"] <= more["reserved"]
    assert 0 < few["gradients"] < few["step"]


@pytest.mark.parametrize("name", ["medium-recomputed", "wide-recomputed-64"])
def test_what_was_measured_on_an_h200_is_within_the_bands_of_answers(name: str) -> None:
    rows = json.loads(MEASURED.read_text())["results"]
    [measured] = [row["measured"] for row in rows if row["name"] == name]
    configuration = plan_steps.CONFIGURATIONS[name]
    planned = plan_step(
        configuration.config(), configuration.world, plan_steps.load_profile("h200")
    )
    parameters = parameters_of(open_model(planned.config))
    for answer, found in (
        ("allocated", planned.memory.allocated),
        ("reserved", planned.memory.reserved),
    ):
        band = band_of(planned, answer, parameters)
        assert band.is_validated and found == pytest.approx(measured[answer], rel=band.relative)


def test_waits_of_ranks_are_compared_with_those_of_the_plan() -> None:
    planned = plan_ranks.planned_times(2, 16, plan_ranks.load_profile("cpu"))
    assert 0 < planned.called_ms < planned.exposed_ms < planned.step_ms
