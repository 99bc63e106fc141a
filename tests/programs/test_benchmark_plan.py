"""The benchmarks of plans, with models that take no time: published_runs, plan_steps and plan_ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import plan_ranks, plan_steps, published_models, published_runs


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


def test_memory_and_time_are_foretold_for_a_configuration() -> None:
    tiny = ("model.layers=2", "model.width=64", "model.heads=2", "data.context=32")
    machine = plan_steps.load_profile("h200")
    few, more = (
        plan_steps.foretold(plan_steps.Configuration("medium", (*tiny, *options)), machine)
        for options in ((plan_steps.RECOMPUTED,), ())
    )
    assert few["allocated"] < more["allocated"] <= more["reserved"]
    assert 0 < few["gradients"] < few["step"]


def test_waits_of_ranks_are_compared_with_those_of_the_plan() -> None:
    planned = plan_ranks.planned_times(2, 16, plan_ranks.load_profile("cpu"))
    assert 0 < planned.called_ms < planned.exposed_ms < planned.step_ms
