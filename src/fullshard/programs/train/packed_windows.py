"""Windows of records: several in one, each for itself.

    context 8     | a b c d | x y z | pad |     inputs
                  | b c d e | y z w |     |     targets; those that are not learned are IGNORED
                  | 0 0 0 0 | 1 1 1 |  2  |     segments: no token sees one of another segment

A record of n tokens takes n - 1 places. Records are put, in their order, into the first of the last `OPEN` windows that has room
for them. Without packing each has a window of its own, and there are no segments: what follows a record is not seen by it.

A window is a row of planes (inputs, targets, segments), so a batch is one tensor of shape (rows, planes, context).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100
"""The target of a place whose next token is not learned."""

OPEN = 64
"""Windows that still take records. More would waste fewer places, and mix records from further apart."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that stand in a window: a record, or a part of one."""

    first: int
    """Index of its first token."""
    length: int
    """Places that it takes: one less than its tokens."""


class PackedWindows:
    """Windows of pieces of tokens that are in memory, numbered from 0."""

    def __init__(
        self,
        tokens: Tensor,
        is_target: Tensor,
        pieces: Sequence[Piece],
        *,
        context: int,
        packing: bool,
    ) -> None:
        """Put pieces into windows.

        Args:
            tokens: Tokens of all records.
            is_target: Marks of those that are learned.
            pieces: Parts of windows; none is longer than the context.
            context: Places of a window.
            packing: Whether windows hold several pieces.
        """
        self._tokens = tokens
        self._is_target = is_target
        self._context = context
        self._packing = packing
        self._windows = packed(pieces, context) if packing else [[piece] for piece in pieces]
        ends = is_target.long().cumsum(0)
        self._targets = [
            sum(int(ends[each.first + each.length] - ends[each.first]) for each in window)
            for window in self._windows
        ]
        """Number of learned tokens in each window."""

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def tokens(self) -> int:
        """Number of tokens that are predicted in an epoch."""
        return sum(self._targets)

    @property
    def filled(self) -> float:
        """The share of all places that hold records."""
        places = sum(piece.length for window in self._windows for piece in window)
        return places / max(1, len(self) * self._context)

    def rows(self, indices: Sequence[int]) -> Tensor:
        """Return windows as int64 planes (rows, 2 or 3, context), on the CPU."""
        return torch.stack([self._planes(self._windows[index]) for index in indices])

    def num_targets(self, indices: Sequence[int]) -> int:
        """Return how many tokens of these windows are predicted."""
        return sum(self._targets[index] for index in indices)

    def scale(self, indices: Sequence[int]) -> float | None:
        """Return the factors of the losses of a window's tokens, so that the mean over these windows is that of tokens."""
        return len(indices) / max(1, self.num_targets(indices))

    def _planes(self, window: Sequence[Piece]) -> Tensor:
        planes = torch.zeros(3, self._context, dtype=torch.int64)
        planes[1] = IGNORED
        planes[2] = len(window)  # of the padding
        place = 0
        for number, piece in enumerate(window):
            here = slice(place, place + piece.length)
            values = self._tokens[piece.first : piece.first + piece.length + 1].long()
            wanted = self._is_target[piece.first + 1 : piece.first + piece.length + 1]
            planes[0, here] = values[:-1]
            planes[1, here] = torch.where(wanted, values[1:], IGNORED)
            planes[2, here] = number
            place += piece.length
        return planes if self._packing else planes[:2]


def packed(pieces: Sequence[Piece], context: int) -> list[list[Piece]]:
    """Return the pieces in windows: each in the first of the last `OPEN` windows that has room."""
    windows: list[list[Piece]] = []
    room: list[int] = []
    for piece in pieces:
        first = max(0, len(windows) - OPEN)
        for number in range(first, len(windows)):
            if room[number] >= piece.length:
                windows[number].append(piece)
                room[number] -= piece.length
                break
        else:
            windows.append([piece])
            room.append(context - piece.length)
    return windows


def positions(segments: Tensor) -> Tensor:
    """Return the place of each token in its segment, for segments of shape (rows, length)."""
    places = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return places - torch.where(begins, places, 0).cummax(dim=1).values


def visible(segments: Tensor) -> Tensor:
    """Return which tokens each token sees: those of its segment up to itself; (rows, 1, length, length)."""
    same = segments[:, :, None] == segments[:, None, :]
    return same.tril()[:, None]
