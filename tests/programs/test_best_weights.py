"""Weights with the lowest held-out loss, runs that end early, and weights that are in bfloat16 between steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from fullshard.errors import ConfigurationError
from fullshard.programs.train import loop
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.config_file import read_config
from fullshard.programs.train.exported_model import read_mark
from fullshard.programs.train.origin import find_origin
from fullshard.programs.train.result import TrainResult
from tests.helpers.ranks import World
from tests.helpers.runs import records, run, tiny

MakeWorld = Callable[[int], World]

EVERY = ("evaluation.every=1", "checkpoint.every=1", "checkpoint.keep=9")


def run_with_losses(config: RunConfig, losses: list[float]) -> TrainResult:
    """A run whose evaluations find these losses, in their order."""
    found = iter(losses)
    with patch.object(loop, "held_out_loss", lambda *_, **__: next(found)):
        return run(config)


def test_the_best_weights_are_kept_and_exported(world: MakeWorld, tmp_path: Path) -> None:
    config = tiny(tmp_path, *EVERY, "checkpoint.best=true", "checkpoint.export=true")
    world(2).run(run_with_losses, config, [5.0, 4.0, 3.0, 3.5, float("nan"), 4.0, 3.0])
    best = [each for each in records(config, "checkpoint") if each["best"]]
    assert [each["step"] for each in best] == [0, 1, 2]
    assert {each["path"] for each in best} == {"best"}
    mark = read_mark(config.run.folder / "model")
    assert mark is not None and mark.step == 2
    origin = find_origin(config.run.folder / "best", None)
    assert origin.run is not None and origin.run.path == config.run.folder
    saved, two = (
        weights(config.run.folder / name) for name in ("best", "checkpoints/step_00000002")
    )
    assert saved.keys() == two.keys() and all(torch.equal(saved[name], two[name]) for name in two)


def weights(path: Path) -> dict[str, Any]:
    """The weights of all files of a checkpoint, by name."""
    found: dict[str, Any] = {}
    for file in sorted(path.glob("data-*/*.safetensors")):
        found |= {f"{file.name} {name}": each for name, each in load_file(file).items()}
    return {name: each for name, each in found.items() if " model/" in name}


def test_a_run_ends_when_evaluations_find_no_lower_loss(world: MakeWorld, tmp_path: Path) -> None:
    config = tiny(tmp_path, *EVERY, "evaluation.patience=2")
    [result] = world(1).run(run_with_losses, config, [5.0, 4.0, 4.5, 4.0])
    assert list(result.losses) == [1, 2, 3]
    [stopped] = records(config, "stopped")
    assert stopped["why"] == "evaluation.patience: no lower held-out loss in 2 evaluations"
    assert [each["patience"] for each in records(config, "end")] == [2]
    [again] = world(1).run(run, config)
    assert again.was_finished, "it would end again at once"
    more = tiny(tmp_path, *EVERY, "evaluation.patience=3")
    [rest] = world(1).run(run_with_losses, more, [4.0, 3.0, 3.5])
    assert list(rest.losses) == [4], "one more evaluation without a lower loss ends it"


def test_a_resumed_run_knows_the_lowest_loss(world: MakeWorld, tmp_path: Path) -> None:
    settings = (*EVERY, "checkpoint.best=true", "evaluation.patience=3")
    world(1).run(run_with_losses, tiny(tmp_path, *settings, "train.steps=2"), [5.0, 3.0, 4.0])
    config = tiny(tmp_path, *settings)
    [result] = world(1).run(run_with_losses, config, [3.5, 2.5, 4.0, 4.0])
    assert list(result.losses) == [3, 4, 5, 6]
    assert [each["step"] for each in records(config, "checkpoint") if each["best"]] == [0, 1, 4]


def test_checkpoints_of_earlier_versions_resume(world: MakeWorld, tmp_path: Path) -> None:
    world(1).run(run_of_an_earlier_version, tiny(tmp_path, "train.steps=2"))
    [result] = world(1).run(run, tiny(tmp_path, "train.steps=3"))
    assert list(result.losses) == [3]


def run_of_an_earlier_version(config: RunConfig) -> None:
    old = {"step": 2, "position": 16, "tokens": 256, "bad_steps": 0}
    with patch("fullshard.programs.train.resume.asdict", lambda state: old):
        run(config)


@pytest.mark.parametrize("setting", ["evaluation.patience=2", "checkpoint.best=true"])
def test_both_need_evaluations_between_the_steps(setting: str) -> None:
    with pytest.raises(ConfigurationError, match=r"needs evaluations between the steps"):
        read_config(None, [setting])


# --- bfloat16 ----------------------------------------------------------------------------------------------


def test_weights_in_bfloat16_take_half_of_the_memory(world: MakeWorld, tmp_path: Path) -> None:
    [full] = world(1).run(run, tiny(tmp_path / "full"))
    for api in ("fsdp2", "fsdp1"):
        config = tiny(
            tmp_path / api,
            *("model.dtype=bf16", "compute.precision=bf16", f"sharding.api={api}"),
            "checkpoint.export=true",
        )
        results = world(2).run(run, config)
        assert results[0].losses == pytest.approx(full.losses, rel=0.1)
        [start] = records(config, "start")
        assert start["unsharded_bytes"] == 2 * start["parameters"]
        *_, step = records(config, "step")
        assert 1.9 < step["optimizer_bytes"] / start["rank_bytes"][0] < 2.2, (
            "the state is bf16, too"
        )
        found = weights(config.run.folder / "checkpoints" / "step_00000006")
        assert {each.dtype for each in found.values()} == {torch.bfloat16}
        assert '"bfloat16"' in (config.run.folder / "model" / "config.json").read_text()


def test_weights_in_bfloat16_are_computed_with_in_bfloat16() -> None:
    with pytest.raises(ConfigurationError, match=r"model\.dtype is bf16, and compute\.precision"):
        read_config(None, ["model.dtype=bf16"])
