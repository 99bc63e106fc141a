"""Hooks around the forward of a sharded module, for its inputs and outputs.

    pre_forward    inputs to the device and into the compute dtype, `Step.enter`, hooks on inputs
    post_forward   outputs cast to their dtype, copies in the place of parameters, hooks on outputs, `Step.leave`

The hooks are the one place that knows of the compiler, the profiler, transforms and exceptions.

[Note: returned parameters]
The memory of unsharded parameters is released after forward. A module may still return one
(tables of positions, tied weights), or a view of one. The caller gets a copy instead.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fullshard import torch_border
from fullshard.engine import captures, profiler_ranges
from fullshard.engine.lazy_init import lazy_init
from fullshard.engine.schedule import Call
from fullshard.engine.state import FSDPState
from fullshard.engine.step import Step, leave_call
from fullshard.engine.tensor_trees import (
    cast_floating,
    map_tensors,
    tensors_in,
    tensors_within,
    to_device,
)
from fullshard.errors import LifecycleError
from fullshard.storage import mixed_tensors
from fullshard.transport.monitor import monitor

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


# The compiler is kept out here, at the border to user code, and nowhere below.
@torch_border.opaque_to_compiler
def pre_forward(
    state: FSDPState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Inputs:
    """Put unsharded parameters on the modules, and return the inputs in the compute dtype.

    The outermost module's inputs are moved to its device, too.
    """
    step = state.step or _first_step_of(state)
    try:
        context = step.context
        if torch_border.profiler_enabled() is not (context.profiler_ranges is not None):
            profiler_ranges.follow(context)
        observer = context.observer
        if observer is not None:
            observer.begins("pre_forward", state)
        if step.root.call is None and state.device.type != "cpu":
            if observer is not None:
                observer.begins("inputs_to_device", None)
            args, kwargs = to_device(args, state.device), to_device(kwargs, state.device)
            if observer is not None:
                observer.ends("inputs_to_device", None)
        if torch_border.innermost_transform() is None and torch_border.num_dispatch_modes() == 0:
            step.enter(state)
        else:
            with torch_border.outside_transforms(), torch_border.outside_checkpoints():
                step.enter(state)
        policy = state.options.mp_policy
        if policy.param_dtype is not None and (
            policy.cast_forward_inputs or (state.options.cast_root_inputs and step.root is state)
        ):
            args, kwargs = _cast_inputs(args, kwargs, policy.param_dtype)
        if torch.is_grad_enabled() and torch_border.backward_pass_id() == -1:
            _watch_inputs(state, args, kwargs)
        if observer is not None:
            observer.ends("pre_forward", state)
            observer.forward_begins(state)
        return args, kwargs
    except BaseException as error:
        _failed(step, error)
        raise


@torch_border.opaque_to_compiler
def post_forward(state: FSDPState, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Put sharded parameters on the modules, and return the output, watched for backward.

    After an exception, too; the output is None then.
    """
    step = state.step
    if step is None:
        return output  # the first forward was refused
    try:
        observer = step.context.observer
        if observer is not None:
            observer.begins("post_forward", state)
        if output is None and (error := sys.exception()) is not None:
            _note_exception(state, step, error)
        if observer is not None:
            observer.forward_ends(state)
        if state.options.mp_policy.output_dtype is not None:
            output = cast_floating(output, state.options.mp_policy.output_dtype)
        state.modules_run.add(module)
        output, parts, refusal = _safe_output(state, output)
        call = state.call
        if torch_border.innermost_transform() is None and torch_border.num_dispatch_modes() == 0:
            if parts and call is not None:
                _watch_outputs(step, call, parts)
            step.leave(state)
        else:
            with torch_border.outside_transforms(), torch_border.outside_checkpoints():
                if parts and call is not None:
                    _watch_outputs(step, call, parts)
                step.leave(state)
        if observer is not None:
            observer.ends("post_forward", state)
        if refusal is not None:
            raise refusal
        return output
    except BaseException as error:
        _failed(step, error)
        raise


def _first_step_of(state: FSDPState) -> Step:
    with torch_border.outside_transforms():
        return lazy_init(state)


def _failed(step: Step, error: BaseException) -> None:
    """Tell the step of an exception that leaves a hook. In backward, it may be what ends a recomputation early."""
    if step.context.observer is not None:
        step.context.observer.failed()
    if torch_border.backward_pass_id() == -1:
        step.break_off(error)


# --- inputs ---------------------------------------------------------------------------------------


def _cast_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Inputs:
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):  # as of most modules
        tensor = args[0]
        if tensor.dtype is dtype or not tensor.is_floating_point():
            return args, kwargs
        return (tensor.to(dtype),), kwargs
    return cast_floating(args, dtype), cast_floating(kwargs, dtype)


def _watch_inputs(state: FSDPState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Have `leave_call` run when the gradient of an input is there: [Note: gradients of gradients]."""
    tensors: Sequence[Tensor] = args  # as of most modules
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        tensors = tensors_in((args, kwargs))
    hook = None
    for part in tensors if _are_ordinary(tensors) else _graph_tensors(tensors):
        if not part.requires_grad:
            continue
        if part.is_leaf:
            if state.watched_leaves.get(id(part)) is part:
                continue
            state.watched_leaves[id(part)] = part
        hook = hook or functools.partial(leave_call, weakref.ref(state))
        torch_border.hook_gradient(part, hook)


# --- outputs --------------------------------------------------------------------------------------


def _safe_output(
    state: FSDPState, output: Any
) -> tuple[Any, Sequence[Tensor], LifecycleError | None]:
    """Return the output without lent memory, its parts that have a graph, and the error to raise if that was impossible."""
    tensors = [output] if isinstance(output, Tensor) else tensors_within(output)
    ordinary, refusal = _are_ordinary(tensors), None
    if _any_lent(state, tensors, ordinary=ordinary):
        output = map_tensors(functools.partial(_copied_if_lent, state), output)
        tensors = tensors_within(output)
        ordinary = _are_ordinary(tensors)
        if _any_lent(state, tensors, ordinary=ordinary):
            refusal = _refusal(state, output)
    parts: list[Tensor] = []
    if torch.is_grad_enabled():
        for part in tensors if ordinary else _graph_tensors(tensors):
            if part.grad_fn is not None:
                parts.append(part)
        state.use.had_backward = bool(parts)
    return output, parts, refusal


def _note_exception(state: FSDPState, step: Step, error: BaseException) -> None:
    """Note an exception that leaves the outermost module; others may be caught by the modules around them.

    What ends a recomputation within backward may be no error; `run_backward` notes those that leave backward.
    """
    mixed_tensors.explain(error)
    if torch_border.backward_pass_id() != -1:
        return
    if state is step.root or step.root.call is None:
        monitor().exception_left(error)
        captures.end_failed_pass()


def _watch_outputs(step: Step, call: Call[FSDPState], parts: Sequence[Tensor]) -> None:
    """Let `pre_backward` run when the gradient of any output has arrived, before backward continues from it."""
    hook = functools.partial(Step.reach, call)
    call.has_backward = True
    step.context.latest_graph = weakref.ref(hook)  # the graph alone refers to it
    for tensor in parts:
        torch_border.hook_gradient(tensor, hook)
        # If the caller changes a view in place, backward comes through its base instead.
        base = torch_border.base_of(tensor)
        if base is not None and base.grad_fn is not None:
            torch_border.hook_gradient(base, hook)


def _any_lent(state: FSDPState, tensors: Sequence[Tensor], *, ordinary: bool) -> bool:
    """Whether one of the tensors is an unsharded parameter or a view of one: [Note: returned parameters].

    ``ordinary`` is what `_are_ordinary` says of the tensors.
    """
    for group in state.groups:
        memory = group.gathered_addresses
        for tensor in tensors if memory else ():
            plain = ordinary and type(tensor) is Tensor
            for part in (tensor,) if plain else torch_border.plain_parts(tensor):
                if part.data_ptr() in memory:
                    return True
    return False


def _copied_if_lent(state: FSDPState, tensor: Tensor) -> Tensor:
    lent = _any_lent(state, (tensor,), ordinary=_are_ordinary((tensor,)))
    return tensor.clone() if lent else tensor


def _refusal(state: FSDPState, output: Any) -> LifecycleError:
    return LifecycleError(
        "Parameters must not be returned inside of objects in which they cannot be replaced: "
        f"{state.name} returns one, or a view of one, in a {type(output).__name__}, and its memory is freed after "
        "forward. Return a clone, or return it in a tuple, list, dict or dataclass: then a copy is made."
    )


# --- transforms -----------------------------------------------------------------------------------


def _graph_tensors(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return all tensors that make up these, if they are not ordinary: each may have a backward graph of its own."""
    return [part for tensor in tensors for part in torch_border.graph_tensors(tensor)]


def _are_ordinary(tensors: Sequence[Tensor]) -> bool:
    """Whether no transform wraps the tensors, and each consists of itself alone."""
    if torch_border.innermost_transform() is not None or torch_border.forward_ad_level() >= 0:
        return False
    for tensor in tensors:  # on the hot path: cheaper than any()
        if torch_border.is_batched(tensor) or torch_border.is_wrapped(tensor):
            return False
    return True
