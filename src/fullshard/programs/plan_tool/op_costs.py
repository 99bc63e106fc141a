"""Cost of an operation of torch on a CUDA device: its flops, its traffic, its launches, and the memory that it takes meanwhile.

The facts are those of torch's CUDA kernels, although the operation itself runs on the meta device. An operation falls into
the first of these that it fits:

    no kernel         views, `empty`, changes of metadata, and all whose tensors are empty or on the CPU
    matrix product    also convolutions and attention (`matrix_costs`)
    of its own        reads or writes less or more than whole tensors, or starts several kernels: those in `_COSTS`
    many tensors      `_foreach_` operations and fused optimizers
    plain             reads its inputs, writes its results, in one kernel: pointwise operations, and those in `_PLAIN`
    unlisted          everything else; it counts like a plain one, and `is_listed` says so

Scratch is what a kernel takes from the caching allocator and gives back before it returns. It is known for backward of
embeddings and of attention, and for norms of many tensors. It counts as none, though there may be some, for: convolutions
(workspaces of cuDNN), matrix products (cuBLAS keeps one workspace per stream, which is no scratch), `sort`, `topk` and
`cumsum` (temporary storage of CUB), `index_put` that accumulates (it sorts), reductions to few numbers (a small buffer for
partial sums), and backward of `native_layer_norm` with more than 65,536 narrow rows.

Collectives are not here: the recorder of a step sees them first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fullshard import torch_border
from fullshard.programs.plan_tool.matrix_costs import MATRIX_COSTS, Cost
from fullshard.programs.plan_tool.operations import (
    Operation,
    dtype_name,
    region_bytes,
    tensors_in,
)
from fullshard.programs.plan_tool.program import Kernel
from fullshard.torch_border import Operator
from fullshard.virtual.operations import FILLS, starts_work


def kernel_of(
    operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Kernel | None:
    """Return the cost of a call; None if it starts no kernel.

    Args:
        operator: As a dispatch mode gets it.
        args: Arguments of the call.
        kwargs: Named arguments of the call.
        result: Result of the call.
    """
    op, cost = _call_of(operator)
    if cost is None:
        return None
    # A mode may be on that replaces functions, and would see every question to a tensor.
    with torch_border.without_function_modes():
        return cost(op, args, kwargs, result)


def is_listed(operator: Operator) -> bool:
    """Whether this file was written with the operator in mind; otherwise it counts like a plain one."""
    return _cost_of(operator) is not _unlisted


@functools.cache
def _call_of(operator: Operator) -> tuple[Operation, Cost | None]:
    """Return the part that is the same for all calls of an operator: this runs for every operation of a step."""
    return Operation(operator), _cost_of(operator)


def _cost_of(operator: Operator) -> Cost | None:
    if not starts_work(operator):
        return None
    signature = torch_border.signature_of(operator)
    name = signature.name
    if signature.namespace != "aten":
        return _unlisted
    if found := MATRIX_COSTS.get(name) or _COSTS.get(name):
        return found
    if name.startswith(("_foreach_", "_amp_foreach_")):
        return _many
    return _plain if torch.Tag.pointwise in operator.tags or name in _PLAIN else _unlisted


_PLAIN = FILLS | {
    # Element by element.
    *("_to_copy", "clone", "copy_", "contiguous", "constant_pad_nd", "flip", "im2col", "col2im"),
    *("masked_fill", "masked_fill_", "masked_scatter"),
    *(
        "floor_divide",
        "repeat",
        "roll",
        "stack",
        "tril",
        "tril_",
        "triu",
        "triu_",
        "_local_scalar_dense",
    ),
    # Random numbers.
    *("bernoulli", "bernoulli_", "exponential_", "multinomial", "normal_", "random_", "uniform_"),
    *("fill_", "zero_", "native_dropout", "native_dropout_backward"),
    # Reductions.
    *("all", "amax", "amin", "aminmax", "any", "argmax", "argmin", "count_nonzero", "dot"),
    *("linalg_vector_norm", "logsumexp", "max", "mean", "min", "mv", "nansum", "norm", "prod"),
    *("std", "sum", "var", "var_mean", "histc", "bincount", "nonzero_static"),
    # Row by row.
    *("_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data"),
    *("_safe_softmax", "cumsum", "cumprod", "logcumsumexp", "_fused_rms_norm"),
    *("native_layer_norm", "native_group_norm", "_weight_norm_interface"),
    # Of pictures.
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "avg_pool2d", "avg_pool2d_backward"),
    *("max_pool2d_with_indices", "native_batch_norm", "_native_batch_norm_legit"),
    *("upsample_bilinear2d", "upsample_nearest2d", "upsample_bicubic2d", "_batch_norm_with_update"),
}
"""Operations that pass over whole tensors in one kernel, and whose schema does not say so."""

_CHUNK = 65536
_CHUNKS_PER_LAUNCH = 320
_TENSORS_PER_LAUNCH = (110, 64, 48, 36, 30)
"""Most tensors of a launch, by the number of lists. Their addresses go with the launch of a kernel, and must fit there."""


def _plain(op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    nbytes, dtype = op.traffic(args, kwargs, result)
    return _memory(op, nbytes, dtype)


def _unlisted(op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    return _plain(op, args, kwargs, result)


def _memory(
    op: Operation,
    nbytes: int,
    dtype: torch.dtype | None,
    launches: int = 1,
    scratch: int = 0,
) -> Kernel | None:
    if not nbytes:
        return None
    return Kernel(op.name, "memory", dtype_name(dtype), 0, nbytes, (), launches, scratch)


def _in_kernels(launches: int) -> Cost:
    """Return the cost of an operation that passes over whole tensors, in that many kernels."""

    def cost(op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        nbytes, dtype = op.traffic(args, kwargs, result)
        return _memory(op, nbytes, dtype, launches)

    return cost


def _cat(op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    nbytes, dtype = op.traffic(args, kwargs, result)
    return _memory(op, nbytes, dtype, -(-len(args[0]) // 128))


def _many(op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    nbytes, dtype = op.traffic(args, kwargs, result)
    if not nbytes:
        return None
    lists = sum(1 for each in args if isinstance(each, list | tuple) and _is_of_tensors(each))
    sizes = [each.numel() for each in args[0]]
    launches = _launches_for(sizes, lists + op.has_results)
    scratch = 0
    if op.name.endswith("norm"):
        # A number per chunk, which a second kernel adds up.
        launches += 2
        scratch = 4 * len(sizes) * -(-max(sizes) // _CHUNK)
    return _memory(op, nbytes, dtype, launches, scratch)


def _fused_optimizer(
    op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Any:
    nbytes, dtype = op.traffic(args, kwargs, result)
    if not nbytes:
        return None
    if op.argument("grad_scale", args, kwargs) is None:
        # The schema says that gradients change. They do only where there is a scale to divide by.
        nbytes -= sum(map(region_bytes, args[1]))
    # Numbers of steps are a list too, but of single numbers that go along with the tensors.
    lists = sum(1 for each in args[:5] if isinstance(each, list | tuple) and _is_of_tensors(each))
    return _memory(op, nbytes, dtype, _launches_for([each.numel() for each in args[0]], lists))


def _is_of_tensors(values: Sequence[Any]) -> bool:
    return bool(values) and isinstance(values[0], Tensor)


def _launches_for(sizes: Sequence[int], lists: int) -> int:
    """Return how many kernels an operation on lists of tensors starts: each takes so many tensors and so many chunks."""
    chunks = sum(-(-size // _CHUNK) for size in sizes)
    tensors = _TENSORS_PER_LAUNCH[min(lists, len(_TENSORS_PER_LAUNCH)) - 1]
    return max(-(-len(sizes) // tensors), -(-chunks // _CHUNKS_PER_LAUNCH))


def _rows_read(op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Return the cost of taking parts of a tensor: as much is read as is written, and the indices."""
    if result.is_cpu:
        return None
    nbytes = 2 * result.nbytes + _index_bytes(args[1:])
    return _memory(op, nbytes, result.dtype)


def _rows_written(accumulates: bool, launches: int = 1) -> Cost:
    """Return the cost of writing parts of a tensor; of the whole, if the operation makes a changed copy of it."""

    def cost(op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        target = args[0]
        if target.is_cpu:
            return None
        parts = [each for each in tensors_in(args[1:]) if each.dtype is target.dtype]
        rows = parts[-1].nbytes if parts else _index_bytes(args[1:])
        nbytes = (3 if accumulates else 2) * rows + _index_bytes(args[1:])
        if op.has_results:
            return _memory(op, nbytes + 2 * target.nbytes, target.dtype, launches + 1)
        return _memory(op, nbytes, target.dtype, launches)

    return cost


def _index_bytes(values: Any) -> int:
    return sum(
        each.nbytes for each in tensors_in(values) if each.dtype in (torch.int64, torch.int32)
    )


def _zeros_and_part(
    op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Any:
    """Return the cost of a gradient that is zero but for a part."""
    if result.is_cpu:
        return None
    nbytes = result.nbytes + 2 * region_bytes(args[0])
    return _memory(op, nbytes, result.dtype, launches=2)


def _embedding_backward(
    op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Any:
    """Return the cost of an embedding's gradient.

    All of it is zeroed, and rows are added. From 3,073 tokens on, tokens are sorted first (sorted tokens, their places before
    and after, and the sort's own copies), and parts of the sums are kept in float32: up to a row for each token or each
    entry of the vocabulary, whichever are fewer, and one more for every ten tokens.
    """
    gradient, indices, rows = args[:3]
    if result.is_cpu:
        return None
    tokens, width = indices.numel(), result.shape[-1]
    nbytes = result.nbytes + 3 * gradient.nbytes + indices.nbytes
    if tokens <= 3072 and args[3] < 0:
        return _memory(op, nbytes, result.dtype, launches=2)
    segments = min(tokens, rows)
    parts = tokens // 10 + segments
    scratch = indices.element_size() * (5 * tokens + 2 * segments + parts) + 4 * parts * width
    nbytes += 10 * indices.nbytes + 2 * 4 * min(parts, tokens) * width
    return _memory(op, nbytes, result.dtype, launches=12, scratch=scratch)


def _loss(op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Return the cost of the mean of one score per row."""
    scores, targets = args[:2]
    if scores.is_cpu:
        return None
    # A cache line of 32 bytes for each score.
    return _memory(op, 32 * targets.numel() + targets.nbytes, scores.dtype)


def _loss_backward(
    op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Any:
    targets = args[2]
    if result.is_cpu:
        return None
    nbytes = result.nbytes + 32 * targets.numel() + targets.nbytes
    return _memory(op, nbytes, result.dtype, launches=2)


def _sorted(op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Return the cost of a sort by digits of eight bits, each of which passes over keys and places."""
    given = args[0]
    if given.is_cpu:
        return None
    passes = given.element_size()
    nbytes = 2 * passes * prod(given.shape) * (given.element_size() + 8)
    return _memory(op, nbytes, given.dtype, launches=passes + 2)


_COSTS: dict[str, Cost] = {
    "cat": _cat,
    "embedding": _rows_read,
    "embedding_dense_backward": _embedding_backward,
    "nll_loss_forward": _loss,
    "nll_loss_backward": _loss_backward,
    "nll_loss2d_forward": _loss,
    "nll_loss2d_backward": _loss_backward,
    **dict.fromkeys(("slice_backward", "select_backward", "diagonal_backward"), _zeros_and_part),
    **dict.fromkeys(("gather", "index", "index_select", "take", "unfold_copy"), _rows_read),
    **dict.fromkeys(("index_copy", "index_copy_", "scatter", "scatter_"), _rows_written(False)),
    **dict.fromkeys(
        ("index_add", "index_add_", "scatter_add", "scatter_add_"), _rows_written(True)
    ),
    **dict.fromkeys(
        ("index_put", "index_put_", "_index_put_impl_", "scatter_reduce", "scatter_reduce_"),
        _rows_written(True, launches=4),
    ),
    **dict.fromkeys(("sort", "argsort", "topk", "kthvalue", "msort"), _sorted),
    # The addresses of the parts go to the device first.
    "split_with_sizes_copy": _in_kernels(2),
    **dict.fromkeys(
        ("native_layer_norm_backward", "_fused_rms_norm_backward", "native_group_norm_backward"),
        _in_kernels(2),
    ),
    **dict.fromkeys(
        ("native_batch_norm_backward", "batch_norm_backward", "max_pool2d_with_indices_backward"),
        _in_kernels(2),
    ),
    **dict.fromkeys(
        ("_fused_adamw_", "_fused_adam_", "_fused_sgd_", "_fused_adagrad_"), _fused_optimizer
    ),
}
"""Costs of operations that do something else than to pass over whole tensors in one kernel, by the name in ``aten``."""
