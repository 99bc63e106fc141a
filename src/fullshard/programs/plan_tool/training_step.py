"""The training step of a run: what `fullshard train` does in a step, without data.

The planner runs it on a virtual device. Benchmarks run it on a real one and compare.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.programs.plan_tool.program import Phase
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.evaluation import window_losses
from fullshard.programs.train.model_source import ModelSource
from fullshard.programs.train.optimizer import build_ema, build_optimizer
from fullshard.programs.train.sharded_model import build_model
from fullshard.programs.train.weights import materialise


class TrainingStep:
    """The model and the optimizer of a run on one rank, and its step."""

    def __init__(
        self, config: RunConfig, world: int, source: ModelSource, device: torch.device
    ) -> None:
        """Build the model and its optimizer; all ranks do.

        Raises:
            ConfigurationError: the configuration does not go together, or not with this number of ranks.
        """
        self._config, self._source = config, source
        rows, context = config.train.batch // world, config.data.context
        self.tokens = rows * context
        self.model = build_model(config, source, device, allocate=self.allocate)
        with self.during("optimizer"):  # some have their state at once
            self.optimizer = build_optimizer(config.optimizer, self.model)
            self.ema = build_ema(config.optimizer, self.model.module)
        self.windows = torch.zeros(rows, context + 1, dtype=torch.int64, device=device)

    def allocate(self, model: nn.Module, device: torch.device) -> None:
        """Give the shards of a model their memory."""
        materialise(model, device)

    @torch.no_grad()
    def randomize(self) -> None:
        """Give parameters, buffers and tokens random values, so that a step takes the time of a real one.

        Products of zeros take less power and time, and equal tokens queue up in an embedding's backward.
        """
        module = self.model.module
        for each in (*module.parameters(), *module.buffers()):
            if each.is_floating_point():
                (each.to_local() if isinstance(each, DTensor) else each).normal_(std=0.02)
        self.windows.random_(self._config.model.vocabulary or 2)

    def take(self) -> None:
        """Take a step."""
        self.compute_gradients()
        with self.during("optimizer"):
            self.update()

    def compute_gradients(self) -> None:
        """Run forward and backward of all microbatches."""
        accumulate = self._config.train.accumulate
        micro = self.windows.shape[0] // accumulate
        for index in range(accumulate):
            is_last = index + 1 == accumulate
            with nullcontext() if is_last else self.model.accumulating():
                with self.during("forward"):
                    windows = self.windows[index * micro : (index + 1) * micro]
                    losses = window_losses(self._source, self.model.module, windows)
                    loss = losses.sum() / self.windows.shape[0]
                with self.during("backward"):
                    loss.backward()
                del losses, loss

    def update(self) -> None:
        """Clip the gradients and update the parameters."""
        self.model.clip_gradients(self._config.train.clip or math.inf)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update()
        self.optimizer.zero_grad()

    def during(self, phase: Phase) -> AbstractContextManager[None]:
        """Return the context of a phase; a recorder of steps has another."""
        return nullcontext()
