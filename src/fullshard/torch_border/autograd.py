"""Hooks, versions and passes of autograd, its profiler ranges, and the compiler."""

from __future__ import annotations

import contextlib
import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")

R = TypeVar("R")

post_accumulate_grad_hooks: Callable[[Tensor], dict[int, Callable[[Tensor], None]] | None] = (
    operator.attrgetter("_post_accumulate_grad_hooks")
)
"""What the user registered to run once a parameter's gradient is complete."""

tensor_hooks: Callable[[Tensor], dict[int, Callable[[Tensor], Tensor | None]] | None] = (
    operator.attrgetter("_backward_hooks")
)
"""What the user registered with `Tensor.register_hook`: to see or replace a gradient before it is accumulated."""

backward_pass_id: Callable[[], int] = torch._C._current_graph_task_id
"""A number that is unique to the backward pass running on this thread, or -1 outside of one."""


def version_sum(tensors: Sequence[Tensor]) -> int:
    """How often tensors have been written in place, by operators that count; inference tensors have no count."""
    return sum(map(_version, tensors))


_version = operator.attrgetter("_version")


def versions_kept(tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Within it, writing to tensors does not look to autograd like a change of them."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


def opaque_to_compiler(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, at which the compiler breaks its graph instead of looking inside.

    The guard takes longer than some functions do, so nobody else goes through it.
    """
    guarded = cast("Callable[P, R]", torch._disable_dynamo(function))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return guarded(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def versions_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """What autograd compares to notice that a tensor it saved is not what it was."""
    return tuple(map(_version, tensors))


set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)
"""Set them."""


def move_hooks(old: Tensor, new: Tensor) -> None:
    """Let the hooks that a user registered on one leaf be those of another; their handles still remove them."""
    if tensor_hooks(old):
        cast(Any, new)._backward_hooks = tensor_hooks(old)
    if post_accumulate_grad_hooks(old):
        cast(Any, new)._post_accumulate_grad_hooks = post_accumulate_grad_hooks(old)


def observe_backward(
    translate: Callable[[tuple[Any, ...], bool], tuple[Any, ...]],
    explain: Callable[[int], Exception | None],
    returned: Callable[[list[Tensor]], None],
) -> None:
    """From now on, let ``translate`` say which ``inputs`` a backward pass really has, and ``explain`` its errors.

    ``translate`` is called only if inputs were named: with them, and with whether their gradients are
    accumulated (`backward`) or returned (`autograd.grad`). Nothing on a tensor tells this in time:
    parameters that are not in the graph make autograd execute no node, so no hook of ours would run.

    ``explain`` is called if a saved tensor is not at the version it was saved at: with the version it is at.
    ``returned`` is called with the gradients that a pass returns, after it.
    """
    run = torch.autograd._engine_run_backward

    def run_observed(*args: Any, **options: Any) -> Any:
        if len(args) > 4 and args[4]:
            inputs = translate(args[4], bool(options.get("accumulate_grad")))
            args = (*args[:4], inputs, *args[5:])
        try:
            gradients = run(*args, **options)
        except RuntimeError as error:
            version = re.search(r"is at version (\d+); expected version", str(error))
            told = None if version is None else explain(int(version.group(1)))
            if told is None:
                raise
            raise told from error
        returned([gradient for gradient in gradients or () if gradient is not None])
        return gradients

    torch.autograd._engine_run_backward = run_observed


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass now running has executed its last node."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


_NO_RANGE = contextlib.nullcontext()

_profiler_enabled = torch.autograd._profiler_enabled


def profiler_range(label: str) -> contextlib.AbstractContextManager[Any]:
    """A labelled range in the trace while a profiler runs, and next to nothing otherwise."""
    return torch.profiler.record_function(label) if _profiler_enabled() else _NO_RANGE
