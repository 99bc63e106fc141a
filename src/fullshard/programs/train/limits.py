"""Ranges of numbers for the values of fields."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """A range of numbers, as metadata of a type: `Annotated[int, Limits(1)]`."""

    low: int

    high: float = math.inf

    open_low: bool = False
    """`low` itself is not in the range."""

    open_high: bool = False
    """`high` itself is not in the range."""

    def __contains__(self, number: float) -> bool:
        """Say whether a number is in the range; NaN and infinity never are."""
        if isinstance(number, float) and not math.isfinite(number):
            return False
        above = number > self.low if self.open_low else number >= self.low
        below = number < self.high if self.open_high else number <= self.high
        return above and below

    def __str__(self) -> str:
        """Return the range as a text."""
        low = f"above {self.low}" if self.open_low else f"at least {self.low}"
        if self.high == math.inf:
            return low
        return f"{low} and {'below' if self.open_high else 'at most'} {self.high:g}"
