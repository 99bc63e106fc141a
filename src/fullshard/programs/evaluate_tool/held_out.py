"""The result of an evaluation. This file imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutResult:
    """The loss of a checkpoint on held-out data."""

    checkpoint: Path
    step: int
    """Steps that were trained."""
    loss: float
    """Mean, in nats per token."""
    windows: int
    tokens: int
    ema: bool
    """Whether the averages of the parameters were evaluated."""
    note: str = ""
    """Sentence about the data that the reader must know; empty if there is none."""

    @property
    def perplexity(self) -> float:
        """Two models with the same tokens can be compared by it."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf
