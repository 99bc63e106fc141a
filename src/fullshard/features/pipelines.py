"""Stages of `torch.distributed.pipelining` whose modules are sharded: one reduction in a step, none lost.

    forward            of a microbatch: what was gathered for another one of the step is used again, if it was kept
    backward           of a microbatch: gradients are added up, not reduced, and gathered parameters are kept
    backward_weight    the part of a split backward that computes the gradients of parameters
    reduce_gradients   after the last microbatch: gradients are reduced, and gathered parameters released

torch's stages do this for torch's own class only, and run a module of any other class as one that is not sharded. So
the methods of stages are observed, by both APIs, whether or not `fullshard.install` was called. Schedules may
gather and reshard, too (their actions UNSHARD and RESHARD); nothing here depends on it.

[Note: split backward]
Zero-bubble schedules compute the gradients of a stage's inputs first, and those of its parameters later, maybe after the
forward of another microbatch. Both parts find the parameters in the graph by what ``parameters()`` of the module returns.
The second part starts inside of the graph, calls `autograd.grad`, and writes `.grad` itself. Four things follow.

    During the step, ``parameters()`` returns the unsharded parameters. They are the same objects in all microbatches.
    The first part passes outputs of modules, so their hooks gather what it needs, as in any backward.
    The second need not pass any, so all parameters are gathered before it, unless they were kept.
    No hook tells that it has written a gradient, so gradients are taken when it has ended.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fullshard import torch_border
from fullshard.engine.feature_events import UPDATE_BEGINS, call_at
from fullshard.engine.sharded_state import Retention
from fullshard.engine.state import FSDPState, named_states
from fullshard.errors import LifecycleError
from fullshard.storage.sharded_params import group_of, unsharded_name

if TYPE_CHECKING:
    from fullshard.engine.step import Step

_IN_STEP: weakref.WeakKeyDictionary[Any, Sequence[FSDPState]] = weakref.WeakKeyDictionary()
"""Stages whose gradients are not reduced yet in this step, each with the states of its module; most have none."""

_OBSERVING = threading.Lock()
_observed = False


def observe() -> bool:
    """Observe stages, now that pipelining has been imported; return whether they are."""
    global _observed
    with _OBSERVING:  # ranks may be threads
        _observed = _observed or torch_border.observe_stages(
            _forward,
            _backward,
            _backward_weight,
            _start_reduction,
            _reduce_gradients,
            _scale_gradients,
        )
    if _observed:
        call_at(UPDATE_BEGINS, _check_reduced)
    return _observed


def _forward(run: Callable[..., Any], stage: Any, fwd_chunk_id: int, *args: Any, **kw: Any) -> Any:
    if fwd_chunk_id == 0:
        _end_microbatches(stage)  # of a step that failed
    for state in _IN_STEP.get(stage, ()):
        # Nothing has written to the shards since the last microbatch, so what was left of it can be used.
        state.retention = Retention.NONE
    output = run(stage, fwd_chunk_id, *args, **kw)
    if stage.has_backward and torch.is_grad_enabled():
        # After the forward: the first one of a step trusts nothing that is left from the step before.
        _begin_microbatches(stage)
    return output


def _backward(
    run: Callable[..., Any],
    stage: Any,
    bwd_chunk_id: int,
    loss: Any = None,
    full_backward: bool = True,
    last_backward: bool = False,
) -> Any:
    states = _begin_microbatches(stage) if stage.has_backward else ()
    split = states and not full_backward
    with _unsharded_parameters(stage.submod, states) if split else contextlib.nullcontext():
        return run(stage, bwd_chunk_id, loss, full_backward, last_backward)


def _backward_weight(run: Callable[..., Any], stage: Any, *args: Any, **kw: Any) -> Any:
    states = _begin_microbatches(stage) if stage.has_backward else ()
    if not states or (stage.is_first and stage.dw_builder is None):
        # Of the first stage, which has no first part: a whole backward.
        return run(stage, *args, **kw)
    for step, theirs in _by_step(states):
        step.unshard_for_weights(theirs)
    try:
        with _unsharded_parameters(stage.submod, states):
            run(stage, *args, **kw)
        for state in states:
            for group in state.groups:
                group.reduction.accumulate()
    finally:
        for state in states:
            state.use_sharded_params()


def _start_reduction(run: Callable[..., Any], stage: Any) -> None:
    """Let torch's stage finalize a backward of its own module: after `fullshard.install`, it takes ours for one."""
    _end_microbatches(stage)
    run(stage)


def _reduce_gradients(run: Callable[..., Any], stage: Any, grad_scale_factor: int) -> None:
    if not _reduce(stage):
        run(stage, grad_scale_factor)
    elif grad_scale_factor != 1:
        stage.scale_grads(grad_scale_factor)


def _scale_gradients(run: Callable[..., Any], stage: Any, grad_scale_factor: int) -> None:
    _reduce(stage)
    run(stage, grad_scale_factor)


def _reduce(stage: Any) -> bool:
    """Reduce what the microbatches have added up; return whether the stage's module is sharded by us."""
    states = _end_microbatches(stage)
    for step, theirs in _by_step(states):
        step.reduce_microbatches(theirs)
        step.end_backward()
        step.root.options.manual_finalization = False  # as set by torch's stage
    return bool(states)


def _check_reduced(params: Callable[[], Iterable[Tensor]]) -> None:
    """Refuse an update of parameters whose gradients were added up in a step of a pipeline that has not ended."""
    if not _IN_STEP:
        return
    wanted = {id(param) for param in params()}
    stages = [reference() for reference in _IN_STEP.keyrefs()]  # ranks may be threads
    names = [
        f"{param.name} of stage {stage.stage_index}"
        for stage in stages
        if stage is not None
        for state in _IN_STEP.get(stage, ())
        for group in state.groups
        if group.reduction.unreduced.held
        for param in group.params
        if id(param.sharded_param.param) in wanted
    ]
    if names:
        raise LifecycleError(
            "A pipeline's step must end before its optimizer's. The gradients of these parameters were added up over "
            f"microbatches and not reduced: {names}. If the schedule's step() failed, call zero_grad() and run it "
            "again. A schedule of your own calls perform_reduce_grad() of its stages after the last microbatch."
        )


def _begin_microbatches(stage: Any) -> Sequence[FSDPState]:
    """Let gradients be added up until the step's end; return the states of the stage's module."""
    states = _IN_STEP.get(stage)
    if states is None:
        states = _IN_STEP[stage] = tuple(named_states(stage.submod))
    for state in states:
        state.options.begin_microbatches()
    return states


def _end_microbatches(stage: Any) -> Sequence[FSDPState]:
    """Let options be again as the user chose them; return the states of the stage's module that had others."""
    states = _IN_STEP.pop(stage, ())
    for state in states:
        state.options.end_microbatches()
    return states


def _by_step(states: Sequence[FSDPState]) -> list[tuple[Step, list[FSDPState]]]:
    """Return the states that have run, by the step they run in: one, if the stage's module itself is sharded."""
    found: dict[Step, list[FSDPState]] = {}
    for state in states:
        if state.step is not None:
            found.setdefault(state.step, []).append(state)
    return list(found.items())


@contextlib.contextmanager
def _unsharded_parameters(module: nn.Module, states: Sequence[FSDPState]) -> Iterator[None]:
    """Let ``module.parameters()`` return what the graph was made with: [Note: split backward]."""
    found: list[Tensor] = [
        p for p in module.parameters() if not group_of(p) and not unsharded_name(p)
    ]
    for state in states:
        for group in state.groups:
            for param in group.params:
                if param.unsharded_param is not None:
                    found.append(param.unsharded_param)
    before = module.__dict__.get("parameters")
    module.__dict__["parameters"] = lambda recurse=True: iter(found)
    try:
        yield
    finally:
        del module.__dict__["parameters"]
        if before is not None:
            module.__dict__["parameters"] = before
