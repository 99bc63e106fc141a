"""Hooks, versions and passes of autograd, and its profiler ranges."""

from __future__ import annotations

import contextlib
import functools
import operator
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

post_accumulate_grad_hooks: Callable[[Tensor], dict[int, Callable[[Tensor], None]] | None] = (
    operator.attrgetter("_post_accumulate_grad_hooks")
)
"""Hooks of the user that run once a parameter's gradient is complete."""

tensor_hooks: Callable[[Tensor], dict[int, Callable[[Tensor], Tensor | None]] | None] = (
    operator.attrgetter("_backward_hooks")
)
"""Functions of `Tensor.register_hook`, which see or replace a gradient before it is accumulated."""

backward_pass_id: Callable[[], int] = torch._C._current_graph_task_id
"""A number that is unique to the backward pass running on this thread, or -1 outside of one."""

pass_executes: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the backward pass running on this thread executes a node of the graph, or has done so."""


def pass_accumulates(leaf: Tensor) -> bool:
    """Return whether the backward pass running on this thread wants the gradient of a leaf."""
    return pass_executes(torch.autograd.graph.get_gradient_edge(leaf).node)


version_of: Callable[[Tensor], int] = operator.attrgetter("_version")
"""Number of in-place writes to a tensor, by operators that count; inference tensors have no count."""

REDUCES_IN_GRAD_DTYPE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
"""Whether torch's FSDP2, if it has no reduce dtype, reduces gradients in `Tensor.grad_dtype` of the parameter.

Since torch 2.15; until then in the dtype of the unsharded parameter.
"""

_dtype_of: Callable[[Tensor], torch.dtype] = operator.attrgetter("dtype")


plain_attributes: Callable[[], contextlib.AbstractContextManager[Any]] = (
    torch._C.DisableTorchFunctionSubclass
)
"""Returns a context in which DTensors are asked for attributes in half the time: torch need not look for a function of their own."""


def sum_of_versions(tensors: Iterable[Tensor]) -> int:
    """Return a number that is another one after each counted write to any of the tensors."""
    # DTensors are asked for attributes in half the time if torch need not look for a function of their own.
    with torch._C.DisableTorchFunctionSubclass():
        return sum(map(version_of, tensors))


def dtypes_of(tensors: Iterable[Tensor]) -> list[torch.dtype]:
    """Return the dtypes of the tensors."""
    with torch._C.DisableTorchFunctionSubclass():  # as above
        return [*map(_dtype_of, tensors)]


below_autograd: Callable[[], contextlib.AbstractContextManager[Any]] = (
    torch._C._AutoDispatchBelowADInplaceOrView
)
"""Returns a context in which operators do not pass through autograd, which takes them a part of their time.

For operators on memory that autograd does not know. Nothing is recorded, autograd does not see views as views, and
writes are not counted. User code must not run within. A context may be kept and entered
any number of times, one after the other.
"""


def versions_kept(tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which writes to tensors do not look to autograd like changes."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


def versions_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the versions that autograd compares to notice that a saved tensor has changed."""
    return tuple(map(version_of, tensors))


set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)
"""Sets the versions of tensors."""


def hook_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Register a hook that is never removed, as ``tensor.register_hook(hook)`` does, in less time."""
    node = tensor.grad_fn if type(tensor) is Tensor else None
    if node is None:
        tensor.register_hook(hook)
        return
    hooks: dict[Any, Any] | None = tensor._backward_hooks
    if hooks is None:
        cast(Any, tensor)._backward_hooks = OrderedDict({hook: hook})
        cast(Any, node)._register_hook_dict(tensor)
    else:
        hooks[hook] = hook  # users' hooks have numbers as keys


def move_hooks(old: Tensor, new: Tensor) -> None:
    """Move a user's hooks from one leaf to another; their handles still remove them."""
    if tensor_hooks(old):
        cast(Any, new)._backward_hooks = tensor_hooks(old)
    if post_accumulate_grad_hooks(old):
        cast(Any, new)._post_accumulate_grad_hooks = post_accumulate_grad_hooks(old)


def observe_backward(run_observed: Callable[..., Any]) -> None:
    """From now on, run every backward pass through ``run_observed``: it gets torch's own function and its arguments."""
    torch.autograd._engine_run_backward = functools.partial(
        run_observed, torch.autograd._engine_run_backward
    )


inputs_of_backward: Callable[[tuple[Any, ...]], tuple[Any, ...]] = operator.itemgetter(slice(4, 5))
"""The named inputs among the arguments of a backward pass: one tuple of them, maybe empty, or none."""


def with_inputs_of_backward(
    args: tuple[Any, ...], translate: Callable[[tuple[Any, ...]], tuple[Any, ...]]
) -> tuple[Any, ...]:
    """Return the arguments of a backward pass with other named inputs."""
    return (*args[:4], translate(args[4]), *args[5:])


def version_found(error: RuntimeError) -> int | None:
    """Return the version of a saved tensor, if ``error`` says that it was saved at another one."""
    version = re.search(r"is at version (\d+); expected version", str(error))
    return None if version is None else int(version.group(1))


queue_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
"""Runs a function when the backward pass now running has executed its last node."""

NO_RANGE = contextlib.nullcontext()
"""The result of `profiler_range` without a profiler."""

profiler_enabled: Callable[[], bool] = torch.autograd._profiler_enabled
"""Whether a profiler runs: a cheap question, to be asked before `profiler_range` where every call counts."""


def profiler_range(label: str) -> contextlib.AbstractContextManager[Any]:
    """Return a labelled range for a running profiler; without one it costs next to nothing."""
    return torch.profiler.record_function(label) if profiler_enabled() else NO_RANGE


def is_autocast_on(device_type: str) -> bool:
    """Return whether autocast casts what operators of a device are given; torch has none for the meta device, and raises."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)
