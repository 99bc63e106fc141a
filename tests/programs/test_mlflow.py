"""Runs that are shown by MLflow (`log.mlflow`), with a stand-in for its module."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.result import TrainResult
from tests.helpers.runs import Incident, run, tiny

MLFLOW = ("log.mlflow=true", "log.mlflow_experiment=here", "schedule.kind=constant")


class FakeMlflow(ModuleType):
    """The module: it remembers calls."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.calls: list[tuple[str, Any]] = []

    def set_experiment(self, name: str) -> None:
        self.calls.append(("experiment", name))

    def start_run(self, **options: Any) -> Any:
        self.calls.append(("start", options))
        return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    def log_params(self, params: dict[str, Any]) -> None:
        assert len(params) <= 100, "MLflow takes no more"
        self.calls.append(("params", params))

    def log_metrics(self, numbers: dict[str, float], step: int) -> None:
        self.calls.append(("log", (step, numbers)))

    def end_run(self, status: str) -> None:
        self.calls.append(("end", status))


def tracked(config: RunConfig, *incidents: Incident) -> tuple[TrainResult | None, Any]:
    fake = FakeMlflow()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mlflow", fake)
        try:
            return run(config, *incidents, shown=io.StringIO()), fake.calls
        except RuntimeError:
            return None, fake.calls


def test_a_run_and_its_resume_are_one_run_of_mlflow(world: Any, tmp_path: Path) -> None:
    (first, calls), (_, others) = world(2).run(tracked, tiny(tmp_path, *MLFLOW, "train.steps=2"))
    assert not others, "only the first rank tells"
    assert calls[:2] == [("experiment", "here"), ("start", {"run_name": "run"})]
    params = {
        name: value for kind, some in calls if kind == "params" for name, value in some.items()
    }
    assert params["train.steps"] == 2 and params["run.folder"] == str(tmp_path / "run")
    logged = [value for kind, value in calls if kind == "log"]
    assert [step for step, _ in logged] == [0, 1, 2, 2]
    assert logged[1][1]["train/loss"] == first.losses[1]
    assert calls[-1] == ("end", "FINISHED")
    [(_, resumed)] = world(1).run(tracked, tiny(tmp_path, *MLFLOW, "train.steps=3"))
    assert resumed[1] == ("start", {"run_id": "abc"})
    failing = tiny(tmp_path, *MLFLOW, "train.steps=4")
    [(_, failed)] = world(1).run(tracked, failing, Incident("error", 1, rank=None))
    assert failed[-1] == ("end", "FAILED")


def failing_writer(*_: Any, **__: Any) -> Any:
    raise OSError("the disk is full\nand more")


def run_without_tensorboard(config: RunConfig) -> str:
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.utils.tensorboard.SummaryWriter", failing_writer)
        run(config, shown=shown)
    return " ".join(shown.getvalue().split())


def test_tensorboard_costs_no_run_either(world: Any, tmp_path: Path) -> None:
    config = tiny(tmp_path, "train.steps=2", "log.tensorboard=true")
    [shown] = world(1).run(run_without_tensorboard, config)
    text = "Logging to TensorBoard has stopped, and the run goes on: the disk is full"
    assert shown.count(text) == 1 and "and more" not in shown and "Trained 2 steps" in shown
