"""Saves on their way, and how a living writer's files are told from those that a dead one left.

    path/manifest.json.<id>.tmp   made first, and locked by its writer; the manifest in the end
    path/data-<id>/               made second

The lock (`flock`) is the kernel's: it ends with its process, however that ends. The first six digits of an id name the
machine. So on one machine it is certain who lives. A machine cannot always see the locks of another one: there, a
save also counts as living until nothing has been written to it for `PATIENCE_S`, by the file system's clock.

The order of things is what keeps writers, cleaners and readers apart without any of them waiting:

    writer    lock, data, rename the locked file to manifest.json, unlock
    cleaner   sees that the lock is free or its file gone; *then* reads which data the manifest names; then removes others

The rename comes before the lock's end. So a cleaner that finds no lock finds the manifest, or a later one.
"""

from __future__ import annotations

import contextlib
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
"""How long nothing is written to a save of another machine before it counts as dead."""

MAX_TRIES = 100
"""To make a folder that others remove at the same time."""

_UNFINISHED_MANIFEST = re.compile(re.escape(MANIFEST) + r"\.([0-9a-f]{12})\.tmp")
_NAMES_WITH_ID = re.compile(rf"(?:data-|{re.escape(MANIFEST)}\.)([0-9a-f]{{12}})(?:\.tmp)?")


class UnfinishedSave:
    """A save that has begun: it is published or abandoned, or its process dies.

    All of this is done by one rank; the others write into `folder`.
    """

    def __init__(self, path: Path) -> None:
        """Begin a checkpoint at ``path``: new, empty, or a checkpoint."""
        self.path = path
        self._is_published = False
        try:
            _refuse_other_folders(path)
            self._file, self.folder = _claim(path)
        except OSError as error:
            raise CheckpointError(f"No checkpoint can be written to {path}: {error}") from error

    def publish(self, manifest: Manifest) -> IO[str]:
        """Let ``manifest`` be the checkpoint from now on; its data are complete and flushed.

        Returns the manifest's file, still locked: whoever keeps it open shows that the writer lives.
        """
        text = manifests.text_of(manifest)
        manifests.parse(text.encode(), self.path)  # nothing is published that could not be read
        try:
            self._file.write(text)
            self._file.flush()
            # Names are flushed before they are referred to: files, their folder, its name, then the manifest's.
            for folder in (self.folder, self.path):
                flush(folder)
            with manifest_lock(self.path):
                self._rename()
            with contextlib.suppress(PermissionError):  # one may write to a folder, and not list it
                flush(self.path.absolute().parent)
        except OSError as error:
            raise CheckpointError(
                f"The checkpoint {self.path} cannot be completed: {error}"
            ) from error
        return self._file

    def _rename(self) -> None:
        unfinished = Path(self._file.name)
        try:
            rename_into_place(unfinished, self.path / MANIFEST, durable=True)
        finally:
            # The rename may be done and only the flush after it have failed. In doubt the data stay: a later save
            # removes what no manifest names.
            self._is_published = not os.path.exists(unfinished)

    def abandon(self) -> None:
        """Remove the data, and the folder if that was made for them. What has been published stays."""
        if not self._is_published:
            shutil.rmtree(self.folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(self._file.name)
        unlock(self._file)
        with contextlib.suppress(OSError):
            self.path.rmdir()  # if it is empty


def _claim(path: Path) -> tuple[IO[str], Path]:
    """Make the locked file of a new save, then the folder for its data."""
    for _ in range(MAX_TRIES):
        name = _machine() + secrets.token_hex(3)
        try:
            path.mkdir(parents=True, exist_ok=True)
            file = (path / f"{MANIFEST}.{name}.tmp").open("x+")
        except (FileExistsError, FileNotFoundError):
            if path.exists() and not path.is_dir():
                raise
            continue  # the folder was there a moment ago, and was removed as an empty one; or the name is taken
        try:
            # Before it was locked, the file may have been taken for a dead one's.
            if _lock(file) is not False and _is_there(file):
                (path / f"data-{name}").mkdir()
                return file, path / f"data-{name}"
        except FileExistsError:
            os.unlink(file.name)
        except BaseException:
            file.close()
            raise
        file.close()
    raise CheckpointError(f"No checkpoint can be written to {path}: others keep removing it.")


def _refuse_other_folders(path: Path) -> None:
    strange = [name for name in folder_entries(path) if not _is_ours(path / name)]
    if strange:
        raise CheckpointError(
            f"A checkpoint is written to a folder that is new, empty or a checkpoint; {path} has other things "
            f"in it: {sorted(strange)[:10]}. Choose another folder."
        )


# --- what is left of saves that have ended -----------------------------------------------------------------


def remove_leftovers(path: Path, now: float) -> None:
    """Remove data that no manifest names, unless it is of a save on its way; remove the folder if that leaves it empty.

    Args:
        path: A checkpoint's folder, or one where a save was killed; nothing happens in others.
        now: By the clock of the file system.
    """
    try:
        names = folder_entries(path)
        if not names or not all(_is_ours(path / name) for name in names):
            return
        for id_ in {found[1] for name in names if (found := _NAMES_WITH_ID.fullmatch(name))}:
            with _writer_ended(path, id_, now) as is_dead:
                # Only now: see above.
                if is_dead and data_in_use(path) != f"data-{id_}":
                    shutil.rmtree(path / f"data-{id_}", ignore_errors=True)
                    _unfinished(path, id_).unlink(missing_ok=True)
        path.rmdir()
    except (OSError, CheckpointError):
        # Not empty; or not ours to remove, or not readable: what cannot be understood is left alone.
        return


def data_in_use(path: Path) -> str | None:
    """The folder that the manifest names; None if there is no manifest.

    Raises:
        CheckpointError: there is one that cannot be read.
    """
    if not (path / MANIFEST).exists():
        return None
    try:
        return manifests.read(path).data
    except CheckpointError:
        if not (path / MANIFEST).exists():
            return None
        raise


@contextlib.contextmanager
def _writer_ended(path: Path, id_: str, now: float) -> Iterator[bool]:
    """Whether the writer of a save has ended, or is done with it; within the block nobody else removes it."""
    try:
        file = _unfinished(path, id_).open("r+")
    except FileNotFoundError:
        yield True  # published, or what a cleaner left that was killed
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
    """Whether a living process has locked a file; also if that cannot be known."""
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
    """Within the block, no other process of this machine replaces or removes the manifest in ``path``."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield  # not there: whoever changes it will notice
        return
    try:
        with contextlib.suppress(OSError):  # where folders cannot be locked
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def unlock(file: IO[str]) -> None:
    """Let go of a lock, also where a process that was forked meanwhile has the file, too; and close the file."""
    if not file.closed:
        with contextlib.suppress(OSError):
            fcntl.flock(file.fileno(), fcntl.LOCK_UN)
        file.close()


def _lock(file: IO[str]) -> bool | None:
    """Lock a file if nobody has; None where files cannot be locked."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_there(file: IO[str]) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except FileNotFoundError:
        return False


@cache
def _machine() -> str:
    """Six digits for this machine, until it is started again: processes of one machine see each other's locks."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        name = platform.node()
    return hashlib.sha256(name.encode()).hexdigest()[:6]


# --- folders -----------------------------------------------------------------------------------------------


def folder_entries(path: Path) -> list[str]:
    """What is in a folder; nothing if it is none, or has just been removed."""
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_ours(entry: Path) -> bool:
    if DATA_FOLDER.fullmatch(entry.name):
        return entry.is_dir() or not entry.exists()
    # NFS gives such names to files that were removed while somebody reads them; a disk of its own is not empty when new.
    return (
        entry.name in (MANIFEST, "lost+found")
        or entry.name.startswith(".nfs")
        or _UNFINISHED_MANIFEST.fullmatch(entry.name) is not None
    )
