"""Which windows of the text each rank sees at which step.

The windows of a step are drawn for all ranks at once, from the seed and the step alone; a rank then
takes its rows. So the global batch depends on the total number of rows, not on how many ranks share
them:

    step 7, 4 windows   | w0 | w1 | w2 | w3 |
    1 rank  * 4 rows    | rank 0            |
    2 ranks * 2 rows    | rank 0  | rank 1  |

A window is one byte longer than the context: its bytes without the last are the inputs, without the
first the targets.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fullshard.train.text import Text

MAX_HELD_OUT_WINDOWS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutRows:
    """One rank's rows of one evaluation batch."""

    offsets: tuple[int, ...]

    weights: tuple[float, ...]
    """1 for a window, 0 for a row that only fills up the batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """Where in the text one rank's windows start: a pure function of these fields and the step."""

    context: int
    batch: int
    seed: int
    rank: int
    world: int

    @property
    def total(self) -> int:
        """Rows of the global batch."""
        return self.batch * self.world

    def training_offsets(self, step: int, num_bytes: int) -> tuple[int, ...]:
        """Return the starts of this rank's windows at a step, in a text of `num_bytes`."""
        draw = random.Random(f"windows of seed {self.seed} step {step}")
        starts = num_bytes - self.context  # the last start leaves room for context + 1 bytes
        offsets = [draw.randrange(starts) for _ in range(self.total)]
        return tuple(offsets[self.rank * self.batch : (self.rank + 1) * self.batch])

    def held_out_rows(self, num_bytes: int) -> Iterator[HeldOutRows]:
        """Yield this rank's share of windows spread evenly over a text of `num_bytes`.

        Every rank gets the same number of batches, because every forward of a sharded model is a
        collective; rows beyond the last window weigh nothing.
        """
        window = self.context + 1
        num_windows = min(MAX_HELD_OUT_WINDOWS, num_bytes // window)
        stride = num_bytes // num_windows
        for first in range(0, num_windows, self.total):
            mine = first + self.rank * self.batch
            rows = range(mine, mine + self.batch)
            yield HeldOutRows(
                offsets=tuple(row * stride if row < num_windows else 0 for row in rows),
                weights=tuple(float(row < num_windows) for row in rows),
            )


class Batches:
    """One rank's batches of a text, on the device that trains; lives as long as the run."""

    def __init__(self, plan: BatchPlan, text: Text, device: torch.device) -> None:
        self.plan = plan
        self._training = _as_tensor(text.training)
        self._held_out = _as_tensor(text.held_out)
        self._device = device

    def training(self, step: int) -> Tensor:
        """Return this rank's windows at a step (from 0): rows of context + 1 byte numbers."""
        return self._cut(self._training, self.plan.training_offsets(step, len(self._training)))

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's windows for evaluation, and the weight of each."""
        for rows in self.plan.held_out_rows(len(self._held_out)):
            weights = torch.tensor(rows.weights, device=self._device)
            yield self._cut(self._held_out, rows.offsets), weights

    def _cut(self, content: Tensor, offsets: Sequence[int]) -> Tensor:
        window = self.plan.context + 1
        rows = torch.stack([content[start : start + window] for start in offsets])
        return rows.to(self._device).long()


def _as_tensor(content: bytes) -> Tensor:
    # A bytearray, because torch wants memory that it may write to.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
