"""Folders of checkpoints: a checkpoint appears at once and complete, or not at all.

    path/manifest.json                 names the folder of its data; without it there is no checkpoint
    path/data-<id>/rank-*.safetensors  written before the manifest that names them

A save writes a data folder of its own, flushes it, and replaces the manifest by a rename (`unfinished_save`). That rename
is the moment in which the checkpoint changes. Only then is the old data removed. Removing a checkpoint begins with its
manifest. So whenever a process dies, readers find a complete checkpoint, the old one or the new one. Everything else is
data that no manifest names.

Other things beside a checkpoint may be unreadable, and may come and go at any time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import warnings
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import torch

from fullshard import __version__
from fullshard.checkpoint import manifest as manifests
from fullshard.checkpoint.folders.unfinished_save import (
    MAX_TRIES,
    UnfinishedSave,
    data_in_use,
    emptying,
    folder_entries,
    manifest_lock,
    remove_leftovers,
    unlock,
)
from fullshard.checkpoint.manifest import MANIFEST, Manifest, file_name
from fullshard.errors import CheckpointError
from fullshard.files import flush, local_path


def begin(path: Path) -> UnfinishedSave:
    """Begin a new checkpoint at ``path``."""
    return UnfinishedSave(path)


def publish(save: UnfinishedSave, manifest: Manifest, *, keep_lock: bool = False) -> IO[str]:
    """Make ``manifest`` the checkpoint's manifest, and remove the data it replaces.

    Returns:
        The manifest's file: closed, or locked with ``keep_lock``.
    """
    file = save.publish(manifest)
    if not keep_lock:
        unlock(file)
    remove_leftovers(save.path, file_system_time(save.path))
    return file


def file_system_time(path: Path) -> float:
    """Return when the checkpoint at ``path`` was written, by the file system's clock."""
    try:
        return (path / MANIFEST).stat().st_mtime
    except OSError:  # replaced or removed already
        return 0.0


def stamped(manifest: Manifest, beside: Survey) -> Manifest:
    """Return a manifest with the time, the versions, and a serial number above those of the checkpoints beside it."""
    return replace(
        manifest,
        serial=beside.next_serial,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        fullshard=__version__,
        torch=torch.__version__,
    )


def remove(path: Path, manifest: Manifest, now: float) -> None:
    """Remove the checkpoint with this manifest, unless it has been replaced.

    Args:
        path: Its folder.
        manifest: The content of its manifest.
        now: The time by the file system's clock.

    Raises:
        OSError: it cannot be removed.
    """
    with emptying(path):
        with manifest_lock(path):
            if data_in_use(path) != manifest.data:
                return  # another process has removed or replaced it
            (path / MANIFEST).unlink()
        with contextlib.suppress(FileNotFoundError):  # another process has removed the rest
            flush(path)
        remove_leftovers(path, now)


# --- finding checkpoints -----------------------------------------------------------------------------------


TRIES = 3
"""Number of times that a folder is searched if something in it cannot be read for a reason that may pass."""

_LASTING = (
    *(errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EISDIR, errno.EINVAL, errno.EFBIG, errno.ENXIO),
)
"""Errors that say what a file is, or whose. All others (EIO, ESTALE, ETIMEDOUT) may pass: the file may be good."""


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint in a folder, or None.

    The newest is the one that was written last, by serial numbers and not by clocks. Folders without a manifest are not
    checkpoints. A checkpoint is skipped, with a warning, if it cannot be read, if its manifest is damaged, or if a
    file is missing or cut short. Other processes may save in the folder at the same time.

    None means that there is none. It is never the answer if there may be one: a run would begin anew.

    Raises:
        CheckpointError: the folder itself cannot be listed; or no checkpoint is complete, and some are damaged, or cannot be
            read for a reason that may pass.
    """
    found = survey(local_path(folder))
    if found.unlisted is not None:
        raise CheckpointError(f"{folder} cannot be searched for checkpoints: {found.unlisted}")
    unusable = [path for path in found.faults if found.may_be_checkpoint(path)]
    if unusable and not found.complete:
        raise CheckpointError(
            f"{folder} has no complete checkpoint, as far as can be seen; these cannot be read now, or are damaged:\n  "
            + "\n  ".join(f"{path}: {found.faults[path]}" for path in sorted(unusable))
            + "\nTry again. If they are damaged for good, move them away."
        )
    for path, fault in found.faults.items():
        warnings.warn(f"{path} is skipped: {fault}", stacklevel=2)
    return max(found.serials)[1] if found.serials else None


def survey(folder: Path, *, with_files: bool = True) -> Survey:
    """Search a folder again and again until nothing changed meanwhile, and, a few times, until all could be read.

    Without ``with_files`` a checkpoint is taken for complete if it has a manifest.
    """
    before = None
    for turn in range(MAX_TRIES):
        found = Survey(folder, with_files=with_files)
        # A writer may publish a checkpoint where this scan has been, then remove the one it comes to next. So an empty
        # result counts only if two scans saw the same.
        is_settled = not found.has_changed and (found.complete or found.seen == before)
        if is_settled and (turn + 1 >= TRIES or found.is_certain):
            break
        before = found.seen
    return found


class Survey:
    """Findings of one pass over a folder, while other processes may change it."""

    def __init__(self, folder: Path, *, with_files: bool) -> None:
        self._with_files = with_files
        self.manifests: dict[Path, Manifest] = {}
        """Manifests by the path of the checkpoint; files may be missing."""
        self.complete: dict[Path, Manifest] = {}
        """The checkpoints of which all files are there."""
        self.faults: dict[Path, str] = {}
        """Faults of other entries: they are no complete checkpoints, although they may look like some."""
        self.unsettled: set[Path] = set()
        """Entries of which nothing is known, because an error may pass."""
        self.unlisted: OSError | None = None
        """The error for which the folder cannot be listed."""
        self.seen: dict[str, bytes | None] = {}
        """The text of each manifest by the name of its folder; None where there is none."""
        self.has_changed = False
        """Whether something was replaced or removed during the pass."""
        self._highest_serial = 0
        try:
            for name in folder_entries(folder):
                self._add(folder / name)
        except OSError as error:
            self.unlisted = error

    def may_be_checkpoint(self, path: Path) -> bool:
        """Whether an entry with a fault has a manifest, or may have one."""
        return path in self.unsettled or self.seen[path.name] is not None

    @property
    def is_certain(self) -> bool:
        """Whether no error hides a checkpoint. Without that, nothing may be removed."""
        return self.unlisted is None and not self.unsettled

    @property
    def serials(self) -> list[tuple[int, Path]]:
        """Serial numbers of the complete checkpoints, with their paths."""
        return [(manifest.serial, path) for path, manifest in self.complete.items()]

    @property
    def next_serial(self) -> int:
        """A serial number above all others in the folder.

        If an error hides some of them, it is the time in microseconds: far above all that were counted, and above all
        that were such times.
        """
        least = 1 if self.is_certain else time.time_ns() // 1000
        return max(self._highest_serial + 1, least)

    def _add(self, path: Path) -> None:
        text = None
        try:
            text = manifests.text_in(path)
            if text is not None:
                self._highest_serial = max(self._highest_serial, manifests.serial_in(text))
                self.manifests[path] = manifest = manifests.parse(text, path)
                if self._with_files:
                    _raise_if_incomplete(path, manifest)
                self.complete[path] = manifest
        except (OSError, CheckpointError) as error:
            with contextlib.suppress(OSError):
                if manifests.text_in(path) != text:
                    self.has_changed = True
                    return
            if isinstance(error, OSError) and error.errno not in _LASTING:
                self.unsettled.add(path)
            self.faults[path] = str(error)
        self.seen[path.name] = text


def _raise_if_incomplete(path: Path, manifest: Manifest) -> None:
    lost = [
        str(file)
        for rank, record in manifest.files.items()
        if not _has_length(file := path / manifest.data / file_name(rank), record.nbytes)
    ]
    if lost:
        raise CheckpointError(f"missing or cut short: {lost[:5]}")


def _has_length(file: Path, nbytes: int) -> bool:
    try:
        return file.stat().st_size == nbytes
    except (FileNotFoundError, NotADirectoryError):
        return False
