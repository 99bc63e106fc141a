"""A file system with a bad moment (EIO, ESTALE) loses nothing: each call of a save fails once, listings included."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from fullshard import CheckpointError, checkpoint
from fullshard.checkpoint import manifest as manifests
from tests.checkpoint.folders.test_retention import names, restarted
from tests.helpers.failing_files import FailingFiles, Nth


def save(path: Path, model: nn.Linear, value: float, keep: int) -> None:
    with torch.no_grad():
        model.weight.fill_(value)
    checkpoint.save(path, model, extra=value, keep_last=keep)


def value_of(path: Path) -> float:
    """What a checkpoint has, after it was read in whole."""
    model = nn.Linear(2, 2)
    value: float = checkpoint.load(path, model).extra
    assert bool((model.weight == value).all())
    return value


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the checkpoints of a run that has ended, and a folder of the user's."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    model = nn.Linear(2, 2)
    for step in (1, 2, 3):
        save(tmp_path / "before" / f"step-{step}", model, step, 3)
    (tmp_path / "before" / "empty").mkdir()
    return tmp_path / "before"


@pytest.mark.parametrize("name", ["step-4", "step-1"])
@pytest.mark.filterwarnings("ignore:No old checkpoint in", "ignore:An old checkpoint cannot")
def test_whichever_call_of_a_save_fails_once_no_newest_checkpoint_is_lost(
    three: Path, name: str
) -> None:
    sites = set()
    for number in itertools.count():
        folder = three.with_name(str(number))
        shutil.copytree(three, folder)
        model, fault = restarted(folder / "step-3"), Nth(number)
        was_saved = True
        with FailingFiles(folder, fault, (errno.EIO, errno.ESTALE)[number % 2]):
            try:
                save(folder / name, model, 4.0, 2)
            except CheckpointError:
                was_saved = False
        newest = checkpoint.latest(folder)
        assert newest is not None
        left, value = names(folder), value_of(newest)
        where = (number, fault.site, left)
        assert value_of(folder / "step-3") == 3, where
        assert value == 4 or (not was_saved and {"step-1", "step-2"} <= set(left)), where
        save(folder / "step-5", restarted(newest), 5.0, 2)
        assert names(folder) == sorted(["empty", newest.name, "step-5"]), where
        assert all(len(names(folder / each)) == 2 for each in (newest.name, "step-5")), where
        shutil.rmtree(folder)
        if fault.site is None:
            break
        sites.add(fault.site.split()[0])
    assert number > 50 and {"listdir", "stat", "open", "mkdir", "replace", "rmdir"} <= sites


def test_whichever_call_fails_once_the_newest_is_found(three: Path) -> None:
    for number in itertools.count():
        fault = Nth(number)
        with FailingFiles(three, fault):
            assert checkpoint.latest(three) == three / "step-3", fault.site
        if fault.site is None:
            break
    assert number > 8


@pytest.mark.parametrize("hidden", ["the folder", "step-3", "step-3 and step-2"])
def test_what_cannot_be_read_for_a_while_is_not_outnumbered(three: Path, hidden: str) -> None:
    """All the time in which a new process saves, an error hides the folder, or checkpoints in it."""
    model = nn.Linear(2, 2)

    def fails(call: str, path: Path) -> bool:
        if hidden == "the folder":
            return path == three and call in ("listdir", "scandir")
        return path.name == "manifest.json" and path.parent.name in hidden

    with (
        FailingFiles(three, fails),
        pytest.warns(UserWarning, match="No old checkpoint in .*Input"),
    ):
        save(three / "step-4", model, 4.0, 1)
        save(three / "step-5", model, 5.0, 1)
    assert names(three) == ["empty", *(f"step-{step}" for step in range(1, 6))]
    assert checkpoint.latest(three) == three / "step-5"
    save(three / "step-6", restarted(three / "step-5"), 6.0, 2)
    assert names(three) == ["empty", "step-1", "step-2", "step-3", "step-5", "step-6"]
    assert checkpoint.latest(three) == three / "step-6"


def test_a_run_does_not_begin_anew_because_nothing_can_be_read_now(three: Path) -> None:
    with FailingFiles(three, lambda _, path: path.name == "manifest.json"):
        with pytest.raises(CheckpointError, match=r"(?s)no complete .*step-1: .*Input/output"):
            checkpoint.latest(three)
    with FailingFiles(three, lambda _, path: path.parent.name == "step-3"):
        with pytest.warns(UserWarning, match="step-3 is skipped: .*Input/output error"):
            assert checkpoint.latest(three) == three / "step-2"


def test_another_version_of_fullshard_numbers_its_checkpoints_above_ours(three: Path) -> None:
    """A downgrade: the newest checkpoints have a format that this version cannot read; then the upgrade."""
    unread = {}
    for name in ("step-2", "step-3"):
        file = three / name / "manifest.json"
        unread[file] = file.read_text()
        parts = json.loads(unread[file])
        parts["version"] = 2
        del parts["crc32"]
        parts["crc32"] = manifests._checksum(parts)
        file.write_text(json.dumps(parts))
    model = restarted(three / "step-1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(three / "step-4", model, 4.0, 1)
    for file, text in unread.items():
        file.write_text(text)
    assert checkpoint.latest(three) == three / "step-4"
    save(three / "step-5", model, 5.0, 1)
    assert names(three) == ["empty", "step-2", "step-3", "step-5"]


def test_of_equal_numbers_none_is_removed_for_the_other(three: Path) -> None:
    """An older fullshard has given a number twice."""
    file = three / "step-3" / "manifest.json"
    parts = json.loads(file.read_text())
    parts["serial"] = 2
    del parts["crc32"]
    parts["crc32"] = manifests._checksum(parts)
    file.write_text(json.dumps(parts))
    save(three / "step-4", restarted(three / "step-3"), 4.0, 2)
    assert names(three) == ["empty", "step-2", "step-3", "step-4"]
