"""A folder that several ranks fill, and that appears, or takes another one's place, when it is complete.

    parent/folder              new or empty, or what is to be replaced
    parent/.folder.<id>.tmp    the workshop: what is needed meanwhile, and
             ... /new          the folder to be
             ... /old          the one that was, for the moment between two renames

A process that dies leaves a workshop behind, and the folder as it was. If it dies in that moment, the old folder
is in there.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CheckpointError
from .team import Team
from .unfinished import flush

NEW = "new"
_OLD = "old"

Keep = Callable[[Path], bool]
"""Whether something that is in a folder stays there when the rest is replaced."""


@contextmanager
def replacing(folder: Path, team: Team, *, keep: Keep | None) -> Iterator[Path]:
    """A workshop beside ``folder``, on all ranks the same; its `NEW` becomes the folder at the end.

    Errors within must be the same on all ranks. After one, the folder is as it was.

    Args:
        folder: Where the new one will be.
        team: The ranks that fill it.
        keep: What stays of a folder that is there already, unless there is a new one of the name; None if it must be
            empty.
    """
    folder = folder.resolve()
    workshop = Path(team.first(lambda: str(_begin(folder, keep))))
    try:
        yield workshop
        team.first(lambda: _put_in_place(workshop, folder, keep))
    finally:
        # If the old one could not be put back, it is in there.
        if team.is_first and (folder.exists() or not (workshop / _OLD).exists()):
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
    # A rename replaces an empty folder, and no other: that has to go before.
    if keep is not None and folder.exists():
        folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    flush(folder.parent)


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
