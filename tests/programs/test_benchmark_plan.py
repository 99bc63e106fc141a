"""The benchmarks of plans, with models that take no time: published_runs and plan_steps."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from benchmarks import plan_steps, published_models, published_runs
from fullshard.programs.plan_tool.host_steps import recorded_steps
from fullshard.programs.plan_tool.planned_step import parameters_of, plan_step
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


def serve_steps_of_a_slow_minute(configuration: object, pipe: Connection) -> None:
    pipe.send({"allocated": 1.0, "reserved": 2.0})
    times = {"turn": [9.0, 3.0, 3.0, 3.0, 1.0], "gradients": [4.0], "step": [5.0]}
    for word in iter(pipe.recv, "end"):
        pipe.send(times[word].pop())


def serve_small_steps_of_a_slow_minute(pipe: Connection) -> None:
    for _ in iter(pipe.recv, "end"):
        pipe.send([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [3.0, 6.0, 9.0]])


def serve_nothing(configuration: object, pipe: Connection) -> None:
    raise RuntimeError("There is no memory left.")


def test_small_steps_take_turns_with_a_configuration(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_steps, "serve_row", serve_steps_of_a_slow_minute)
    assert plan_steps.measured("medium", None) == {
        "allocated": 1.0,
        "reserved": 2.0,
        "gradients": 4.0,
        "step": 5.0,
    }
    with plan_steps.served(serve_small_steps_of_a_slow_minute) as small:
        found = plan_steps.measured("medium", small)
        assert found is not None
        assert [found[name] for name in ("gradients", *plan_steps.SMALL)] == [3.0, 2.0, 4.0, 6.0]
        monkeypatch.setattr(plan_steps, "serve_row", serve_nothing)
        assert plan_steps.measured("medium", small) is None
    monkeypatch.setattr(plan_steps, "serve_row", serve_steps_of_a_slow_minute)
    with plan_steps.served(partial(serve_nothing, None)) as small:
        assert plan_steps.measured("medium", small) is None
    assert "There is no memory left." in capfd.readouterr().err


def test_a_plan_follows_the_host_that_was_measured_along() -> None:
    machine, entries = plan_steps.load_profile("h200"), recorded_steps()
    usual = {"plain": 0.02, "recomputed": 0.03, "selective": 0.05}
    slow = {name: 2 * seconds for name, seconds in usual.items()}
    one, other = (plan_steps.with_host_of(machine, each, entries).host for each in (usual, slow))
    assert other.launch_us == pytest.approx(2 * one.launch_us)
    assert other.decision_us == pytest.approx(2 * one.decision_us)
    assert one.decision_us > 0
