"""What a run learns from: training windows, held-out windows, and the tokenizer.

    | file a | file b | ...                 | file y | file z |
    | training                                   | held out   |

Text is read and tokenised when a run starts, as one sequence; arrays are mapped into memory, each
file a sequence of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fullshard.errors import ConfigurationError
from fullshard.train.config import DataSection, RunConfig
from fullshard.train.data_files import DataFiles, data_files
from fullshard.train.models import ModelSource
from fullshard.train.tokenizing import Bytes, Tokenizer, open_tokenizer
from fullshard.train.windows import Tokens, Windows


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What one run learns from."""

    source: str
    """Where it comes from, in words."""

    training: Windows
    held_out: Windows
    """At least one window each."""

    tokenizer: Tokenizer


def open_data(config: RunConfig, model: ModelSource) -> Data:
    """Open the data of a run.

    Raises:
        ConfigurationError: there is none, it cannot be read, or it is too little to cut one window from each part.
    """
    files = data_files(config.data)
    tokenizer = open_tokenizer(config)
    sequences = [_text(files, tokenizer, config.data)]
    training, held_out = split(sequences, config.data, files.source)
    context, vocabulary = config.data.context, model.vocabulary
    return Data(
        source=files.source,
        training=Windows(training, context=context, vocabulary=vocabulary),
        held_out=Windows(held_out, context=context, vocabulary=vocabulary),
        tokenizer=tokenizer,
    )


def split(
    sequences: Sequence[Tokens], section: DataSection, source: str
) -> tuple[list[Tokens], list[Tokens]]:
    """Keep the end back for evaluation: a part of all tokens, and at least one window."""
    total = sum(map(len, sequences))
    cut = total - int(total * section.held_out)
    # The last window there is must be behind the cut.
    start, last = 0, None
    for sequence in sequences:
        if sequence.num_windows(section.context):
            last = start + len(sequence) - (section.context + 1)
        start += len(sequence)
    if last is not None:
        cut = min(cut, last)
    training, held_out = [], []
    start = 0
    for sequence in sequences:
        place = min(max(cut - start, 0), len(sequence))
        training.append(sequence.part(0, place))
        held_out.append(sequence.part(place, len(sequence)))
        start += len(sequence)
    if last is None or not any(each.num_windows(section.context) for each in training):
        window = section.context + 1
        raise ConfigurationError(
            f"The data must hold a window for training and one for evaluation, each of data.context "
            f"{section.context} + 1 = {window} tokens of one file; {source} has {total} tokens in "
            f"{len(sequences)} {'sequence' if len(sequences) == 1 else 'sequences'}. "
            "Use a smaller data.context, or more data."
        )
    return training, held_out


def _text(files: DataFiles, tokenizer: Tokenizer, section: DataSection) -> Tokens:
    """Return the text of all files, tokenised, as one sequence."""
    content = _read_up_to(section.max_bytes, files.paths)
    if not content:
        raise ConfigurationError(
            f"There is no text to learn from: all files of {files.source} are empty. "
            "Name others with data.path."
        )
    if isinstance(tokenizer, Bytes):
        # A bytearray, because torch wants memory that it may write to.
        values = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    else:
        values = torch.tensor(tokenizer.encode(content.decode(errors="replace")))
    return Tokens(source=files.source, values=values)


def _read_up_to(max_bytes: int, files: Sequence[Path]) -> bytes:
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
            "Name another file or folder with data.path."
        ) from error
    return bytes(content[:max_bytes])
