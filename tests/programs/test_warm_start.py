"""Runs that start from the weights of other runs (`model.weights`): step, schedule and optimizer begin anew."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fullshard.errors import ConfigurationError
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.launch import problems_here
from fullshard.programs.train.result import TrainResult
from tests.helpers.ranks import World
from tests.helpers.runs import records, run, tiny

MakeWorld = Callable[[int], World]

SHORT = ("train.steps=2", "optimizer.lr=0.005")


@pytest.fixture(scope="module")
def first(
    world: MakeWorld, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunConfig, TrainResult]:
    """A run that was trained and exported."""
    config = tiny(tmp_path_factory.mktemp("first"), "checkpoint.export=true")
    [result] = world(1).run(run, config)
    return config, result


def test_weights_of_a_run_a_checkpoint_and_an_export_start_a_run_anew(
    world: MakeWorld, tmp_path: Path, first: tuple[RunConfig, TrainResult]
) -> None:
    config, result = first
    folder = config.run.folder
    origins = [folder, folder / "checkpoints" / "step_00000006", folder / "model"]
    for number, origin in enumerate(origins):
        settings = (*SHORT, f"model.weights={origin}", "sharding.api=fsdp1")
        started = tiny(tmp_path / str(number), *settings)
        warm, _ = world(2).run(run, started)
        assert warm.evaluations[0] == pytest.approx(result.evaluations[6], rel=1e-5)
        assert list(warm.losses) == [1, 2] and warm.tokens == 2 * 8 * 16
        [start] = records(started, "start")
        assert start["resumed_from"] is None
        assert f"weights of {origins[1] if not number else origin}" in start["model"]
        assert next(step["lr"] for step in records(started, "step")) == 0.005


def test_a_run_does_not_need_its_starting_weights_any_more_when_it_is_resumed(
    world: MakeWorld, tmp_path: Path, first: tuple[RunConfig, TrainResult]
) -> None:
    weights = tmp_path / "weights"
    shutil.copytree(first[0].run.folder / "model", weights)
    settings = (*SHORT, f"model.weights={weights}")
    world(1).run(run, tiny(tmp_path, *settings))
    shutil.rmtree(weights)
    resumed = tiny(tmp_path, *settings, "train.steps=3")
    assert not list(problems_here(resumed))
    [result] = world(1).run(run, resumed)
    assert list(result.losses) == [3]
    [problem] = problems_here(resumed, fresh=True)
    assert problem.about == ("model.weights",) and "there is nothing at" in problem.text


def test_weights_that_do_not_fit_are_named_before_the_folder_is_touched(
    world: MakeWorld, tmp_path: Path, first: tuple[RunConfig, TrainResult]
) -> None:
    other = ("model.layers=3", "model.vocabulary=300", f"model.weights={first[0].run.folder}")
    config = tiny(tmp_path, *SHORT, *other)
    outcomes = world(2).outcomes(run, config)
    assert all(isinstance(each, ConfigurationError) for each in outcomes)
    [message] = {str(each) for each in outcomes}
    assert "embed.weight: (256, 18), not (300, 18)" in message
    assert all(
        f"  blocks.2.{name}.weight\n" in message for name in ("attention.key", "attention_norm")
    )
    assert not config.run.folder.exists()
    lenient = tiny(tmp_path, *SHORT, *other, "model.weights_strict=false")
    result, _ = world(2).run(run, lenient)
    [start] = records(lenient, "start")
    assert "(11 tensors drawn, 0 left out)" in start["model"]
    assert len(result.losses) == 2
