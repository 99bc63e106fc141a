"""The files that a run reads its data from, in order.

    no path         the sources of Python's standard library, which every machine has
    text            a file, or every text file under a folder
    array           tokens in a `.npy` or `.bin` file, or in every such file under a folder
    records         chats, instructions or documents: see `record_files`

Everything in a folder that a user names is read, except for what `DataFiles.left_out` lists; `data` adds what it finds only
when it reads. Files are sorted by path, so all ranks find the same order. This file imports no torch, so a wrong path is
reported at once.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fullshard.errors import ConfigurationError
from fullshard.programs.train.config import DataSection
from fullshard.programs.train.record_files import can_have_records, is_of_records

Kind = Literal["text", "array", "records"]

ARRAY_SUFFIXES = (".npy", ".bin")

NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
"""Folders that are not the standard library, or unlike the rest of it."""

LIBRARY_BYTES = 8_000_000
"""Most bytes of the standard library that are read, unless `data.max_bytes` says otherwise."""

WHAT: dict[Kind, str] = {
    "text": "text files",
    "array": f"{' or '.join(ARRAY_SUFFIXES)} files",
    "records": "files of records (.jsonl, .parquet, compressed ones)",
}
"""Files of each kind, for messages."""

NONE_OF: dict[Kind, str] = {"array": "no arrays", "records": "no records"}

BY_NAME = "to read one, name it with data.path"

AS_TEXT = f'{BY_NAME}, and set data.kind = "text"'

OPENING_BYTES = 4096
"""Bytes of a file that show whether it is text."""

BINARY_KINDS = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip, as .npz is",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"\x89HDF": "HDF5",
    b"\x93NUMPY": "an array of numpy, whose name must end with .npy",
}
"""Beginnings of files that are no text."""

SHOWN_NAMES = 3
"""Number of names listed of what is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """Some of a folder's content that is not read."""

    reason: str
    names: tuple[str, ...]
    """Names of files or folders, relative to the folder."""
    remedy: str
    """The field that has them read."""

    def __str__(self) -> str:
        num_more = len(self.names) - SHOWN_NAMES
        more = f" and {num_more:,} more" if num_more > 0 else ""
        return f"{self.reason}: {', '.join(self.names[:SHOWN_NAMES])}{more} ({self.remedy})"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFiles:
    """The files of one run."""

    source: str
    """Place of the files, for people."""

    kind: Kind

    paths: tuple[Path, ...]
    """At least one."""

    left_out: tuple[LeftOut, ...] = ()
    """Other content of the folder, found without reading files."""

    max_bytes: int | None = None
    """Most bytes of text to read."""


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
        raise ConfigurationError(
            f"There is nothing to learn from: found no {WHAT[files.kind]} in {files.source}. "
            "Name a file or a folder with data.path."
        )
    return files


def has_records(section: DataSection) -> bool:
    """Say whether a run learns from records, also when they have gone, as long as the configuration tells."""
    if section.kind != "auto":
        return section.kind == "records"
    try:
        return data_files(section).kind == "records"
    except ConfigurationError:
        return False


def _found(section: DataSection) -> DataFiles:
    path, kind = section.path, section.kind
    if path is None:
        folder = Path(sysconfig.get_path("stdlib"))
        sources = tuple(file for file in _walk(folder, [], NOT_LIBRARY) if file.suffix == ".py")
        return DataFiles(
            source=f"the Python standard library in {folder}, without its tests",
            kind="text",
            paths=sources,
            max_bytes=section.max_bytes or LIBRARY_BYTES,
        )
    if path.is_file():
        if kind == "array" and _kind_of(path) != "array":
            raise ConfigurationError(
                f"Arrays of tokens are {' or '.join(ARRAY_SUFFIXES)} files, but data.path is {path}. "
                'Rename it, or set data.kind to "text".'
            )
        if kind == "records" and not can_have_records(path):
            raise ConfigurationError(
                f"Records are read from .jsonl, .json, .parquet and compressed files, but data.path is {path}. Rename it, or leave "
                "data.kind out."
            )
        if kind == "auto" and _kind_of(path) == "text":
            _refuse_binary(path)
        return DataFiles(
            source=f"the file {path}",
            kind=_kind_of(path) if kind == "auto" else kind,
            paths=(path,),
            max_bytes=section.max_bytes,
        )
    if not path.is_dir():
        raise ConfigurationError(
            f"data.path must name a file or a folder, but there is none at {path}. "
            "Leave it out to learn from the Python standard library."
        )
    return _in_folder(path, section)


def binary_kind(opening: bytes) -> str:
    """Return the kind of a file that begins so, if it is no text; empty if it may be text."""
    known = (name for start, name in BINARY_KINDS.items() if opening.startswith(start))
    return next(known, "binary: it has zero bytes" if b"\0" in opening else "")


def _refuse_binary(path: Path) -> None:
    with path.open("rb") as file:
        kind = binary_kind(file.read(OPENING_BYTES))
    if kind:
        raise ConfigurationError(
            f"data.path must be text, or an array of tokens ({' or '.join(ARRAY_SUFFIXES)}); {path} is neither ({kind}). Unpack "
            'it to text in UTF-8, or write its tokens with numpy.save. data.kind = "text" reads its bytes as they are.'
        )


def _in_folder(folder: Path, section: DataSection) -> DataFiles:
    skipped: list[Path] = []
    files = tuple(_walk(folder, skipped))
    left_out = left_out_of(folder, skipped, "hidden, or a link to a folder", BY_NAME)
    for kind, none in NONE_OF.items():
        chosen = tuple(file for file in files if _is_of(file, kind, section.kind))
        if section.kind == kind or (section.kind == "auto" and chosen):
            others = [file for file in files if file not in chosen]
            left_out += left_out_of(folder, others, none, 'data.kind = "text" reads them')
            return DataFiles(
                source=f"the folder {folder}", kind=kind, paths=chosen, left_out=left_out
            )
    return DataFiles(
        source=f"the folder {folder}",
        kind="text",
        paths=files,
        left_out=left_out,
        max_bytes=section.max_bytes,
    )


def _is_of(file: Path, kind: Kind, wanted: str) -> bool:
    """Say whether a file in a folder is of a kind. A `.json` file has records only where records are wanted."""
    if kind == wanted == "records":
        return can_have_records(file)
    return _kind_of(file) == kind


def left_out_of(
    folder: Path, paths: Sequence[Path], reason: str, remedy: str
) -> tuple[LeftOut, ...]:
    """Return one `LeftOut` for paths in a folder, or none if there are no paths."""
    names = tuple(str(path.relative_to(folder)) for path in paths)
    return (LeftOut(reason=reason, names=names, remedy=remedy),) if names else ()


def _kind_of(file: Path) -> Kind:
    if file.suffix in ARRAY_SUFFIXES:
        return "array"
    return "records" if is_of_records(file) else "text"


def _walk(
    folder: Path, left_out: list[Path], skipped: Collection[str] = ("lost+found",)
) -> Iterator[Path]:
    """Yield the files under a folder by path, and collect in ``left_out`` what is not entered.

    That is: hidden files and folders; links to folders, which may lead back up; what is neither file nor folder; and
    folders with one of the names in ``skipped`` (only root may read `lost+found`).
    """
    if not folder.is_dir():
        return
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            left_out.append(Path(entry.path))
        elif entry.is_file():
            yield Path(entry.path)
        elif entry.is_dir(follow_symlinks=False) and entry.name not in skipped:
            yield from _walk(Path(entry.path), left_out, skipped)
        else:
            left_out.append(Path(entry.path))
