"""Calls of the operating system that fail, as they do on a network file system with a bad moment."""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CALLS: tuple[tuple[Any, str], ...] = (
    *((os, name) for name in ("stat", "lstat", "listdir", "scandir", "open", "fsync")),
    *((os, name) for name in ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "link")),
    *((io, "open"), (builtins, "open"), (fcntl, "flock")),
)
"""All calls by which a folder is read or changed. `glob`, `Path` and `shutil` use these."""

ShouldFail = Callable[[str, Path], bool]


class FailingFiles:
    """Let calls below a folder fail for which ``should_fail``, given the call and its path, is true."""

    def __init__(self, folder: Path, should_fail: ShouldFail, code: int = errno.EIO) -> None:
        self._folder, self._should_fail, self._code = str(folder), should_fail, code
        self._patches = pytest.MonkeyPatch()
        self._is_inside = False

    def __enter__(self) -> None:
        for place, name in CALLS:
            self._patches.setattr(place, name, self._failing(name, getattr(place, name)))

    def __exit__(self, *_: object) -> None:
        self._patches.undo()

    def _failing(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._is_inside:
                self._is_inside = True
                try:
                    path = _path_of(args[0] if args else ".", kwargs.get("dir_fd"))
                    if path.startswith(self._folder) and self._should_fail(name, Path(path)):
                        raise OSError(self._code, os.strerror(self._code), path)
                finally:
                    self._is_inside = False
            return function(*args, **kwargs)

        return call


class Nth:
    """True for one call only, counted from 0."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.site: str | None = None
        """The call that failed, or None if there were not so many."""

    def __call__(self, name: str, path: Path) -> bool:
        self._left -= 1
        if self._left == -1:
            self.site = f"{name} {path.name}"
        return self._left == -1


def _path_of(argument: Any, folder: int | None) -> str:
    if isinstance(argument, int) or hasattr(argument, "fileno"):
        number = argument if isinstance(argument, int) else argument.fileno()
        return os.readlink(f"/proc/self/fd/{number}")
    path = os.fspath(argument)
    return path if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
