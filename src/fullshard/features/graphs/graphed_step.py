"""`graphed`: a step that is captured in a CUDA graph once, and replayed from then on.

    eager     the first calls with inputs of a kind, and every call where nothing can be captured
    capture   the call after them: the step is recorded, and then replayed as in all later calls
    replay    inputs are copied, the graph is launched, results are copied

[Note: ranks replay together]
Kernels of collectives wait for those of other ranks, and a step that is captured on some ranks only could differ in them:
the ranks decide together. In every call each rank says what it would do. All do what the most careful one wants: run
eagerly, warm up, capture, replay, in this order. Hosts meet for it (`collectives.texts_of_all_ranks`), no device waits.
After a capture they meet again: if it has failed on one of them, none replays.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from enum import IntEnum
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import DistBackendError

from fullshard import torch_border
from fullshard.divergence.journal import PROGRESS, Journal, journal_of
from fullshard.divergence.meetings import lost_within
from fullshard.divergence.model_description import process_groups
from fullshard.engine import interruption
from fullshard.engine.captures import obstacles_to_capture
from fullshard.engine.state import named_states
from fullshard.engine.step import Step
from fullshard.engine.tensor_trees import map_tensors, to_device
from fullshard.errors import ConfigurationError
from fullshard.features.graphs.baked_in import baked_in, changes, kind_of, modes
from fullshard.features.graphs.graph_capture import CapturedStep, Inputs
from fullshard.features.graphs.step_hook import StepHook
from fullshard.transport.collectives import texts_of_all_ranks
from fullshard.transport.streams import FSDPCommContext
from fullshard.transport.tags import tag

__all__ = ["GraphedStep", "graphed"]

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("fullshard")

MAX_GRAPHS = 16
"""Limit for one `graphed`: each graph takes memory, and seconds to capture."""

_DECIDING = tag("decision about a graphed step")
_REPLAY = tag("replay of a graphed step")


class Plan(IntEnum):
    """A rank's way through a call; the smaller, the more careful."""

    EAGER = 0
    WARM_UP = 1
    CAPTURE = 2
    REPLAY = 3


def graphed(
    step_fn: Callable[P, R],
    sample_inputs: Sequence[Any],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    warmup: int = 3,
) -> GraphedStep[P, R]:
    """Return a function that does what ``step_fn`` does, in one launch: a CUDA graph that is replayed.

        def step(tokens, targets):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            fullshard.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss


        step = fullshard.graphed(step, (tokens, targets), model=model, optimizer=optimizer)
        for tokens, targets in batches:
            loss = step(tokens, targets)

    Every call is a step, and each input is used once: the first ``warmup`` calls run ``step_fn`` itself, the next one
    captures it, and all others replay it. Inputs of another shape get a graph of their own. All graphs share their memory.

    A replay repeats what the device did, and nothing of what the host did. So ``step_fn`` must not depend on numbers
    that the host reads or changes, and it prints or counts only when it is captured. Inputs are copied to the
    model's device before each call. Results are copies without an autograd graph. Each call begins without gradients:
    accumulate within ``step_fn``. Learning rates become tensors on the device, and may be changed at any time, by a
    scheduler or by assignment.

    The step is captured again, and the logger ``fullshard`` says so, if parameters were replaced, options were set or
    optimizer state was loaded. Where nothing can be captured (on the CPU, with CPU offload), ``step_fn`` itself
    runs, and the logger says why, once. All ranks capture, replay or run eagerly together. See docs/graphs.md.

    Args:
        step_fn: A step: forward and backward, perhaps several, perhaps clipping and the optimizer.
        sample_inputs: Positional inputs as the step will get them, to be checked now. They are not used for training.
        model: The sharded model that the step trains.
        optimizer: The optimizer whose step is in ``step_fn``. It must be made with ``capturable=True``; SGD with
            ``fused=True``.
        warmup: How many calls run eagerly before the capture, for each kind of inputs; at least 1.

    Returns:
        The step, with the signature of ``step_fn``.

    Raises:
        ConfigurationError: an argument cannot be used.
    """
    _check_arguments(sample_inputs, model, warmup)
    return GraphedStep(step_fn, model, optimizer, warmup)


def _check_arguments(sample_inputs: Sequence[Any], model: nn.Module, warmup: int) -> None:
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 1:
        raise ConfigurationError(f"warmup must be a number of calls, 1 or more, got {warmup!r}.")
    if not named_states(model):
        raise ConfigurationError(
            "graphed needs the sharded model that the step trains, but nothing in model is sharded. Call fully_shard or "
            "FullyShardedDataParallel first; torch.cuda.make_graphed_callables is for models that are not sharded."
        )
    try:
        kind_of(tuple(sample_inputs))
    except TypeError as error:
        raise ConfigurationError(f"sample_inputs cannot be used: {error}.") from error


class _Entry:
    """Knowledge about inputs of one kind."""

    def __init__(self) -> None:
        self.runs = 0
        """Calls that ran eagerly since the last change."""
        self.captured: CapturedStep | None = None


class GraphedStep(Generic[P, R]):
    """A step that is replayed from a CUDA graph; made by `graphed`."""

    def __init__(
        self,
        step_fn: Callable[P, R],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        warmup: int,
    ) -> None:
        self._step, self._model, self._optimizer, self._warmup = step_fn, model, optimizer, warmup
        self._states = list(named_states(model))
        self.device = self._states[0].device
        """The device of the step."""
        self._entries: dict[Hashable, _Entry] = {}
        self._baked: dict[str, Any] | None = None
        """Facts that the existing graphs have taken over."""
        self._failure: str | None = None
        """Why the last capture has failed."""
        self._told: set[str] = set()
        self.eager_reason: str | None = None
        """Why the last call ran eagerly, unless it was to warm up; None if it did not."""
        self._pool: tuple[int, int] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._has_streams = self.device.type == "cuda"
        self._rates: _Rates | None = None
        if self._has_streams and optimizer is not None and not obstacles_of_optimizer(optimizer):
            self._rates = _Rates(optimizer, self.device)

    # --- what users see -----------------------------------------------------------------------------

    @property
    def num_graphs(self) -> int:
        """How many graphs there are now: one for each kind of inputs and each mode of the model."""
        return sum(entry.captured is not None for entry in self._entries.values())

    @property
    def pool_bytes(self) -> int:
        """Bytes of device memory that the graphs hold, together."""
        return 0 if self._pool is None else torch_border.pool_bytes(self._pool)

    def reset(self) -> None:
        """Drop all graphs and their memory; the next calls warm up and capture again. Call it on all ranks."""
        for entry in self._entries.values():
            if entry.captured is not None:
                entry.captured.forget()
        self._entries.clear()
        self._pool = None  # torch takes a pool back when its last graph goes
        self._baked = self._failure = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Do the step."""
        inputs: Inputs = (args, kwargs)
        if self._rates is not None:
            self._rates.keep()
        if not self._has_streams:
            self._say_eager(f"the model is on {self.device.type}, and graphs are CUDA's")
            return self._run(inputs)
        entry = self._entry_of(inputs)
        plan, reason = self._decide(*self._wish(entry))
        if plan is Plan.CAPTURE:
            plan, reason = self._capture_together(entry, inputs)
        if plan is Plan.REPLAY:
            self.eager_reason = None
            return self._replay(entry, inputs)
        if plan is Plan.EAGER:
            self._say_eager(reason)
        entry.runs += 1
        return self._run(inputs)

    # --- eagerly ------------------------------------------------------------------------------------

    def _run(self, inputs: Inputs) -> R:
        self._clear_gradients()
        args, kwargs = to_device(inputs, self.device)
        results: R = map_tensors(Tensor.detach, self._step(*args, **kwargs))
        return results

    def _clear_gradients(self) -> None:
        self._model.zero_grad(set_to_none=True)

    def _say_eager(self, reason: str) -> None:
        self.eager_reason = reason
        if reason not in self._told:
            self._told.add(reason)
            logger.warning("A graphed step runs eagerly: %s.", reason)

    # --- decisions ----------------------------------------------------------------------------------

    def _entry_of(self, inputs: Inputs) -> _Entry:
        """Return what is known about such inputs; forget what was captured if something has changed since."""
        settle = getattr(self._optimizer, "fuse_state", None)
        if settle is not None:
            settle()  # the user may have read its state, and have changed it
        if self._baked is not None:
            now = baked_in(self._model, self._states, self._optimizer)
            changed = changes(self._baked, now)
            if changed:
                logger.warning(
                    "A graphed step is captured again: %s changed.", " and ".join(changed)
                )
                self.reset()
        try:
            kind: Hashable = (kind_of(inputs), modes(self._model))
        except TypeError as error:
            raise ConfigurationError(
                f"A graphed step cannot take these inputs: {error}."
            ) from error
        return self._entries.setdefault(kind, _Entry())

    def _wish(self, entry: _Entry) -> tuple[Plan, str]:
        """Return what this rank would do, and why."""
        contexts = self._contexts
        if self._failure is not None:
            return Plan.EAGER, f"it could not be captured: {self._failure}"
        if any(not each.capturable for context in contexts for each in context.observers):
            return Plan.EAGER, "a trace is recorded"
        if any(journal.guard is not None for journal in self._journals):
            return (
                Plan.EAGER,
                "it is called in a guarded step, which ranks may leave at every collective",
            )
        if entry.captured is not None:
            return Plan.REPLAY, ""
        if entry.runs < self._warmup:
            return Plan.WARM_UP, ""
        obstacles = obstacles_to_capture(
            [group for state in self._states for group in state.groups]
        ) + obstacles_of_optimizer(self._optimizer)
        if obstacles:
            return Plan.EAGER, "; ".join(obstacles)
        if self.num_graphs >= MAX_GRAPHS:
            return (
                Plan.EAGER,
                f"it has reached the limit of {MAX_GRAPHS} graphs, one for each kind of inputs",
            )
        return Plan.CAPTURE, ""

    def _decide(self, plan: Plan, reason: str) -> tuple[Plan, str]:
        """Return what all ranks do: [Note: ranks replay together]."""
        text = f"{plan.value} {reason}"
        for group, device in process_groups(self._states).items():
            text = min(texts_of_all_ranks(text, group, _DECIDING, device), key=_value)
        return Plan(_value(text)), text.partition(" ")[2]

    # --- capture and replay -------------------------------------------------------------------------

    def _capture_together(self, entry: _Entry, inputs: Inputs) -> tuple[Plan, str]:
        """Capture the step on all ranks; return what they do then."""
        failure = None
        if entry.captured is None:
            try:
                self._capture(entry, inputs)
            # The step then runs eagerly, and raises errors again that have nothing to do with the capture.
            except Exception as error:
                failure = f"{type(error).__name__}: {_first_line(error)}"
                self._clean_up()
        plan, reason = self._decide(
            *(
                (Plan.REPLAY, "")
                if failure is None
                else (Plan.EAGER, f"it could not be captured: {failure}")
            )
        )
        if plan is Plan.EAGER:
            self.reset()
            self._failure = reason.removeprefix("it could not be captured: ")
        return plan, reason

    def _capture(self, entry: _Entry, inputs: Inputs) -> None:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._clear_gradients()
        self._run_step_hooks()
        for context in self._contexts:
            context.replay_end = None
        steps = PROGRESS.step
        entry.captured = CapturedStep(
            self._step,
            inputs,
            list(self._model.parameters()),
            self._journals,
            device=self.device,
            pool=self._pool,
            stream=self._stream,
        )
        if PROGRESS.step > steps and self._optimizer is None:
            entry.captured = None
            raise ConfigurationError(
                "it has a step of an optimizer that was not given as optimizer=..., so its learning rate could never change"
            )
        _CAPTURED.add(self)
        torch_border.before_shutdown(_drop_graphs)
        self._baked = baked_in(self._model, self._states, self._optimizer)
        entry.runs = 0
        logger.info(
            "A graphed step was captured; its graphs hold %.1f MiB.", self.pool_bytes / 2**20
        )

    def _clean_up(self) -> None:
        """Make the model usable after a capture that failed: nothing of the captured step has run."""
        for step in self._steps:
            interruption.reset(step)
        self._clear_gradients()

    def _replay(self, entry: _Entry, inputs: Inputs) -> R:
        captured = entry.captured
        assert captured is not None, "all ranks replay only if each has a graph"
        self._run_step_hooks()
        try:
            results: R = captured.replay(inputs)
        except DistBackendError as error:
            raise lost_within(_REPLAY.text, error) from error
        for context in self._contexts:
            context.note_replay()
        # The host calls none of the collectives. One entry says that ranks have done the same.
        for journal, steps in zip(self._journals, captured.optimizer_steps, strict=True):
            journal.note(_REPLAY)
            for _ in range(steps if entry.runs else 0):  # the capture has counted the first
                journal.end_step()
        if entry.runs:
            PROGRESS.step += max(captured.optimizer_steps, default=0)
        entry.runs += 1
        if self._optimizer is not None:
            # Autograd did not see the writes: a forward from before them must not be followed by its backward now.
            torch.autograd.graph.increment_version(list(self._model.parameters()))
        return results

    def _run_step_hooks(self) -> None:
        """Run what must come before the optimizer's writes, such as copies for a checkpoint that are under way."""
        if self._optimizer is not None:
            for hook in torch_border.step_pre_hooks(self._optimizer):
                if isinstance(hook, StepHook):
                    hook()

    # --- the model ----------------------------------------------------------------------------------

    @property
    def _steps(self) -> list[Step]:
        found = (state.step for state in self._states)
        return list(dict.fromkeys(each for each in found if each is not None))

    @property
    def _contexts(self) -> list[FSDPCommContext]:
        return list(dict.fromkeys(step.context for step in self._steps))

    @property
    def _journals(self) -> list[Journal]:
        return [journal_of(group) for group in process_groups(self._states)]


_CAPTURED: weakref.WeakSet[GraphedStep[Any, Any]] = weakref.WeakSet()
"""The steps that have graphs."""


def _drop_graphs() -> None:
    """Drop all graphs before a process group is destroyed: NCCL waits until none holds its communicator any more."""
    for each in list(_CAPTURED):
        each.reset()


class _Rates:
    """Learning rates in device memory, where graphs read them."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._tensors: list[Tensor] = []

    def keep(self) -> None:
        """Let each group have its tensor as the rate, with the value that a user has set since."""
        for index, group in enumerate(self._optimizer.param_groups):
            rate = group["lr"]
            if index == len(self._tensors):
                is_there = isinstance(rate, Tensor) and rate.device == self._device
                self._tensors.append(rate if is_there else torch.empty((), device=self._device))
            own = self._tensors[index]
            if rate is not own:
                own.fill_(rate)
                group["lr"] = own


def obstacles_of_optimizer(optimizer: torch.optim.Optimizer | None) -> list[str]:
    """Return why an optimizer's step cannot be captured; empty if it can."""
    if optimizer is None:
        return []
    maker = optimizer
    if isinstance(optimizer, torch_border.DelegatingOptimizer):
        maker = optimizer.inner
    if getattr(maker, "COUNTS_ON_HOST", False):
        return [f"{type(maker).__name__} counts its steps on the host"]
    needed = "capturable"
    if isinstance(maker, torch.optim.SGD):
        needed = "fused"  # other ways to compute its step make the host read the learning rate
    if all(group.get(needed) for group in optimizer.param_groups):
        return []
    return [f"{type(maker).__name__} was made without {needed}=True, so its step needs the host"]


def _value(text: str) -> int:
    return int(text.partition(" ")[0])


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
