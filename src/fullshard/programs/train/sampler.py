"""The order in which a run sees its windows.

Every epoch visits all windows once, in an order of its own. There is no table of that order: a small Feistel network, keyed
by seed and epoch, permutes the numbers below the next power of two. A number that is not a window is permuted again until it
is one (cycle walking, fewer than two turns on average). So a checkpoint only has to keep the position, one integer, and
nothing grows with the data.

    10 windows, batch of 4     position   0 1 2 3 | 4 5 6 7 | 8 9 10 11 | ...
                               epoch      0                     1
                               window     3 9 6 8   7 5 4 1   2 0 2  3
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

ROUNDS = 3
"""Each round scrambles both halves. Two rounds look random; small halves get one more."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """The order of windows: a pure function of these fields and the position."""

    num_windows: int
    seed: int

    def __post_init__(self) -> None:
        assert self.num_windows > 0, "data without a window is refused when it is opened"

    def windows(self, position: int, count: int) -> tuple[int, ...]:
        """Return the next windows after `position` windows have been drawn since the run began."""
        return tuple(self._window(each) for each in range(position, position + count))

    def _window(self, position: int) -> int:
        epoch, index = divmod(position, self.num_windows)
        bits = (self.num_windows - 1).bit_length()
        window = _permuted(index, bits, f"{self.seed} {epoch}")
        while window >= self.num_windows:
            window = _permuted(window, bits, f"{self.seed} {epoch}")
        return window


def _permuted(number: int, bits: int, key: str) -> int:
    """Return the image of a number under a permutation of all numbers of `bits` bits.

    Each line of the loop is invertible, because it changes one half by the other alone.
    """
    low_bits = bits // 2
    high_mask, low_mask = (1 << (bits - low_bits)) - 1, (1 << low_bits) - 1
    high, low = number >> low_bits, number & low_mask
    for step in range(ROUNDS):
        high ^= _scrambled(f"{key} {step} high {low}") & high_mask
        low ^= _scrambled(f"{key} {step} low {high}") & low_mask
    return high << low_bits | low


def _scrambled(content: str) -> int:
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "big")
