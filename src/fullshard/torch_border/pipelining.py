"""The stages of `torch.distributed.pipelining`: where its schedules run microbatches and reduce gradients."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

Observer = Callable[..., Any]
"""Called in the place of a stage's method, with torch's own function, the stage and the arguments."""


_STAGES = "torch.distributed.pipelining.stage"

pipelining_is_imported: Callable[[], bool] = functools.partial(sys.modules.__contains__, _STAGES)
"""Whether pipelining was imported; asked at the beginning of every forward, so it has no Python frame."""


def observe_stages(
    forward: Observer,
    backward: Observer,
    backward_weight: Observer,
    start_reduction: Observer,
    reduce_gradients: Observer,
    scale_gradients: Observer,
) -> bool:
    """From now on, run the methods of all stages through these; return False if pipelining was not imported yet.

    Args:
        forward: For the forward of a microbatch.
        backward: For its backward, or for the part of it that computes the gradients of inputs.
        backward_weight: For the part that computes the gradients of parameters.
        start_reduction: For the beginning of a reduction that is waited for later; torch has it since 2.15.
        reduce_gradients: For the end of a step, after the last microbatch.
        scale_gradients: For the division by the number of microbatches, at the end of a step, too. Schedules that
            derive from torch's oldest class for several stages call nothing else there.
    """
    stage = getattr(sys.modules.get(_STAGES), "_PipelineStageBase", None)
    if stage is None:
        return False
    # Before torch 2.11 the last one had another name.
    end = "perform_reduce_grad" if hasattr(stage, "perform_reduce_grad") else "_post_backward"
    for name, observer in (
        ("forward_one_chunk", forward),
        ("backward_one_chunk", backward),
        ("backward_weight_one_chunk", backward_weight),
        ("start_gradient_reduction", start_reduction),
        (end, reduce_gradients),
        ("scale_grads", scale_gradients),
    ):
        method = getattr(stage, name, None)
        if method is not None:
            setattr(stage, name, _observed(method, observer))
    return True


def _observed(run: Callable[..., Any], observer: Observer) -> Callable[..., Any]:
    @functools.wraps(run)
    def method(stage: Any, *args: Any, **kwargs: Any) -> Any:
        return observer(run, stage, *args, **kwargs)

    return method
