"""Unfinished saves, and how to tell files of a running writer from files that a dead writer left.

    path/manifest.json.<id>.tmp   made first and locked by its writer; becomes the manifest
    path/data-<id>/               made second

The kernel holds the lock (`flock`): it ends with its process, however that ends. The first six digits of an id name the
machine. So on one machine it is certain which writers are alive. One machine cannot always see the locks of another. A
save of another machine therefore also counts as alive until nothing was written to it for `PATIENCE_S`, by the file
system's clock.

Writers, cleaners and readers do not wait for each other. This order keeps them apart:

    writer    lock, write data, rename the locked file to manifest.json, unlock
    cleaner   see that the lock is free or its file gone; *then* read which data the manifest names; then remove other data

The rename comes before the unlock. So a cleaner that finds no lock finds this manifest, or a later one.

[Note: empty folders]
An empty folder may be the user's, and is left alone. So a process that is killed must not leave an empty folder of ours
without a sign of it:

    parent/.new-checkpoint-<id>/             a new folder, until it has its first file; then it gets its own name
    parent/.empty-checkpoint-<inode>-<name>  made before the folder of this name and inode is emptied and removed

A cleaner removes these, and the empty folder that the latter names. A writer whose new folder is removed in that moment
makes another one. The modes of folders are never changed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import IO

from fullshard.checkpoint import manifest as manifests
from fullshard.checkpoint.manifest import DATA_FOLDER, MANIFEST, Manifest
from fullshard.errors import CheckpointError
from fullshard.files import flush, rename_into_place

PATIENCE_S = 3600.0
"""A save of another machine counts as dead if nothing was written to it for so long."""

MAX_TRIES = 100
"""Number of tries when other processes change the same folder."""

_CHANGED = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT)
"""Errors of a writer where another process has made or removed the folder."""

_NEW_FOLDER = re.compile(r"\.new-checkpoint-[0-9a-f]{12}")
_EMPTY_FOLDER = re.compile(r"\.empty-checkpoint-([0-9a-f]+)-(.+)", re.DOTALL)
_UNFINISHED_MANIFEST = re.compile(re.escape(MANIFEST) + r"\.([0-9a-f]{12})\.tmp")
_NAMES_WITH_ID = re.compile(rf"(?:data-|{re.escape(MANIFEST)}\.)([0-9a-f]{{12}})(?:\.tmp)?")


class UnfinishedSave:
    """A save that has begun and is not yet published or abandoned.

    One rank has this object; the other ranks only write into `folder`.
    """

    def __init__(self, path: Path) -> None:
        """Begin a checkpoint at ``path``, which is new, empty, or a checkpoint.

        Raises:
            CheckpointError: the folder has other things in it, or cannot be written to.
        """
        self.path = path
        self._is_published = False
        try:
            _refuse_other_folders(path)
            id_, self._file, self._is_new_folder = _claim(path)
        except OSError as error:
            raise CheckpointError(f"No checkpoint can be written to {path}: {error}") from error
        self.folder = path / f"data-{id_}"
        self._unfinished = _unfinished(path, id_)

    def publish(self, manifest: Manifest) -> IO[str]:
        """Make ``manifest`` the checkpoint's manifest. Its data must be complete and flushed.

        Returns:
            The manifest's file, still locked. While it is open, others see that the writer is alive.
        """
        text = manifests.text_of(manifest)
        manifests.parse(text.encode(), self.path)  # publish nothing that cannot be read
        try:
            self._file.write(text)
            self._file.flush()
            # A manifest must come to the disk after all that it refers to: files, their folder, the name of that folder.
            for folder in (self.folder, self.path):
                flush(folder)
            with manifest_lock(self.path):
                self._rename()
            with contextlib.suppress(PermissionError):  # a folder may be writable and not readable
                flush(self.path.absolute().parent)
        except OSError as error:
            raise CheckpointError(
                f"The checkpoint {self.path} cannot be completed: {error}. The one before it, if any, is still there."
            ) from error
        return self._file

    def _rename(self) -> None:
        try:
            rename_into_place(self._unfinished, self.path / MANIFEST, durable=True)
        finally:
            # The rename may have worked and the flush after it failed. In doubt keep the data: a later save removes
            # what no manifest names.
            self._is_published = not os.path.exists(self._unfinished)

    def abandon(self) -> None:
        """Remove the data, and the folder if this save has made it and nothing else is in it. A published checkpoint stays.

        What cannot be removed stays, without an error: the caller raises the one that ended the save.
        """
        if not self._is_published:
            with emptying(self.path) if self._is_new_folder else contextlib.nullcontext():
                _discard(self._file, self._unfinished, self.folder)
        unlock(self._file)


def _claim(path: Path) -> tuple[str, IO[str], bool]:
    """Make and lock the file of a new save, then make the folder for its data.

    Returns:
        The save's id, its file, and whether the folder ``path`` was made for it.
    """
    for _ in range(MAX_TRIES):
        id_ = _machine() + secrets.token_hex(3)
        is_new = not os.path.lexists(path)
        place = path.parent / f".new-checkpoint-{id_}" if is_new else path
        try:
            if is_new:
                path.parent.mkdir(parents=True, exist_ok=True)
                place.mkdir()
            file = _unfinished(place, id_).open("x+")
        except (FileExistsError, FileNotFoundError):
            if not is_new and path.exists() and not path.is_dir():
                raise
            continue  # a cleaner removed the folder while it was empty; or the name is taken
        except OSError:
            if is_new:
                _remove_if_empty(place)
            raise
        try:
            # Before it was locked, a cleaner may have taken the file for a dead writer's.
            if _lock(file) is not False and _is_there(file):
                (place / f"data-{id_}").mkdir()
                # This fails if another writer has made the folder, and has something in it.
                if is_new:
                    place.rename(path)
                return id_, file, is_new
        except BaseException as error:
            _discard(file, _unfinished(place, id_), place / f"data-{id_}")
            if not isinstance(error, OSError) or error.errno not in _CHANGED:
                raise
        finally:
            if is_new:
                _remove_if_empty(place)
        unlock(file)
    raise CheckpointError(
        f"No checkpoint can be written to {path}: other processes keep removing the folder. Choose another folder."
    )


def _discard(file: IO[str], unfinished: Path, data: Path) -> None:
    """Remove the files that a writer has begun, as far as that is possible."""
    shutil.rmtree(data, ignore_errors=True)
    with contextlib.suppress(OSError):
        unfinished.unlink()
    unlock(file)


def _refuse_other_folders(path: Path) -> None:
    others = [name for name in folder_entries(path) if not _is_ours(path / name)]
    if others:
        raise CheckpointError(
            f"The folder of a checkpoint must be new, empty or a checkpoint; {path} has other things "
            f"in it: {sorted(others)[:10]}. Choose another folder."
        )


# --- leftovers of dead writers -----------------------------------------------------------------------------


def remove_all_leftovers(folder: Path, now: float) -> None:
    """Remove the files that dead writers left in and beside the checkpoints in a folder; ``now`` as in `remove_leftovers`."""
    with contextlib.suppress(OSError):
        for name in folder_entries(folder):
            if mark := _EMPTY_FOLDER.fullmatch(name):
                _remove_marked(folder / name, folder / mark[2], int(mark[1], 16))
                continue
            remove_leftovers(folder / name, now)
            if _NEW_FOLDER.fullmatch(name):
                _remove_if_empty(folder / name)


def remove_leftovers(path: Path, now: float) -> None:
    """Remove data that no manifest names and no running save writes. Remove the folder if that leaves it empty.

    Args:
        path: The folder of a checkpoint or of a killed save. Other folders are left alone.
        now: The time by the file system's clock.
    """
    # Files that cannot be read or removed are left alone.
    with contextlib.suppress(OSError, CheckpointError):
        names = folder_entries(path)
        ids = {found[1] for name in names if (found := _NAMES_WITH_ID.fullmatch(name))}
        if not ids or not all(_is_ours(path / name) for name in names):
            return
        with emptying(path) if MANIFEST not in names else contextlib.nullcontext():
            for id_ in ids:
                with _writer_ended(path, id_, now) as has_ended:
                    # The manifest must be read after the lock was seen: see the order above.
                    if has_ended and data_in_use(path) != f"data-{id_}":
                        shutil.rmtree(path / f"data-{id_}", ignore_errors=True)
                        _unfinished(path, id_).unlink(missing_ok=True)


@contextlib.contextmanager
def emptying(path: Path) -> Iterator[None]:
    """Remove the folder after the block if it is empty then. A process that dies leaves a mark: [Note: empty folders]."""
    mark = None
    with contextlib.suppress(
        OSError
    ):  # the folder is gone, or beside it nothing can be written, or its name is too long
        mark = path.parent / f".empty-checkpoint-{path.stat().st_ino:x}-{path.name}"
        mark.mkdir()
    try:
        yield
    finally:
        _remove_if_empty(path)
        if mark is not None:
            _remove_if_empty(mark)


def _remove_marked(mark: Path, path: Path, inode: int) -> None:
    """Remove the folder that a process was emptying when it died, if it is empty and still the same; then the mark."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_ino == inode:
            _remove_if_empty(path)
            if path.is_dir() and not (path / MANIFEST).exists():
                return  # it is not empty yet
    _remove_if_empty(mark)


def _remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):  # it is not empty: a save has begun in it
        path.rmdir()


def data_in_use(path: Path) -> str | None:
    """Return the data folder that the manifest names, or None if there is no manifest.

    Raises:
        OSError: there may be a manifest, which cannot be read now.
        CheckpointError: the manifest is damaged.
    """
    text = manifests.text_in(path)
    return None if text is None else manifests.parse(text, path).data


@contextlib.contextmanager
def _writer_ended(path: Path, id_: str, now: float) -> Iterator[bool]:
    """Yield whether the writer of a save is done or dead. Within the block, no other process removes the save."""
    try:
        file = _unfinished(path, id_).open("r+")
    except FileNotFoundError:
        yield True  # it was published, or a cleaner was killed before it had removed all
        return
    with file:
        locked = _lock(file)
        is_here = id_.startswith(_machine())
        if locked is False or not _is_there(file):
            yield False
        elif locked and is_here:
            yield True
        else:
            yield now - _last_written(path, id_) > PATIENCE_S
        if locked:
            unlock(file)


def _last_written(path: Path, id_: str) -> float:
    folder = path / f"data-{id_}"
    files = [_unfinished(path, id_), folder, *(folder / name for name in folder_entries(folder))]
    times = []
    for file in files:
        with contextlib.suppress(OSError):
            times.append(file.stat().st_mtime)
    return max(times, default=0.0)


def _unfinished(path: Path, id_: str) -> Path:
    return path / f"{MANIFEST}.{id_}.tmp"


# --- locks -------------------------------------------------------------------------------------------------


def is_locked(file: Path) -> bool:
    """Return whether a process has locked a file; True also if that cannot be known."""
    try:
        with file.open("r+") as opened:
            locked = _lock(opened)
            if locked:
                unlock(opened)
            return locked is False
    except FileNotFoundError:
        return False
    except OSError:
        return True


@contextlib.contextmanager
def manifest_lock(path: Path) -> Iterator[None]:
    """Keep other processes of this machine from replacing or removing the manifest in ``path`` within the block."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield  # there is no folder to lock: the block fails where it uses it
        return
    try:
        with contextlib.suppress(OSError):  # some file systems cannot lock folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def unlock(file: IO[str]) -> None:
    """Unlock and close a file. Closing alone is not enough if a process was forked meanwhile: it has the file open, too."""
    if not file.closed:
        with contextlib.suppress(OSError):
            fcntl.flock(file.fileno(), fcntl.LOCK_UN)
        with contextlib.suppress(
            OSError
        ):  # what is not written yet cannot be: the disk is full, and the save has failed
            file.close()


def _lock(file: IO[str]) -> bool | None:
    """Lock a file. Return False if another process has locked it, None if files cannot be locked here."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_there(file: IO[str]) -> bool:
    """Return whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except FileNotFoundError:
        return False


@cache
def _machine() -> str:
    """Return six digits for this boot of this machine: its processes see each other's locks."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        name = platform.node()
    return hashlib.sha256(name.encode()).hexdigest()[:6]


# --- folders -----------------------------------------------------------------------------------------------


def folder_entries(path: Path) -> list[str]:
    """Return the names in a folder; none if it is no folder, or was just removed."""
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_ours(entry: Path) -> bool:
    if DATA_FOLDER.fullmatch(entry.name):
        return entry.is_dir() or not entry.exists()
    # NFS renames files that are removed while they are open to .nfs*; a new disk has a folder lost+found.
    return (
        entry.name in (MANIFEST, "lost+found")
        or entry.name.startswith(".nfs")
        or _UNFINISHED_MANIFEST.fullmatch(entry.name) is not None
    )
