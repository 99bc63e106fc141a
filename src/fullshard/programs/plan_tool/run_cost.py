"""Cost of a whole run: days, GPU hours and money for so many tokens. This file imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fullshard.errors import ConfigurationError

UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
NAMES = (("trillion", 10**12), ("billion", 10**9), ("million", 10**6))
DEFAULT_TOKENS = 10**9
"""Tokens of a run whose length is not known."""
MAX_TOKENS = 10**18


@dataclass(frozen=True, slots=True)
class RunCost:
    """Cost of so many tokens with steps of a plan, without evaluation, checkpoints and failures."""

    tokens: int
    steps: int
    days: float
    gpu_hours: float
    price: float | None
    """Price of a GPU for an hour; None if it was not given."""

    def __str__(self) -> str:
        """Return it for people."""
        parts = [
            f"{days_text(self.days)} for {count_text(self.tokens)} tokens",
            f"{self.steps:,} steps",
            f"{digits_text(self.gpu_hours)} GPU hours",
        ]
        if self.price is not None:
            parts.append(f"{self.gpu_hours * self.price:,.0f} at {self.price:g} a GPU hour")
        return ", ".join(parts)


def run_cost(
    tokens: int, *, tokens_of_step: int, seconds: float, gpus: int, price: float | None
) -> RunCost:
    """Return the cost of a run.

    Args:
        tokens: Tokens of the whole run.
        tokens_of_step: Tokens of a step of all GPUs together.
        seconds: Seconds of a step.
        gpus: Number of GPUs.
        price: Price of a GPU for an hour; None if it is not known.
    """
    steps = -(-tokens // tokens_of_step)
    hours = steps * seconds / 3600
    return RunCost(
        tokens=tokens,
        steps=steps,
        days=hours / 24,
        gpu_hours=hours * gpus,
        price=price,
    )


def read_tokens(text: str) -> int:
    """Return a number of tokens that is written like 15T, 300B, 1.5e9 or 200000000.

    Raises:
        ConfigurationError: it is no such number.
    """
    found = re.fullmatch(r"(\d[\d_,]*(?:\.\d+)?(?:[eE]\+?\d{1,2})?)\s*([kKmMbBtT]?)", text.strip())
    number = (
        float(found[1].replace("_", "").replace(",", "")) * UNITS[found[2].lower()] if found else 0
    )
    if not 1 <= number <= MAX_TOKENS:
        raise ConfigurationError(
            f"--tokens takes a number of tokens such as 15T, 300B or 2e9, up to {MAX_TOKENS:.0e}; got {text}."
        )
    return round(number)


def count_text(number: int) -> str:
    """Return a large number in words: `1.5 trillion`."""
    for name, unit in NAMES:
        if number >= unit:
            return f"{number / unit:.4g} {name}"
    return f"{number:,}"


def days_text(days: float) -> str:
    """Return a time in the unit that fits."""
    for unit, in_days in (("days", 1.0), ("hours", 1 / 24), ("minutes", 1 / 1440)):
        if days >= 2 * in_days:
            return f"{digits_text(days / in_days)} {unit}"
    return f"{digits_text(days * 86400)} seconds"


def digits_text(number: float) -> str:
    """Return a number with three digits, or all that are before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
