"""What a training run can be told, checked before anything starts.

This file imports no torch: a wrong option is answered at once. What only the machine can answer
(does the text exist, are there enough GPUs) is checked by `text` and `launch`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from fullshard.errors import ConfigurationError

DeviceChoice = Literal["auto", "cpu", "cuda"]
Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """One training run, as the user asked for it."""

    ranks: int | None = None
    """Number of ranks. None takes the ranks a launcher gives, else 2 on CPU and one per GPU."""

    device: DeviceChoice = "auto"
    """Where to train; auto takes CUDA when there is one."""

    steps: int = 240
    """Optimizer steps."""

    batch: int = 8
    """Windows of text per rank and step; ranks * batch is the global batch."""

    context: int = 128
    """Bytes the model sees at once."""

    layers: int = 4
    """Decoder blocks, each a group of its own to `fully_shard`."""

    width: int = 128
    """Width of the residual stream."""

    heads: int = 4
    """Attention heads; width / heads must be an even number, rotary turns pairs of features."""

    lr: float = 3e-3
    """Highest learning rate, reached after the warm-up."""

    seed: int = 0
    """Decides the starting weights and the order of the text."""

    text: Path | None = None
    """File or folder to learn from; None takes the Python standard library's sources."""

    precision: Precision = "fp32"
    """fp32, or bf16: compute in bfloat16, keep parameters and reduce gradients in float32."""

    def __post_init__(self) -> None:
        problems = [*self._size_problems(), *self._head_problems(), *self._choice_problems()]
        if problems:
            raise ConfigurationError("\n".join(problems))

    def _size_problems(self) -> Iterator[str]:
        for name in ("ranks", "steps", "batch", "context", "layers", "width", "heads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f"{name} must be at least 1, got {value}."
        if not (math.isfinite(self.lr) and self.lr > 0):
            yield f"lr must be a positive number, got {self.lr}."
        if self.seed < 0:
            yield f"seed must not be negative, got {self.seed}."

    def _head_problems(self) -> Iterator[str]:
        if self.width < 1 or self.heads < 1:
            return
        if self.width % self.heads:
            yield (
                f"width must be divisible by heads, got width {self.width} and heads {self.heads}; "
                f"{_nearest_width(self.width, self.heads)} would do as a width."
            )
        elif self.width // self.heads % 2:
            yield (
                "width / heads must be even because rotary attention turns pairs of features, got "
                f"{self.width} / {self.heads} = {self.width // self.heads}; "
                f"{_nearest_width(self.width, self.heads)} would do as a width."
            )

    def _choice_problems(self) -> Iterator[str]:
        for name, choices in (("device", DeviceChoice), ("precision", Precision)):
            value = getattr(self, name)
            if value not in get_args(choices):
                yield f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}."


def _nearest_width(width: int, heads: int) -> int:
    """Return the smallest width from `width` on that gives every head an even number of features."""
    return math.ceil(width / (2 * heads)) * 2 * heads
