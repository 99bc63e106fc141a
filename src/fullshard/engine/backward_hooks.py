"""Hooks of backward: around every pass, on outputs and inputs of sharded modules, on unsharded parameters.

    run_backward           around a pass           names of sharded parameters among its inputs, its errors, its results
    pre_backward           output of a call        its gradient has arrived: the parameters are needed
    leave_call             input of a call         its gradient has arrived, and another pass may come through it
    gradient_arrived       unsharded parameter     its gradient has been accumulated
    end_of_pass            the pass                its last node has been executed

Hooks that autograd holds refer to the model weakly: a graph that outlives the model must not keep it. They look up the
state's runtime when they run, as the state may belong to another root by then. Transforms run backward passes of their
own (`torch.func.grad`, say), so these hooks step out of them as those of forward do.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fullshard import torch_border
from fullshard.engine import captures, fused_linear
from fullshard.engine.known_groups import group_without_memory, groups_of
from fullshard.engine.schedule import Call
from fullshard.errors import LifecycleError
from fullshard.storage.param import FSDPParam
from fullshard.storage.sharded_params import group_of
from fullshard.transport.monitor import monitor
from fullshard.transport.streams import comm_contexts

if TYPE_CHECKING:
    from fullshard.engine.backward_passes import BackwardPasses
    from fullshard.engine.state import FSDPState

# --- around a pass --------------------------------------------------------------------------------


def run_backward(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run a backward pass of any model with autograd's own ``run``; sharded parameters are seen to.

    The inputs are looked at before the pass since nothing on a tensor tells them in time: parameters that are
    not in the graph make autograd execute no node, so no other hook of ours would run.
    """
    if any(torch_border.inputs_of_backward(args)):
        args = torch_border.with_inputs_of_backward(
            args, functools.partial(_graph_inputs, bool(options.get("accumulate_grad")))
        )
        run = functools.partial(fused_linear.without_fusing, run)
    if any(context.has_graph for context in comm_contexts()):
        run = functools.partial(torch_border.on_calling_thread, run)
    try:
        gradients = run(*args, **options)
    except BaseException as error:
        monitor().exception_left(error)
        captures.end_failed_pass()
        if not isinstance(error, RuntimeError):
            raise
        told = _needed_too_late(torch_border.version_found(error))
        if told is None:
            raise
        raise told from error
    if _ADDED_AT_END:
        _watch_results([gradient for gradient in gradients or () if gradient is not None])
    return gradients


def _graph_inputs(accumulated: bool, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the inputs of a backward pass with unsharded parameters in the place of sharded ones."""
    sharded = {id(each): each for each in inputs if isinstance(each, Tensor) and group_of(each)}
    leaves: dict[int, list[Tensor]] = {key: [] for key in sharded}
    names = []
    for group in groups_of(sharded.values()):
        for param in group.params:
            if id(param.sharded_param.param) in leaves:
                names.append(param.name)
                if param.unsharded_param is not None:
                    leaves[id(param.sharded_param.param)].append(param.unsharded_param)
    if not names:
        return inputs
    if not accumulated:
        raise LifecycleError(
            "torch.autograd.grad returns gradients without reducing them over ranks, so it cannot return those of sharded "
            f"parameters: {names}. Call backward(), with inputs=... for some parameters only, and read their .grad."
        )
    found = (leaves.get(id(each), [each]) for each in inputs)
    return tuple(leaf for together in found for leaf in together)


def _needed_too_late(version: int | None) -> LifecycleError | None:
    """Explain an error about a saved tensor that is at ``version``, if it is a parameter without memory."""
    group = None if version is None else group_without_memory(version)
    if group is None:
        return None
    return LifecycleError(
        f"Backward needs the parameters of {group.name!r}, whose memory has been freed: it reached this module through "
        "a tensor that is neither an input nor an output of it. Return such a tensor from the module's "
        "forward instead of keeping it elsewhere, or call unshard() on the module before backward."
    )


# --- calls ----------------------------------------------------------------------------------------


def pre_backward(call: Call[FSDPState], gradient: Tensor) -> None:
    """Tell the runtime that backward has reached an output of ``call``."""
    state = call.living_unit()
    if state is None or state.runtime is None:
        return
    parts = _parts_with_graph(gradient) if torch.is_grad_enabled() else None
    passes = state.runtime.backward
    if parts is None and torch_border.innermost_transform() is None:
        passes.pre_backward(state, call)
        return
    with torch_border.outside_transforms():
        if parts:
            passes.watch_gradient(parts, None)
        passes.pre_backward(state, call)


def leave_call(state_ref: weakref.ref[FSDPState], gradient: Tensor) -> None:
    """Watch the gradient of an input of one of the state's calls: [Note: gradients of gradients]."""
    if not torch.is_grad_enabled():
        return  # no later pass comes through it
    state = state_ref()
    if state is not None and state.runtime is not None:
        parts = _parts_with_graph(gradient)
        if parts:
            with torch_border.outside_transforms():
                state.runtime.backward.watch_gradient(parts, state)


# --- parameters and the end -----------------------------------------------------------------------


def watch_gradient(state_ref: weakref.ref[FSDPState], param: FSDPParam) -> None:
    """Have `gradient_arrived` run when the gradient of an unsharded parameter has been accumulated."""
    state = state_ref()
    assert state is not None, "a state outlives its groups"
    assert param.unsharded_param is not None, "watched once it is on a module"
    # The hook refers to the parameter by its id: it must not keep it alive.
    param.unsharded_param.register_post_accumulate_grad_hook(
        functools.partial(gradient_arrived, state.awaited, id(param), state_ref)
    )
    param.watched = True


def gradient_arrived(
    awaited: set[int], param_id: int, state_ref: weakref.ref[FSDPState], _: Tensor
) -> None:
    """Note that a gradient has been accumulated; tell the runtime if it is one it has to act on."""
    if len(awaited) > 1:  # for every parameter in every step
        awaited.discard(param_id)  # others are still to come
        return
    state = state_ref()
    if state is not None and state.runtime is not None:
        state.runtime.backward.gradient_arrived(state, param_id)


def end_of_pass(passes_ref: weakref.ref[BackwardPasses], this_pass: int) -> None:
    """Tell the runtime that a backward pass has executed its last node."""
    passes = passes_ref()
    if passes is None:
        return
    if torch_border.innermost_transform() is None:
        passes.end_of_pass(this_pass)
        return
    with torch_border.outside_transforms():
        passes.end_of_pass(this_pass)


# --- gradients of gradients: see the note in `schedule` --------------------------------------------


_ADDED_AT_END: list[Call[FSDPState]] = []
"""What states that were in backward when a pass ended have added to the graph, until its results are watched."""


def note_added_at_end(calls: Sequence[Call[FSDPState]]) -> None:
    """Have the results of the pass that ends now watched, for what ``calls`` have added to the graph."""
    _ADDED_AT_END.extend(calls)


def _watch_results(gradients: Sequence[Tensor]) -> None:
    """Watch the gradients that a pass returns, for all its inputs, also inside of modules."""
    calls = list(_ADDED_AT_END)
    _ADDED_AT_END.clear()
    parts = [part for gradient in gradients for part in _parts_with_graph(gradient)]
    for runtime in {call.unit.runtime for call in calls}:
        if runtime is not None and parts:
            theirs = [call for call in calls if call.unit.runtime is runtime]
            watch_graph(runtime.backward, parts, theirs)


def watch_graph(
    passes: BackwardPasses, parts: Sequence[Tensor], calls: Sequence[Call[FSDPState]]
) -> None:
    """Have ``calls`` reached when a later pass comes through one of ``parts``, gradients of this pass."""
    hook = functools.partial(_pre_backward_of_backward, weakref.ref(passes), calls)
    for part in parts:
        part.register_hook(hook)


def _pre_backward_of_backward(
    passes_ref: weakref.ref[BackwardPasses], calls: Sequence[Call[FSDPState]], gradient: Tensor
) -> None:
    passes = passes_ref()
    if passes is None:
        return
    parts = _parts_with_graph(gradient) if torch.is_grad_enabled() else []
    with torch_border.outside_transforms():
        if parts:
            passes.watch_gradient(parts, None)
        for call in calls:
            state = call.living_unit()
            if state is not None and state.runtime is not None:
                state.runtime.backward.pre_backward_of_backward(state, call)


def _parts_with_graph(tensor: Tensor) -> list[Tensor]:
    return [part for part in torch_border.graph_tensors(tensor) if part.grad_fn is not None]
