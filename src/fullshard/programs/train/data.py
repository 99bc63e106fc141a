"""The data of a run: training windows, held-out windows, and the tokenizer.

Text is read and tokenised when a run starts, as one sequence. Arrays are mapped into memory; each file is a sequence of its
own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fullshard.errors import ConfigurationError
from fullshard.programs.train.array_files import read_header
from fullshard.programs.train.config import DataSection, RunConfig
from fullshard.programs.train.data_files import DataFiles, data_files
from fullshard.programs.train.held_out_split import training_lengths
from fullshard.programs.train.model_source import ModelSource
from fullshard.programs.train.tokenizer import Bytes, Tokenizer
from fullshard.programs.train.windows import Tokens, Windows, check_tokens

CHUNK_LENGTH = 65_536
"""Characters that are tokenised at once: some tokenizers need far longer for one long text than for its chunks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The data of one run."""

    source: str
    """Where it comes from, for people."""

    training: Windows
    held_out: Windows
    """At least one window each."""

    tokenizer: Tokenizer


def open_data(config: RunConfig, model: ModelSource) -> Data:
    """Open the data of a run. Every rank does it for itself, and finds the same.

    Raises:
        ConfigurationError: there is no data, it cannot be read, it is too short for a window each of training and
            held-out data, or text has tokens that the model does not know. (Tokens of arrays, which may be larger than
            memory, are checked by `Windows.rows`.)
    """
    section = config.data
    files = data_files(section)
    if files.kind == "text":
        sequences = [_read_text(files, model.tokenizer, section)]
        check_tokens(sequences[0], model.vocabulary)
    else:
        headers = [read_header(path, section.dtype) for path in files.paths]
        sequences = [Tokens(f"the file {each.path}", each.mapped()) for each in headers]
    lengths = training_lengths([len(each) for each in sequences], section, files.source)
    split = list(zip(sequences, lengths, strict=True))
    return Data(
        source=files.source,
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
    )


def _read_text(files: DataFiles, tokenizer: Tokenizer, section: DataSection) -> Tokens:
    """Return the text of all files, tokenised, as one sequence."""
    try:
        content = _read_up_to(section.max_bytes, files.paths)
    except OSError as error:
        raise ConfigurationError(
            f"All files of the text must be readable: {error}. "
            "Name another file or folder with data.path."
        ) from error
    if not content:
        raise ConfigurationError(
            f"There is no text to learn from: what is in {files.source} is empty, or not text. "
            "Name a file or a folder with data.path."
        )
    if isinstance(tokenizer, Bytes):
        return Tokens(files.source, torch.frombuffer(content, dtype=torch.uint8))
    values = [
        token
        for chunk in _chunks(content.decode(errors="replace"))
        for token in tokenizer.encode(chunk)
    ]
    return Tokens(files.source, torch.tensor(values, dtype=torch.int64))


def _read_up_to(max_bytes: int, files: Sequence[Path]) -> bytearray:
    """Return the files' bytes one after the other, cut off at `max_bytes`. Of several files, binary ones are left out."""
    content = bytearray()
    for file in files:
        with file.open("rb") as stream:
            new = stream.read(max_bytes - len(content))
        if len(files) == 1 or b"\0" not in new[:4096]:
            content += new
        if len(content) >= max_bytes:
            break
    return content


def _chunks(text: str) -> Iterator[str]:
    """Cut a text into chunks of about `CHUNK_LENGTH`, after the end of a line if there is one."""
    start = 0
    while start < len(text):
        stop = start + CHUNK_LENGTH
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop
