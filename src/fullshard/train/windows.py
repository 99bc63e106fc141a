"""Windows: the rows of batches, cut from sequences of tokens.

A window is one token longer than the context: its tokens without the last are the inputs, without
the first the targets. Windows lie `context` apart, so neighbours share one token and every token
but the first of a sequence is predicted once an epoch. No window crosses from one sequence into the
next; what is left at a sequence's end is not used.

    context 3    | a b c d e f g h |         windows  a b c d    d e f g
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from fullshard.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokens:
    """A sequence of tokens: a file's, or a part of them."""

    source: str
    """Where they are from, in words."""

    values: Tensor
    """One dimension, of any integer dtype; may be mapped from a file, and is not written to."""

    first: int = 0
    """How many tokens of the file come before."""

    def __len__(self) -> int:
        return len(self.values)

    def part(self, start: int, stop: int) -> Tokens:
        """Return a part of them."""
        return Tokens(source=self.source, values=self.values[start:stop], first=self.first + start)

    def num_windows(self, context: int) -> int:
        """Return how many windows can be cut."""
        return max(0, (len(self) - 1) // context)


class Windows:
    """The windows of some sequences, numbered through."""

    def __init__(self, sequences: Sequence[Tokens], *, context: int, vocabulary: int) -> None:
        self._sequences = tuple(each for each in sequences if each.num_windows(context))
        self._ends = tuple(accumulate(each.num_windows(context) for each in self._sequences))
        """How many windows there are up to the end of each sequence."""
        self._context = context
        self._vocabulary = vocabulary

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def tokens(self) -> int:
        """How many tokens are predicted in an epoch."""
        return len(self) * self._context

    def rows(self, indices: Sequence[int]) -> Tensor:
        """Return windows as int64 rows of context + 1 tokens, on the CPU.

        Raises:
            ConfigurationError: a token is not in the model's vocabulary.
        """
        rows = torch.stack([self._window(index) for index in indices])
        if rows.min() < 0 or rows.max() >= self._vocabulary:
            self._refuse(indices, rows)
        return rows

    def _window(self, index: int) -> Tensor:
        sequence, start = self._place(index)
        return sequence.values[start : start + self._context + 1].long()

    def _place(self, index: int) -> tuple[Tokens, int]:
        """Return the sequence that a window is in, and where it starts there."""
        number = bisect_right(self._ends, index)
        before = self._ends[number - 1] if number else 0
        return self._sequences[number], (index - before) * self._context

    def _refuse(self, indices: Sequence[int], rows: Tensor) -> None:
        wrong = (rows < 0) | (rows >= self._vocabulary)
        row, column = (int(each) for each in wrong.nonzero()[0])
        sequence, start = self._place(indices[row])
        raise ConfigurationError(
            f"Tokens must be at least 0 and below the model's vocabulary of {self._vocabulary}, but in "
            f"{sequence.source} token number {sequence.first + start + column} is {int(rows[row, column])}. "
            "Take the tokenizer and the model that belong together, or set model.vocabulary."
        )
