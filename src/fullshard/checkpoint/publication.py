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
import os
import warnings
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import torch

from fullshard import __version__
from fullshard.checkpoint import manifest as manifests
from fullshard.checkpoint.manifest import MANIFEST, Manifest, file_name
from fullshard.checkpoint.unfinished_save import (
    MAX_TRIES,
    UnfinishedSave,
    folder_entries,
    manifest_lock,
    remove_leftovers,
    unlock,
)
from fullshard.errors import CheckpointError
from fullshard.files import flush


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


def stamped(path: Path, manifest: Manifest) -> Manifest:
    """Return a manifest with the time, the versions, and a serial number above those of all checkpoints beside ``path``."""
    return replace(
        manifest,
        serial=next_serial(path),
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        fullshard=__version__,
        torch=torch.__version__,
    )


def next_serial(path: Path) -> int:
    """Return a serial number above those of all checkpoints beside ``path``, and of the one at ``path``."""
    serials = [manifest.serial for manifest in manifests_in(path.absolute().parent).values()]
    return max(serials, default=0) + 1


def manifests_in(folder: Path) -> dict[Path, Manifest]:
    """Return the manifests of all checkpoints in a folder that can be read, by the path of the checkpoint."""
    found = {}
    with contextlib.suppress(OSError):  # a folder may be writable and not readable
        for name in folder_entries(folder):
            with contextlib.suppress(CheckpointError):
                found[folder / name] = manifests.read(folder / name)
    return found


def remove(path: Path, manifest: Manifest, now: float) -> None:
    """Remove the checkpoint with this manifest, unless it has been replaced.

    Args:
        path: Its folder.
        manifest: What its manifest says.
        now: The time by the file system's clock.

    Raises:
        OSError: it cannot be removed.
    """
    with manifest_lock(path):
        try:
            if manifests.read(path).data != manifest.data:
                return
        except CheckpointError:
            return  # another process has removed it
        (path / MANIFEST).unlink()
    with contextlib.suppress(FileNotFoundError):  # another process has removed the rest
        flush(path)
    remove_leftovers(path, now)


# --- finding checkpoints -----------------------------------------------------------------------------------


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint in a folder, or None.

    The newest is the one that was written last, by serial numbers and not by clocks. Folders without a manifest are not
    checkpoints. A checkpoint is skipped, with a warning, if it cannot be read, if its manifest is damaged, or if a
    file is missing or cut short. Other processes may save in the folder at the same time.

    Raises:
        CheckpointError: the folder itself cannot be listed.
    """
    scan = _settled_scan(Path(folder))
    for path, fault in scan.faults.items():
        warnings.warn(f"{path} is skipped: {fault}", stacklevel=2)
    return max(scan.serials)[1] if scan.serials else None


def _settled_scan(folder: Path) -> _Scan:
    """Scan a folder again and again until nothing changed during a scan."""
    before = None
    for _ in range(MAX_TRIES):
        try:
            scan = _Scan(folder)
        except OSError as error:
            raise CheckpointError(
                f"{folder} cannot be searched for checkpoints: {error}"
            ) from error
        # A writer may publish a checkpoint where this scan has been, then remove the one it comes to next. So an empty
        # result counts only if two scans saw the same.
        if scan.is_settled and (scan.complete or scan.seen == before):
            break
        before = scan.seen
    return scan


class _Scan:
    """What one pass over a folder found, while other processes may change it."""

    def __init__(self, folder: Path) -> None:
        self.complete: dict[Path, Manifest] = {}
        self.faults: dict[Path, str] = {}
        self.seen: dict[str, bytes | None] = {}
        """The text of each manifest by the name of its folder; None where there is none."""
        self.is_settled = True
        """Whether nothing was replaced or removed during the pass."""
        for name in folder_entries(folder):
            self._add(folder / name)

    @property
    def serials(self) -> list[tuple[int, Path]]:
        """Serial numbers of the complete checkpoints, with their paths."""
        return [(manifest.serial, path) for path, manifest in self.complete.items()]

    def _add(self, path: Path) -> None:
        text = None
        try:
            text = _text_of_manifest(path)
            if text is not None:
                manifest = manifests.parse(text, path)
                lost = [
                    str(file)
                    for rank, record in manifest.files.items()
                    if not _has_length(
                        file := path / manifest.data / file_name(rank), record.nbytes
                    )
                ]
                if lost:
                    raise CheckpointError(f"missing or cut short: {lost[:5]}")
                self.complete[path] = manifest
        except (OSError, CheckpointError) as error:
            with contextlib.suppress(OSError, CheckpointError):
                if _text_of_manifest(path) != text:
                    self.is_settled = False
                    return
            self.faults[path] = str(error)
        self.seen[path.name] = text


def _text_of_manifest(path: Path) -> bytes | None:
    """Return the manifest's text, or None if there is none. Raise if it cannot be read, or if that cannot be known."""
    try:
        (path / MANIFEST).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return manifests.read_bytes(path)


def complete_checkpoints(folder: Path) -> dict[Path, Manifest]:
    """Return the complete checkpoints in a folder that can be read; none if the folder cannot be listed."""
    try:
        return _Scan(folder).complete
    except OSError:
        return {}


def _has_length(file: Path, nbytes: int) -> bool:
    try:
        return file.stat().st_size == nbytes
    except OSError:
        return False
