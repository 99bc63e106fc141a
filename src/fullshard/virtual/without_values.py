"""A model on the meta device runs as it would on a CUDA device: `inspect` and `plan` measure there.

torch chooses some kernels by the device, and the choice decides what is kept for backward, what is computed and what is
copied. On the meta device it would choose otherwise:

    attention    fused kernels; the meta device would compute, and keep, the matrix of scores
    RMSNorm      one kernel, which keeps its input and a number per row; otherwise eight operations in float32
    dropout      one kernel, which keeps a mask of one byte per element; otherwise a factor per element
    experts      their product takes all dtypes; on the meta device torch's takes bfloat16 only

What asks for a value gets an answer: models of transformers ask whether all windows are whole, and hear yes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fullshard import torch_border
from fullshard.virtual import torch_internals

ATTENTION = F.scaled_dot_product_attention
DROPOUT = F.dropout


@contextmanager
def without_values() -> Iterator[None]:
    """Let operations on the meta device choose the kernels of a CUDA device."""
    # The mode does not see calls inside of functions that it has seen, such as that of nn.MultiheadAttention, and what backward
    # recomputes.
    replaced = {ATTENTION: fused_attention, DROPOUT: fused_dropout}
    for function, other in replaced.items():
        setattr(F, function.__name__, other)
    try:
        with (
            torch_internals.fused_rms_norm_on_meta(),
            torch_internals.grouped_products_on_meta(),
            _CudaChoices(),
        ):
            yield
    finally:
        for function in replaced:
            setattr(F, function.__name__, function)


class _CudaChoices(TorchFunctionMode):
    """Replacements of operations that need values, or do something else where there are none."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace these three, and call everything else."""
        kwargs = kwargs or {}
        if func is torch.Tensor.__bool__ and args[0].is_meta:
            return True
        if func is ATTENTION:
            return fused_attention(*args, **kwargs)
        return fused_dropout(*args, **kwargs) if func is DROPOUT else func(*args, **kwargs)


def fused_dropout(
    given: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Return the result of torch's function, by the kernel that CUDA devices have for it."""
    if not (given.is_meta and training and 0 < p < 1) or inplace:
        return DROPOUT(given, p, training, inplace)
    return torch.native_dropout(given, p, True)[0]


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the result of torch's function, by the kernel that CUDA devices would choose.

    Flash attention does without a mask, in 16 bits, with queries, keys and values of the same width. What it does not
    take is done by the memory-efficient kernel, and what that does not take, by torch's function as it is.
    """
    width = query.shape[-1]
    options: Any = {
        "dropout": dropout_p,
        "is_causal": is_causal,
        "scale": width**-0.5 if scale is None else scale,
    }
    if not (query.is_meta and query.dim() == 4 and query.dtype in _FUSED_WIDTHS):
        return ATTENTION(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    is_square = query.shape[-2] == key.shape[-2] or not is_causal
    has_one_width = width == value.shape[-1] <= 256
    if attn_mask is None and query.dtype in _HALVES and has_one_width and is_square:
        padding = -width % 8
        given = (F.pad(each, (0, padding)) if padding else each for each in (query, key, value))
        return torch_border.flash_attention(*given, **options)[..., :width]
    if width % _FUSED_WIDTHS[query.dtype] or value.shape[-1] % _FUSED_WIDTHS[query.dtype]:
        return ATTENTION(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    return torch_border.memory_efficient_attention(query, key, value, bias, **options)


_HALVES = (torch.bfloat16, torch.float16)
_FUSED_WIDTHS = {torch.bfloat16: 8, torch.float16: 8, torch.float32: 4}
"""Factors that the widths of heads must be multiples of."""


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the bias of the scores: the kernel takes no booleans, and rows that begin at multiples of 16."""
    if mask.dtype is torch.bool:
        numbers = torch.zeros_like(mask, dtype=query.dtype)
        mask = numbers.masked_fill_(mask.logical_not(), float("-inf"))
    if padding := -mask.shape[-1] % 16:
        mask = F.pad(mask, (0, padding))[..., : mask.shape[-1]]
    return mask.expand(*query.shape[:3], key.shape[2])
