"""Contexts around operations: transforms of `torch.func`, forward-mode differentiation, selective checkpoints."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.utils import _python_dispatch, checkpoint

innermost_transform: Callable[[], Any] = _functorch.peek_interpreter_stack
"""The innermost transform of `torch.func` on this thread, or None."""

forward_ad_level: Callable[[], int] = functools.partial(
    operator.attrgetter("_current_level"), forward_ad
)
"""Depth of nested forward-mode differentiation; negative outside of it."""

is_batched: Callable[[Tensor], bool] = _functorch.is_legacy_batchedtensor
"""Whether the older vmap made a tensor: `is_grads_batched` and `vectorize` of torch.autograd use it."""

is_wrapped: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor
"""Whether a transform of `torch.func` made a tensor, even one that has ended."""


class _OutsideTransforms:
    """Takes the transforms of `torch.func` off this thread's stack, and puts them back."""

    def __init__(self) -> None:
        self._layers: list[Any] = []

    def __enter__(self) -> None:
        while innermost_transform() is not None:
            self._layers.append(_functorch.pop_dynamic_layer_stack())

    def __exit__(self, *_: object) -> None:
        while self._layers:
            _functorch.push_dynamic_layer_stack(self._layers.pop())


_NO_TRANSFORM = contextlib.nullcontext()

num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Number of modes that see every operation of this thread; 0 in most steps."""

_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


class _OutsideCheckpoints:
    """Takes the modes of selective checkpoints off this thread's stack, and puts them back."""

    def __init__(self) -> None:
        self._taken: list[Any] = []
        """Modes from the innermost one to the outermost selective one."""
        self._kept: list[Any] = []
        """The others of these, which stay."""

    def __enter__(self) -> None:
        modes = _python_dispatch._get_current_dispatch_mode_stack()
        outermost = next(n for n, mode in enumerate(modes) if isinstance(mode, _SELECTIVE))
        self._taken = [_python_dispatch._pop_mode() for _ in modes[outermost:]]
        self._kept = [mode for mode in reversed(self._taken) if not isinstance(mode, _SELECTIVE)]
        for mode in self._kept:
            _python_dispatch._push_mode(mode)

    def __exit__(self, *_: object) -> None:
        for _ in self._kept:
            _python_dispatch._pop_mode()
        for mode in reversed(self._taken):
            _python_dispatch._push_mode(mode)


def outside_checkpoints() -> contextlib.AbstractContextManager[None]:
    """Return a context whose operations selective checkpoints do not see.

    They count what a forward does, and its recomputation must do the same. What does not belong to the module differs: a
    gather may be finished in the one, and issued and finished in the other.
    """
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    if not any(isinstance(mode, _SELECTIVE) for mode in modes):
        return _NO_TRANSFORM
    return _OutsideCheckpoints()


def outside_transforms() -> contextlib.AbstractContextManager[None]:
    """Return a context in which operations on tensors that no transform made are ordinary ones.

    A transform (`torch.func.jvp`, `grad`, `vmap`, ...) forbids in-place writes to tensors from outside
    of it, and makes wrapped tensors of new ones. Tensors that it has wrapped must not be touched within.
    """
    if innermost_transform() is None:
        return _NO_TRANSFORM
    return _OutsideTransforms()


def with_tangent(tensor: Tensor) -> Sequence[Tensor]:
    """Return the tensor, and its tangent if it is a dual number of forward-mode differentiation."""
    if forward_ad_level() < 0:
        return (tensor,)
    tangent = forward_ad.unpack_dual(tensor).tangent
    return (tensor,) if tangent is None else (tensor, tangent)


def graph_tensors(tensor: Tensor) -> Sequence[Tensor]:
    """Return all tensors that make up one: each may have a backward graph of its own.

    Outside of transforms these are the tensor and its tangent. A transform wraps tensors; it builds its
    graph on the wrapper, and the transforms outside of it, or ordinary autograd, build theirs on what is
    wrapped.
    """
    if innermost_transform() is None:
        parts = with_tangent(tensor)
        if any(map(is_batched, parts)):
            parts = [*parts, *map(_without_batch_dimension, parts)]
        return parts
    found: dict[int, Tensor] = {}
    layers: list[Any] = []
    tensors: Sequence[Tensor] = (tensor,)
    try:
        while True:
            top = innermost_transform()
            if top is None or top.key() == _functorch.TransformType.Jvp:
                tensors = [part for whole in tensors for part in with_tangent(whole)]
            found.update((id(part), part) for part in tensors)
            if top is None:
                return tuple(found.values())
            level = top.level()
            layers.append(_functorch.pop_dynamic_layer_stack())
            tensors = [
                _functorch.get_unwrapped(part)
                if _functorch.maybe_get_level(part) == level
                else part
                for part in tensors
            ]
    finally:
        while layers:
            _functorch.push_dynamic_layer_stack(layers.pop())


def _without_batch_dimension(tensor: Tensor) -> Tensor:
    """Return the tensor inside a tensor of the older vmap.

    The very tensor if its batch dimension is the first one, as it is unless an operator has moved it.
    """
    if not is_batched(tensor):
        return tensor
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return torch._remove_batch_dim(tensor, level, 0, 0)


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """Return those of `graph_tensors` that have memory of their own: no wrappers, no subclasses."""
    return [
        part
        for part in graph_tensors(tensor)
        if type(part) in (Tensor, nn.Parameter) and not is_wrapped(part) and not is_batched(part)
    ]
