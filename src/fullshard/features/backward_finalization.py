"""Backward passes that the user ends by himself: `set_manual_backward_finalization`, `finalize_backward`.

    set_manual          from now on, the end of a backward pass does not wait for reductions
    finalize            gradients that were only added up are reduced; what was kept for backward is released
    handle.wait         the streams are joined: gradients are in `.grad`

For schedules that reduce gradients at a place of their own, after one backward pass or several.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from fullshard import torch_border
from fullshard.engine.feature_events import UPDATE_BEGINS, call_at
from fullshard.engine.state import FSDPState
from fullshard.errors import LifecycleError

if TYPE_CHECKING:
    from fullshard.engine.step import Step


class GradientReductionHandle:
    """Reductions in flight: what `FSDPModule.finalize_backward(async_op=True)` returns."""

    def __init__(self, step: Step | None) -> None:
        """Begin to await the reductions of a model; None for one that has not run."""
        self._step = step
        self._num_resets = 0 if step is None else step.num_resets

    def wait(self) -> None:
        """Wait until the gradients are reduced; the current stream may use them afterwards.

        Raises:
            LifecycleError: `reset_iter_state` has dropped them since.
        """
        step = self._step
        if step is None:
            return  # nothing was reduced, or this was called before
        if step.num_resets != self._num_resets:
            raise LifecycleError(
                "A GradientReductionHandle cannot wait for gradients that reset_iter_state() has dropped since. Forget "
                "the handle, and run the step again."
            )
        self._step = None
        if step.busy:
            step.context.join()  # with another forward, whose backward ends as usual
        elif step.awaits_finalization:
            step.end_backward()


_MANUAL: weakref.WeakSet[FSDPState] = weakref.WeakSet()
"""Roots whose backward the user finalizes; usually none."""


def set_manual(state: FSDPState, enabled: bool) -> None:
    """Let the user finalize backward, or the end of each pass; between backwards."""
    step = state.step
    if step is not None:
        _check_is_root(state, step, "set_manual_backward_finalization")
        has_begun = step.passes or step.awaits_finalization
        if has_begun and enabled is not state.options.manual_finalization:
            raise LifecycleError(
                "set_manual_backward_finalization must be called between steps, but a backward of this model has begun and is "
                "not finalized. Call finalize_backward() before, or reset_iter_state() after a failed step."
            )
    state.options.manual_finalization = enabled
    (_MANUAL.add if enabled else _MANUAL.discard)(state)
    call_at(UPDATE_BEGINS, _check_finalized)


def finalize(state: FSDPState, async_op: bool) -> GradientReductionHandle | None:
    """Reduce what passes have added up, and end backward; with ``async_op``, return a handle that ends it."""
    step = state.step
    if step is not None:
        _check_is_root(state, step, "finalize_backward")
        if not state.options.manual_finalization:
            raise LifecycleError(
                "finalize_backward() is for a model whose backward does not finalize itself. Call "
                "set_manual_backward_finalization(True) before the forward, or leave this call out."
            )
        if step.busy or torch_border.backward_pass_id() != -1:
            raise LifecycleError(
                "finalize_backward() must be called outside of forward and backward, but one of this model is running. Call it "
                "after the last backward."
            )
        if step.awaits_finalization:
            for each in step.states:
                if each.options.reshard_after_backward:
                    each.reshard()
        step.reduce_microbatches(
            [
                each
                for each in step.states
                if each.options.requires_gradient_sync
                and (
                    each in step.postponed
                    or any(group.reduction.unreduced.partial for group in each.groups)
                )
            ]
        )
        step.awaits_finalization = True
    handle = GradientReductionHandle(step)
    if async_op:
        return handle
    handle.wait()
    return None


def _check_finalized(params: Callable[[], Iterable[Tensor]]) -> None:
    """Refuse an update of parameters whose gradients may not be there yet, as their backward is not finalized."""
    steps = [state.step for state in [*_MANUAL] if state.step is not None]
    if not any(step.awaits_finalization for step in steps):
        return
    wanted = {id(param) for param in params()}
    names = [
        sharded_param.name
        for step in steps
        if step.awaits_finalization
        for state in step.states
        for group in state.groups
        for sharded_param in group.sharded_params
        if id(sharded_param.param) in wanted
    ]
    if names:
        raise LifecycleError(
            "Backward must be finalized before an optimizer updates sharded parameters. These belong to a model with "
            f"set_manual_backward_finalization(True), and their gradients may be incomplete: {names}. Call "
            "finalize_backward() of the root module before step(), or wait() of the handle that it has returned."
        )


def _check_is_root(state: FSDPState, step: Step, method: str) -> None:
    if step.root is not state:
        raise LifecycleError(
            f"{method} must be called on the root module; {state.name!r} is below it. Call it on the module whose forward "
            "you call."
        )
