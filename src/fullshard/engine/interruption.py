"""Steps that did not end: an exception has left a forward or a backward, maybe at any line of the engine."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fullshard.engine.step import Step


def reset_unfinished(step: Step) -> None:
    """Reset a model whose last pass was left without an end, and say so."""
    warnings.warn(
        "The last forward or backward pass did not finish (an exception?): gradients that were not reduced are dropped. "
        "Call reset_iter_state() on the root module after a failed step.",
        stacklevel=2,
    )
    reset(step)


def reset(step: Step, *, together: bool = False) -> None:
    """Return to the state between steps, whatever happened: see `FSDPModule.reset_iter_state`.

    With ``together``, all ranks do so after the same step, though in different places of it. What they have
    learned from it may differ, and is forgotten.
    """
    context = step.context
    if context.observer is not None:
        context.observer.abandoned(step.states)
    if context.asynchronous and context.at_border():
        context.cross_border()  # a capture may have failed, whose events are of no use now
    context.join(accumulate=False)
    step.forget(together=together)
    for state in step.states:
        state.options.end_microbatches()
        state.recomputes = state.recomputes and not together
        for group in state.groups:
            group.drop_gather()
            group.reshard()
            group.reduction.drop()
