"""Runs that are shown by Weights & Biases (`log.wandb`), with a stand-in for its module."""

import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fullshard.programs.run_events import read_events
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.launch import problems_here
from fullshard.programs.train.result import TrainResult
from fullshard.programs.train.run_folder import RunFolder
from fullshard.programs.train.trackers import Tracking
from fullshard.programs.train.wandb_run import WandbRun
from tests.helpers.runs import Incident, run, tiny

Calls = list[tuple[str, Any]]

WANDB = ("log.wandb=true", "log.wandb_offline=true", "schedule.kind=constant")


class FakeWandb(ModuleType):
    """The module, and its only run: it remembers calls, and fails in those that it is told to."""

    def __init__(self, failing: tuple[str, ...] = ()) -> None:
        super().__init__("wandb")
        self.calls: Calls = []
        self._failing = failing

    def _note(self, name: str, value: Any) -> None:
        self.calls.append((name, value))
        if name in self._failing:
            raise ConnectionError(f"{name}: no network\nand more")

    def init(self, **options: Any) -> Any:
        self._note("init", options)
        return self

    def define_metric(self, name: str, **options: Any) -> None:
        self._note("define_metric", (name, options))

    def log(self, data: dict[str, Any]) -> None:
        self._note("log", data)

    def finish(self, exit_code: int | None = None) -> None:
        self._note("finish", exit_code)


def tracked(
    config: RunConfig, *incidents: Incident, failing: tuple[str, ...] = ()
) -> tuple[TrainResult | str, Calls, str]:
    """The result of a run or its error, what W&B was told, and what was shown."""
    shown, fake = io.StringIO(), FakeWandb(failing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", fake)
        try:
            result: Any = run(config, *incidents, shown=shown)
        except RuntimeError as error:
            result = str(error)
    return result, fake.calls, shown.getvalue()


def test_a_run_and_its_resume_are_one_run_of_wandb(world: Any, tmp_path: Path) -> None:
    config = tiny(tmp_path, *WANDB, "train.steps=2")
    (first, calls, _), (_, others, _) = world(2).run(tracked, config)
    assert not others, "only the first rank tells"
    name, options = calls[0]
    assert (name, options["mode"], options["project"]) == ("init", "offline", "fullshard")
    assert options["dir"] == str(config.run.folder) and options["name"] == "run"
    assert options["config"]["train"]["steps"] == 2 and options["resume"] == "allow"
    assert options["config"]["run"]["folder"] == str(config.run.folder)
    logged = [data for kind, data in calls if kind == "log"]
    assert [(data["step"], data.get("held_out/loss")) for data in logged] == [
        (0, first.evaluations[0]),
        *((1, None), (2, None)),
        (2, first.evaluations[2]),
    ]
    assert [data["train/loss"] for data in logged[1:3]] == list(first.losses.values())
    assert {"train/lr", "train/grad_norm", "train/step_s"} <= logged[1].keys()
    assert calls[-1] == ("finish", 0)
    longer = tiny(tmp_path, *WANDB, "train.steps=3")
    [(_, resumed, _)] = world(1).run(tracked, longer)
    assert resumed[0][1]["id"] == options["id"]
    assert [data["step"] for kind, data in resumed if kind == "log"] == [3, 3]
    [(error, failed, _)] = world(1).run(
        tracked, tiny(tmp_path, *WANDB, "train.steps=4"), Incident("error", 1, rank=None)
    )
    assert error == "died" and failed[-1] == ("finish", 1)


def test_a_tracker_that_fails_stops_nothing_and_is_told_once(world: Any, tmp_path: Path) -> None:
    text = "Logging to Weights & Biases has stopped, and the run goes on: {}: no network"
    config = tiny(tmp_path, *WANDB, "train.steps=2")
    [(result, calls, shown)] = world(1).run(tracked, config, failing=("log",))
    assert len(result.losses) == 2 and [kind for kind, _ in calls].count("log") == 1
    assert " ".join(shown.split()).count(text.format("log")) == 1 and "and more" not in shown
    for failing in ("init", "finish"):
        warnings: list[str] = []
        fake = FakeWandb((failing,))
        wandb_run = WandbRun(RunFolder(config.run.folder), config, fake)
        tracker = Tracking("Weights & Biases", wandb_run, warnings.append)
        for event in read_events(config.run.folder / "metrics.jsonl"):
            tracker(event)
        tracker.close()
        assert warnings == [text.format(failing)]
        assert len(fake.calls) == (1 if failing == "init" else 8)


def test_a_missing_package_is_found_before_the_run_starts(tmp_path: Path) -> None:
    if importlib.util.find_spec("wandb") is not None:
        pytest.skip("it is installed here")
    [problem] = problems_here(tiny(tmp_path, "log.wandb=true"))
    assert "log.wandb needs the package wandb. Install the extra (pip install" in problem.text
