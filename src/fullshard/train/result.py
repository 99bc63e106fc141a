"""What the training loop reports: before the first step, after each step, and at the end.

Plain values, so that a display, a test or a file can be on the other side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What is about to be trained."""

    parameters: int
    ranks: int
    device: str
    source: str
    training_bytes: int
    held_out_bytes: int
    steps: int
    tokens_per_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """Where the run stands after a step."""

    step: int
    """Steps done, counted from 1."""

    loss: float
    """Mean over the global batch, in nats per byte, before the step's update."""

    tokens: int
    """Tokens seen so far, all ranks together."""

    seconds: float
    """Time since the first step began."""

    memory_bytes: int
    """Resident memory of this rank's process on CPU, peak of allocated memory on CUDA."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What a run has come to; the same on every rank but for the seconds."""

    facts: RunFacts

    losses: tuple[float, ...]
    """Of every step, mean over the global batch, in nats per byte."""

    held_out_before: float
    held_out_after: float

    tokens: int
    seconds: float
    """Time of the training steps alone."""

    unsharded_bytes: int
    """Bytes of all parameters of the model."""

    rank_bytes: tuple[int, ...]
    """Bytes of parameters each rank holds at rest, between steps."""


class Watcher(Protocol):
    """Whoever follows a run."""

    def begin(self, facts: RunFacts) -> None:
        """Take note of what is about to be trained."""

    def step(self, report: StepReport) -> None:
        """Take note of a step that was done."""

    def end(self, result: TrainResult) -> None:
        """Take note of how it ended."""


def bits_per_byte(nats: float) -> float:
    """Convert a loss in nats per byte."""
    return nats / math.log(2)
