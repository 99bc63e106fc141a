"""Files that are replaced whole, as `fullshard.files.atomic_write` promises it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fullshard.files import atomic_write


def write(path: Path, content: bytes, *, durable: bool = False) -> None:
    with atomic_write(path, durable=durable) as file:
        file.write(content)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


@pytest.mark.parametrize("durable", [False, True])
def test_readers_see_the_old_file_until_the_block_ends_and_then_the_new_one(
    tmp_path: Path, durable: bool
) -> None:
    path = tmp_path / "a.txt"
    write(path, b"old", durable=durable)
    with path.open("rb") as reader:
        with atomic_write(path, durable=durable) as file:
            file.write(b"new")
            file.flush()
            assert path.read_bytes() == b"old"
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("failure", [OSError("full"), KeyboardInterrupt()])
def test_an_error_in_the_block_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, failure: BaseException
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")
    with pytest.raises(type(failure)), atomic_write(path, durable=True) as file:
        file.write(b"new")
        raise failure
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.txt"]


def test_a_process_that_dies_leaves_the_old_file_and_one_of_a_name_that_is_stated(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")
    child = os.fork()
    if not child:
        with atomic_write(path, durable=False) as file:
            file.write(b"half")
            file.flush()
            os._exit(1)
    os.waitpid(child, 0)
    assert path.read_bytes() == b"old"
    left, kept = sorted(tmp_path.iterdir(), key=lambda each: -len(each.name))
    assert kept == path and left.match("a.txt.????????????.tmp")
    write(path, b"new")
    assert path.read_bytes() == b"new" and left.exists()


def test_only_a_durable_write_waits_for_the_disk_file_first_folder_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    replace = Path.replace

    def watch_flush(descriptor: int) -> None:
        steps.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).suffix or "folder")

    def watch_replace(self: Path, target: Path) -> Path:
        steps.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", watch_flush)
    monkeypatch.setattr(Path, "replace", watch_replace)
    monkeypatch.chdir(tmp_path)
    write(Path("a.txt"), b"", durable=False)
    assert steps == ["rename"]
    write(Path("a.txt"), b"", durable=True)
    assert steps[1:] == [".tmp", "rename", "folder"]


def test_the_new_file_is_in_place_if_only_the_folder_could_not_be_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(5, "broken")

    monkeypatch.setattr(os, "fsync", refuse_folders)
    with pytest.raises(OSError, match="broken"):
        write(tmp_path / "a.txt", b"new", durable=True)
    assert (tmp_path / "a.txt").read_bytes() == b"new"
    assert names(tmp_path) == ["a.txt"]


def test_a_link_is_replaced_and_what_it_names_stays(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"other")
    (tmp_path / "a.txt").symlink_to("other")
    write(tmp_path / "a.txt", b"new")
    assert not (tmp_path / "a.txt").is_symlink()
    assert (tmp_path / "other").read_bytes() == b"other"


def test_a_folder_in_the_way_is_an_error_and_so_is_a_missing_one_around_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").mkdir()
    with pytest.raises(IsADirectoryError):
        write(tmp_path / "a.txt", b"new")
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "none" / "a.txt", b"new")
    for nameless in (Path(), Path("/")):
        with pytest.raises(IsADirectoryError):
            write(nameless, b"new")
    assert names(tmp_path) == ["a.txt"]


def test_the_new_file_has_the_permissions_of_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.touch(mode=0o600)
    old_mask = os.umask(0o027)
    try:
        write(path, b"new")
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
