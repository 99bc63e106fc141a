"""What is published is complete; what is not is never found, and is removed."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fullshard import CheckpointError, checkpoint
from fullshard.checkpoint import manifest as manifests, save_plan
from fullshard.checkpoint.folders import publication, retention
from fullshard.checkpoint.folders.unfinished_save import unlock
from fullshard.checkpoint.manifest import FileRecord, Manifest, file_name
from tests.helpers.failing_files import FailingFiles


def write(path: Path, content: bytes = b"data") -> Manifest:
    """A checkpoint of one file."""
    serial = publication.survey(path.parent).next_serial
    save = publication.begin(path)
    (save.folder / file_name(0)).write_bytes(content)
    manifest = Manifest(
        data=save.folder.name,
        world=1,
        tensors={},
        files={0: FileRecord(len(content), 0)},
        serial=serial,
    )
    publication.publish(save, manifest)
    return manifest


def content(path: Path) -> bytes:
    return (path / manifests.read(path).data / file_name(0)).read_bytes()


def kill_a_save(path: Path) -> Path:
    """What is left if a process dies while it saves: the kernel lets go of its lock."""
    save = publication.begin(path)
    unlock(save._file)
    return save.folder


def test_the_newest_is_what_was_written_last(tmp_path: Path) -> None:
    assert publication.latest(tmp_path) is None
    assert publication.latest(tmp_path / "nobody") is None
    for name in ("step-9", "step-10", "step-2"):
        write(tmp_path / name)
        assert publication.latest(tmp_path) == tmp_path / name
    write(tmp_path / "step-9")
    assert publication.latest(tmp_path) == tmp_path / "step-9"


def test_a_checkpoint_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last"
    write(path, b"old")
    seen = []
    replace_file = Path.replace

    def watch(self: Path, target: Any) -> Any:
        seen.append(content(path))
        found = replace_file(self, target)
        seen.append(content(path))
        return found

    monkeypatch.setattr(Path, "replace", watch)
    write(path, b"new!")
    assert seen == [b"old", b"new!"]
    assert len(list(path.iterdir())) == 2  # the old data are gone


def test_files_are_flushed_before_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    flush, replace_file = os.fsync, Path.replace

    def watch_flush(descriptor: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        flush(descriptor)

    def watch_replace(self: Path, target: Any) -> Any:
        calls.append("rename")
        return replace_file(self, target)

    monkeypatch.setattr(os, "fsync", watch_flush)
    monkeypatch.setattr(Path, "replace", watch_replace)
    manifest = write(tmp_path / "step-1")
    before, after = calls[: calls.index("rename")], calls[calls.index("rename") + 1 :]
    assert before[:2] == [manifest.data, "step-1"]
    assert before[2].startswith("manifest.json.")
    assert after == ["step-1", tmp_path.name]


def test_unfinished_and_damaged_ones_are_passed_over(tmp_path: Path) -> None:
    good = tmp_path / "good"
    write(good)
    kill_a_save(tmp_path / "killed")
    assert publication.latest(tmp_path) == good
    manifest = write(tmp_path / "short")
    (tmp_path / "short" / manifest.data / file_name(0)).write_bytes(b"dat")
    with pytest.warns(UserWarning, match=r"short is skipped: missing or cut short: .*rank-00000"):
        assert publication.latest(tmp_path) == good
    (tmp_path / "short" / "manifest.json").write_text("{}")
    with pytest.warns(UserWarning, match="is not a usable manifest"):
        assert publication.latest(tmp_path) == good
    write(tmp_path / "next")
    with pytest.warns(UserWarning, match="is not a usable manifest"):
        assert publication.latest(tmp_path) == tmp_path / "next"


def test_removing_begins_with_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write(tmp_path / "a")
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: pytest.fail("killed here"))
    with pytest.raises(pytest.fail.Exception):
        publication.remove(tmp_path / "a", manifest, 0.0)
    assert publication.latest(tmp_path) is None


def test_other_folders_are_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(CheckpointError, match=r"has other things in it: \['thesis.tex'\]"):
        publication.begin(tmp_path)
    with pytest.raises(CheckpointError, match="No checkpoint can be written to"):
        publication.begin(tmp_path / "thesis.tex")
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    publication.begin(tmp_path / "new").abandon()
    assert list(tmp_path.iterdir()) == []
    manifest = write(tmp_path / "old")
    publication.begin(tmp_path / "old").abandon()
    assert sorted(e.name for e in (tmp_path / "old").iterdir()) == [manifest.data, "manifest.json"]


def test_the_error_of_a_save_is_not_hidden_by_those_of_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails while a rank writes also fails when the first rank removes what was written."""
    fails = FailingFiles(tmp_path, lambda call, path: True)

    def write_file(*_: Any, **__: Any) -> None:
        fails.__enter__()
        raise OSError(errno.ENOSPC, "The first error")

    monkeypatch.setattr(save_plan, "write_file", write_file)
    for name in ("new", "old"):
        with pytest.raises(CheckpointError, match="The first error") as caught:
            try:
                checkpoint.save(tmp_path / name, nn.Linear(2, 2))
            finally:
                fails.__exit__()
        assert "Input/output" not in str(caught.value)
    # What is buffered is written at the end, too, and a full disk has no room for it.
    save = publication.begin(tmp_path / "full")
    save._file.write("a manifest")
    os.dup2(os.open("/dev/full", os.O_WRONLY), save._file.fileno())
    save.abandon()
    assert save._file.closed and not (tmp_path / "full").exists()


# --- folders of others ---------------------------------------------------------------------------------------------


def test_empty_folders_and_modes_of_others_stay_as_they_are(tmp_path: Path) -> None:
    """A folder that many share has the sticky bit, be it empty or not."""
    for name in ("empty", "shared", "given", "abandoned"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o1777)
    (tmp_path / "shared" / "theirs").touch()
    publication.begin(tmp_path / "abandoned").abandon()
    model = nn.Linear(2, 2)
    for path in ("step-1", "step-2", "given"):
        checkpoint.save(tmp_path / path, model, keep_last=1)
    found = {path.name: path.stat().st_mode & 0o7777 for path in tmp_path.iterdir()}
    assert found == dict.fromkeys(("abandoned", "empty", "given", "shared"), 0o1777)


def test_a_mark_of_an_emptied_folder_is_of_that_folder_only(tmp_path: Path) -> None:
    for name in ("other", "full", "emptied"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "theirs").touch()

    def mark(name: str, more: int = 0) -> Path:
        inode = (tmp_path / name).stat().st_ino + more
        mark = tmp_path / f".empty-checkpoint-{inode:x}-{name}"
        mark.mkdir()
        return mark

    marks = [mark("other", 1), mark("emptied"), mark("full")]
    (tmp_path / ".new-checkpoint-0123456789ab").mkdir()
    (tmp_path / ".new-checkpoint-of-mine").mkdir()
    checkpoint.save(tmp_path / "step-1", nn.Linear(2, 2), keep_last=1)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(
        [".new-checkpoint-of-mine", "full", "other", "step-1", marks[2].name]
    )
    shutil.rmtree(tmp_path / "full")
    checkpoint.save(tmp_path / "step-2", nn.Linear(2, 2), keep_last=1)
    assert not marks[2].exists()


def test_a_manifest_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write(tmp_path / "a")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    save = publication.begin(tmp_path / "a")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"cannot be completed: .*No space left"):
        publication.publish(save, replace(manifest, serial=9))
    save.abandon()
    assert manifests.read(tmp_path / "a") == manifest
    assert len(list((tmp_path / "a").iterdir())) == 2


def test_a_checkpoint_that_is_published_stays_if_only_the_last_flush_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write(tmp_path / "a")
    save = publication.begin(tmp_path / "a")
    (save.folder / file_name(0)).write_bytes(b"data")
    newer = replace(manifest, serial=9, data=save.folder.name)

    def refuse_after_the_rename(_: int) -> None:
        if manifests.read(tmp_path / "a") == newer:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse_after_the_rename)
    with pytest.raises(CheckpointError, match=r"cannot be completed: .*Input/output error"):
        publication.publish(save, newer)
    save.abandon()
    assert publication.latest(tmp_path) == tmp_path / "a"
    assert manifests.read(tmp_path / "a") == newer


# --- kills --------------------------------------------------------------------------------------------------------

CALLS = (
    *("open", "os.chmod", "os.mkdir", "os.remove", "os.rename", "os.rmdir"),
    *("os.listdir", "os.scandir"),
)
"""Audit events of calls that list or may change a folder."""


def go_on(path: Path) -> None:
    """Load the newest checkpoint in the folder, and save one at ``path``, of which three are kept."""
    run = retention.TrainingRun()
    newest = publication.latest(path.parent)
    if newest is not None:
        manifest = manifests.read(newest)
        assert manifest.run is not None
        run.continue_from(newest, manifest.run, manifest.serial)
    save = publication.begin(path)
    (save.folder / file_name(0)).write_bytes(b"data")
    beside = publication.survey(path.parent, with_files=False)
    record = run.record_for(path, beside)
    manifest = Manifest(
        data=save.folder.name, world=1, tensors={}, files={0: FileRecord(4, 0)}, run=record
    )
    manifest = publication.stamped(manifest, beside)
    run.keep_locked(publication.publish(save, manifest, keep_lock=True))
    retention.remove_old_checkpoints(path, manifest, 3)
    run.release()


def dies_before_call(number: int, path: Path) -> bool:
    """Save in a process that is killed before this call that lists or changes the folder; return whether it was."""
    process = os.fork()
    if process == 0:
        calls = itertools.count()

        def die(event: str, args: tuple[Any, ...]) -> None:
            reads = event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR)
            if event not in CALLS or reads:
                return
            where = os.readlink(f"/proc/self/fd/{args[0]}") if type(args[0]) is int else args[0]
            if str(path.parent) in str(where) and next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(die)
        try:
            go_on(path)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL


def test_nothing_of_a_save_is_left_wherever_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # only processes die here
    for step in range(3):
        go_on(tmp_path / "before" / f"step-{step}")
    (tmp_path / "before" / "empty").mkdir()  # the user's
    for number in itertools.count():
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "before", folder)
        was_killed = dies_before_call(number, folder / "step-3")
        newest = publication.latest(folder)
        assert newest is not None and newest.name in ("step-2", "step-3")
        go_on(folder / "step-4")
        found = {path.name: sorted(map(str, path.iterdir())) for path in folder.iterdir()}
        assert found.pop("empty") == []
        assert len(found) == 3, (number, found)
        assert all(
            each[1:] == [str(folder / name / "manifest.json")] for name, each in found.items()
        )
        assert {stat.S_IMODE((folder / name).stat().st_mode) for name in found} == {
            stat.S_IMODE((folder / "empty").stat().st_mode)
        }
        if not was_killed:
            break
    assert number > 20
