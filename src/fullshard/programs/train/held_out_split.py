"""Split of tokens into trained and held out: arithmetic on the lengths of sequences, without torch.

| file a | file b | ...                 | file y | file z |
| training                                   | held out   |
"""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.errors import ConfigurationError
from fullshard.programs.train.config import DataSection


def num_windows(length: int, context: int) -> int:
    """Return how many windows of context + 1 tokens, `context` apart, a sequence has."""
    return max(0, (length - 1) // context)


def training_lengths(lengths: Sequence[int], section: DataSection, source: str) -> list[int]:
    """Return how many tokens of each sequence are for training; the rest is held out.

    A share of all tokens is held out, from the end, and at least one window.

    Raises:
        ConfigurationError: there are too few tokens for a window each of training and held-out data.
    """
    total, context = sum(lengths), section.context
    cut = total - int(total * section.held_out)
    start = 0
    last_window = None
    for length in lengths:
        if num_windows(length, context):
            last_window = start + length - (context + 1)
        start += length
    if last_window is not None:
        cut = min(cut, last_window)
    training = []
    start = 0
    for length in lengths:
        training.append(min(max(cut - start, 0), length))
        start += length
    if last_window is None or not any(num_windows(length, context) for length in training):
        many = f"{len(lengths)} files, the longest of {max(lengths)}" if len(lengths) > 1 else "one"
        raise ConfigurationError(
            "The data must hold a window for training and one for evaluation, each of data.context + 1 = "
            f"{context + 1} tokens of one sequence; {source} has {total} tokens in {many}. "
            "Use a smaller data.context, or more data."
        )
    return training
