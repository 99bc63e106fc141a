"""Hooks around the forward of a sharded module: what happens to its inputs and outputs.

    pre_forward    inputs to the device and into the compute dtype, `Runtime.enter`, hooks on inputs
    post_forward   outputs into their dtype, copies in the place of parameters, hooks on outputs, `Runtime.leave`

[Note: returned parameters]
The memory of unsharded parameters is given back after forward. A module may return one all the same
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
from fullshard.comm.journal import POSITION
from fullshard.engine import backward_hooks
from fullshard.engine.lazy_init import lazy_init
from fullshard.engine.runtime import Runtime
from fullshard.engine.state import FSDPState
from fullshard.engine.tensor_trees import (
    cast_floating,
    map_tensors,
    tensors_in,
    tensors_within,
    to_device,
)
from fullshard.errors import LifecycleError
from fullshard.plan.schedule import Call

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def pre_forward(
    state: FSDPState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Inputs:
    """Put unsharded parameters on the modules, and return the inputs in the compute dtype.

    The outermost module's inputs are moved to its device, too.
    """
    # The compiler is kept out here, at the border to user code, and nowhere below.
    if torch.compiler.is_compiling():
        return _uncompiled_pre_forward(state, args, kwargs)
    return _pre_forward(state, args, kwargs)


def post_forward(state: FSDPState, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Put sharded parameters on the modules, and return the output, watched for backward.

    After an exception, too; the output is None then.
    """
    if torch.compiler.is_compiling():
        return _uncompiled_post_forward(state, module, output)
    return _post_forward(state, module, output)


# --- inputs ---------------------------------------------------------------------------------------


def _pre_forward(state: FSDPState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    runtime = state.runtime
    if runtime is None:
        with torch_border.outside_transforms():
            runtime = lazy_init(state)
    with (
        torch_border.profiler_range(state.labels.pre_forward)
        if torch_border.profiler_enabled()
        else torch_border.NO_RANGE
    ):
        if runtime.root.call is None and state.device.type != "cpu":
            with torch_border.profiler_range("FSDP::inputs_to_device"):
                args, kwargs = to_device(args, state.device), to_device(kwargs, state.device)
        if torch_border.innermost_transform() is None:
            runtime.enter(state)
        else:
            with torch_border.outside_transforms():
                runtime.enter(state)
        args, kwargs = _cast_inputs(state, runtime, args, kwargs)
        if torch.is_grad_enabled() and torch_border.backward_pass_id() == -1:
            _watch_inputs(state, (args, kwargs))
        if runtime.context.recorder is not None:
            runtime.context.recorder.forward_begins(state)
        return args, kwargs


def _cast_inputs(
    state: FSDPState, runtime: Runtime, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Inputs:
    policy = state.options.mp_policy
    if policy.param_dtype is not None and (
        policy.cast_forward_inputs or (state.options.cast_root_inputs and runtime.root is state)
    ):
        return cast_floating(args, policy.param_dtype), cast_floating(kwargs, policy.param_dtype)
    return args, kwargs


def _watch_inputs(state: FSDPState, inputs: Inputs) -> None:
    """Have `leave_call` run when the gradient of an input is there: [Note: gradients of gradients]."""
    hook = None
    for part in _graph_tensors(tensors_in(inputs)):
        if not part.requires_grad:
            continue
        if part.is_leaf:
            if state.watched_leaves.get(id(part)) is part:
                continue
            state.watched_leaves[id(part)] = part
        hook = hook or functools.partial(backward_hooks.leave_call, weakref.ref(state))
        part.register_hook(hook)


# --- outputs --------------------------------------------------------------------------------------


def _post_forward(state: FSDPState, module: nn.Module, output: Any) -> Any:
    runtime = state.runtime
    if runtime is None:
        return output  # the first forward was refused
    if output is None and (error := sys.exception()) is not None:
        _note_exception(state, runtime, error)
    if runtime.context.recorder is not None:
        runtime.context.recorder.forward_ends(state)
    with (
        torch_border.profiler_range(state.labels.post_forward)
        if torch_border.profiler_enabled()
        else torch_border.NO_RANGE
    ):
        if state.options.mp_policy.output_dtype is not None:
            output = cast_floating(output, state.options.mp_policy.output_dtype)
        state.modules_run.add(module)
        tensors, refusal = tensors_within(output), None
        if _any_lent(state, tensors):
            output = map_tensors(functools.partial(_copied_if_lent, state), output)
            tensors = tensors_within(output)
            if _any_lent(state, tensors):
                refusal = _refusal(state, output)
        parts: list[Tensor] = []
        if torch.is_grad_enabled():
            parts = [part for part in _graph_tensors(tensors) if part.grad_fn is not None]
            state.use.had_backward = bool(parts)
        if torch_border.innermost_transform() is None:
            _leave(state, runtime, parts)
        else:
            with torch_border.outside_transforms():
                _leave(state, runtime, parts)
        if refusal is not None:
            raise refusal
        return output


def _note_exception(state: FSDPState, runtime: Runtime, error: BaseException) -> None:
    """Note an exception that leaves the outermost module; others may be caught by the modules around them.

    What ends a recomputation within backward may be no error; `run_backward` notes those that leave backward.
    """
    if torch_border.backward_pass_id() != -1:
        return
    if state is runtime.root or runtime.root.call is None:
        POSITION.note_exception(error)


def _leave(state: FSDPState, runtime: Runtime, parts: Sequence[Tensor]) -> None:
    if parts and state.call is not None:
        _watch_outputs(state.call, parts)
    runtime.leave(state)


def _watch_outputs(call: Call[FSDPState], parts: Sequence[Tensor]) -> None:
    """Have `pre_backward` run when the gradient of any output is there, before backward goes on from it."""
    hook = functools.partial(backward_hooks.pre_backward, call)
    call.has_backward = True
    for tensor in parts:
        tensor.register_hook(hook)
        # If the caller changes a view in place, backward comes through its base instead.
        base = torch_border.base_of(tensor)
        if base is not None and base.grad_fn is not None:
            base.register_hook(hook)


def _any_lent(state: FSDPState, tensors: Sequence[Tensor]) -> bool:
    """Whether one of the tensors is an unsharded parameter or a view of one: [Note: returned parameters]."""
    gathered = [addresses for group in state.groups if (addresses := group.gathered_addresses)]
    if not gathered:
        return False
    parts = tensors
    if not _are_ordinary(tensors) or any(type(each) is not Tensor for each in tensors):
        parts = [part for tensor in tensors for part in torch_border.plain_parts(tensor)]
    return any(part.data_ptr() in memory for part in parts for memory in gathered)


def _copied_if_lent(state: FSDPState, tensor: Tensor) -> Tensor:
    return tensor.clone() if _any_lent(state, (tensor,)) else tensor


def _refusal(state: FSDPState, output: Any) -> LifecycleError:
    return LifecycleError(
        "Parameters must not be returned inside of objects in which they cannot be replaced: "
        f"{state.name} returns one, or a view of one, in a {type(output).__name__}, and its memory is given back "
        "after forward. Return a clone, or return it in a tuple, list, dict or dataclass: then a copy is made."
    )


# --- transforms -----------------------------------------------------------------------------------


def _graph_tensors(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return all tensors that make up these: each may have a backward graph of its own."""
    if _are_ordinary(tensors):
        return tensors
    return [part for tensor in tensors for part in torch_border.graph_tensors(tensor)]


def _are_ordinary(tensors: Sequence[Tensor]) -> bool:
    """Whether no transform wraps the tensors, and each consists of itself alone."""
    return (
        torch_border.innermost_transform() is None
        and torch_border.forward_ad_level() < 0
        and not any(map(torch_border.is_batched, tensors))
        and not any(map(torch_border.is_wrapped, tensors))
    )


_uncompiled_pre_forward = torch_border.hidden_from_compiler(_pre_forward)
_uncompiled_post_forward = torch_border.hidden_from_compiler(_post_forward)
