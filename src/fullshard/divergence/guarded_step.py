"""Steps that fail together: `guarded_step`.

`step_guard` brings all ranks out of the step, with the same failures. Here is what a failed step leaves of the model:

    collectives in flight   all ranks have issued them, so they are waited for
    parameters              sharded; gathered and prefetched parameters are released
    gradients               dropped: reduced, unreduced, partial sums over shards
    forecasts               dropped on all ranks: ranks have stopped at different places
    options                 those that change from microbatch to microbatch are as before the step
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Literal, NamedTuple, Self

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fullshard.divergence.step_guard import StepFailure, StepGuard, step_failed
from fullshard.engine import interruption
from fullshard.engine.model_changes import CHANGES
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.reduction_state import ReduceSettings
from fullshard.engine.state import FSDPState, named_states, state_of
from fullshard.errors import (
    ConfigurationError,
    DivergenceError,
    StepFailedError,
    UnsupportedError,
    exception_message,
)
from fullshard.mesh.axes import global_rank, world_size
from fullshard.mesh.backends import Backend, backend_of

__all__ = ["GuardedStep", "guarded_step"]

_MESSAGE_CHARACTERS = 2_000
_TRACEBACK_CHARACTERS = 8_000


def guarded_step(*models: nn.Module, on_error: Literal["raise", "skip"] = "raise") -> GuardedStep:
    """Let all ranks leave a step if one of them raises an exception in it.

        with fullshard.guarded_step(model, on_error="skip") as step:
            for microbatch in batch:
                model(microbatch).mean().backward()
        if step.failed:
            print(step.failure)  # rank 3: OutOfMemoryError: ...
        else:
            optimizer.step()
        optimizer.zero_grad()

    Without it, the other ranks would wait for the rank that has raised: out of memory, a bad sample, a check for NaN.
    With it, they leave the block at their next collective, or at the end of the block. After a failed step, on all
    ranks,

    - no gradient of the models is left: `.grad` of all parameters is None, and gradients that were only accumulated are
      dropped. That includes gradients from before the block, so put all microbatches of an optimizer step into one
      block;
    - the models are as between steps, as after `reset_iter_state`, and train on;
    - ``step.failed`` is True, and ``step.failure`` says which rank has failed and why.

    Parameters, optimizers, buffers (running statistics, say) and random numbers are not touched or rewound.

    - All ranks of the models' process groups must enter and leave the block together, with the same ``on_error``.
    - Call the optimizer after the block. Its step cannot be taken back, so within the block it is refused.
    - Collectives of the program itself (``torch.distributed``, tensor parallelism, pipelines) are not guarded: a rank that
      waits in one within the block is found by the watchdog. Put collectives on losses or metrics after the block.
    - Host processes meet before every collective, also on NCCL. That takes some tens of microseconds each, which do not
      matter while the host is ahead of its device.

    Args:
        *models: All sharded models that run in the block, by either API. They may be, or contain, several roots.
        on_error: ``"raise"``: raise `StepFailedError`, the same on all ranks. ``"skip"``: end the block as if nothing
            had happened, on all ranks. These are never skipped: `KeyboardInterrupt` and `SystemExit`, which propagate
            on their rank while the others raise `StepFailedError`; wrong use of fullshard (`ConfigurationError`,
            `UnsupportedError`); and `DivergenceError`.

    Returns:
        The step, a context manager.

    Raises:
        ConfigurationError: there is no model, or no such policy; or, on entering the block, none of them is sharded.
    """
    if on_error not in ("raise", "skip"):
        raise ConfigurationError(f"on_error must be 'raise' or 'skip', got {on_error!r}.")
    if not models or not all(isinstance(model, nn.Module) for model in models):
        raise ConfigurationError(
            f"guarded_step needs the models that run in the step, got {[type(each).__name__ for each in models]}."
        )
    return GuardedStep(models, on_error)


class _Options(NamedTuple):
    """Options of a state that programs change between microbatches."""

    requires_gradient_sync: bool
    is_last_backward: bool
    reshard_after_backward: bool
    reductions: tuple[ReduceSettings, ...]

    @classmethod
    def of(cls, state: FSDPState) -> _Options:
        """Return those of a state."""
        options = state.options
        return cls(
            options.requires_gradient_sync,
            options.is_last_backward,
            options.reshard_after_backward,
            tuple([group.reduction.settings for group in state.groups]),
        )

    def restore(self, state: FSDPState) -> None:
        """Let a state have them again."""
        options = state.options
        options.requires_gradient_sync = self.requires_gradient_sync
        options.is_last_backward = self.is_last_backward
        options.reshard_after_backward = self.reshard_after_backward
        for group, settings in zip(state.groups, self.reductions, strict=True):
            group.reduction.settings = settings


class GuardedStep:
    """A step that all ranks finish, or none; made by `guarded_step`."""

    def __init__(self, models: Sequence[nn.Module], on_error: str) -> None:
        self._models, self._on_error = tuple(models), on_error
        self._guard: StepGuard
        self._options: dict[FSDPState, _Options] = {}
        self.failures: tuple[StepFailure, ...] = ()
        """A failure for each rank that has raised an exception; the same on all ranks."""

    @property
    def failed(self) -> bool:
        """Whether the step has failed."""
        return bool(self.failures)

    @property
    def failure(self) -> StepFailure | None:
        """The failure of the lowest rank that has one; None if the step has not failed."""
        return self.failures[0] if self.failures else None

    def __enter__(self) -> Self:
        """Begin the step; collective the first time, when ranks connect."""
        states = [state for model in self._models for state in _states_of(model)]
        self._guard = _guard_of(self._models, states)
        self._guard.begin()
        self._options = {state: _Options.of(state) for state in states}
        self.failures = ()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Meet the other ranks; leave the step as failed if one of them, or this one, has failed."""
        try:
            if error is None and self._all_have_finished():
                return False
            if isinstance(error, DivergenceError):
                return False  # ranks cannot go on together
            self._leave_as_failed(error)
        finally:
            self._guard.finish()
            self._options = {}
        if error is not None and not isinstance(error, Exception):
            return False  # it ends the program
        if self._on_error == "skip" and all(failure.may_skip for failure in self.failures):
            return True
        raise step_failed(self.failures) from (None if self._guard.has_learned else error)

    def _all_have_finished(self) -> bool:
        """Return whether no rank has failed. All have come to the end of the step, or have failed."""
        try:
            self._guard.end(self._on_error)
        except StepFailedError:
            return False
        return True

    def _leave_as_failed(self, error: BaseException | None) -> None:
        # After it has learned of another rank's failure, an exception of this one is a consequence.
        failure = None if error is None or self._guard.has_learned else _describe(error)
        try:
            self._reset()
        except DivergenceError:
            raise
        except Exception as broken:
            # Others must not go on without this rank.
            failure = _describe(broken, may_skip=False)
        failures = self._guard.fail(failure)
        if failure is not None and failure not in failures:
            failures = (*failures, failure)
        self.failures = failures

    def _reset(self) -> None:
        """Return to the state between steps, without gradients. No collective is issued."""
        for step in dict.fromkeys(state.step for state in self._options):
            if step is not None:
                interruption.reset(step, together=True)
        for state, options in self._options.items():
            options.restore(state)
        CHANGES.note()  # what ranks have agreed on in the step may be another
        for model in self._models:
            model.zero_grad(set_to_none=True)


def _describe(error: BaseException, *, may_skip: bool = True) -> StepFailure:
    wrong_use = isinstance(error, (ConfigurationError, UnsupportedError))
    skippable = isinstance(error, Exception) and not wrong_use
    return StepFailure(
        rank=global_rank(),
        type=type(error).__name__,
        message=exception_message(error)[:_MESSAGE_CHARACTERS],
        traceback="".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS:],
        may_skip=may_skip and skippable,
    )


# --- what is guarded ----------------------------------------------------------------------------------


def _states_of(model: nn.Module) -> Iterable[FSDPState]:
    state = state_of(model)
    if state is not None and state.step is not None and state.step.root is state:
        return state.step.states  # no need to look at all modules in every step
    return named_states(model)


_GUARDS: weakref.WeakKeyDictionary[nn.Module, dict[tuple[int, ...], StepGuard]] = (
    weakref.WeakKeyDictionary()
)
"""Guards by the first model of a step, and by the serial numbers of all groups of its models."""


def _guard_of(models: Sequence[nn.Module], states: Sequence[FSDPState]) -> StepGuard:
    """Return the guard of these models, made once; collective."""
    groups = [group for state in states for group in state.groups]
    known = _GUARDS.setdefault(models[0], {})
    # A process group for shards after forward is made by the first forward.
    made = sum(len(_post_forward(group)) for group in groups)
    key = (*[group.serial_number for group in groups], made)
    if key not in known:
        backends = _backends(models, groups)
        if world_size() > 1 and not groups and not backends:
            names = ", ".join(type(model).__name__ for model in models)
            raise ConfigurationError(
                f"guarded_step lets the ranks of sharded models leave a step together, and nothing here is sharded: {names}. "
                "Pass the models that fully_shard or FullyShardedDataParallel have sharded."
            )
        known[key] = StepGuard(backends)
    return known[key]


def _backends(
    models: Sequence[nn.Module], groups: Sequence[FSDPParamGroup]
) -> dict[ProcessGroup, Backend]:
    """Return all process groups on which fullshard may call collectives for the models, with their backends."""
    backends: dict[ProcessGroup, Backend] = {}
    for group in groups:
        axes = group.mesh_info
        used = [axes.shard_peers, axes.replicate_process_group, *_post_forward(group)]
        backends |= {each: backend_of(each, group.device) for each in used if each is not None}
    params = [param for model in models for param in model.parameters()]
    params += [sharded_param.param for group in groups for sharded_param in group.sharded_params]
    for param in params:
        if isinstance(param, DTensor):  # norms of gradients are summed over the other axes, too
            for each in param.device_mesh.get_all_groups():
                backends.setdefault(each, backend_of(each, param.device))
    return {group: backend for group, backend in backends.items() if group.size() > 1}


def _post_forward(group: FSDPParamGroup) -> list[ProcessGroup]:
    """Return the process group over which a group is sharded after forward, if it is and one has been made."""
    kept = group.routes.post_forward
    return [] if kept is None or kept.process_group is None else [kept.process_group]
