"""What a finding is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["bad", "slow", "good"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something to know, with its numbers, and what to do about it; text in `backquotes` is code."""

    title: str
    text: str
    remedies: tuple[str, ...] = ()
    """Each as a field of the trainer's configuration, and as a call of the API. What stands there as `section.name = value`
    is read, too: a remedy that a run has taken already is left out."""
    severity: Severity = "slow"
    cost_share: float = 0.0
    """Part of the step's time that it costs; 1 for what endangers the run."""
