"""The costs of what tensor cores compute: matrix products, convolutions and attention.

Flops count a multiplication and an addition as two. Causal attention counts half, since fused kernels skip the tiles above
the diagonal; backward of attention computes five products where forward computes two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

from torch import Tensor

from fullshard import torch_border
from fullshard.programs.plan_tool.operations import Operation, dtype_name
from fullshard.programs.plan_tool.program import Kernel, KernelKind

Cost: TypeAlias = Callable[[Operation, Sequence[Any], Mapping[str, Any], Any], Kernel | None]
"""Returns the cost of a call; None if it starts no kernel."""


def _product_of(first: int) -> Cost:
    """Return the cost of a product of two arguments, the first of which is at that position."""

    def cost(op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        one, other = args[first], args[first + 1]
        *batch, rows, inner = one.shape
        shape = (prod(batch), rows, other.shape[-1], inner)
        return _kernel(op, "matmul", shape, 2 * prod(shape), args, kwargs, result, like=one)

    return cost


def _linear(op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    given, weight = args[:2]
    shape = (1, prod(given.shape[:-1]), weight.shape[0], weight.shape[1])
    return _kernel(op, "matmul", shape, 2 * prod(shape), args, kwargs, result, like=given)


def _grouped(op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Return the cost of the experts' products: all rows of all experts, each multiplied by one expert's matrix."""
    one, other = args[:2]
    offsets = op.argument("offs", args, kwargs)
    groups = offsets.numel() if offsets is not None else one.shape[0]
    rows, inner, columns = one.shape[-2], one.shape[-1], other.shape[-1]
    # Experts share the rows, the columns, or (for gradients of weights) what is summed over.
    if one.dim() == 2 and other.dim() == 3:
        rows //= groups
    elif one.dim() == 3 and other.dim() == 2:
        columns //= groups
    elif one.dim() == other.dim() == 2:
        inner //= groups
    shape = (groups, rows, columns, inner)
    return _kernel(op, "matmul", shape, 2 * prod(shape), args, kwargs, result, like=one)


def _convolution(op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    given, weight = args[:2]
    transposed = op.argument("transposed", args, kwargs)
    shape = _as_product(given, weight, given if transposed else result, args[-1])
    return _kernel(op, "matmul", shape, 2 * prod(shape), args, kwargs, result, like=given)


def _convolution_backward(
    op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Any:
    gradient, given, weight = args[:3]
    transposed = op.argument("transposed", args, kwargs)
    wanted = sum(op.argument("output_mask", args, kwargs)[:2])
    shape = _as_product(
        given, weight, given if transposed else gradient, op.argument("groups", args, kwargs)
    )
    flops = 2 * prod(shape) * wanted
    return _kernel(op, "matmul", shape, flops, args, kwargs, result, like=given, launches=3)


def _as_product(
    given: Tensor, weight: Tensor, windows: Tensor, groups: int
) -> tuple[int, int, int, int]:
    """Return a convolution's shape as a product: groups, places of the window, channels, what a window covers."""
    rows = given.shape[0] * prod(windows.shape[2:])
    return groups, rows, weight.shape[0] // groups, prod(weight.shape[1:])


def _attention(op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    query, key, value = args[:3]
    shape, pairs = _scores(op, args, kwargs, query, key)
    flops = 2 * pairs * (query.shape[-1] + value.shape[-1])
    return _kernel(op, "attention", shape, flops, args, kwargs, result, like=query)


def _attention_backward(
    op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Any:
    query, key, value = args[1:4]
    shape, pairs = _scores(op, args, kwargs, query, key)
    # The scores again, the gradients of query and key, and those of value and of the probabilities.
    flops = 2 * pairs * (3 * query.shape[-1] + 2 * value.shape[-1])
    scratch = _attention_scratch(query, key, value)
    return _kernel(
        op,
        "attention",
        shape,
        flops,
        args,
        kwargs,
        result,
        like=query,
        launches=3 if query.shape[1] == key.shape[1] else 5,
        scratch=scratch,
    )


def _scores(
    op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], query: Tensor, key: Tensor
) -> tuple[tuple[int, int, int, int], int]:
    """Return the shape of attention, and how many pairs of a query and a key there are."""
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    pairs = batch * heads * queries * keys
    halved = pairs // 2 if op.argument("is_causal", args, kwargs) else pairs
    return (batch * heads, queries, keys, width), halved


def _attention_scratch(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return the bytes that backward of fused attention needs besides its results.

    It sums the gradient of query in float32, with rows and width rounded up to tiles, and one number per query. Where heads
    share a key, it makes the gradients of key and value for each head, and adds them up at the end.
    """
    batch, heads, queries, width = query.shape
    rows = -(-queries // 128) * 128
    tile = 32 if width <= 128 else 64
    columns = -(-width // tile) * tile
    sums = 4 * batch * heads * rows * (columns + 1)
    if key.shape[1] == heads:
        return sums
    per_head = batch * heads * key.shape[2] * (width + value.shape[-1]) * key.element_size()
    return sums + per_head


def _kernel(
    op: Operation,
    kind: KernelKind,
    shape: tuple[int, ...],
    flops: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
    *,
    like: Tensor,
    launches: int = 1,
    scratch: int = 0,
) -> Kernel | None:
    nbytes, _ = op.traffic(args, kwargs, result)
    if not nbytes:
        return None
    return Kernel(op.name, kind, dtype_name(like.dtype), flops, nbytes, shape, launches, scratch)


MATRIX_COSTS: dict[str, Cost] = {
    **dict.fromkeys(("mm", "bmm", "_scaled_mm", "_int_mm"), _product_of(0)),
    **dict.fromkeys(
        ("addmm", "addmm_", torch_border.ADDMM_WITH_ACTIVATION, "baddbmm", "baddbmm_"),
        _product_of(1),
    ),
    "linear": _linear,
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm"), _grouped),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
        ),
        _attention,
    ),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention_backward",
        ),
        _attention_backward,
    ),
}
"""Cost functions, by the name of the operator in ``aten``."""
