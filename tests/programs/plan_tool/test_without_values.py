"""On the meta device, attention, RMSNorm and dropout are what they are on a CUDA device: one kernel each way, that keeps little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullshard.programs.train.sharded_model import keep_expensive_results
from fullshard.virtual.without_values import DROPOUT, without_values
from tests.programs.plan_tool.watched_kernels import WatchedKernels

ATTENTION = F.scaled_dot_product_attention


def heads(
    length: int, count: int, width: int, dtype: torch.dtype = torch.bfloat16, batch: int = 2
) -> Tensor:
    """Queries, keys or values, laid out as a linear layer leaves them."""
    whole = torch.empty(batch, length, count, width, dtype=dtype, device="meta")
    return whole.transpose(1, 2).requires_grad_()


def ran(compute: Callable[[], Tensor]) -> tuple[Tensor, list[str], int]:
    """Run forward and backward; return the output, the names of kernels, and the bytes that were kept for backward."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[id(storage)] = storage
        return tensor

    with without_values(), WatchedKernels() as watch:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = compute()
        size = sum(storage.nbytes() for storage in kept.values())
        output.backward(torch.empty_like(output))
    assert not watch.unlisted
    return output, [each.name.removeprefix("aten.") for each in watch.kernels], size


RANDOM_STATE = 24
"""Bytes of the state of random numbers that a kernel was started with."""
FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"


def test_flash_attention_keeps_its_inputs_its_output_and_a_number_per_query() -> None:
    query, key, value = heads(48, 8, 16), heads(48, 2, 16), heads(48, 2, 16)
    output, kernels, kept = ran(
        lambda: ATTENTION(query, key, value, is_causal=True, enable_gqa=True)
    )
    assert kernels == [FLASH, FLASH + "_backward"]
    assert kept == 2 * query.nbytes + 2 * key.nbytes + 4 * 2 * 8 * 48 + RANDOM_STATE
    assert output.stride() == query.stride(), "so that the next layer needs no copy"
    for each in (query, key, value):
        assert each.grad is not None
        assert each.grad.shape == each.shape


def test_widths_that_flash_attention_does_not_take_are_padded() -> None:
    query = heads(48, 8, 20)
    output, kernels, _ = ran(lambda: ATTENTION(query, query, query))
    assert output.shape == query.shape
    assert kernels[:4] == [*["constant_pad_nd"] * 3, FLASH]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, None])
def test_masks_and_float32_are_done_by_the_memory_efficient_kernel(dtype: Any) -> None:
    kind = torch.bfloat16 if dtype is not None else torch.float32
    query, key, value = heads(32, 4, 16, kind), heads(64, 4, 16, kind), heads(64, 4, 24, kind)
    mask = None if dtype is None else torch.empty(2, 1, 32, 64, dtype=dtype, device="meta")
    output, kernels, kept = ran(lambda: ATTENTION(query, key, value, attn_mask=mask))
    assert output.shape == (2, 4, 32, 24)
    assert output.transpose(1, 2).is_contiguous()
    # A mask of booleans becomes one of numbers, which is kept.
    made = ["zeros_like", "logical_not", "masked_fill_"] if dtype is torch.bool else []
    assert kernels == [*made, EFFICIENT, EFFICIENT + "_backward"]
    bias = 0 if dtype is None else 2 * 2 * 32 * 64
    inputs = query.nbytes + key.nbytes + value.nbytes + output.nbytes
    assert kept == inputs + bias + 4 * 2 * 4 * 32 + 16


def test_shared_keys_are_repeated_for_the_memory_efficient_kernel() -> None:
    query, key = heads(32, 4, 16, torch.float32), heads(32, 2, 16, torch.float32)
    _, kernels, _ = ran(lambda: ATTENTION(query, key, key, enable_gqa=True))
    assert EFFICIENT in kernels
    assert key.grad is not None
    assert key.grad.shape == key.shape


def test_what_no_fused_kernel_takes_is_computed_as_torch_would() -> None:
    query = heads(32, 4, 17, torch.float32)
    for given in (query, query[0]):
        _, kernels, _ = ran(lambda given=given: ATTENTION(given, given, given))  # type: ignore[misc]
        assert "_safe_softmax" in kernels or "_softmax" in kernels


def test_attention_inside_of_modules_of_torch_is_fused() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, device="meta", dropout=0.1)
    layer.to(torch.bfloat16)
    x = torch.empty(2, 16, 32, dtype=torch.bfloat16, device="meta")
    _, kernels, _ = ran(lambda: layer(x))
    assert kernels.count(FLASH) == kernels.count(FLASH + "_backward") == 1
    assert kernels.count("native_dropout") == kernels.count("native_dropout_backward") == 3
    assert F.scaled_dot_product_attention is ATTENTION, "it is put back"


def test_dropout_keeps_a_byte_per_element_and_norms_a_number_per_row() -> None:
    x = torch.empty(64, 32, dtype=torch.bfloat16, device="meta", requires_grad=True)
    norm = nn.RMSNorm(32, dtype=torch.bfloat16, device="meta")
    _, kernels, kept = ran(lambda: F.dropout(norm(x), 0.5))
    backward = ["native_dropout_backward", "_fused_rms_norm_backward"]
    assert kernels == ["_fused_rms_norm", "native_dropout", *backward]
    assert kept == x.nbytes + norm.weight.nbytes + 4 * 64 + 64 * 32
    with WatchedKernels() as watch:
        norm(x)
    assert "aten.rsqrt" in [each.name for each in watch.kernels], "it is put back"


def test_products_of_experts_take_all_dtypes() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.empty(32, 16, dtype=dtype, device="meta", requires_grad=True)
        weights = torch.empty(4, 16, 24, dtype=dtype, device="meta", requires_grad=True)
        offsets = torch.empty(4, dtype=torch.int32, device="meta")

        def compute(x: Tensor = x, weights: Tensor = weights, offsets: Tensor = offsets) -> Tensor:
            return F.grouped_mm(x, weights, offs=offsets)

        output, kernels, _ = ran(compute)
        assert (output.shape, output.dtype) == ((32, 24), dtype)
        assert kernels == ["_grouped_mm"] * 3
        for each in (x, weights):
            assert each.grad is not None
            assert (each.grad.shape, each.grad.dtype) == (each.shape, dtype)
    stacked = torch.empty(4, 8, 16, device="meta", requires_grad=True)
    assert ran(lambda: F.grouped_mm(stacked, stacked.mT))[0].shape == (4, 8, 8)
    if torch.__version__ < "2.15":  # which takes all dtypes
        with pytest.raises(RuntimeError, match="BF16"):
            F.grouped_mm(stacked, stacked.mT)  # it is put back


@pytest.mark.parametrize("is_selective", [False, True])
def test_dropout_is_one_kernel_where_backward_computes_it_again(is_selective: bool) -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8)).to("meta")
    options = {"context_fn": keep_expensive_results} if is_selective else {}
    x = torch.empty(4, 8, device="meta", requires_grad=True)
    _, kernels, _ = ran(lambda: checkpoint(block, x, use_reentrant=False, **options))
    assert kernels.count("native_dropout") == 2 and kernels.count("native_dropout_backward") == 1
    assert "bernoulli_" not in kernels and torch.nn.functional.dropout is DROPOUT
