"""Paths that users give, files that are read whole, and files that are replaced whole. This module imports no torch."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.parse import unquote

from fullshard.errors import ConfigurationError

_URL = re.compile(r"[a-z][a-z0-9+.:-]+:/", re.IGNORECASE)
"""How a URL begins: a scheme of two letters or more (`C:/` has one), and a slash. `Path` makes one slash of two."""


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path that a user gave; refuse a URL, which `Path` would take for the name of a folder here.

    Every path of a user becomes a `Path` here, and nowhere else (`tests/test_local_paths.py`).

    Raises:
        ConfigurationError: it is the URL of an object store, a hub, or a file.
    """
    # Classes of other packages have the URL as their text, and the path of a cached copy as their path.
    text = str(path)
    if not (_URL.match(text) or _URL.match(str(Path(path)))):
        return Path(path)
    remedy = (
        f"Give the path alone: {_path_in(text)}."
        if text.lower().startswith("file:")
        else "Object stores and hubs are not supported: give a folder of this machine, also one that is mounted, and copy "
        "to or from there."
    )
    raise ConfigurationError(
        f"A path must be one of this machine; {text} is a URL. {remedy} If it is meant as the name of a folder, give its "
        "absolute path."
    )


def _path_in(url: str) -> str:
    """Return the path in a ``file:`` URL, without its host."""
    return unquote(re.sub(r"^file:(//[^/]*(?=/))?", "", url, flags=re.IGNORECASE))


def content_of(path: Path, *, max_bytes: int) -> bytes:
    """Return the bytes of a small regular file. It never waits for the other end of a pipe.

    Raises:
        OSError: the file cannot be read, is not a regular file, or has more than ``max_bytes``.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "It is not a regular file", str(path))
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"It has more than {max_bytes} bytes", str(path))
        return file.read()


@contextmanager
def atomic_write(path: Path, *, durable: bool) -> Iterator[IO[bytes]]:
    """Open a new file, and give it the name ``path`` when the block ends without an error.

    Readers see the old file or the new one, never a part. A reader that has the old file open keeps reading it.

    - After an error in the block, ``path`` is as it was and nothing else is left.
    - After a crash of the process, ``path`` is the old file or the new one. A file ``NAME.<12 hex digits>.tmp`` may be
      left beside it; nobody removes it.
    - After a crash of the machine, the same holds if ``durable`` is set, and once the block has ended it is the new file.
      Otherwise ``path`` may also be empty or cut short: some file systems write a name before its data.
    - A link at ``path`` is replaced, not followed. A folder there is an error, after the block; one without a name of its
      own (``.`` or ``/``) before it.
    - The new file has the permissions of any new file of this process, not those of the old one.
    - Two processes may write to one path at a time. The one that ends last wins.

    Args:
        path: The file. Its folder must exist.
        durable: Whether to wait until the disk has the data (``fsync`` of the file before the rename) and the name
            (``fsync`` of its folder after it). If only the latter fails, the error is raised with the new file in place.

    Raises:
        OSError: the file cannot be written or renamed.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with unfinished.open("xb") as file:
            yield file
        # The file is closed before: some file systems (NFS) say only then that the disk is full.
        rename_into_place(unfinished, path, durable=durable)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def rename_into_place(written: Path, path: Path, *, durable: bool) -> None:
    """Give a file that is completely written the name ``path``; `atomic_write` says what then holds."""
    if durable:
        flush(written)
    written.replace(path)
    if durable:
        flush(path.absolute().parent)


def flush(path: Path) -> None:
    """Wait until the disk has the data of a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
