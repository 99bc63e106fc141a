"""The data of a run: training windows, held-out windows, and the tokenizer.

Text is read and tokenised when a run starts, as one sequence. So are records (`tokenised_records`), each for itself. Arrays are
read when they are used; each file is a sequence of its own.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fullshard.errors import ConfigurationError, size_text
from fullshard.programs.train.array_files import read_header
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.data_files import (
    AS_TEXT,
    OPENING_BYTES,
    DataFiles,
    binary_kind,
    data_files,
    left_out_of,
)
from fullshard.programs.train.held_out_split import training_lengths
from fullshard.programs.train.model_source import ModelSource
from fullshard.programs.train.tokenised_records import Prompts, tokenise_records
from fullshard.programs.train.tokenizer import Bytes, Tokenizer
from fullshard.programs.train.windows import Rows, Tokens, Windows, check_tokens, tokens_in

OPENING_LENGTH = 24
"""Most tokens of an opening."""

CHUNK_LENGTH = 65_536
"""Characters that are tokenised at once: some tokenizers need far longer for one long text than for its chunks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The data of one run."""

    source: str
    """Origin of the data, for people."""

    left_out: str
    """The part of the source that is not read, and why, in one line; empty if all is."""

    training: Rows
    held_out: Rows
    """At least one window each."""

    tokenizer: Tokenizer

    split: tuple[tuple[Tokens, int], ...]
    """All sequences, each with the number of its tokens that are for training."""

    prompts: Prompts | None = None
    """Prompts for the model, if the data are records."""

    def opening(self) -> list[int]:
        """Return the first tokens of the held-out data, for a model to go on from. Bytes of broken characters are left out."""
        if self.prompts is not None:
            return list(self.prompts.opening)
        row = self.held_out.rows([0])[0].tolist()
        tokens = row[: min(OPENING_LENGTH, (len(row) + 1) // 2)]
        if isinstance(self.tokenizer, Bytes):
            tokens = list(bytes(tokens).decode(errors="ignore").encode())
        return tokens


def open_data(config: RunConfig, model: ModelSource) -> Data:
    """Open the data of a run. Every rank does it for itself, and finds the same.

    Raises:
        ConfigurationError: there is no data, it cannot be read, it is too short for a window each of training and
            held-out data, or text has tokens that the model does not know. (Tokens of arrays, which may be larger than
            memory, are checked by `Windows.rows`.)
    """
    section = config.data
    files = data_files(section)
    left_out = [str(each) for each in files.left_out]
    if files.kind == "records":
        return _open_records(files, config, model, left_out)
    if files.kind == "text":
        text = _read_text(files)
        left_out += text.left_out
        sequences = [tokens_in(files.source, _tokens_of(text.content, model.tokenizer))]
        check_tokens(sequences[0], model.vocabulary)
    else:
        headers = [read_header(path, section.dtype) for path in files.paths]
        sequences = [
            Tokens(f"the file {each.path}", each.opened().read, 0, each.length) for each in headers
        ]
    lengths = training_lengths([len(each) for each in sequences], section, files.source)
    split = tuple(zip(sequences, lengths, strict=True))
    return Data(
        source=files.source,
        left_out="; ".join(left_out),
        training=Windows(
            [tokens.slice(0, length) for tokens, length in split],
            context=section.context,
            vocabulary=model.vocabulary,
        ),
        held_out=Windows(
            [tokens.slice(length, len(tokens)) for tokens, length in split],
            context=section.context,
            vocabulary=model.vocabulary,
        ),
        tokenizer=model.tokenizer,
        split=split,
    )


def _open_records(
    files: DataFiles, config: RunConfig, model: ModelSource, left_out: list[str]
) -> Data:
    found = tokenise_records(files, config, model.tokenizer)
    sequence = tokens_in(files.source, found.tokens)
    check_tokens(sequence, model.vocabulary)
    return Data(
        source=f"{files.source}: {found.summary}",
        left_out="; ".join([*left_out, *found.left_out]),
        training=found.training,
        held_out=found.held_out,
        tokenizer=model.tokenizer,
        split=((sequence, len(sequence)),),
        prompts=found.prompts,
    )


@dataclass(frozen=True, slots=True)
class _Text:
    """The text of all files."""

    content: bytearray
    left_out: list[str]


def _read_text(files: DataFiles) -> _Text:
    """Return the text of all files, up to `max_bytes`. Of several files, binary ones are left out."""
    content, binary, num_unread = bytearray(), list[Path](), 0
    try:
        for file in files.paths:
            size = file.stat().st_size
            room = -1 if files.max_bytes is None else files.max_bytes - len(content)
            if room == 0:
                num_unread += size
                continue
            with file.open("rb") as stream:
                new = stream.read(room)
            if len(files.paths) > 1 and binary_kind(new[:OPENING_BYTES]):
                binary.append(file)
                continue
            content += new
            num_unread += max(size - len(new), 0)
    except OSError as error:
        raise ConfigurationError(
            f"All files of the text must be readable: {error}. "
            "Name another file or folder with data.path."
        ) from error
    if not content:
        raise ConfigurationError(
            f"There is no text to learn from: {files.source} is empty, or not text. "
            "Name a file or a folder with data.path."
        )
    common = Path(os.path.commonpath([file.parent for file in files.paths]))
    left_out = [str(each) for each in left_out_of(common, binary, "binary", AS_TEXT)]
    if num_unread:
        sizes = size_text(num_unread), size_text(len(content) + num_unread)
        left_out.append(f"{sizes[0]} of {sizes[1]} of text (data.max_bytes)")
    return _Text(content, left_out)


def _tokens_of(content: bytearray, tokenizer: Tokenizer) -> Tensor:
    if isinstance(tokenizer, Bytes):
        return torch.frombuffer(content, dtype=torch.uint8)
    values = array("q")  # a list would take five times the memory
    for chunk in _chunks(content.decode(errors="replace")):
        values.extend(tokenizer.encode(chunk))
    return torch.frombuffer(values, dtype=torch.int64) if values else torch.empty(0).long()


def _chunks(text: str) -> Iterator[str]:
    """Cut a text into chunks of about `CHUNK_LENGTH`, after the end of a line if there is one."""
    start = 0
    while start < len(text):
        stop = start + CHUNK_LENGTH
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop
