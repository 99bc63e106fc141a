"""The steps of a run on one rank.

A step, and what its ranks communicate:

    gradients    of this rank's windows, in microbatches; the last backward reduces them      collectives
                 with train.on_error = "skip", a guarded step: all ranks have gradients, or none
    norm         of all gradients, which are scaled down if it is too large                   one number
                 with compute.graph, all up to here is one CUDA graph
    agreement    loss; whether the step is bad; whether any rank was asked to stop            one small message
    update       skipped if the step is bad and the configuration says so; averages (EMA) follow it

The host waits for the device once, to read the agreement. That comes before the update, because it decides whether there
is one. It costs the time in which the host issues the update.

A step depends only on its number, the configuration, weights and optimizer state: windows, learning rate and random
numbers are computed from the number. So a resumed run takes the same steps, to the last bit if it has the same ranks.
"""

from __future__ import annotations

import math
import platform
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import __version__
from fullshard.checkpoint.rank_group import RankGroup
from fullshard.divergence.guarded_step import guarded_step
from fullshard.divergence.step_guard import StepFailure
from fullshard.divergence.watchdog import stalls
from fullshard.features.graphs.graphed_step import graphed
from fullshard.programs.console.tables import counted
from fullshard.programs.run_events import (
    BadStep,
    BadStepAction,
    End,
    Evaluation,
    Samples,
    Stall,
    Start,
    Step,
    Stopped,
    Watcher,
)
from fullshard.programs.train.config import RunConfig, TrainSection
from fullshard.programs.train.data import Data
from fullshard.programs.train.evaluation import held_out_loss, scale_of, window_losses
from fullshard.programs.train.memory import device_name, memory_bytes
from fullshard.programs.train.model_source import ModelSource
from fullshard.programs.train.optimizer import (
    build_ema,
    build_optimizer,
    learning_rate,
    set_learning_rate,
)
from fullshard.programs.train.optimizer_cost import OptimizerCost
from fullshard.programs.train.result import TrainResult
from fullshard.programs.train.resume import Checkpoints, RunState
from fullshard.programs.train.run_folder import RunFolder
from fullshard.programs.train.sampler import Sampler
from fullshard.programs.train.samples import write_samples
from fullshard.programs.train.sharded_model import build_model
from fullshard.programs.train.stop import BadStepError, StoppedBySignalError, StopRequest
from fullshard.programs.train.stored_weights import load_weights
from fullshard.programs.train.traced_steps import TracedSteps

MAX_FAULT = 300
"""Most characters of an exception that are reported for a failed step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Training of one rank: the model, its data and its device."""

    config: RunConfig
    source: ModelSource
    data: Data
    device: torch.device
    stop: StopRequest

    @property
    def folder(self) -> RunFolder:
        """The folder of the run."""
        return RunFolder(self.config.run.folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Facts about a step that all ranks know before its update."""

    loss: float
    grad_norm: float
    norm_is_bad: bool
    """Some rank found the norm to be bad."""
    is_asked_to_stop: bool
    """Some rank was asked to stop."""

    @property
    def is_finite(self) -> bool:
        """Whether loss and norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def fault(self, max_norm: float) -> str | None:
        """Return the fault of the step; None if it is good."""
        if not math.isfinite(self.loss):
            return f"loss is {self.loss}"
        if not math.isfinite(self.grad_norm):
            return f"norm of the gradients is {self.grad_norm}"
        if self.norm_is_bad:
            return f"norm of the gradients is {self.grad_norm:g}, above train.max_norm {max_norm:g}"
        return None


class Training:
    """One rank's share of a run, from its start or a checkpoint to its end."""

    def __init__(self, job: Job, watch: Watcher) -> None:
        """Build the model, and load the newest checkpoint if there is one. All ranks call it."""
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.job, self.config, self.watch = job, job.config, watch
        self._baseline_bytes = memory_bytes(job.device) if job.device.type == "cpu" else 0
        self.model = build_model(job.config, job.source, job.device)
        self.optimizer = build_optimizer(job.config.optimizer, self.model)
        self.cost = OptimizerCost(self.optimizer, job.device)
        self.ema = build_ema(job.config.optimizer, self.model.module)
        self.sampler = Sampler(len(job.data.training), job.config.run.seed)
        self.checkpoints = Checkpoints(
            job.folder,
            job.config,
            self.model.module,
            self.optimizer,
            self.ema,
            watch,
        )
        self._weights = ""
        """Origin of the starting weights, for people; empty if they were drawn, or if the run is resumed."""
        self.state = self.checkpoints.resume() or self._begin()
        self._gradients: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]] = (
            self._compute_clipped_gradients
        )
        if job.config.compute.graph:
            self._gradients = graphed(
                self._compute_clipped_gradients, self._windows(), model=self.model.module
            )
        self.result = TrainResult(tokens=self.state.tokens)
        self.peak_bytes = 0
        self._told_stall = max((each.number for each in stalls()), default=0)
        """The last one that was told, or was before this run."""

    def run(self) -> TrainResult:
        """Take the steps that are left, and finish the run.

        Raises:
            StoppedBySignalError: a rank was asked to stop; the last step is in a checkpoint.
            BadStepError: a step was bad, and the configuration says to stop.
        """
        config, began = self.config, time.perf_counter()
        self.watch(self._start())
        if self.state.step == 0:
            self._evaluate()
        with TracedSteps(
            config.trace, self.model.module, self.job.folder.trace, rank=self.rank
        ) as traced:
            while self.state.step < config.train.steps and not self._ends_early:
                traced.begin(self.state.step + 1)
                is_asked_to_stop = self._take_step()
                traced.end(self.state.step)
                self._tell_stalls()
                if is_asked_to_stop and self.state.step < config.train.steps:
                    self._stop()
                with traced.between_steps():
                    self._between_steps()
        # The checkpoint comes first, so that a run that is killed from here on need not repeat steps.
        self.checkpoints.save(self.state)
        if self.state.step >= config.train.steps:
            self._evaluate()
        else:
            worse = counted(self.state.worse_evaluations, "evaluation")
            why = f"evaluation.patience: no lower held-out loss in {worse}"
            self.watch(Stopped(step=self.state.step, why=why))
        self.checkpoints.finish()
        if config.samples.count:
            self._write_samples()
        self._tell_stalls()
        self.result.seconds = time.perf_counter() - began
        patience = 0 if self.state.step >= config.train.steps else config.evaluation.patience
        self.watch(End(step=self.state.step, seconds=self.result.seconds, patience=patience))
        return self.result

    # --- one step -------------------------------------------------------------------------------------

    def _take_step(self) -> bool:
        """Take a step, or skip it; say whether a rank was asked to stop."""
        began, train, number = time.perf_counter(), self.config.train, self.state.step + 1
        rate = learning_rate(
            self.state.step,
            highest=self.config.optimizer.lr,
            steps=train.steps,
            section=self.config.schedule,
        )
        set_learning_rate(self.optimizer, rate)
        loss, norm, failure = self._compute_guarded_gradients()
        agreed = self._agree(loss, norm)
        fault = agreed.fault(train.max_norm) if failure is None else _first_line(failure)
        action = self._action(fault, train.on_bad_step if failure is None else train.on_error)
        if action in (None, "ignore"):
            with self.cost.timed():
                self.optimizer.step()
            if self.ema is not None:
                self.ema.update()
        self.optimizer.zero_grad()
        self._count_step(is_bad=fault is not None)
        self.result.losses[number] = agreed.loss
        self.peak_bytes = max(self.peak_bytes, memory_bytes(self.job.device))
        self.watch(
            Step(
                step=number,
                loss=agreed.loss,
                grad_norm=agreed.grad_norm,
                lr=rate,
                tokens=self.state.tokens,
                step_s=time.perf_counter() - began,
                memory_bytes=self.peak_bytes,
                optimizer_s=self.cost.seconds,
                optimizer_bytes=self.cost.state_bytes,
            )
        )
        if fault is not None and action is not None:
            trace = "" if failure is None else failure.traceback
            self.watch(BadStep(step=number, what=fault, action=action, traceback=trace))
            if action == "stop":
                self._give_up(number, fault, agreed, has_failed=failure is not None)
        return agreed.is_asked_to_stop

    def _compute_guarded_gradients(self) -> tuple[Tensor, Tensor, StepFailure | None]:
        """Compute and clip gradients; return the loss of this rank, their norm and, if failed steps are skipped, the failure.

        A step that has failed has no gradients, and its loss is no number.
        """
        # For dropout and the like: other numbers on each rank and at each step, but the same after a resume.
        torch.manual_seed(seed_of_step(self.config.run.seed, self.state.step, self.rank))
        if self.config.train.on_error == "stop":
            # Nothing is guarded: where one rank fails, all end.
            loss, norm = self._gradients(*self._windows())
            return loss, norm, None
        with guarded_step(self.model.module, on_error="skip") as step:
            loss = self._compute_gradients(*self._windows())
        if step.failed:
            device = self.job.device
            return (
                torch.full((), math.nan, device=device),
                torch.zeros((), device=device),
                step.failure,
            )
        return loss, self._clip(), None

    def _compute_clipped_gradients(
        self, windows: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute and clip gradients; return the loss of this rank and their norm. With `compute.graph` it is captured."""
        return self._compute_gradients(windows, scale), self._clip()

    def _compute_gradients(self, windows: Tensor, scale: Tensor | None) -> Tensor:
        """Compute the gradients of the global batch's mean loss, and return the mean loss of this rank's windows.

        All ranks have the same number of windows and gradients are averaged over ranks, so the mean over all windows is
        the mean of the ranks' means. A microbatch counts by its number of windows. Windows of records have few or many targets:
        ``scale`` makes the mean over windows that over all targets of the batch.
        """
        num_rows = len(windows)
        micro_rows = num_rows // self.config.train.accumulate
        total = torch.zeros((), device=self.job.device)
        for first in range(0, num_rows, micro_rows):
            is_last = first + micro_rows == num_rows
            with nullcontext() if is_last else self.model.accumulating():
                microbatch = windows[first : first + micro_rows]
                losses = window_losses(self.job.source, self.model.module, microbatch, scale)
                loss = losses.sum() / num_rows
                loss.backward()
            total += loss.detach()
        return total

    def _clip(self) -> Tensor:
        """Scale the gradients down to the largest norm, and return their norm before."""
        return self.model.clip_gradients(self.config.train.clip or math.inf).to(self.job.device)

    def _windows(self) -> tuple[Tensor, Tensor | None]:
        """Return this rank's windows of the step, and the factor of their losses, on the device."""
        batch = self.config.train.batch
        drawn = self.sampler.windows(self.state.position, batch)
        num_rows = batch // self.world
        windows = self.job.data.training.rows(
            drawn[self.rank * num_rows : (self.rank + 1) * num_rows]
        )
        if self.job.device.type == "cuda":
            windows = windows.pin_memory()  # otherwise the host would wait for the copy
        return (
            windows.to(self.job.device, non_blocking=True),
            scale_of(self.job.data.training, drawn, self.job.device),
        )

    def _agree(self, loss: Tensor, norm: Tensor) -> Agreement:
        """Agree with all ranks about the step, whose gradients have this norm."""
        train, device = self.config.train, self.job.device
        is_bad = ~(norm.isfinite() & (norm <= (train.max_norm or math.inf)))
        # Made on the device: the host would wait for a copy to it.
        is_asked = torch.full((), float(self.job.stop.is_made), device=device)
        facts = torch.stack((loss / self.world, is_bad.float(), is_asked, norm.float()))
        dist.all_reduce(facts[:3])  # the norm is the same on all ranks already
        mean, num_bad, num_asked, grad_norm = facts.tolist()
        return Agreement(
            loss=mean,
            grad_norm=grad_norm,
            norm_is_bad=num_bad > 0,
            is_asked_to_stop=num_asked > 0,
        )

    def _action(self, fault: str | None, wanted: BadStepAction) -> BadStepAction | None:
        """Return the action after a bad step: the same on all ranks, because they agree about the fault."""
        if fault is None:
            return None
        if wanted == "skip" and self.state.bad_steps + 1 >= self.config.train.max_bad_steps:
            return "stop"
        return wanted

    def _count_step(self, *, is_bad: bool) -> None:
        self.state.step += 1
        self.state.position += self.config.train.batch
        self.state.tokens += self.config.train.batch * self.config.data.context
        self.state.bad_steps = self.state.bad_steps + 1 if is_bad else 0
        self.result.tokens = self.state.tokens

    def _tell_stalls(self) -> None:
        """Tell the times in which ranks waited for slow ones. They are over: all ranks have met since."""
        for stall in stalls():
            if stall.number > self._told_stall:
                self._told_stall = stall.number
                self.watch(
                    Stall(
                        step=self.state.step,
                        seconds=round(stall.seconds, 1),
                        ranks=stall.ranks,
                        where=stall.where,
                        report=stall.report,
                    )
                )

    # --- between steps --------------------------------------------------------------------------------

    def _between_steps(self) -> None:
        step, every = self.state.step, self.config.evaluation.every
        self.checkpoints.notice_completed()
        if step == self.config.train.steps:
            return  # `run` does the same things at the end
        # First, because a checkpoint has the lowest loss until then.
        if every and step % every == 0:
            self._evaluate()
        if self.checkpoints.is_due(step):
            self.checkpoints.save(self.state)

    @property
    def _ends_early(self) -> bool:
        """Whether the evaluations of late have found no lower loss. All ranks have the same losses."""
        return 0 < self.config.evaluation.patience <= self.state.worse_evaluations

    def _evaluate(self) -> None:
        config = self.config
        with self._weights_to_show():
            loss = held_out_loss(
                self.job.source,
                self.model.module,
                self.job.data.held_out,
                limit=config.evaluation.windows,
                rows=config.train.batch // (self.world * config.train.accumulate),
                device=self.job.device,
            )
        self.result.evaluations[self.state.step] = loss
        self.watch(Evaluation(step=self.state.step, loss=loss))
        if self.state.note_evaluation(loss) and config.checkpoint.best:
            self.checkpoints.save_best(self.state)

    def _weights_to_show(self) -> AbstractContextManager[None]:
        """Let the model have the weights that are evaluated within the block: the trained ones, or their averages."""
        if self.ema is None or not self.config.evaluation.ema:
            return nullcontext()
        return self.ema.averaged()

    def _write_samples(self) -> None:
        with self._weights_to_show():
            texts = write_samples(
                self.model.module,
                self.job.source,
                self.job.data.tokenizer,
                self.config.samples,
                opening=self.job.data.opening(),
                prompts=self.job.data.prompts,
                seed=self.config.run.seed,
                context=self.config.data.context,
                device=self.job.device,
            )
        self.result.samples = tuple(texts)
        self.watch(Samples(step=self.state.step, texts=tuple(texts)))

    # --- before the end -------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Save a checkpoint, and end the run."""
        self.checkpoints.save(self.state)
        self.checkpoints.finish()
        self.watch(Stopped(step=self.state.step, why="a signal"))
        raise StoppedBySignalError(
            f"Stopped by a signal after step {self.state.step} of {self.config.train.steps}, which is saved in "
            f"{self.checkpoints.newest}. Run the same command again to resume."
        )

    def _give_up(self, number: int, fault: str, agreed: Agreement, *, has_failed: bool) -> None:
        """End the run because of a bad step, whose update was not made."""
        self.checkpoints.finish()
        in_a_row, newest = self.state.bad_steps, self.checkpoints.newest
        raise BadStepError(
            f"Step {number} was bad: {fault}"
            + (f", and {in_a_row} steps in a row were" if in_a_row > 1 else "")
            + ". Its update was not made, and the run was stopped. "
            + (
                advice_after_failed_step(newest)
                if has_failed
                else advice_after_bad_step(self.config.train, newest, is_finite=agreed.is_finite)
            )
        )

    # --- at the start ---------------------------------------------------------------------------------

    def _begin(self) -> RunState:
        source, module = self.job.source, self.model.module
        if self.config.model.weights is None:
            source.fill(module, seed=self.config.run.seed)
        else:
            self._weights = load_weights(self.config, source, module)
        if self.ema is not None:
            self.ema.reset()
        return RunState()

    def _start(self) -> Start:
        config, data = self.config, self.job.data
        return Start(
            world=self.world,
            device=self.job.device.type,
            device_name=device_name(self.job.device),
            parameters=self.model.unsharded.num_elements,
            unsharded_bytes=self.model.unsharded.num_bytes,
            rank_bytes=tuple(RankGroup().collect(self.model.bytes_at_rest())),
            baseline_bytes=self._baseline_bytes,
            tokens_per_step=config.train.batch * config.data.context,
            steps=config.train.steps,
            model=", ".join(filter(None, (self.job.source.description, self._weights))),
            data=data.source,
            left_out=data.left_out,
            training_tokens=data.training.tokens,
            held_out_tokens=data.held_out.tokens,
            versions={
                "fullshard": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            resumed_from=self.state.step or None,
        )


def advice_after_bad_step(train: TrainSection, newest: Path | None, *, is_finite: bool) -> str:
    """Return advice for a run that a bad step has stopped. If the step was finite, its norm was above the limit."""
    changes = [
        "a larger train.max_bad_steps"
        if train.on_bad_step == "skip"
        else 'train.on_bad_step = "skip"',
        *(["a higher train.max_norm"] if is_finite else []),
    ]
    start = _start_of(newest)
    anew = ["a lower optimizer.lr", "a lower train.clip" if train.clip else "a train.clip above 0"]
    return (
        f"The same command with {' or '.join(changes)} resumes from {start}. If it reaches a bad step again, look at "
        f"the data, or start a new run with {' or '.join(anew)}."
    )


def advice_after_failed_step(newest: Path | None) -> str:
    """Return advice for a run that too many failed steps in a row have stopped."""
    return (
        f"The same command with a larger train.max_bad_steps resumes from {_start_of(newest)}. If memory runs out, use "
        "compute.checkpoint_activations, more ranks, or a larger train.accumulate (ranks then keep the gradients of the "
        "whole model between microbatches); metrics.jsonl has the traceback."
    )


def _start_of(newest: Path | None) -> str:
    return (
        "the start: there is no checkpoint yet"
        if newest is None
        else f"the last checkpoint, {newest}"
    )


def _first_line(failure: StepFailure) -> str:
    return (str(failure).splitlines() or [""])[0][:MAX_FAULT]


def seed_of_step(seed: int, step: int, rank: int) -> int:
    """Return the seed of a step's random numbers."""
    return random.Random(f"step {seed} {step} {rank}").getrandbits(63)
