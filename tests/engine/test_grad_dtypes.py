"""`Tensor.grad_dtype` of parameters: in which dtype gradients are summed over ranks, and which one `.grad` has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import torch_border
from fullshard.engine.state import state_of
from tests.helpers.compare import assert_equal
from tests.helpers.training import FULLSHARD, gradients, of_both
from tests.helpers.wrapped_nets import library

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
FOLLOWS = torch_border.REDUCES_IN_GRAD_DTYPE


class Wide(torch.autograd.Function):
    """A product whose weight gets its gradient in fp32, whatever its own dtype is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.float().T @ gradient.float() * 1.001


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return Wide.apply(x, self.weight) + self.bias


ALL = ("weight", "bias")
CASES: dict[str, tuple[Any, ...]] = {
    # name: dtypes of compute and reduction, grad_dtype and whose, dtypes of sums (weight and bias) since torch 2.15 and
    # before, dtypes of gradients since and before
    "own dtype": (BF16, None, FP32, (), [FP32, FP32], [BF16, BF16], [FP32, FP32], [FP32, FP32]),
    "narrow": (BF16, None, BF16, ALL, [BF16, BF16], [BF16, BF16], [BF16, BF16], [BF16, BF16]),
    "narrow, summed in fp32": (BF16, FP32, BF16, ALL, *[[FP32, FP32]] * 2, *[[BF16, BF16]] * 2),
    "narrow, fp32 compute": (
        *(None, None, BF16, ALL),
        *([BF16, BF16], [FP32, FP32], [BF16, BF16], [BF16, BF16]),
    ),
    "wide": (None, None, FP64, ALL, [FP64, FP64], [FP32, FP32], *[[FP64, FP64]] * 2),
    # The gradient of the weight comes in fp32, that of the bias in bf16; both are summed together.
    "any": (BF16, None, None, ALL, [FP32, FP32], [BF16, BF16], [FP32, FP32], [BF16, BF16]),
    "any, summed in fp32": (BF16, FP32, None, ALL, *[[FP32, FP32]] * 4),
    "one of two": (
        *(BF16, None, BF16, ("bias",)),
        *([FP32, FP32], [BF16, BF16], [FP32, BF16], [FP32, BF16]),
    ),
}


def choose(model: nn.Module, whose: tuple[str, ...], dtype: torch.dtype | None) -> None:
    for name, param in model.named_parameters():
        if name.endswith(whose) and whose:
            param.grad_dtype = dtype


def train(api: str, name: str, before: bool, backwards: int) -> dict[str, Tensor]:
    """Gradients of a step with that many backwards, of which the last one reduces."""
    param_dtype, reduce_dtype, dtype, whose, *expected = CASES[name]
    lib, model = library(api), nn.Sequential(Layer(), Layer())
    if before:
        choose(model, whose, dtype)
    policy = lib.MixedPrecisionPolicy(param_dtype, reduce_dtype)
    for module in (*model, model):
        lib.fully_shard(module, mp_policy=policy)
    if not before:
        choose(model, whose, dtype)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(backwards):
        model.set_requires_gradient_sync(step == backwards - 1)
        model(torch.randn(4, 3, generator=generator)).float().square().sum().backward()
    found = [model[0].weight.grad.dtype, model[0].bias.grad.dtype]
    if api == FULLSHARD:
        (group,) = state_of(model[0]).groups  # type: ignore[union-attr]
        assert group.reduction.dtypes.reduce == expected[0 if FOLLOWS else 1]
        assert found == expected[2 if FOLLOWS else 3]
    assert found == [param.grad.to_local().dtype for param in model[0].parameters()]
    return gradients(model)


def compare(name: str, before: bool) -> None:
    for backwards in (1, 2):
        if FOLLOWS:
            ours, theirs = of_both(train, name, before, backwards)
            assert_equal(ours, theirs)
        else:
            train(FULLSHARD, name, before, backwards)


@pytest.mark.parametrize("before", [True, False], ids=["before sharding", "after sharding"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_have_the_dtype_that_the_parameter_says(world, name: str, before: bool) -> None:
    world(2).run(compare, name, before)


def wide_gradients(param_dtype: torch.dtype, reduce_dtype: torch.dtype) -> Tensor:
    lib, layer = library(FULLSHARD), Layer()
    lib.fully_shard(layer, mp_policy=lib.MixedPrecisionPolicy(param_dtype, reduce_dtype))
    layer(torch.full((1, 3), 1.0)).sum().backward()
    return gradients(layer)["weight"]


@pytest.mark.skipif(not FOLLOWS, reason="torch's FSDP2 rounds them before 2.15, and so do we")
def test_a_gradient_that_comes_in_fp32_is_not_rounded_to_the_compute_dtype(world) -> None:
    (found, _) = world(2).run(wide_gradients, BF16, FP32)
    assert_equal(found, torch.full((3, 3), 1.001))
