"""Hooks around the forward of a sharded module: what happens to its inputs and outputs.

pre_forward    inputs to the device and into the compute dtype, `Runtime.enter`, hooks on inputs
post_forward   outputs into their dtype, copies of parameters among them, hooks on outputs, `Runtime.leave`
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn

from fullshard import torch_border
from fullshard.engine import backward_hooks
from fullshard.engine.lazy_init import lazy_init
from fullshard.engine.module_outputs import without_parameters
from fullshard.engine.runtime import Runtime
from fullshard.engine.state import FSDPState
from fullshard.engine.tensor_trees import cast_floating, tensors_in, to_device

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def pre_forward(
    state: FSDPState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Inputs:
    """Before a module's forward: unsharded parameters on the modules, inputs in the compute dtype.

    The outermost module's inputs are moved to its device, too.
    """
    # The compiler is kept out here, at the border to user code, and nowhere below.
    if torch.compiler.is_compiling():
        return _uncompiled_pre_forward(state, args, kwargs)
    return _pre_forward(state, args, kwargs)


def post_forward(state: FSDPState, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """After a module's forward: outputs watched for backward, sharded parameters on the modules.

    After an exception, too; the output is None then.
    """
    if torch.compiler.is_compiling():
        return _uncompiled_post_forward(state, module, output)
    return _post_forward(state, module, output)


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
    for tensor in tensors_in(inputs):
        for part in torch_border.graph_tensors(tensor):
            if not part.requires_grad:
                continue
            if part.is_leaf:
                if state.watched_leaves.get(id(part)) is part:
                    continue
                state.watched_leaves[id(part)] = part
            hook = hook or functools.partial(backward_hooks.leave_call, weakref.ref(state))
            part.register_hook(hook)


def _post_forward(state: FSDPState, module: nn.Module, output: Any) -> Any:
    runtime = state.runtime
    if runtime is None:
        return output  # the first forward was refused
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
        returned = without_parameters(output, state.groups, state.name)
        outputs = []
        if torch.is_grad_enabled():
            outputs = [
                part
                for tensor in returned.tensors
                for part in torch_border.graph_tensors(tensor)
                if part.grad_fn is not None
            ]
        with torch_border.outside_transforms():
            if outputs and state.call is not None:
                backward_hooks.watch_outputs(state.call, outputs)
            runtime.leave(state)
        if returned.refusal is not None:
            raise returned.refusal
        return returned.output


_uncompiled_pre_forward = torch_border.hidden_from_compiler(_pre_forward)
_uncompiled_post_forward = torch_border.hidden_from_compiler(_post_forward)
