"""Records of chats, instructions or documents: the files that hold them, read one record after the other.

    .jsonl                                  a JSON object in each line
    .json                                   an array of objects, or lines of them
    .parquet                                a table; a row is a record
    .jsonl.gz, .json.zst, .txt.xz, ...      the same, compressed; a text is one record with the field "text"

Plain JSON is read here. Everything else is read by the package datasets, as a stream: nothing is downloaded, and nothing is
written to its cache. This file imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigurationError

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")

READER = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
"""Readers in datasets, by the ending of a name."""

Record = Mapping[str, Any]


def is_of_records(file: Path) -> bool:
    """Say whether a file's name says that it has records. A `.json` or `.txt` file may be anything."""
    return _reader(file) is not None and file.suffix not in (".json", ".txt")


def can_have_records(file: Path) -> bool:
    """Say whether records can be read from a file, by its name."""
    return _reader(file) is not None and file.suffix != ".txt"


def needs_datasets(file: Path) -> bool:
    """Say whether a file of records is read by the package datasets."""
    return file.suffix not in (".jsonl", ".json")


def check_datasets(files: tuple[Path, ...]) -> None:
    """Raise unless the files can be read with the packages that are installed; ConfigurationError."""
    needing = [file for file in files if needs_datasets(file)]
    if needing and find_spec("datasets") is None:
        raise ConfigurationError(
            f"Parquet and compressed files are read by the package datasets, which is not installed: {needing[0]}. Install "
            "fullshard[datasets], or write the records as lines of JSON (.jsonl)."
        )


def read_records(file: Path) -> Iterator[tuple[str, Record]]:
    """Yield the records of a file, each with its place for messages.

    Raises:
        ConfigurationError: the file cannot be read, or has something else than records.
    """
    check_datasets((file,))
    found = _stream(file) if needs_datasets(file) else _plain_json(file)
    for number, record in enumerate(found, start=1):
        where = f"record {number:,} of {file}"
        if not isinstance(record, Mapping):
            raise ConfigurationError(
                f"A record must be an object with named fields; {where} is a {type(record).__name__}. Correct it, or set "
                'data.kind = "text" to read the file as text.'
            )
        yield where, record


def _reader(file: Path) -> str | None:
    suffixes = file.suffixes[-2:]
    if suffixes and suffixes[-1] in COMPRESSED:
        kind = suffixes[0] if len(suffixes) == 2 else ""
        return None if kind == ".parquet" else READER.get(kind)
    return READER.get(file.suffix)


def _plain_json(file: Path) -> Iterator[Any]:
    try:
        if file.suffix == ".json":
            text = file.read_text(encoding="utf-8-sig")
            if text.lstrip().startswith("["):
                yield from json.loads(text)
                return
        with file.open(encoding="utf-8-sig") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except (ValueError, RecursionError) as error:
                        raise ConfigurationError(
                            f"Each line of {file} must be a JSON object; line {number:,} is not: {error}. Correct it, or set "
                            'data.kind = "text" to read the file as text.'
                        ) from error
    except ConfigurationError:  # it is a ValueError, too
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{file} must be JSON in UTF-8, and cannot be read: {error}."
        ) from error


def _stream(file: Path) -> Iterator[Any]:
    from datasets import load_dataset

    reader = _reader(file)
    options = {"sample_by": "document"} if reader == "text" else {}
    try:
        yield from load_dataset(
            reader, data_files=str(file), split="train", streaming=True, **options
        )
    except Exception as error:  # whatever datasets and its readers raise on a file that is damaged
        raise ConfigurationError(
            f"The package datasets must be able to read {file}: {error}"
        ) from error
