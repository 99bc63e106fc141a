"""What is published is complete; what is not is never found, and is removed."""

from __future__ import annotations

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

from fullshard import CheckpointError
from fullshard.checkpoint import manifest as manifests, publication, retention
from fullshard.checkpoint.manifest import FileRecord, Manifest, file_name
from fullshard.checkpoint.unfinished_save import unlock


def write(path: Path, content: bytes = b"data") -> Manifest:
    """A checkpoint of one file."""
    serial = publication.next_serial(path)
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

CHANGES = ("open", "os.chmod", "os.mkdir", "os.remove", "os.rename", "os.rmdir")
"""Audit events that may change a folder."""


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
    record = run.record_for(path)
    manifest = Manifest(
        data=save.folder.name, world=1, tensors={}, files={0: FileRecord(4, 0)}, run=record
    )
    file = publication.publish(save, publication.stamped(path, manifest), keep_lock=True)
    run.keep_locked(file)
    retention.remove_old_checkpoints(path, record, 3)
    run.release()


def dies_before_change(number: int, path: Path) -> bool:
    """Save in a process that is killed before it changes something for this time; return whether it was."""
    process = os.fork()
    if process == 0:
        changes = itertools.count()

        def die(event: str, args: tuple[Any, ...]) -> None:
            reads = event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR)
            if event not in CHANGES or reads or str(path.parent) not in str(args[0]):
                return
            if next(changes) == number:
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
        was_killed = dies_before_change(number, folder / "step-3")
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
    assert number > 10
