"""Windows: the rows of batches, cut from sequences of tokens.

A window is one token longer than the context: all tokens but the last are the inputs, all but the first the targets.
Windows start `context` tokens apart, so neighbours share one token, and every token of a sequence but the first is
predicted once an epoch. No window crosses from one sequence into the next. The rest at a sequence's end is not used.

    context 3    | a b c d e f g h |         windows  a b c d    d e f g
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from fullshard.errors import ConfigurationError
from fullshard.programs.train.held_out_split import num_windows


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """A sequence of tokens: a file's, or a slice of them."""

    source: str
    """Origin of the tokens, for people."""

    read: Callable[[int, int], Tensor]
    """Return the tokens of the source from one index to another: one dimension, of any integer dtype, not written to."""

    first: int
    """Index of the first token in the source."""

    length: int

    def __len__(self) -> int:
        return self.length

    @property
    def values(self) -> Tensor:
        """The tokens. Those of a file are read each time."""
        return self.read(self.first, self.first + self.length)

    def slice(self, start: int, stop: int) -> Tokens:
        """Return a slice of the sequence."""
        stop = min(stop, self.length)
        return Tokens(self.source, self.read, self.first + start, max(stop - start, 0))


def tokens_in(source: str, values: Tensor) -> Tokens:
    """Return tokens that are in memory."""
    return Tokens(source, lambda start, stop: values[start:stop], 0, len(values))


class Rows(Protocol):
    """Windows, numbered from 0."""

    def __len__(self) -> int:
        """Return how many there are."""

    @property
    def tokens(self) -> int:
        """Number of tokens that are predicted in an epoch."""

    def rows(self, indices: Sequence[int]) -> Tensor:
        """Return windows, on the CPU."""

    def num_targets(self, indices: Sequence[int]) -> int:
        """Return how many tokens of these windows are predicted."""

    def scale(self, indices: Sequence[int]) -> float | None:
        """Return the factor of the sums of their losses, if these are sums; None if the loss of a window is a mean."""


class Windows:
    """The windows of some sequences, numbered from 0."""

    def __init__(self, sequences: Sequence[Tokens], *, context: int, vocabulary: int) -> None:
        self._sequences = [each for each in sequences if num_windows(len(each), context)]
        self._ends = list(accumulate(num_windows(len(each), context) for each in self._sequences))
        """Number of windows up to the end of each sequence."""
        self._context = context
        self._vocabulary = vocabulary

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def tokens(self) -> int:
        """Number of tokens that are predicted in an epoch."""
        return len(self) * self._context

    def rows(self, indices: Sequence[int]) -> Tensor:
        """Return windows as int64 rows of context + 1 tokens, on the CPU.

        Raises:
            ConfigurationError: a token is not in the model's vocabulary.
        """
        windows = [self._window(index) for index in indices]
        rows = torch.stack([window.values.long() for window in windows])
        if rows.min() < 0 or rows.max() >= self._vocabulary:
            for window in windows:
                check_tokens(window, self._vocabulary)
        return rows

    def num_targets(self, indices: Sequence[int]) -> int:
        """Return how many tokens of these windows are predicted."""
        return len(indices) * self._context

    def scale(self, indices: Sequence[int]) -> None:
        """Return None: all have the same number of targets, so the loss of a window is a mean."""

    def _window(self, index: int) -> Tokens:
        number = bisect_right(self._ends, index)
        before = self._ends[number - 1] if number else 0
        start = (index - before) * self._context
        return self._sequences[number].slice(start, start + self._context + 1)


def check_tokens(tokens: Tokens, vocabulary: int) -> None:
    """Raise a ConfigurationError if a model does not know a token; it names the first."""
    values = tokens.values.long()
    wrong = ((values < 0) | (values >= vocabulary)).nonzero()
    if len(wrong):
        index = int(wrong[0])
        raise ConfigurationError(
            f"Tokens must be at least 0 and below the model's vocabulary of {vocabulary}, but token "
            f"number {tokens.first + index} of {tokens.source} is {int(values[index])}. "
            "Take the tokenizer and the model that belong together, or begin a run with a larger model.vocabulary."
        )
