"""Which checkpoint is at a path: it may be replaced or removed while it is read, and then is read again.

`FoundCheckpoint` is made before anything is opened. Whoever then cannot read asks whether it is outdated: if so, what went wrong is
no damage, and the new one is read from the beginning.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fullshard.checkpoint import manifest as manifests
from fullshard.checkpoint.dcp_metadata import METADATA
from fullshard.checkpoint.manifest import MANIFEST, Manifest
from fullshard.checkpoint.rank_group import RankGroup
from fullshard.checkpoint.unfinished_save import MAX_TRIES
from fullshard.errors import CheckpointError

T = TypeVar("T")

_WRITTEN_LAST = (MANIFEST, METADATA, "model.safetensors", "model.safetensors.index.json")
"""Files that are new when a checkpoint is, by format: our own, DCP, Hugging Face."""


class FoundCheckpoint:
    """Which checkpoint was at a path when somebody looked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._version = _version(path)

    @property
    def is_ours(self) -> bool:
        """Whether it was one of our own."""
        return isinstance(self._version, bytes)

    def manifest(self) -> Manifest | None:
        """Of one of our own, as it was then, whatever is there by now: so all ranks read one checkpoint."""
        if not isinstance(self._version, bytes):
            return None
        return manifests.parse(self._version, self.path)

    def is_outdated(self) -> bool:
        """Whether there is another one by now.

        Raises:
            CheckpointError: there is none any more.
        """
        now = _version(self.path)
        if self._version is not None and (now is None or type(now) is not type(self._version)):
            raise CheckpointError(
                f"The checkpoint {self.path} was removed while it was read: a run that saves with keep_last removes its "
                "old ones. fullshard.checkpoint.latest(folder) finds the newest complete one in a folder."
            )
        return bool(now != self._version)


def read_together(
    path: str | os.PathLike[str],
    rank_group: RankGroup,
    read: Callable[[FoundCheckpoint], T],
    *,
    own_paths: bool = False,
) -> T:
    """Read the checkpoint that the first rank finds at its path; if it is replaced meanwhile, read the new one.

    Args:
        path: The first rank's counts.
        rank_group: The ranks that read.
        read: Is called again if it raised `CheckpointError`, which must be the same on all ranks.
        own_paths: Every rank looks at its own path instead: copies on the disks of their hosts.
    """
    one = rank_group.on_each if own_paths else rank_group.on_first
    for _ in range(MAX_TRIES):
        found = one(lambda: FoundCheckpoint(Path(os.path.abspath(path))))

        def is_outdated(found: FoundCheckpoint = found) -> bool:
            return any(rank_group.collect(one(found.is_outdated)))

        try:
            result = read(found)
        except CheckpointError:
            if not is_outdated():
                raise
        else:
            # Without a manifest of ours, ranks may have opened one before it was replaced, and one after.
            if (found.is_ours and not own_paths) or not is_outdated():
                return result
    raise _never_the_same(found.path)


def read_alone(path: Path, read: Callable[[], T], is_good: Callable[[T], bool]) -> T:
    """The same in one process; also, what is not good is read again, if there is a new one."""
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
    """What is another one once the checkpoint at ``path`` is another one; None if there is none.

    Our own manifest is read, and not only asked for its times: a network file system may know these late.
    """
    try:
        for file in (*(path / name for name in _WRITTEN_LAST), path):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                status = file.stat()
                if file.name == MANIFEST:
                    return manifests.read_bytes(path)
                # Other things may come into a folder, and leave it, without its being another one.
                when = 0 if stat.S_ISDIR(status.st_mode) else status.st_mtime_ns
                return status.st_dev, status.st_ino, when
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return None


def _never_the_same(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} was replaced {MAX_TRIES} times while it was read. Save there less often, or read a copy."
    )
