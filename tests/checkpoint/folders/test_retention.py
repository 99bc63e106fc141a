"""Several runs in one folder: each removes its own old checkpoints, and nothing of anybody else."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from fullshard import CheckpointError, FullyShardedDataParallel, checkpoint
from fullshard.checkpoint import manifest as manifests
from fullshard.checkpoint.folders import retention, unfinished_save
from tests.checkpoint.folders.test_publication import kill_a_save

SAVES = 12


def save(path: Path, model: nn.Module, keep: int | None) -> None:
    checkpoint.save(path, model, keep_last=keep)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def restarted(path: Path) -> nn.Linear:
    """A model that goes on from a checkpoint of a process that has ended."""
    retention._OWN_IDS.clear()
    for run in list(retention._RUNS.values()):
        run.release()
    model = nn.Linear(2, 2)
    checkpoint.load(path, model)
    return model


# --- who removes what ----------------------------------------------------------------------------------------


def test_a_run_removes_only_what_it_wrote_itself(tmp_path: Path) -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    save(tmp_path / "best", first, None)  # by hand
    for step in range(3):
        save(tmp_path / f"a-{step}", first, 2)
        save(tmp_path / f"b-{step}", second, 1)
        if step == 1:
            shutil.copytree(tmp_path / "a-1", tmp_path / "copy")
            (tmp_path / "link").symlink_to("a-1")
    save(tmp_path / "a-3", first, 1)
    assert names(tmp_path) == ["a-3", "b-2", "best", "copy", "link"]
    for name in ("a-3", "b-2", "best", "copy"):
        checkpoint.load(tmp_path / name, nn.Linear(2, 2))


def test_what_cannot_be_removed_stays_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    for step in range(2):
        save(tmp_path / str(step), model, 2)

    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(f"{path} is another user's")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match=r"stays: .*0 is another"):
        patch.setattr(retention, "remove", refuse)
        save(tmp_path / "2", model, 2)
    assert names(tmp_path) == ["0", "1", "2"]
    save(tmp_path / "3", model, 2)
    assert names(tmp_path) == ["2", "3"]


def test_a_run_that_goes_on_in_another_process_removes_its_old_ones(tmp_path: Path) -> None:
    save(tmp_path / "other", nn.Linear(2, 2), 1)
    model = nn.Linear(2, 2)
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step}", model, 3)
    model = restarted(tmp_path / "step-3")
    save(tmp_path / "step-4", model, 3)
    assert names(tmp_path) == ["other", "step-2", "step-3", "step-4"]
    model = restarted(tmp_path / "step-4")
    save(tmp_path / "step-5", model, 2)
    assert names(tmp_path) == ["other", "step-4", "step-5"]
    # What is not there any more is not written down for ever.
    model = restarted(tmp_path / "step-5")
    save(tmp_path / "step-6", model, 1)
    save(tmp_path / "step-7", model, 1)
    mark = manifests.read(tmp_path / "step-7").run
    assert mark is not None and mark.before == {}
    # What was loaded to look at it, or to begin something else with it, is not gone on with.
    checkpoint.save(tmp_path / "full", model, optim.SGD(model.parameters()), keep_last=1)
    fresh = nn.Linear(2, 2)
    checkpoint.load(tmp_path / "full", fresh, without_optimizer=True)
    save(tmp_path / "fresh", fresh, 1)
    assert names(tmp_path) == ["fresh", "full", "other"]


def test_what_another_one_has_gone_on_with_stays(tmp_path: Path) -> None:
    living = nn.Linear(2, 2)
    save(tmp_path / "a-1", living, 1)
    branch = nn.Linear(2, 2)
    checkpoint.load(tmp_path / "a-1", branch)
    save(tmp_path / "b-1", branch, 1)  # the first run has not ended: this is another one
    assert names(tmp_path) == ["a-1", "b-1"]
    save(tmp_path / "a-2", living, 2)
    one, other = restarted(tmp_path / "a-1"), nn.Linear(2, 2)
    checkpoint.load(tmp_path / "a-1", other)
    save(tmp_path / "c-1", one, 1)
    save(tmp_path / "d-1", other, 1)
    # a-1 is behind both, and a-2 is behind none of them.
    assert names(tmp_path) == ["a-2", "b-1", "c-1", "d-1"]


def test_a_model_that_was_loaded_before_it_was_wrapped_is_the_same_run(
    tmp_path: Path, world: Any
) -> None:
    save(tmp_path / "step-1", nn.Linear(2, 2), 1)
    world(1).run(wrap_and_save, tmp_path)
    assert names(tmp_path) == ["step-2"]


def wrap_and_save(folder: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoint.load(folder / "step-1", model)
    save(folder / "step-2", FullyShardedDataParallel(model), 1)


def test_older_manifests_are_of_no_run(tmp_path: Path) -> None:
    save(tmp_path / "old", nn.Linear(2, 2), None)
    manifest = manifests.read(tmp_path / "old")
    parts = manifests.text_of(manifest).replace('\n"run": null,', "")
    without = json.loads(parts)
    del without["crc32"]
    without["crc32"] = manifests._checksum(without)
    (tmp_path / "old" / "manifest.json").write_text(json.dumps(without))
    model = restarted(tmp_path / "old")
    save(tmp_path / "new", model, 1)
    assert names(tmp_path) == ["new", "old"]


# --- the living and the dead ---------------------------------------------------------------------------------


def test_unfinished_saves_of_the_dead_are_removed_and_those_of_the_living_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path / "step-1", model, 2)
    kill_a_save(tmp_path / "killed")
    kill_a_save(tmp_path / "step-1")
    (tmp_path / "early").mkdir()  # killed before it had made its folder
    (tmp_path / "early" / "manifest.json.0123456789ab.tmp").touch()
    living = [unfinished_save.UnfinishedSave(tmp_path / name) for name in ("living", "step-1")]
    monkeypatch.setattr(unfinished_save, "_machine", lambda: "ffffff")
    elsewhere = kill_a_save(tmp_path / "elsewhere")
    monkeypatch.undo()
    for name in ("notes", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    save(tmp_path / "step-2", model, 2)
    there = ["empty", "living", "notes", "step-1", "step-2"]
    # A machine cannot always see the locks of another one, so it waits.
    assert names(tmp_path) == sorted(["early", "elsewhere", *there])
    assert len(names(tmp_path / "step-1")) == 4
    long_ago = time.time() - 2 * unfinished_save.PATIENCE_S
    files = [elsewhere, *elsewhere.parent.iterdir(), *(tmp_path / "early").iterdir()]
    for file in files:
        os.utime(file, (long_ago, long_ago))
    for each in living:
        each.abandon()
    save(tmp_path / "step-1", model, 2)
    there.remove("living")
    assert names(tmp_path) == there
    assert len(names(tmp_path / "step-1")) == 2


# --- two jobs at once, and readers ---------------------------------------------------------------------------


def work_at_once(folder: Path) -> list[str]:
    """Two ranks are jobs of their own, which save in one folder and to one path; the third one reads all the time."""
    rank = dist.get_rank()
    group = [dist.new_group([each]) for each in range(3)][rank]
    model = nn.Linear(3, 3)
    dist.barrier()
    if rank == 2:
        return read_at_once(folder, model, group)
    for step in range(SAVES):
        with torch.no_grad():
            model.weight.fill_(step)
        extra = {"job": rank, "step": step}
        path = folder / f"job{rank}-{step}"
        saved = checkpoint.save(path, model, extra=extra, keep_last=1, process_group=group)
        if step % 4 == 0:
            both = folder / "same" / "path"
            checkpoint.save(both, model, extra=extra, keep_last=1, process_group=group)
        assert checkpoint.load(saved.path, model, process_group=group).extra == extra
    (folder / f"done-{rank}").touch()
    return []


def read_at_once(folder: Path, model: nn.Module, group: Any) -> list[str]:
    """What reading failed with, beside what was removed before it could be read."""
    errors = []
    seen = set()
    while not all((folder / f"done-{rank}").exists() for rank in range(2)):
        for parent in (folder, folder / "same"):
            path = checkpoint.latest(parent)
            if path is None:
                errors += ["there was one, and now there is none"] if parent in seen else []
                continue
            seen.add(parent)
            try:
                loaded = checkpoint.load(path, model, process_group=group)
                assert bool((model.weight == loaded.extra["step"]).all())
            except CheckpointError as error:
                # Wholly, so far that the manifest is gone, or while it was read.
                said = ("is not there", "has none", "was removed while")
                removed = any(text in str(error) for text in said)
                if not removed or parent != folder:
                    errors.append(str(error))
    return errors


def test_two_jobs_in_one_folder_lose_nothing_and_readers_see_no_damage(
    world: Any, tmp_path: Path
) -> None:
    assert world(3).run(work_at_once, tmp_path) == [[], [], []]
    last = [f"job{rank}-{SAVES - 1}" for rank in range(2)]
    assert names(tmp_path) == sorted(["done-0", "done-1", *last, "same"])
    for name in last:
        assert names(tmp_path / name)[1:] == ["manifest.json"]
        checkpoint.load(tmp_path / name, nn.Linear(3, 3))
    assert len(names(tmp_path / "same" / "path")) == 2
