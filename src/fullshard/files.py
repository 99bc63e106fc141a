"""Small files, read whole: manifests, metadata, indices. What is at their path may be anything."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def content_of(path: Path, *, most_bytes: int) -> bytes:
    """The bytes of a regular file; it neither waits for the other end of a pipe nor reads without an end.

    Raises:
        OSError: it cannot be read, is no regular file, or has more than ``most_bytes``.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "It is not a regular file", str(path))
        if status.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"It has more than {most_bytes} bytes", str(path))
        return file.read()
