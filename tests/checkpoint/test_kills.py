"""Processes die at any moment; the newest complete checkpoint is always there, and nothing confuses it."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from fullshard import checkpoint, fully_shard
from fullshard.checkpoint import manifest as manifests
from fullshard.checkpoint.blocks import whole
from fullshard.checkpoint.stored import StoredCheckpoint
from tests.helpers.ranks import RankError

KILLS = 50
LIFE_S = 0.3
"""Of the longest-lived ranks: a load, and some ten saves."""


def build() -> tuple[nn.Module, optim.Optimizer]:
    model = nn.Sequential(nn.Linear(7, 50), nn.Linear(50, 3))
    fully_shard(model)
    return model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def live_and_die(folder: Path, seed: int) -> None:
    """Load, then save without end, until this rank, the other, or both are killed."""
    choice = random.Random(seed)
    victim = choice.choice([0, 1, None])
    moment = choice.uniform(0, LIFE_S)
    model, optimizer = build()
    dist.barrier()
    if victim in (None, dist.get_rank()):
        killer = threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL))
        killer.daemon = True
        killer.start()
    step = 0
    newest = checkpoint.latest(folder)
    if newest is not None:
        step = checkpoint.load(newest, model, optimizer).extra["step"]
    while True:
        step += 1
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(step)
                optimizer.state[param] = {"momentum_buffer": torch.full_like(param, step)}
        kind = checkpoint.async_save if step % 2 else checkpoint.save
        kind(folder / f"step-{step % 5}", model, optimizer, extra={"step": step}, keep_last=3)


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
    steps = [0]
    for seed in range(KILLS):
        with pytest.raises(RankError):
            world(2).run(live_and_die, tmp_path, seed)
        steps.append(newest_step(tmp_path))
    assert steps == sorted(steps)  # what was complete is never lost
    assert steps[-1] > KILLS
    # What the killed ones left is gone after the next save.
    world(2).run(save_once, tmp_path)
    assert len(list(tmp_path.iterdir())) <= 3
    for path in tmp_path.iterdir():
        assert sorted(each.name for each in path.iterdir())[1:] == ["manifest.json"]


def save_once(folder: Path) -> None:
    model, optimizer = build()
    checkpoint.save(folder / "last", model, optimizer, keep_last=3)
