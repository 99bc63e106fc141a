"""Records as tokens: read, rendered by the chat template, tokenised, cut, held out and put into windows.

    record        "user: How many? assistant: Four."
    tokens        u u u u u u u a a a               of all records, one after the other
    is_target     . . . . . . . x x x               with data.loss_on = "answers"
    pieces        |      record 0     | record 1 ...

A conversation that is longer than a window is cut. If no answer is left of it, it is left out. A long document is divided, as
text is. The last records are held out, or the last part of the last document.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fullshard.errors import ConfigurationError
from fullshard.programs.console.tables import counted
from fullshard.programs.train.chat_template import ChatTemplate, own_template
from fullshard.programs.train.config import DataSection, RunConfig
from fullshard.programs.train.conversations import (
    USER,
    Conversation,
    Document,
    read_record,
)
from fullshard.programs.train.data_files import DataFiles
from fullshard.programs.train.packed_windows import PackedWindows, Piece
from fullshard.programs.train.record_files import read_records
from fullshard.programs.train.tokenizer import Tokenizer, tokenizer_path

OPENING_LENGTH = 24
"""Most tokens of a document that a sample begins with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """Prompts for the model of a run: for its samples."""

    template: ChatTemplate
    tokenizer: Tokenizer
    opening: tuple[int, ...]
    """The tokens of the first held-out record, up to its first answer; the first few, if it is learned as a whole."""

    def asking(self, text: str) -> list[int]:
        """Return the tokens of a question that a user asks."""
        question = [{"role": USER, "content": text}]
        return self.tokenizer.encode(self.template.render(question, to_answer=True))

    @property
    def end(self) -> str:
        """The text by which an answer ends; empty if there is none."""
        return self.template.end


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenisedRecords:
    """All records of a run."""

    tokens: Tensor
    training: PackedWindows
    held_out: PackedWindows
    prompts: Prompts
    left_out: tuple[str, ...]
    summary: str
    """Numbers of records and of windows, for people."""


@dataclass(slots=True)
class _Reading:
    """The records that were read so far."""

    context: int
    values: array[int] = field(default_factory=lambda: array("i"))
    is_target: bytearray = field(default_factory=bytearray)
    pieces: list[Piece] = field(default_factory=list)
    num_records: int = 0
    num_cut: int = 0
    num_left_out: int = 0

    def add_conversation(self, parts: Sequence[tuple[Sequence[int], bool]]) -> None:
        """Add a conversation whose parts are answers, or not."""
        tokens = [token for part, _ in parts for token in part]
        is_target = bytes(flag for part, flag in parts for _ in part)
        most = self.context + 1
        if not any(is_target[1:most]):
            self.num_left_out += 1
            return
        self.num_cut += len(tokens) > most
        self._add(tokens[:most], is_target[:most])

    def add_document(self, tokens: Sequence[int]) -> None:
        """Add a document."""
        if len(tokens) < 2:
            self.num_left_out += 1
            return
        self._add(tokens, bytes([1]) * len(tokens))

    def _add(self, tokens: Sequence[int], is_target: bytes) -> None:
        first, last = len(self.values), len(tokens) - 1
        self.values.extend(tokens)
        self.is_target += is_target
        self.num_records += 1
        self.pieces += [
            Piece(first + start, min(self.context, last - start))
            for start in range(0, last, self.context)
        ]

    def left_out(self) -> Iterator[str]:
        """Yield sentences about tokens that are not learned, for people."""
        total = self.num_records + self.num_left_out
        if self.num_cut:
            yield f"the ends of {self.num_cut:,} of {total:,} conversations, which are longer than data.context"
        if self.num_left_out:
            yield f"{self.num_left_out:,} of {total:,} records, of which nothing is to be learned within data.context"


def tokenise_records(files: DataFiles, config: RunConfig, tokenizer: Tokenizer) -> TokenisedRecords:
    """Read and tokenise all records of a run. Every rank does it for itself, and finds the same.

    Raises:
        ConfigurationError: a file or a record cannot be read; or there are too few to learn from.
    """
    section = config.data
    template = ChatTemplate(tokenizer_path(config), own_template(config))
    reading = _Reading(section.context)
    for file in files.paths:
        for where, record in read_records(file):
            _add(reading, read_record(where, record), section, template, tokenizer)
    num_held_out = max(1, int(len(reading.pieces) * section.held_out))
    num_training = len(reading.pieces) - num_held_out
    if num_training < 1:
        raise ConfigurationError(
            f"The data must hold a record for training and one for evaluation; {files.source} has {reading.num_records} of which "
            "something is to be learned. Use a larger data.context, or more data."
        )
    tokens = torch.frombuffer(reading.values, dtype=torch.int32)
    is_target = torch.frombuffer(reading.is_target, dtype=torch.uint8).bool()

    def windows(pieces: Sequence[Piece]) -> PackedWindows:
        return PackedWindows(
            tokens, is_target, pieces, context=section.context, packing=section.packing
        )

    training = windows(reading.pieces[:num_training])
    held_out = windows(reading.pieces[num_training:])
    return TokenisedRecords(
        tokens=tokens,
        training=training,
        held_out=held_out,
        summary=f"{counted(reading.num_records, 'record')} in {len(training) + len(held_out):,} windows, of which records fill "
        f"{training.filled:.0%}",
        prompts=Prompts(
            template=template,
            tokenizer=tokenizer,
            opening=_opening(reading, reading.pieces[num_training]),
        ),
        left_out=tuple(reading.left_out()),
    )


def _add(
    reading: _Reading,
    item: Conversation | Document,
    section: DataSection,
    template: ChatTemplate,
    tokenizer: Tokenizer,
) -> None:
    match item:
        case Document(text):
            end = template.end_of_document
            reading.add_document(tokenizer.encode(text + end))
        case Conversation(messages) if section.loss_on == "all":
            reading.add_conversation([(tokenizer.encode(template.render(messages)), True)])
        case Conversation(messages):
            reading.add_conversation(
                [
                    (tokenizer.encode(text), is_answer)
                    for text, is_answer in template.render_parts(messages)
                ]
            )


def _opening(reading: _Reading, piece: Piece) -> tuple[int, ...]:
    """Return the tokens of a record up to its first answer; of one that is learned as a whole, the first few."""
    first = piece.first
    num_asked = reading.is_target.find(1, first, first + piece.length + 1) - first
    return tuple(reading.values[first : first + (num_asked or min(OPENING_LENGTH, piece.length))])
