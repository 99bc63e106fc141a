"""Small training runs, on the ranks of a test."""

import io
import os
import random
import signal
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from fullshard.divergence.watchdog.judge import Judgement
from fullshard.divergence.watchdog.stalls import StallReports
from fullshard.programs.run_events import read_events
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.config_file import read_config
from fullshard.programs.train.data import open_data
from fullshard.programs.train.loop import Job
from fullshard.programs.train.model_source import open_model
from fullshard.programs.train.rank import run_in_folder
from fullshard.programs.train.result import TrainResult
from fullshard.programs.train.stop import noticing_stop_requests

TINY = (
    # The width makes uneven shapes: four ranks cannot share 18 rows evenly.
    *("model.layers=2", "model.width=18", "model.heads=1", "data.context=16", "data.held_out=0.2"),
    *("train.steps=6", "train.batch=8", "optimizer.lr=0.01", "evaluation.windows=5"),
    *("run.device=cpu", "samples.count=0", "log.report=false", "trace.steps=0"),
)


def write_text(folder: Path) -> Path:
    """A file to learn from; of all files in a folder, the same."""
    draw = random.Random(0)
    words = ["for ", "in ", "range(", "x", "):\n", "    ", "return ", "if "]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "text.txt"
    path.write_text("".join(draw.choices(words, k=1500)))
    return path


def tiny(folder: Path, *settings: str) -> RunConfig:
    """A small run in `folder / "run"`, with the text beside it."""
    return read_config(None, tiny_settings(folder, *settings))


def tiny_settings(folder: Path, *settings: str) -> list[str]:
    text = write_text(folder)
    return [*TINY, f"run.folder={folder / 'run'}", f"data.path={text}", *settings]


@dataclass(frozen=True)
class Incident:
    """Something that happens to the forward of one rank in training."""

    what: str
    """nan: the scores are; dropout: some of the scores are dropped, at random; large: the scores are, such that gradients explode; stall: the watchdog notes one; error: one is raised, when no checkpoint
    is on its way; SIGTERM: the process gets it."""
    call: int
    """In which forward, from 1."""
    until: int = 0
    """The last one, if it is not the same."""
    rank: int | None = 1
    """None: on all."""


class EventfulSource:
    """A source of models to whose forward things happen."""

    def __init__(self, source: Any, incidents: Sequence[Incident]) -> None:
        self._source = source
        self._incidents = incidents
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def scores(self, model: nn.Module, tokens: Tensor) -> Tensor:
        scores: Tensor = self._source.scores(model, tokens)
        if not model.training:
            return scores
        self._calls += 1
        for incident in self._incidents:
            in_time = incident.call <= self._calls <= max(incident.call, incident.until)
            if in_time and incident.rank in (None, dist.get_rank()):
                scores = happen(incident.what, scores)
        return scores


def happen(what: str, scores: Tensor) -> Tensor:
    if what == "nan":
        return scores * float("nan")
    if what == "large":
        return scores * 1e6
    if what == "stall":
        slow = Judgement(kind="slow", message="all of it", culprits=(1,), where="at data.py:3")
        StallReports().note(slow, 7.0, 0.0, speaks=False)
        return scores
    if what == "dropout":
        return F.dropout(scores)
    if what == "error":
        for thread in threading.enumerate():
            if thread.name == "fullshard checkpoint":
                thread.join()
        raise RuntimeError("died")
    os.kill(os.getpid(), signal.Signals[what])
    return scores


def run(
    config: RunConfig,
    *incidents: Incident,
    shown: io.StringIO | None = None,
    fresh: bool = False,
) -> TrainResult:
    """Run it on all ranks of a test; what the user would see goes to ``shown``."""
    source: Any = open_model(config)
    if incidents:
        source = EventfulSource(source, incidents)
    data = open_data(config, source)
    with noticing_stop_requests() as stop:
        job = Job(config=config, source=source, data=data, device=torch.device("cpu"), stop=stop)
        return run_in_folder(job, Console(file=shown or io.StringIO()), fresh=fresh)


def run_each(configs: Sequence[RunConfig]) -> list[TrainResult]:
    """Run one after the other."""
    return [run(config) for config in configs]


def records(config: RunConfig, kind: str) -> list[dict[str, Any]]:
    """What the run has written, of a kind."""
    events = read_events(config.run.folder / "metrics.jsonl")
    return [{"kind": kind, **asdict(event)} for event in events if event.kind == kind]


def last_losses(config: RunConfig) -> dict[int, float]:
    """The loss of each step as a reader sees it: the last record counts."""
    return {record["step"]: record["loss"] for record in records(config, "step")}


def in_folder(config: RunConfig, folder: Path) -> RunConfig:
    """The same run elsewhere."""
    return replace(config, run=replace(config.run, folder=folder))
