"""Runs that train some of their parameters (`model.trainable`), and save only these (`checkpoint.only_trainable`)."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fullshard.errors import CheckpointError, ConfigurationError
from fullshard.programs.cli import build_app
from fullshard.programs.evaluate_tool.rank import evaluate
from tests.helpers.runs import run, tiny

SOME = (
    "model.trainable=blocks.1.* head.*",
    "checkpoint.only_trainable=true",
    "schedule.kind=constant",
)


def test_only_trained_parameters_are_saved_and_a_run_goes_on_with_them(
    world: Any, tmp_path: Path
) -> None:
    config = tiny(tmp_path, *SOME, "train.steps=2")
    [first] = world(1).run(run, config)
    folder = config.run.folder
    resumed, _ = world(2).run(run, tiny(tmp_path, *SOME, "train.steps=4", "sharding.api=fsdp1"))
    whole, _ = world(2).run(run, tiny(tmp_path / "whole", SOME[0], SOME[2], "train.steps=4"))
    assert first.losses | resumed.losses == pytest.approx(whole.losses, rel=1e-4)
    assert resumed.evaluations[4] == pytest.approx(whole.evaluations[4], rel=1e-4)
    saved, base = (
        json.loads((folder / name / "manifest.json").read_text())["tensors"]
        for name in ("checkpoints/step_00000004", "base")
    )
    trained = {key.split("/")[1] for key in saved}
    assert {name.split(".")[0] for name in trained} == {"blocks", "head"}
    assert not any(name.startswith("blocks.0.") for name in trained) and len(base) == 1 + 2 * 9 + 2

    [result] = world(1).run(evaluate, config, None, torch.device("cpu"))
    assert result.loss == pytest.approx(whole.evaluations[4], rel=1e-4)
    exported = CliRunner().invoke(build_app(), ["export", str(folder)])
    assert exported.exit_code == 0, exported.output
    assert len(load_file(folder / "model" / "model.safetensors")) == len(base)

    checkpoint = folder / "checkpoints" / "step_00000004"
    inspected = CliRunner().invoke(build_app(), ["checkpoint", "inspect", str(checkpoint)])
    assert f"{folder / 'base'}hasthefrozenparameters" in "".join(inspected.output.split())
    full = tmp_path / "full.pt"
    converted = CliRunner().invoke(
        build_app(), ["checkpoint", "convert", str(checkpoint), str(full), "--to", "torch"]
    )
    assert converted.exit_code == 0, converted.output
    assert len(torch.load(full)["model"]) == len(base)
    shutil.rmtree(folder / "base")
    [outcome] = world(1).outcomes(run, tiny(tmp_path, *SOME, "train.steps=5"))
    assert isinstance(outcome, CheckpointError) and "needs its base" in str(outcome)
    other = tiny(tmp_path / "other", "model.trainable=blocks.9.*")
    [outcome] = world(1).outcomes(run, other)
    assert isinstance(outcome, ConfigurationError) and "'blocks.9.*' matches none" in str(outcome)
    assert not other.run.folder.exists()
