"""The files that a run reads its data from, in order.

    no path         the sources of Python's standard library, which every machine has
    text            a file, or every text file under a folder
    array           tokens in a `.npy` or `.bin` file, or in every such file under a folder

Files are sorted by path, so all ranks find the same order. This file imports no torch, so a wrong path is reported at
once.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fullshard.errors import ConfigurationError
from fullshard.programs.train.config import DataSection

Kind = Literal["text", "array"]

ARRAY_SUFFIXES = (".npy", ".bin")

SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lost+found"}
)
"""Not the standard library, or unlike the rest of it; and `lost+found`, which only root may read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFiles:
    """The files of one run."""

    source: str
    """Where they are, for people."""

    kind: Kind

    paths: tuple[Path, ...]
    """At least one."""


def data_files(section: DataSection) -> DataFiles:
    """Return the files that a run reads its data from.

    Raises:
        ConfigurationError: there are none, or none of the kind that was asked for.
    """
    try:
        files = _found(section)
    except OSError as error:
        raise ConfigurationError(f"data.path must be readable: {error}.") from error
    if not files.paths:
        what = "text files" if files.kind == "text" else f"{' or '.join(ARRAY_SUFFIXES)} files"
        raise ConfigurationError(
            f"There is nothing to learn from: found no {what} in {files.source}. "
            "Name a file or a folder with data.path."
        )
    return files


def _found(section: DataSection) -> DataFiles:
    path, kind = section.path, section.kind
    if path is None:
        folder = Path(sysconfig.get_path("stdlib"))
        sources = tuple(file for file in _walk(folder) if file.suffix == ".py")
        source = f"the Python standard library in {folder}"
        return DataFiles(source=source, kind="text", paths=sources)
    if path.is_file():
        if kind == "array" and _kind_of(path) != "array":
            raise ConfigurationError(
                f"Arrays of tokens are {' or '.join(ARRAY_SUFFIXES)} files, but data.path is {path}. "
                'Rename it, or set data.kind to "text".'
            )
        return DataFiles(
            source=f"the file {path}",
            kind=_kind_of(path) if kind == "auto" else kind,
            paths=(path,),
        )
    if not path.is_dir():
        raise ConfigurationError(
            f"data.path must name a file or a folder, but there is none at {path}. "
            "Leave it out to learn from the Python standard library."
        )
    files = tuple(_walk(path))
    arrays = tuple(file for file in files if _kind_of(file) == "array")
    if kind == "array" or (kind == "auto" and arrays):
        return DataFiles(source=f"the folder {path}", kind="array", paths=arrays)
    return DataFiles(source=f"the folder {path}", kind="text", paths=files)


def _kind_of(file: Path) -> Kind:
    return "array" if file.suffix in ARRAY_SUFFIXES else "text"


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
