"""Processes die at any moment; the newest complete checkpoint is always there, and nothing confuses it."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from fullshard import checkpoint, fully_shard
from fullshard.checkpoint import manifest as manifests
from fullshard.checkpoint.sources.stored_checkpoint import StoredCheckpoint
from fullshard.layout.blocks import whole
from tests.helpers.ranks import RankError

KILLS = int(os.environ.get("FULLSHARD_KILLS", "7"))
"""Each takes half a second; fifty are for when it matters."""
SAVES = 4


def build() -> tuple[nn.Module, optim.Optimizer]:
    model = nn.Sequential(nn.Linear(7, 50), nn.Linear(50, 3))
    fully_shard(model)
    return model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def live(folder: Path, lives: dict[str, float], seed: int | None) -> dict[str, float]:
    """Load, then save a few times; return how long these took.

    With a seed, this rank, the other, or both are killed at any moment of one of these, of the length that ``lives``
    says.
    """
    choice = random.Random(seed)
    victim, phase = choice.choice([0, 1, None]), choice.choice(["load", "save", "save"])
    moment = choice.uniform(0, lives[phase])
    model, optimizer = build()
    began = {}

    def begin(this: str) -> None:
        dist.barrier()
        began[this] = time.perf_counter()
        if seed is not None and this == phase and victim in (None, dist.get_rank()):
            killer = threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL))
            killer.daemon = True
            killer.start()

    begin("load")
    newest = checkpoint.latest(folder)
    step = 0 if newest is None else checkpoint.load(newest, model, optimizer).extra["step"]
    begin("save")
    for turn in itertools.count() if seed is not None else range(SAVES):
        step += 1
        with torch.no_grad():
            for param in model.parameters():
                state = optimizer.state[param]
                buffer = state.setdefault("momentum_buffer", param.detach().clone())
                for tensor in (param, buffer):
                    tensor.to_local().fill_(step)  # type: ignore[operator]
        kind = checkpoint.save if turn % 2 else checkpoint.async_save
        kind(folder / f"step-{step % 5}", model, optimizer, extra={"step": step}, keep_last=3)
    assert turn % 2, "the last one was not left to a thread"
    end = time.perf_counter()
    return {"load": began["save"] - began["load"], "save": end - began["save"]}


def newest_step(folder: Path) -> int:
    """Of the newest checkpoint, of which every byte is of that step."""
    path = checkpoint.latest(folder)
    if path is None:
        return 0
    source = StoredCheckpoint(path, manifests.read(path))
    assert source.verify([(key, whole(info.shape)) for key, info in source.tensors.items()]) == []
    step: int = source.extra["step"]
    assert len(source.tensors) == 8
    for key, info in source.tensors.items():
        found = torch.empty(info.shape, dtype=info.dtype)
        source.read(key, whole(info.shape), found)
        assert torch.equal(found, torch.full_like(found, step)), f"{key} is not of step {step}"
    source.close()
    return step


@pytest.mark.timeout(180)
def test_the_newest_complete_one_survives_every_kill(world: Any, tmp_path: Path) -> None:
    lives = {"load": 0.0, "save": 0.0}
    for _ in range(2):  # the second one has something to load
        lives, _ = world(2).run(live, tmp_path, lives, None)
    steps = [newest_step(tmp_path)]
    assert steps == [2 * SAVES]
    seeds = itertools.count()
    while len(steps) <= KILLS or steps[-1] == steps[0]:  # some must be completed between kills
        if len(steps) > KILLS:  # the machine is slower than it was
            lives = {phase: 2 * seconds for phase, seconds in lives.items()}
        with pytest.raises(RankError, match="SIGKILL"):
            world(2).run(live, tmp_path, lives, next(seeds))
        steps.append(newest_step(tmp_path))
    assert steps == sorted(steps)  # what was complete is never lost
    # After the next save, all that is left is its run's last checkpoints, and nothing of the killed ones.
    world(2).run(save_once, tmp_path)
    assert len(list(tmp_path.iterdir())) <= 3
    for path in tmp_path.iterdir():
        assert sorted(each.name for each in path.iterdir())[1:] == ["manifest.json"]


def save_once(folder: Path) -> None:
    model, optimizer = build()
    newest = checkpoint.latest(folder)
    assert newest is not None
    checkpoint.load(newest, model, optimizer)
    checkpoint.save(folder / "last", model, optimizer, keep_last=3)
