"""Which files a run learns from, in which order, and what they hold.

    no path         the sources of Python's standard library: every machine that runs this has them
    text            a file, or every text file under a folder
    array           `.npy` or `.bin`, or every such file in a folder: tokens, ready to be learned

Files are taken in the order of their paths, so ranks that look for themselves find the same. This
file imports no torch: a wrong path is answered at once.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fullshard.errors import ConfigurationError
from fullshard.train.config import DataSection

ARRAY_SUFFIXES = (".npy", ".bin")

SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
"""Not the standard library, or not the kind of text the rest of it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFiles:
    """The files of one run."""

    source: str
    """Where they are, in words."""

    kind: Literal["text", "array"]
    paths: tuple[Path, ...]


def data_files(section: DataSection) -> DataFiles:
    """Find the files that a run learns from.

    Raises:
        ConfigurationError: there are none, or not of the kind that was asked for.
    """
    path = section.path
    if path is None:
        return _standard_library(section)
    try:
        if path.is_file():
            kind = section.kind if section.kind != "auto" else _kind_of(path)
            files = DataFiles(source=f"the file {path}", kind=kind, paths=(path,))
        elif path.is_dir():
            files = _folder(path, section)
        else:
            raise ConfigurationError(
                f"data.path must name a file or a folder, but there is none at {path}. "
                "Leave it out to learn from the Python standard library."
            )
    except OSError as error:
        raise ConfigurationError(f"data.path must be readable: {error}.") from error
    _check(files, section)
    return files


def _standard_library(section: DataSection) -> DataFiles:
    folder = Path(sysconfig.get_path("stdlib"))
    if section.kind == "array":
        raise ConfigurationError(
            'data.kind "array" needs a file or a folder: set data.path. '
            "Without one, the text of the Python standard library is learned."
        )
    sources = tuple(file for file in _walk(folder) if file.suffix == ".py")
    files = DataFiles(source=f"the Python standard library in {folder}", kind="text", paths=sources)
    _check(files, section)
    return files


def _kind_of(file: Path) -> Literal["text", "array"]:
    return "array" if file.suffix in ARRAY_SUFFIXES else "text"


def _folder(folder: Path, section: DataSection) -> DataFiles:
    """All of a folder's files of one kind: arrays, if it has any and text was not asked for."""
    source = f"the folder {folder}"
    files = list(_walk(folder))
    arrays = tuple(file for file in files if _kind_of(file) == "array")
    if section.kind == "array" or (section.kind == "auto" and arrays):
        return DataFiles(source=source, kind="array", paths=arrays)
    return DataFiles(source=source, kind="text", paths=tuple(filter(_is_text, files)))


def _check(files: DataFiles, section: DataSection) -> None:
    if not files.paths:
        what = "text files" if files.kind == "text" else f"files {' or '.join(ARRAY_SUFFIXES)}"
        raise ConfigurationError(
            f"There is nothing to learn from: found no {what} in {files.source}. "
            "Name a file or a folder with data.path."
        )
    if files.kind == "array":
        wrong = [str(path) for path in files.paths if path.suffix not in ARRAY_SUFFIXES]
        if wrong:
            raise ConfigurationError(
                f"Arrays of tokens are files {' or '.join(ARRAY_SUFFIXES)}, but data.path is "
                f'{", ".join(wrong)}. Rename it, or set data.kind to "text".'
            )


def _is_text(file: Path) -> bool:
    with file.open("rb") as stream:
        return b"\0" not in stream.read(4096)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files under a folder by path; hidden ones and `SKIPPED_FOLDERS` are left out."""
    if not folder.is_dir():
        return
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        if entry.is_file():
            yield Path(entry.path)
        # Links to folders are not followed: they may lead back up.
        elif entry.is_dir(follow_symlinks=False) and entry.name not in SKIPPED_FOLDERS:
            yield from _walk(Path(entry.path))
