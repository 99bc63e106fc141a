"""Folders of checkpoints: what is written becomes one at once, or not at all.

    path/manifest.json                 names the folder of its data; without it there is no checkpoint
    path/data-<id>/rank-*.safetensors  written before the manifest that names them

A save writes a data folder of its own, flushes it, and replaces the manifest by a rename, which is the one moment
in which the checkpoint changes. Only then is the old data removed. Removing a checkpoint begins with
its manifest. So whenever a process dies, what is found is complete, old or new, and all else is a folder that
no manifest names: the next save removes those beside its own data.

All of this is done by one rank.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import warnings
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from ..errors import CheckpointError
from ..version import __version__
from . import manifest as manifests
from .manifest import DATA_FOLDER, MANIFEST, Manifest, file_name

_UNFINISHED_MANIFEST = re.compile(re.escape(MANIFEST) + r"\.[0-9a-f]{12}\.tmp")


def begin(path: Path) -> Path:
    """Make the folder for the data of a new checkpoint at ``path``."""
    try:
        if path.exists():
            strange = [entry.name for entry in path.iterdir() if not _is_ours(entry)]
            if strange:
                raise CheckpointError(
                    f"A checkpoint is written to a folder that is new, empty or a checkpoint; {path} has other things "
                    f"in it: {sorted(strange)[:10]}. Choose another folder."
                )
        folder = path / f"data-{secrets.token_hex(6)}"
        folder.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"No checkpoint can be written to {path}: {error}") from error
    return folder


def publish(path: Path, manifest: Manifest) -> None:
    """Let ``manifest`` be the checkpoint at ``path`` from now on; its data are complete and flushed."""
    unfinished = path / f"{MANIFEST}.{secrets.token_hex(6)}.tmp"
    try:
        with unfinished.open("x") as file:
            file.write(manifests.text_of(manifest))
            file.flush()
            os.fsync(file.fileno())
        # Names are flushed before they are referred to: files, their folder, its name, then the manifest's.
        for folder in (path / manifest.data, path):
            flush(folder)
        unfinished.replace(path / MANIFEST)
        for folder in (path, path.absolute().parent):
            flush(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise CheckpointError(f"The checkpoint {path} cannot be completed: {error}") from error
    _remove_leftovers(path, keep=manifest.data)


def stamped(path: Path, manifest: Manifest) -> Manifest:
    """A manifest that says when and by what it was written, and comes after all that are beside ``path`` now."""
    return replace(
        manifest,
        serial=next_serial(path),
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        fullshard=__version__,
        torch=torch.__version__,
    )


def abandon(folder: Path) -> None:
    """Remove the data of a checkpoint that will not be completed, and its folder if that was made for it.

    What has been published already stays.
    """
    published = manifest_or_none(folder.parent)
    if published is not None and published.data == folder.name:
        return
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()  # if it is empty


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder, or None.

    Newest is the one that was written last, whatever clocks said. Folders without a manifest are no
    checkpoints; one whose manifest is damaged, or whose files are not all there in full length, is
    passed over with a warning.
    """
    found = complete_ones(Path(folder))
    return found[-1][1] if found else None


def next_serial(path: Path) -> int:
    """The number of a checkpoint that is written now: above those of all beside it, and of the one it replaces."""
    beside = map(manifest_or_none, _candidates(path.absolute().parent))
    serials = [manifest.serial for manifest in beside if manifest is not None]
    return max(serials, default=0) + 1


def retain(folder: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints in a folder, and what is left of saves that never ended."""
    found = complete_ones(folder)
    for _, kept in found[-keep:]:
        manifest = manifest_or_none(kept)
        if manifest is not None:
            _remove_leftovers(kept, keep=manifest.data)
    for _, old in found[:-keep]:
        try:
            remove(old)
        except OSError as error:
            warnings.warn(f"An old checkpoint cannot be removed: {error}", stacklevel=2)
    for each in folder.iterdir():
        if each.is_dir() and not (each / MANIFEST).exists() and _is_leftover(each):
            shutil.rmtree(each, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a checkpoint."""
    (path / MANIFEST).unlink()
    flush(path)
    _remove_leftovers(path, keep=None)
    with contextlib.suppress(OSError):
        path.rmdir()


def complete_ones(folder: Path) -> list[tuple[int, Path]]:
    """Serial numbers and paths of the complete checkpoints in a folder, the oldest first."""
    found = []
    for path in _candidates(folder):
        try:
            manifest = manifests.read(path)
            lost = [
                str(file)
                for rank, record in manifest.files.items()
                if not _has_length(file := path / manifest.data / file_name(rank), record.nbytes)
            ]
            if lost:
                raise CheckpointError(f"missing or cut short: {lost[:5]}")
        except CheckpointError as error:
            warnings.warn(f"{path} is passed over: {error}", stacklevel=3)
        else:
            found.append((manifest.serial, path))
    return sorted(found)


def _candidates(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(each for each in folder.iterdir() if (each / MANIFEST).is_file())


def manifest_or_none(path: Path) -> Manifest | None:
    """The manifest of a checkpoint, unless there is none that can be read."""
    try:
        return manifests.read(path)
    except CheckpointError:
        return None


def _has_length(file: Path, nbytes: int) -> bool:
    try:
        return file.stat().st_size == nbytes
    except OSError:
        return False


def _is_ours(entry: Path) -> bool:
    if entry.is_dir():
        return DATA_FOLDER.fullmatch(entry.name) is not None
    return entry.name == MANIFEST or _UNFINISHED_MANIFEST.fullmatch(entry.name) is not None


def _is_leftover(path: Path) -> bool:
    """Whether a folder is what a save leaves that was killed: nothing but data that no manifest names."""
    entries = list(path.iterdir())
    return bool(entries) and all(map(_is_ours, entries))


def _remove_leftovers(path: Path, *, keep: str | None) -> None:
    for entry in path.iterdir():
        if entry.is_dir() and DATA_FOLDER.fullmatch(entry.name) and entry.name != keep:
            shutil.rmtree(entry, ignore_errors=True)
        elif _UNFINISHED_MANIFEST.fullmatch(entry.name):
            entry.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Let a file, or the names in a folder, be on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
