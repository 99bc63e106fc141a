"""The checkpoint that was found at a path. It may be replaced or removed while it is read; then the new one is read.

A `FoundCheckpoint` is made before any file is opened. A reader that fails asks whether it is outdated. If so, the failure is
not damage, and the reader starts again with the new checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fullshard.checkpoint import manifest as manifests
from fullshard.checkpoint.folders.unfinished_save import MAX_TRIES
from fullshard.checkpoint.manifest import MANIFEST, Manifest
from fullshard.checkpoint.rank_group import RankGroup
from fullshard.checkpoint.sources.dcp_metadata import METADATA
from fullshard.errors import CheckpointError
from fullshard.files import local_path

T = TypeVar("T")

_WRITTEN_LAST = (MANIFEST, METADATA, "model.safetensors", "model.safetensors.index.json")
"""The files that are replaced whenever a checkpoint is, by format: our own, DCP, Hugging Face."""


class FoundCheckpoint:
    """The checkpoint that was at a path at one moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._version = _version(path)

    @property
    def is_ours(self) -> bool:
        """Whether it has our own format."""
        return isinstance(self._version, bytes)

    def manifest(self) -> Manifest | None:
        """Return its manifest as it was found, or None for other formats. So all ranks read the same checkpoint."""
        if not isinstance(self._version, bytes):
            return None
        return manifests.parse(self._version, self.path)

    def is_outdated(self) -> bool:
        """Return whether another checkpoint is there now.

        Raises:
            CheckpointError: it was removed.
        """
        now = _version(self.path)
        if self._version is not None and (now is None or type(now) is not type(self._version)):
            raise CheckpointError(
                f"The checkpoint {self.path} was removed while it was read: a run that saves with keep_last removes its "
                "old checkpoints. fullshard.checkpoint.latest(folder) finds the newest complete one in a folder."
            )
        return bool(now != self._version)


def read_together(
    path: str | os.PathLike[str],
    rank_group: RankGroup,
    read: Callable[[FoundCheckpoint], T],
    *,
    own_paths: bool = False,
) -> T:
    """Read the checkpoint that the first rank finds at its path, on all ranks; if it is replaced meanwhile, read the new one.

    Args:
        path: The path; the first rank's is used.
        rank_group: The ranks that read.
        read: Reads it. It is called again if it raised `CheckpointError`, which must be the same on all ranks.
        own_paths: Whether every rank uses its own path instead: each host may have a copy.
    """
    one = rank_group.on_each if own_paths else rank_group.on_first
    for _ in range(MAX_TRIES):
        found = one(lambda: FoundCheckpoint(Path(os.path.abspath(local_path(path)))))

        def is_outdated(found: FoundCheckpoint = found) -> bool:
            return any(rank_group.collect(one(found.is_outdated)))

        try:
            result = read(found)
        except CheckpointError:
            if not is_outdated():
                raise
        else:
            # Without our manifest, one rank may have opened the old checkpoint and another rank the new one.
            if (found.is_ours and not own_paths) or not is_outdated():
                return result
    raise _never_the_same(found.path)


def read_alone(path: Path, read: Callable[[], T], is_good: Callable[[T], bool]) -> T:
    """Read the checkpoint at ``path`` in one process; if it is replaced meanwhile, read the new one.

    Args:
        path: Its path.
        read: Reads it. It is called again if it failed, or if its result is not good, and there is a new checkpoint.
        is_good: Whether a result can be trusted without asking for a new checkpoint.
    """
    for _ in range(MAX_TRIES):
        found = FoundCheckpoint(path)
        try:
            result = read()
        except (CheckpointError, FileNotFoundError):
            if not found.is_outdated():
                raise
        else:
            if is_good(result) or not found.is_outdated():
                return result
    raise _never_the_same(path)


def _version(path: Path) -> bytes | tuple[int, ...] | None:
    """Return a value that changes when the checkpoint at ``path`` is replaced; None if there is no checkpoint.

    For our own format it is the manifest's text: a network file system may show the time of a file late.
    """
    try:
        for file in (*(path / name for name in _WRITTEN_LAST), path):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                status = file.stat()
                if file.name == MANIFEST:
                    return manifests.read_bytes(path)
                # The time of a folder also changes when other files come and go.
                when = 0 if stat.S_ISDIR(status.st_mode) else status.st_mtime_ns
                return status.st_dev, status.st_ino, when
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return None


def _never_the_same(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} was replaced {MAX_TRIES} times while it was read. Save there less often, or read a copy."
    )
