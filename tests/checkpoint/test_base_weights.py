"""Checkpoints of only what training changes: without frozen parameters, which are those of a base."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard import checkpoint
from fullshard.checkpoint.conversion import write
from fullshard.checkpoint.formats import open_source
from fullshard.errors import CheckpointError
from tests.helpers.checkpointed import ODD, Setting, train, whole_state
from tests.helpers.compare import assert_equal

FROZEN = ("blocks.0.up.weight", "blocks.0.up.bias", "blocks.0.scale", "norm.weight")
MODEL = replace(ODD, depth=1, frozen=FROZEN)
DOORS = ("functional", "wrapper")


def save_all(folder: Path) -> None:
    for door in DOORS:
        model, optimizer = Setting(door=door, model=MODEL).build()
        path = folder / door
        checkpoint.save(path / "base", model)
        base = checkpoint.base_of(path / "base", model)
        train(model, optimizer, range(2))
        checkpoint.async_save(path / "step", model, optimizer, base=base, extra=3).wait()
        state = whole_state(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(state, path / "state.pt")
        every = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(
            CheckpointError, match=r"must not have them; it has:\n  blocks.0.norm.weight\n"
        ):
            checkpoint.save(path / "never", model, every, base=base)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(9.0)
        with pytest.raises(
            CheckpointError, match=r"(?s)blocks.0.scale: other values.*norm.weight: other"
        ):
            checkpoint.base_of(path / "base", model)


def load_all(folder: Path) -> None:
    for number, door in enumerate(DOORS):
        path = folder / DOORS[number - 1]
        expected = torch.load(path / "state.pt")
        for base in (None, folder / "huggingface"):
            model, optimizer = Setting(door=door, model=MODEL).build(seed=5)
            loaded = checkpoint.load(path / "step", model, optimizer, base=base)
            assert loaded.extra == 3
            assert_equal(whole_state(model, optimizer), expected)


def test_the_rest_is_loaded_from_the_base_on_any_ranks(world: Any, tmp_path: Path) -> None:
    world(2).run(save_all, tmp_path)
    manifest = json.loads((tmp_path / "wrapper" / "step" / "manifest.json").read_text())
    kept = {key.split("/")[1] for key in manifest["tensors"]}
    assert kept.isdisjoint(FROZEN) and "blocks.0.down.weight" in kept
    write(open_source(tmp_path / "functional" / "base"), tmp_path / "huggingface", to="huggingface")
    world(3).run(load_all, tmp_path)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of one process, `step`, with the base beside it."""
    model, optimizer = Setting(door="plain", model=MODEL).build()
    checkpoint.save(tmp_path / "run" / "base", model)
    base = checkpoint.base_of(tmp_path / "run" / "base", model)
    checkpoint.save(tmp_path / "run" / "step", model, optimizer, base=base)
    return tmp_path / "run"


def test_a_base_that_is_missing_or_another_one_is_refused(saved: Path) -> None:
    model, optimizer = Setting(door="plain", model=MODEL).build(seed=5)
    moved = saved.rename(saved.with_name("moved"))
    checkpoint.load(moved / "step", model, optimizer)
    before = whole_state(model, optimizer)
    shutil.rmtree(moved / "base")
    with pytest.raises(CheckpointError, match=r"needs its base.*run/base or .*Pass the path"):
        checkpoint.load(moved / "step", model, optimizer)
    other, _ = Setting(door="plain", model=MODEL).build(seed=7)
    checkpoint.save(moved / "base", other)
    with pytest.raises(CheckpointError, match="has other names, shapes, dtypes or values"):
        checkpoint.load(moved / "step", model, optimizer)
    with pytest.raises(CheckpointError, match="needs no base"):
        checkpoint.load(moved / "base", model, base=moved / "base")
    assert_equal(whole_state(model, optimizer), before)
