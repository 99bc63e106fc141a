"""Facts about work in an operator's schema: whether a call starts any, and what it makes."""

from __future__ import annotations

import functools

import torch

from fullshard import torch_border
from fullshard.torch_border import Operator

FILLS = {
    *("arange", "eye", "full", "full_like", "linspace", "new_full", "new_ones", "new_zeros"),
    *("ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like"),
    *("randperm", "scalar_tensor", "zeros", "zeros_like"),
}
"""Operations that read nothing and write their result."""

_NOT_OF_THE_DEVICE = {"c10d", "_c10d_functional", "prim", "profiler"}

_WITHOUT_WORK = {
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
    # Views that do not say so.
    *("_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"),
    *("detach_", "is_same_size", "resize_", "resize_as_", "set_", "lift"),
    *("is_pinned", "_pin_memory", "_assert_async", "_assert_scalar", "sym_constrain_range"),
}


@functools.cache
def starts_work(operator: Operator) -> bool:
    """Return whether a call can read or write memory; views and allocations cannot."""
    signature = torch_border.signature_of(operator)
    if signature.namespace in _NOT_OF_THE_DEVICE or signature.name in _WITHOUT_WORK:
        return False
    writes = any(each.is_written for each in signature.arguments)
    is_view = not writes and signature.new_results and not any(signature.new_results)
    return not is_view and torch.Tag.inplace_view not in operator.tags


@functools.cache
def makes_tensors(operator: Operator) -> bool:
    """Return whether a result may have memory that no tensor among the arguments had. Some views do not say that they are views."""
    if operator is torch_border.SET_STORAGE:
        return True
    signature = torch_border.signature_of(operator)
    writes = any(argument.is_written for argument in signature.arguments)
    return any(signature.new_results) or not writes
