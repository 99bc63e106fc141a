"""A folder that several ranks fill, and that appears, or takes another one's place, when it is complete.

    parent/folder              new or empty, or what is to be replaced
    parent/.folder.<id>.tmp    the workshop: what is needed meanwhile, and
             ... /new          the folder to be; then, what was in its place
             ... /old          where names cannot be exchanged: the one that was, for the moment between two renames

A process that dies leaves a workshop behind, and the folder as it was or as it is to be. Linux exchanges the two names at
once, on most file systems. On others (NFS), a process may die in that moment: then the old folder is in there.
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
"""Whether something that is in a folder stays there when the rest is replaced."""


@contextmanager
def replacing(folder: Path, rank_group: RankGroup, *, keep: Keep | None) -> Iterator[Path]:
    """A workshop beside ``folder``, on all ranks the same; its `NEW` becomes the folder at the end.

    Errors within must be the same on all ranks. After one, the folder is as it was.

    Args:
        folder: Where the new one will be.
        rank_group: The ranks that fill it.
        keep: What stays of a folder that is there already, unless there is a new one of the name; None if it must be
            empty.
    """
    folder = folder.resolve()
    workshop = Path(rank_group.on_first(lambda: str(_begin(folder, keep))))
    try:
        yield workshop
        rank_group.on_first(lambda: _put_in_place(workshop, folder, keep))
    finally:
        # If the old one could not be put back, it is in there.
        if rank_group.is_first and (folder.exists() or not (workshop / _OLD).exists()):
            shutil.rmtree(workshop, ignore_errors=True)


def _begin(folder: Path, keep: Keep | None) -> Path:
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} must be a folder, and is a file. Choose another name.")
    if folder.exists() and any(folder.iterdir()) and keep is None:
        raise CheckpointError(
            f"{folder} must be new or empty, and has something in it. Choose another folder, or overwrite this one."
        )
    workshop = folder.parent / f".{folder.name}.{secrets.token_hex(6)}.tmp"
    (workshop / NEW).mkdir(parents=True)
    return workshop


def _put_in_place(workshop: Path, folder: Path, keep: Keep | None) -> None:
    new, old = workshop / NEW, workshop / _OLD
    if keep is not None and folder.exists():
        for each in folder.iterdir():
            if keep(each) and not (new / each.name).exists():
                _link(each, new / each.name)
    for path in (*new.rglob("*"), new):
        if not path.is_symlink():
            flush(path)
    if keep is None or not folder.exists():
        new.rename(folder)  # replaces an empty folder, and no other
    elif not _exchange(new, folder):
        folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            old.rename(folder)
            raise
    flush(folder.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders have each other's name, at once; False where the system cannot do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    failed = rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _RENAME_EXCHANGE)
    if failed and ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(other))
    return not failed


def _link(kept: Path, new: Path) -> None:
    """Give a file a second name, or all files of a folder; copy where a file cannot have two."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError:
            shutil.copy2(source, target, follow_symlinks=False)

    if kept.is_dir() and not kept.is_symlink():
        shutil.copytree(kept, new, symlinks=True, copy_function=link)
    else:
        link(str(kept), str(new))
