"""Checkpoints of a run: written while it trains, read when it is resumed.

Beside weights and optimizer state a checkpoint has everything else that decides the next step. That is little, because
learning rate, windows and random numbers are computed from the step's number.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from fullshard import checkpoint
from fullshard.checkpoint.rank_group import RankGroup
from fullshard.errors import CheckpointError
from fullshard.optim import EMA
from fullshard.programs.run_events import Checkpoint, Watcher
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.run_folder import STEP, RunFolder


@dataclass(kw_only=True, slots=True)
class RunState:
    """The state of a run between two steps, apart from weights and optimizer."""

    step: int = 0
    """Steps done."""
    position: int = 0
    """Windows drawn from the sampler."""
    tokens: int = 0
    """Tokens seen, all ranks together."""
    bad_steps: int = 0
    """Bad steps in a row until now."""
    best_loss: float | None = None
    """The lowest held-out loss; None if there is none yet."""
    worse_evaluations: int = 0
    """Evaluations in a row, until now, that have found no lower loss."""

    def note_evaluation(self, loss: float) -> bool:
        """Note a held-out loss, and say whether it is the lowest."""
        is_best = math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss)
        if is_best:
            self.best_loss = loss
        self.worse_evaluations = 0 if is_best else self.worse_evaluations + 1
        return is_best


LATER_FIELDS = ("best_loss", "worse_evaluations")
"""Fields that older checkpoints lack."""


def state_in(loaded: checkpoint.Loaded) -> RunState:
    """Return the state of the run in a checkpoint.

    Raises:
        CheckpointError: the checkpoint was not written by a run.
    """
    names = {field.name for field in fields(RunState)}
    extra = loaded.extra
    if (
        not isinstance(extra, dict)
        or not names.difference(LATER_FIELDS) <= extra.keys() <= names
        or not all(_is_valid(name, value) for name, value in extra.items())
    ):
        raise CheckpointError(
            f"A run can only be resumed from a checkpoint of fullshard train; {loaded.path} lacks {', '.join(sorted(names))}. "
            "Move it out of the run's folder."
        )
    return RunState(**extra)


def _is_valid(name: str, value: object) -> bool:
    if name == "best_loss":
        return value is None or (isinstance(value, float) and math.isfinite(value))
    return type(value) is int and value >= 0


class Checkpoints:
    """The checkpoints of a run, one of which may still be being written. All ranks call all methods."""

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        model: nn.Module,
        optimizer: Optimizer,
        ema: EMA | None,
        watch: Watcher,
    ) -> None:
        self._folder = folder
        self._section = config.checkpoint
        self._pretrained = config.model.huggingface if config.model.pretrained else None
        self._base: checkpoint.Base | None = None
        self._model = model
        self._optimizer = optimizer
        self._ema = ema
        self._watch = watch
        self._pending: tuple[Checkpoint, checkpoint.PendingSave] | None = None
        self._last_step = -1
        """The last step with a checkpoint, written or being written."""
        self.newest: Path | None = None
        """The last checkpoint that is known to be complete."""

    def resume(self) -> RunState | None:
        """Load the newest checkpoint and return its state; None if there is none."""
        # The first rank decides for all: on a shared file system others may not see the newest yet.
        self.newest = RankGroup().on_first(lambda: checkpoint.latest(self._folder.checkpoints))
        if self.newest is None:
            return None
        loaded = checkpoint.load(self.newest, self._model, self._optimizer, ema=self._ema)
        state = state_in(loaded)
        self._last_step = state.step
        return state

    def is_due(self, step: int) -> bool:
        """Say whether this step should have a checkpoint."""
        return self._section.every > 0 and step % self._section.every == 0

    def save(self, state: RunState) -> None:
        """Start to save a state, unless it was saved before. Wait for the previous checkpoint first."""
        if state.step == self._last_step:
            return
        began = time.perf_counter()
        self.finish()
        name = f"{STEP}{state.step:08d}"
        pending = checkpoint.async_save(
            self._folder.checkpoints / name,
            self._model,
            self._optimizer,
            ema=self._ema,
            base=self._base_of_checkpoints(),
            extra=asdict(state),
            keep_last=self._section.keep,
        )
        blocked_s = time.perf_counter() - began
        path = f"{self._folder.checkpoints.name}/{name}"
        self._last_step = state.step
        self._pending = Checkpoint(step=state.step, path=path, blocked_s=blocked_s), pending

    def save_best(self, state: RunState) -> None:
        """Start to save the weights of a state, in place of those before. Wait for the previous checkpoint first."""
        began = time.perf_counter()
        self.finish()
        pending = checkpoint.async_save(
            self._folder.best,
            self._model,
            ema=self._ema,
            base=self._base_of_checkpoints(),
            extra=asdict(state),
        )
        blocked_s = time.perf_counter() - began
        event = Checkpoint(
            step=state.step, path=self._folder.best.name, blocked_s=blocked_s, best=True
        )
        self._pending = event, pending

    def _base_of_checkpoints(self) -> checkpoint.Base | None:
        """Return the checkpoint that has the frozen parameters, if they are to be left out. The first call may save it."""
        if self._section.only_trainable and self._base is None:
            path = self._pretrained or self._folder.base
            # The first rank decides for all, as in `resume`.
            if not RankGroup().on_first(path.exists):
                checkpoint.save(path, self._model)
            self._base = checkpoint.base_of(path, self._model)
        return self._base

    def notice_completed(self) -> None:
        """Report a checkpoint that has become complete. Never wait.

        Ranks may notice it after different steps. So errors are left to `finish`, where all ranks raise them.
        """
        if self._pending is not None and self._pending[1].done():
            with contextlib.suppress(CheckpointError):
                self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and report it.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._pending is not None:
            event, pending = self._pending
            saved = pending.wait()
            self._pending = None
            if not event.best:
                self.newest = saved.path
            removed = tuple(
                f"{self._folder.checkpoints.name}/{each.name}" for each in saved.removed
            )
            self._watch(replace(event, removed=removed))
