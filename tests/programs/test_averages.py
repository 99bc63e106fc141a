"""Runs that keep averages of their parameters (`optimizer.ema`)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from fullshard.checkpoint.source import Source
from fullshard.checkpoint.sources.formats import use_source
from fullshard.checkpoint.sources.verified_reads import read_verified
from fullshard.programs.cli import build_app
from fullshard.programs.train.built_in import llama_name
from fullshard.programs.train.config import RunConfig
from tests.helpers.runs import run, tiny

EMA = ("optimizer.ema=0.5", "evaluation.ema=true", "schedule.kind=constant", "train.steps=4")


def tensors_of(config: RunConfig, step: int, prefix: str, suffix: str = "") -> dict[str, Tensor]:
    """The tensors of a run's checkpoint, whole, by the names of their parameters."""

    def read(source: Source) -> dict[str, Tensor]:
        return {
            key.removeprefix(prefix).removesuffix(suffix): read_verified(source, key)
            for key in source.tensors
            if key.startswith(prefix) and key.endswith(suffix)
        }

    return use_source(config.run.folder / "checkpoints" / f"step_{step:08d}", read)


def exported(config: RunConfig, *arguments: object) -> dict[str, Tensor]:
    result = CliRunner().invoke(
        build_app(), ["export", str(config.run.folder), *map(str, arguments)]
    )
    assert result.exit_code == 0, result.output
    return load_file(config.run.folder / "model" / "model.safetensors")


def test_a_run_keeps_averages_evaluates_them_and_exports_them(world: Any, tmp_path: Path) -> None:
    config = tiny(
        tmp_path / "ema",
        *(*EMA, "checkpoint.every=1", "checkpoint.export=true", "checkpoint.export_ema=true"),
    )
    result, _ = world(2).run(run, config)
    before, after = (tensors_of(config, step, "optimizer/", "/ema") for step in (3, 4))
    weights = tensors_of(config, 4, "model/")
    assert before.keys() == after.keys() == weights.keys()
    expected = {name: before[name].lerp(weights[name], 0.5) for name in weights}
    model = load_file(config.run.folder / "model" / "model.safetensors")
    for name, value in expected.items():
        torch.testing.assert_close(after[name], value)
        assert torch.equal(model[llama_name(name)], after[name])
    assert torch.equal(exported(config)["lm_head.weight"], weights["head.weight"])
    assert torch.equal(exported(config, "--ema")["lm_head.weight"], after["head.weight"])

    # The same run in two parts, on other ranks.
    world(1).run(run, tiny(tmp_path / "parts", *EMA, "train.steps=2"))
    resumed, _ = world(2).run(run, tiny(tmp_path / "parts", *EMA, "sharding.api=fsdp1"))
    assert resumed.evaluations[4] == pytest.approx(result.evaluations[4], rel=1e-4)
    assert resumed.losses == pytest.approx({n: result.losses[n] for n in (3, 4)}, rel=1e-4)
