"""Text to learn from: which files, their bytes, and the part kept back for evaluation.

Every machine that runs this has text: the sources of Python's own standard library. The files are
taken in the order of their paths, so ranks that read for themselves read the same.

    | file a | file b | ...                 | file y | file z |
    | training                                   | held out   |
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fullshard.errors import ConfigurationError

MAX_BYTES = 8_000_000
"""Read no more than this: plenty for a run of minutes, and quick to read on every rank."""

HELD_OUT_FRACTION = 0.05

SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
"""Not the standard library, or not the kind of text the rest of it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """The bytes of one run."""

    source: str
    """Where they come from, in words."""

    training: bytes
    held_out: bytes


def read_text(path: Path | None, *, context: int) -> Text:
    """Read the text at a path, or the standard library, and keep the end back for evaluation.

    Raises:
        ConfigurationError: there is no text, or too little to cut one window from each part.
    """
    source, files = _files_of(path)
    content = _read_up_to(MAX_BYTES, files)
    if not content:
        raise ConfigurationError(
            f"There is no text to learn from: found no readable text in {source}. "
            "Name a file or a folder with --text PATH."
        )
    window = context + 1  # the byte after a context is the last one to predict
    if len(content) < 2 * window:
        raise ConfigurationError(
            f"The text must hold a window for training and one for evaluation, 2 * (context "
            f"{context} + 1) = {2 * window} bytes; {source} has {len(content)}. "
            "Use a smaller --context or a longer --text."
        )
    held_out = max(int(len(content) * HELD_OUT_FRACTION), window)
    return Text(source=source, training=content[:-held_out], held_out=content[-held_out:])


def _files_of(path: Path | None) -> tuple[str, Iterator[Path]]:
    """Return what a path names, in words, and its files in the order of their paths."""
    if path is None:
        stdlib = Path(sysconfig.get_path("stdlib"))
        return f"the Python standard library in {stdlib}", _python_sources(stdlib)
    if path.is_file():
        return f"the file {path}", iter((path,))
    if path.is_dir():
        return f"the folder {path}", _text_files(path)
    raise ConfigurationError(
        f"--text must name a file or a folder, but there is none at {path}. "
        "Leave it out to learn from the Python standard library."
    )


def _python_sources(folder: Path) -> Iterator[Path]:
    for file in _walk(folder):
        if file.suffix == ".py":
            yield file


def _text_files(folder: Path) -> Iterator[Path]:
    for file in _walk(folder):
        with file.open("rb") as stream:
            is_binary = b"\0" in stream.read(4096)
        if not is_binary:
            yield file


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files under a folder by path; hidden ones and `SKIPPED_FOLDERS` are left out."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        if entry.is_file():
            yield Path(entry.path)
        # Links to folders are not followed: they may lead back up.
        elif entry.is_dir(follow_symlinks=False) and entry.name not in SKIPPED_FOLDERS:
            yield from _walk(Path(entry.path))


def _read_up_to(max_bytes: int, files: Iterator[Path]) -> bytes:
    """Return the files' bytes one after the other, cut off at `max_bytes`."""
    content = bytearray()
    try:
        for file in files:
            content += file.read_bytes()
            if len(content) >= max_bytes:
                break
    except OSError as error:
        raise ConfigurationError(
            f"All files of the text must be readable: {error}. "
            "Name another file or folder with --text PATH."
        ) from error
    return bytes(content[:max_bytes])
