"""What a run has come to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(kw_only=True, slots=True)
class TrainResult:
    """What this process has seen of a run; the same on every rank but for the seconds."""

    losses: dict[int, float] = field(default_factory=dict)
    """By step (from 1): mean over the global batch, in nats per token. Only of steps taken here."""

    evaluations: dict[int, float] = field(default_factory=dict)
    """By step (from 0): loss on held-out data."""

    tokens: int = 0
    """Of the whole run."""

    seconds: float = 0.0
    """Of this process's part of it."""

    samples: tuple[str, ...] = ()

    was_finished: bool = False
    """There was nothing left to do."""

    report: Path | None = None
