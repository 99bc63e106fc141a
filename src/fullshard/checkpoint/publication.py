"""Folders of checkpoints: what is written becomes one at once, or not at all.

    path/manifest.json                 names the folder of its data; without it there is no checkpoint
    path/data-<id>/rank-*.safetensors  written before the manifest that names them

A save writes a data folder of its own, flushes it, and replaces the manifest by a rename, which is the one moment
in which the checkpoint changes (`unfinished`). Only then is the old data removed. Removing a checkpoint begins with
its manifest. So whenever a process dies, what is found is complete, old or new, and all else is a folder that
no manifest names.

What is beside a checkpoint may be anybody's: it may be unreadable, and come and go while it is looked at.
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
    """Let ``manifest`` be the checkpoint from now on, and remove what it replaces.

    Returns the manifest's file, closed, or locked with ``keep_lock``.
    """
    file = save.publish(manifest)
    if not keep_lock:
        unlock(file)
    remove_leftovers(save.path, file_system_time(save.path))
    return file


def file_system_time(path: Path) -> float:
    """When the checkpoint at ``path``, just written, was written: by the clock that all times of files go by."""
    try:
        return (path / MANIFEST).stat().st_mtime
    except OSError:  # replaced or removed already
        return 0.0


def stamped(path: Path, manifest: Manifest) -> Manifest:
    """A manifest that says when and by what it was written, and comes after all that are beside ``path`` now."""
    return replace(
        manifest,
        serial=next_serial(path),
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        fullshard=__version__,
        torch=torch.__version__,
    )


def next_serial(path: Path) -> int:
    """The number of a checkpoint that is written now: above those of all beside it, and of the one it replaces."""
    serials = [manifest.serial for manifest in manifests_in(path.absolute().parent).values()]
    return max(serials, default=0) + 1


def manifests_in(folder: Path) -> dict[Path, Manifest]:
    """Those that can be read, by the path of their checkpoint."""
    found = {}
    with contextlib.suppress(OSError):  # one may write to a folder, and not list it
        for name in folder_entries(folder):
            with contextlib.suppress(CheckpointError):
                found[folder / name] = manifests.read(folder / name)
    return found


def remove(path: Path, manifest: Manifest, now: float) -> None:
    """Remove the checkpoint that ``manifest`` is of, unless another one is there by now.

    Raises:
        OSError: it cannot be removed.
    """
    with manifest_lock(path):
        try:
            if manifests.read(path).data != manifest.data:
                return
        except CheckpointError:
            return  # somebody else was faster
        (path / MANIFEST).unlink()
    with contextlib.suppress(
        FileNotFoundError
    ):  # another one's retention has cleared it away already
        flush(path)
    remove_leftovers(path, now)


# --- finding them ------------------------------------------------------------------------------------------


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder, or None.

    Newest is the one that was written last, whatever clocks said. Folders without a manifest are no
    checkpoints; one that cannot be read, whose manifest is damaged, or whose files are not all there in full length, is
    passed over with a warning. Others may save in the folder meanwhile.

    Raises:
        CheckpointError: the folder itself cannot be listed.
    """
    scan = _settled_scan(Path(folder))
    for path, fault in scan.faults.items():
        warnings.warn(f"{path} is passed over: {fault}", stacklevel=2)
    return max(scan.serials)[1] if scan.serials else None


def _settled_scan(folder: Path) -> _Scan:
    """What is in a folder at some moment, although writers may publish and remove while it is looked at."""
    before = None
    for _ in range(MAX_TRIES):
        try:
            scan = _Scan(folder)
        except OSError as error:
            raise CheckpointError(
                f"{folder} cannot be searched for checkpoints: {error}"
            ) from error
        # A writer may publish one where we have looked already, then remove the one we come to next. So that there is
        # none is believed when it is seen twice.
        if scan.is_settled and (scan.complete or scan.seen == before):
            break
        before = scan.seen
    return scan


class _Scan:
    """What is found in a folder, looked at once while others may change it."""

    def __init__(self, folder: Path) -> None:
        self.complete: dict[Path, Manifest] = {}
        self.faults: dict[Path, str] = {}
        self.seen: dict[str, bytes | None] = {}
        """The text of each manifest by the name of its folder; None where there is none."""
        self.is_settled = True
        """Whether nothing was replaced or removed while it was looked at."""
        for name in folder_entries(folder):
            self._look_at(folder / name)

    @property
    def serials(self) -> list[tuple[int, Path]]:
        """Of the complete ones."""
        return [(manifest.serial, path) for path, manifest in self.complete.items()]

    def _look_at(self, path: Path) -> None:
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
    """None if there is no manifest; an error if there is one that cannot be read, or if that cannot be known."""
    try:
        (path / MANIFEST).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return manifests.read_bytes(path)


def complete_checkpoints(folder: Path) -> dict[Path, Manifest]:
    """The complete checkpoints in a folder, as far as they can be read; nothing if it cannot be listed."""
    try:
        return _Scan(folder).complete
    except OSError:
        return {}


def _has_length(file: Path, nbytes: int) -> bool:
    try:
        return file.stat().st_size == nbytes
    except OSError:
        return False
