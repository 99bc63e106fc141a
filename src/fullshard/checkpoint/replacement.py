"""A folder that several ranks fill, and that appears, or replaces an old folder, when it is complete.

    parent/folder              new or empty, or the folder to replace
    parent/.folder.<id>.tmp    the workspace: temporary files, and
             ... /new          the new folder; after the exchange, the old one
             ... /old          where names cannot be exchanged: the old folder, between two renames

A process that dies leaves a workspace behind. The folder is then the old one or the new one: Linux exchanges two names in
one step on most file systems. On others (NFS) a process may die between the two renames; then the old folder is in the
workspace.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fullshard.checkpoint.rank_group import RankGroup
from fullshard.errors import CheckpointError
from fullshard.files import flush

NEW = "new"
_OLD = "old"

# As the kernel numbers them.
_HERE = -100
_RENAME_EXCHANGE = 2

Keep = Callable[[Path], bool]
"""Whether a file stays in a folder when the rest is replaced."""


@contextmanager
def replacing(folder: Path, rank_group: RankGroup, *, keep: Keep | None) -> Iterator[Path]:
    """Yield a workspace beside ``folder``, the same on all ranks; its subfolder `NEW` becomes ``folder`` after the block.

    Errors in the block must be the same on all ranks. After an error, ``folder`` is unchanged.

    Args:
        folder: The folder to make or replace.
        rank_group: The ranks that fill it.
        keep: Which files of the old folder stay, unless the new one has a file of that name. None if the old folder must
            be empty.
    """
    folder = folder.resolve()
    workspace = Path(rank_group.on_first(lambda: str(_begin(folder, keep))))
    try:
        yield workspace
        rank_group.on_first(lambda: _install(workspace, folder, keep))
    finally:
        # If the old folder could not be renamed back, the workspace has it.
        if rank_group.is_first and (folder.exists() or not (workspace / _OLD).exists()):
            shutil.rmtree(workspace, ignore_errors=True)


def _begin(folder: Path, keep: Keep | None) -> Path:
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} must be a folder; it is a file. Choose another name.")
    if folder.exists() and any(folder.iterdir()) and keep is None:
        raise CheckpointError(
            f"{folder} must be new or empty; it is not. Choose another folder, or overwrite this one."
        )
    workspace = folder.parent / f".{folder.name}.{secrets.token_hex(6)}.tmp"
    (workspace / NEW).mkdir(parents=True)
    return workspace


def _install(workspace: Path, folder: Path, keep: Keep | None) -> None:
    new, old = workspace / NEW, workspace / _OLD
    if keep is not None and folder.exists():
        for each in folder.iterdir():
            if keep(each) and not (new / each.name).exists():
                _link(each, new / each.name)
    for path in (*new.rglob("*"), new):
        if not path.is_symlink():
            flush(path)
    if keep is None or not folder.exists():
        new.rename(folder)  # fails unless the old folder is empty
    elif not _exchange(new, folder):
        folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            old.rename(folder)
            raise
    flush(folder.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step. Return False where the system cannot do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    failed = rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _RENAME_EXCHANGE)
    if failed and ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(other))
    return not failed


def _link(kept: Path, new: Path) -> None:
    """Hard-link a file, or all files of a folder; copy where the file system has no hard links."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError:
            shutil.copy2(source, target, follow_symlinks=False)

    if kept.is_dir() and not kept.is_symlink():
        shutil.copytree(kept, new, symlinks=True, copy_function=link)
    else:
        link(str(kept), str(new))
