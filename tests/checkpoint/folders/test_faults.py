"""What is damaged, crafted or cannot be written is a clear error on every rank, and changes nothing."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard import CheckpointError, checkpoint
from tests.helpers.checkpointed import Setting, train, whole_state
from tests.helpers.compare import assert_equal

Damage = Callable[[Path], Any]


def files(path: Path) -> list[Path]:
    return sorted(path.glob("data-*/rank-*.safetensors"))


def flip(file: Path, place: int) -> None:
    """Change one bit; a place before 0 counts from the end."""
    data = bytearray(file.read_bytes())
    data[place] ^= 4
    file.write_bytes(data)


def edit(path: Path) -> None:
    manifest = path / "manifest.json"
    parts = json.loads(manifest.read_text())
    parts["tensors"]["model/norm.weight"]["shape"] = [7]
    manifest.write_text(json.dumps(parts))


def swap(path: Path) -> None:
    first, second, *_ = files(path)
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path / "exploded"),)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "cut short": (lambda p: os.truncate(files(p)[1], 900), r"rank-00001\.safetensors"),
    "emptied": (lambda p: os.truncate(files(p)[0], 0), r"rank-00000\.safetensors"),
    "a bit of data": (lambda p: flip(files(p)[1], -5), r"rank-00001\.safetensors.*optimizer/"),
    "a bit of a header": (lambda p: flip(files(p)[0], 60), r"rank-00000\.safetensors"),
    "missing": (lambda p: files(p)[1].unlink(), r"rank-00001\.safetensors"),
    "all data missing": (lambda p: shutil.rmtree(files(p)[0].parent), "rank-0000"),
    "two files swapped": (swap, r"rank-0000"),
    "an edited manifest": (edit, r"manifest\.json .* was changed"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "has none"),
    "a pickle for a file": (
        lambda p: files(p)[0].write_bytes(pickle.dumps(Bomb(p))),
        r"rank-00000\.safetensors",
    ),
    "a pickle for a manifest": (
        lambda p: (p / "manifest.json").write_bytes(pickle.dumps(Bomb(p))),
        r"manifest\.json",
    ),
}


def load_damaged(folder: Path, api: str) -> dict[str, str]:
    """The error of each damage, by its name; the state of model and optimizer never changes."""
    setting = Setting(api=api)
    model, optimizer = setting.build()
    train(model, optimizer, range(1))
    checkpoint.save(folder / "good", model, optimizer)
    train(model, optimizer, range(1, 2))
    before = whole_state(model, optimizer)
    errors = {}
    for name, (damage, _) in DAMAGES.items():
        bad = folder / name
        if dist.get_rank() == 0:
            shutil.copytree(folder / "good", bad)
            damage(bad)
        dist.barrier()
        try:
            checkpoint.load(bad, model, optimizer)
        except CheckpointError as error:
            errors[name] = str(error)
        assert_equal(whole_state(model, optimizer), before)
    checkpoint.load(folder / "good", model, optimizer)
    return errors


@pytest.mark.parametrize("api", ["functional", "flat"])
def test_damage_is_named_and_nothing_is_loaded(world: Any, tmp_path: Path, api: str) -> None:
    first, second = world(2).run(load_damaged, tmp_path, api)
    assert first == second
    assert first.keys() == DAMAGES.keys()
    for name, (_, pattern) in DAMAGES.items():
        with pytest.raises(CheckpointError, match=f"(?s){pattern}"):
            raise CheckpointError(first[name])
    assert not list(tmp_path.glob("**/exploded"))


def save_where_it_fails(folder: Path) -> list[str]:
    model, optimizer = Setting().build()
    train(model, optimizer, range(1))
    # By a thread, which needs room in the store's file for a process group of its own.
    checkpoint.async_save(folder / "ckpt", model, optimizer, extra="old").wait()
    (folder / "file").touch()
    errors = []

    def fails(call: Callable[[], Any]) -> None:
        with pytest.raises(CheckpointError) as caught:
            call()
        errors.append(str(caught.value))
        assert checkpoint.load(folder / "ckpt", model, optimizer).extra == "old"

    fails(lambda: checkpoint.save(folder / "file" / "below", model, optimizer))
    with full_disk(on_rank=1):
        fails(lambda: checkpoint.save(folder / "ckpt", model, optimizer, extra="new"))
        fails(lambda: checkpoint.save(folder / "new", model, optimizer))
        pending = checkpoint.async_save(folder / "ckpt", model, optimizer, extra="new")
        fails(pending.wait)
        checkpoint.async_save(folder / "ckpt", model, optimizer, extra="new")
        fails(
            lambda: checkpoint.save(folder / "other", model, optimizer)
        )  # the error of the thread
    checkpoint.save(folder / "ckpt", model, optimizer, extra="new")
    return errors


class full_disk:
    """No file of this process can grow beyond some bytes."""

    def __init__(self, on_rank: int) -> None:
        self.applies = dist.get_rank() == on_rank

    def __enter__(self) -> None:
        if self.applies:
            self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            self.handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, self.limits[1]))

    def __exit__(self, *_: object) -> None:
        if self.applies:
            resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)
            signal.signal(signal.SIGXFSZ, self.handler)


def test_a_save_that_fails_leaves_the_old_one_and_no_trace(world: Any, tmp_path: Path) -> None:
    first, second = world(2).run(save_where_it_fails, tmp_path)
    assert first == second
    below, *full = first
    assert "file/below" in below
    for error in full:
        assert "rank 1" in error and "rank-00001.safetensors" in error and "File too large" in error
    assert sorted(each.name for each in tmp_path.iterdir()) == ["ckpt", "file"]
    assert len(list((tmp_path / "ckpt").iterdir())) == 2


def load_what_does_not_fit(folder: Path) -> list[str]:
    model, optimizer = Setting().build()
    train(model, optimizer, range(1))
    checkpoint.save(folder / "both", model, optimizer)
    checkpoint.save(folder / "model", model)
    other, other_optimizer = Setting(model=Setting().model.__class__(depth=3, hidden=9)).build()
    before = whole_state(other, other_optimizer)
    errors = []
    for call in (
        lambda: checkpoint.load(folder / "both", other, other_optimizer),
        lambda: checkpoint.load(folder / "both", model),
        lambda: checkpoint.load(folder / "model", model, optimizer),
        lambda: checkpoint.load(folder / "both", model.bfloat16(), without_optimizer=True),
    ):
        with pytest.raises(CheckpointError) as caught:
            call()
        errors.append(str(caught.value))
    assert_equal(whole_state(other, other_optimizer), before)
    checkpoint.load(folder / "both", model, without_optimizer=True, cast=True)
    assert all(param.dtype == torch.bfloat16 for param in model.parameters())
    return errors


def test_what_does_not_fit_is_listed(world: Any, tmp_path: Path) -> None:
    first, second = world(2).run(load_what_does_not_fit, tmp_path)
    assert first == second
    shapes, forgotten, absent, dtypes = first
    for name in ("blocks.2.up.weight", "blocks.0.up.weight", "blocks.0.scale"):
        assert name in shapes
    assert "no optimizer was passed" in forgotten
    assert "has no optimizer" in absent
    assert "norm.weight" in dtypes and "bfloat16" in dtypes
