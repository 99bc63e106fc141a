"""`fullshard evaluate` finds what the run itself found, on any number of ranks."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fullshard.programs.cli import build_app
from fullshard.programs.evaluate_tool import command
from fullshard.programs.evaluate_tool.held_out import HeldOutResult
from fullshard.programs.evaluate_tool.rank import evaluate
from fullshard.programs.train.config import RunConfig
from tests.helpers.runs import run, tiny


class Evaluate:
    """The command, on the ranks of the tests."""

    def __init__(self, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def on_ranks(config: RunConfig, checkpoint: Path | None) -> HeldOutResult:
            results = world(config.run.ranks).run(evaluate, config, checkpoint, torch.device("cpu"))
            assert len(set(results)) == 1, "the same on all ranks"
            result: HeldOutResult = results[0]
            return result

        monkeypatch.setattr(command, "start", on_ranks)

    def __call__(self, *arguments: object, exit_code: int = 0) -> str:
        result = CliRunner().invoke(build_app(), ["evaluate", *map(str, arguments)])
        assert result.exit_code == exit_code, result.output
        return " ".join(result.output.split())

    def loss(self, *arguments: object) -> float:
        [number] = re.findall(r"Loss (\S+) nats", self(*arguments))
        return float(number)


def test_losses_are_those_of_the_run_on_any_number_of_ranks(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(
        tmp_path,
        *("checkpoint.every=4", "evaluation.every=4", "optimizer.ema=0.9", "train.accumulate=2"),
        *("evaluation.ema=true", "sharding.replicas=2"),
    )
    folder, evaluated = config.run.folder, Evaluate(world, monkeypatch)
    result, _ = world(2).run(run, config)
    files = sorted(path for path in folder.rglob("*") if path.name != "lock")
    shown = evaluated(folder, "--ranks", 2)
    assert f"Loss {result.evaluations[6]:.6f} nats per token" in shown
    assert f"Perplexity {math.exp(result.evaluations[6]):.6g} Tokens 80 held-out tokens" in shown
    assert "step_00000006, after step 6, averages of its parameters" in shown
    loss = evaluated.loss(folder, "--step", 4, "--ranks", 3, "--set", "sharding.api=fsdp1")
    assert loss == pytest.approx(result.evaluations[4], rel=1e-5)
    settings = ("--set", "evaluation.ema=false", "--set", "evaluation.windows=9")
    other = evaluated(folder, "--ranks", 1, *settings)
    assert "Tokens 144 held-out tokens, in 9 windows" in other
    [plain] = map(float, re.findall(r"Loss (\S+) nats", other))
    assert abs(plain - result.evaluations[6]) > 0.05
    assert sorted(path for path in folder.rglob("*") if path.name != "lock") == files
    assert "it has those of: 4, 6" in evaluated(folder, "--step", 5, exit_code=2)
    assert "neither the folder of a run" in evaluated(tmp_path, exit_code=2)
