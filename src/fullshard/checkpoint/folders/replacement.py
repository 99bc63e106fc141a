"""A folder that several ranks fill, and that appears, or replaces an old folder, when it is complete.

    parent/folder              new or empty, or the folder to replace
    parent/.folder.<id>.tmp    the workspace: temporary files, and
             ... /new          the new folder
             ... /old          after the exchange, the old folder

A process that dies leaves a workspace behind. The folder is then the old one or the new one: Linux exchanges two names in
one step on most file systems. On others (NFS) a process may die between the two renames; then the old folder is in the
workspace.

Others may write to the folder meanwhile. Files that stay are linked into the new folder before the exchange. After it the
old folder is emptied file by file: what has come or was changed since then is moved to the new folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
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
        keep: Files of the old folder that stay, unless the new one has a file of that name. None if the old folder must
            be empty.
    """

    def begin() -> tuple[str, str]:
        resolved = folder.resolve()
        return str(resolved), str(_begin(resolved, keep))

    resolved, workspace = map(Path, rank_group.on_first(begin))
    try:
        yield workspace
        rank_group.on_first(lambda: _install(workspace, resolved, keep))
    finally:
        if rank_group.is_first:
            _remove(workspace)


def _begin(folder: Path, keep: Keep | None) -> Path:
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} must be a folder; it is a file. Choose another name.")
    mounted = [point for point in _mount_points() if point == folder or folder in point.parents]
    if mounted:
        raise CheckpointError(
            f"{folder} is replaced by a new folder, so no file system may be mounted there or below; at these points one is: "
            f"{', '.join(map(str, mounted[:5]))}. Choose a new folder in it."
        )
    if folder.exists() and any(folder.iterdir()) and keep is None:
        raise CheckpointError(
            f"{folder} must be new or empty; it is not. Choose another folder, or overwrite this one."
        )
    workspace = folder.parent / f".{folder.name}.{secrets.token_hex(6)}.tmp"
    (workspace / NEW).mkdir(parents=True)
    return workspace


def _mount_points() -> list[Path]:
    """Return the points of this process's mounts, as the kernel lists them."""
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:  # not Linux
        return []
    escaped = (line.split(b" ")[4] for line in lines)
    names = (re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), n) for n in escaped)
    return [Path(os.fsdecode(name)) for name in names]


def _install(workspace: Path, folder: Path, keep: Keep | None) -> None:
    new, old = workspace / NEW, workspace / _OLD
    linked: dict[Path, _Version] = {}
    if keep is not None and folder.exists():
        for each in folder.iterdir():
            if keep(each) and not (new / each.name).exists():
                _link(each, new / each.name, linked)
    for path in (*new.rglob("*"), new):
        if not path.is_symlink():
            flush(path)
    if keep is None or not folder.exists():
        new.rename(folder)  # fails unless the old folder is empty
    else:
        _swap(new, old, folder)
        left = {old / path.relative_to(folder): version for path, version in linked.items()}
        _empty_old(old, folder, keep, left)
    flush(folder.parent)


def _swap(new: Path, old: Path, folder: Path) -> None:
    """Give the new folder the name ``folder``, and the old folder the name ``old``."""
    # The exchange leaves the old folder under the name that the new one had.
    new.rename(old)
    exchanged = False
    try:
        exchanged = _exchange(old, folder)
    finally:
        if not exchanged:
            old.rename(new)
    if not exchanged:
        folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            old.rename(folder)
            raise


def _remove(workspace: Path) -> None:
    """Remove the workspace. An old folder in it stays: it could not be renamed back, or has files of others."""
    with contextlib.suppress(OSError):
        for each in workspace.iterdir():
            if each.name != _OLD:
                shutil.rmtree(each, ignore_errors=True)
        workspace.rmdir()


# --- files that stay -----------------------------------------------------------------------------------------

_Version = tuple[int, ...]
"""Changes when a file is replaced or, if it was copied and not linked, written to."""


def _link(kept: Path, new: Path, linked: dict[Path, _Version]) -> None:
    """Hard-link a file, or all files of a folder; copy where the file system has no hard links.

    Args:
        kept: The file or folder.
        new: Its new name.
        linked: Gets the version of each file.
    """

    def link(source: str, target: str) -> None:
        status = os.lstat(source)
        try:
            os.link(source, target, follow_symlinks=False)
            linked[Path(source)] = (status.st_ino,)
        except OSError:
            shutil.copy2(source, target, follow_symlinks=False)
            linked[Path(source)] = (status.st_ino, status.st_mtime_ns, status.st_size)

    if kept.is_dir() and not kept.is_symlink():
        shutil.copytree(kept, new, symlinks=True, copy_function=link)
    else:
        link(str(kept), str(new))


def _is_unchanged(file: Path, version: _Version) -> bool:
    status = file.lstat()
    return (status.st_ino, status.st_mtime_ns, status.st_size)[: len(version)] == version


def _empty_old(old: Path, folder: Path, keep: Keep, linked: Mapping[Path, _Version]) -> None:
    """Remove the old folder, and move what others have written there since its files were linked to the new folder."""
    try:
        for each in old.iterdir():
            _remove_or_move(each, folder / each.name, linked, replaced=not keep(each))
        old.rmdir()
    except OSError as error:
        warnings.warn(
            f"{folder} is complete, but files that others write to the old folder may be left in {old}: {error}",
            stacklevel=2,
        )


def _remove_or_move(
    each: Path, new: Path, linked: Mapping[Path, _Version], *, replaced: bool
) -> None:
    """Remove a file or folder of the old folder, or move it to the new one; ``replaced`` ones are weights."""
    is_folder = each.is_dir() and not each.is_symlink()
    if is_folder and new.is_dir():
        for inner in each.iterdir():
            _remove_or_move(inner, new / inner.name, linked, replaced=False)
        each.rmdir()
    elif each in linked:
        each.unlink() if _is_unchanged(each, linked[each]) else each.replace(new)
    elif is_folder or not (replaced or os.path.lexists(new)):
        each.replace(new)
    else:
        each.unlink()  # old weights, or a file of which the new folder has its own


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
