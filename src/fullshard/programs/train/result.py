"""The result of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(kw_only=True, slots=True)
class TrainResult:
    """The result of a run, as this process has seen it: the same on every rank, except for the seconds."""

    losses: dict[int, float] = field(default_factory=dict)
    """Losses by step (from 1): mean over the global batch, in nats per token. Only steps of this process."""

    evaluations: dict[int, float] = field(default_factory=dict)
    """Losses on held-out data, by step (from 0)."""

    tokens: int = 0
    """Tokens of the whole run."""

    seconds: float = 0.0
    """Seconds of this process only."""

    samples: tuple[str, ...] = ()

    was_finished: bool = False
    """The run had no steps left."""

    report: Path | None = None
