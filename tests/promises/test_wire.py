"""Gradients that travel in bf16 and are summed in fp32 are those of fp32 reductions, for half of the bytes.

Expected values are made by hand: every rank's gradients of an unsharded model, rounded to the wire's
dtype and added up in fp32 in the order of ranks. All comparisons are bit for bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fullshard.layout
from tests.helpers.compare import assert_equal
from tests.helpers.models import ModelOptions, make_decoder
from tests.helpers.training import (
    FULLSHARD,
    Run,
    batch_of,
    gradients,
    mine,
    shard,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
WIRE = Run(param_dtype=BF16, reduce_dtype=FP32, wire_dtype=BF16)


@pytest.fixture(params=["together", "alone"])
def threshold(request: pytest.FixtureRequest) -> int:
    """From how many bytes a segment is exchanged by itself: all or none of a small model's are."""
    return 0 if request.param == "alone" else 1 << 20


def local_gradients(options: ModelOptions, dtype: torch.dtype, steps: int) -> dict[str, Tensor]:
    """Of an unsharded model that computes in ``dtype``, on this rank's rows, summed over steps in fp32."""
    model = make_decoder(options).to(dtype)
    sums = {name: torch.zeros_like(p, dtype=FP32) for name, p in model.named_parameters()}
    for step in range(steps):
        model.zero_grad()
        model(mine(batch_of(step))).backward()
        for name, gradient in gradients(model).items():
            sums[name] += gradient
    return sums


def sum_of_ranks(tensor: Tensor) -> Tensor:
    """In the tensor's dtype, in the order of ranks."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    total = gathered[0]
    for each in gathered[1:]:
        total = total + each
    return total


def by_hand(
    options: ModelOptions, dtype: torch.dtype, wire_dtype: torch.dtype, steps: int
) -> dict[str, Tensor]:
    """The mean over ranks of gradients rounded once."""
    return {
        name: sum_of_ranks(local.to(wire_dtype).to(FP32)) / dist.get_world_size()
        for name, local in local_gradients(options, dtype, steps).items()
    }


def sharded_gradients(run: Run, steps: int, **kwargs: Any) -> dict[str, Tensor]:
    """Reduced in the last of so many steps."""
    model: Any = shard(make_decoder(run.model), FULLSHARD, run, **kwargs)
    for step in range(steps):
        model.set_requires_gradient_sync(step == steps - 1)
        model(mine(batch_of(step))).backward()
    return gradients(model)


# --- the functional door -----------------------------------------------------------------------------

UNEVEN = ModelOptions(width=5, hidden=7, scalar=True)
CASES: dict[str, tuple[Run, int]] = {
    "even": (WIRE, 1),
    "uneven, 0-d": (replace(WIRE, model=UNEVEN), 1),
    "one group": (replace(WIRE, model=UNEVEN, group_blocks=False), 1),
    "accumulated": (replace(WIRE, model=UNEVEN), 3),
    "fp32 gradients are rounded": (replace(WIRE, param_dtype=None, model=UNEVEN), 1),
    "fp16": (replace(WIRE, param_dtype=FP16, wire_dtype=FP16, model=UNEVEN), 1),
}


def equals_by_hand(name: str, threshold: int, columns: bool) -> None:
    run, steps = CASES[name]
    fullshard.layout.IN_PLACE_FROM, usual = threshold, fullshard.layout.IN_PLACE_FROM
    assert run.wire_dtype is not None
    try:
        placement = {"shard_placement_fn": last_dimension} if columns else {}
        ours = sharded_gradients(run, steps, **placement)
    finally:
        fullshard.layout.IN_PLACE_FROM = usual
    expected = by_hand(run.model, run.param_dtype or FP32, run.wire_dtype, steps)
    assert_equal(ours, expected)


def last_dimension(param: nn.Parameter) -> Shard | None:
    return Shard(param.ndim - 1) if param.ndim > 1 else None


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_summed_by_the_receiver(
    world, name: str, world_size: int, threshold: int
) -> None:
    world(world_size).run(equals_by_hand, name, threshold, columns=False)


@pytest.mark.parametrize("name", ["uneven, 0-d", "accumulated"])
def test_columns_are_exchanged_too(world, name: str, threshold: int) -> None:
    world(3).run(equals_by_hand, name, threshold, columns=True)
