"""Low precision: scaled losses that overflow, low-precision masters, where gradients are summed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor

from fullshard import torch_border
from tests.helpers.compare import assert_equal
from tests.helpers.models import ModelOptions, make_decoder
from tests.helpers.training import FULLSHARD, TORCH, Run, batch_of, gradients, mine, shard, weights

SMALL = ModelOptions(depth=1)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def sharded(api: str, run: Run) -> Any:
    return shard(make_decoder(SMALL).to(run.master_dtype), api, run)


# --- scaled losses -----------------------------------------------------------------------------------

SPIKE = 2
"""The step in which one rank overflows."""


def scaled_training(api: str, run: Run, spike_in: str) -> list[dict[str, Any]]:
    """Scales and parameters after each step, of which one must be skipped on all ranks."""
    model = sharded(api, run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = GradScaler(device="cpu", init_scale=2.0**10, growth_interval=2)
    record: list[dict[str, Any]] = [{"params": weights(model), "scale": scaler.get_scale()}]
    for step in range(5):
        spikes = step == SPIKE and dist.get_rank() == 1
        loss = model(mine(batch_of(step)))
        scaler.scale(loss * 1e9 if spikes and spike_in == "loss" else loss).backward()
        if spikes and spike_in == "shard":
            gradient = model.blocks[0].up.weight.grad
            assert isinstance(gradient, DTensor)
            gradient.to_local()[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        entry = {"loss": loss.detach()}
        if step != SPIKE:
            entry["gradients"] = gradients(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        record.append({**entry, "params": weights(model), "scale": scaler.get_scale()})
    return record


def scaled_training_of_both(run: Run, spike_in: str) -> None:
    ours, theirs = (scaled_training(api, run, spike_in) for api in (FULLSHARD, TORCH))
    assert_equal(ours, theirs)
    assert_equal(ours[SPIKE + 1]["params"], ours[SPIKE]["params"])  # skipped
    assert [entry["scale"] for entry in ours] == [2.0**e for e in (10, 10, 11, 10, 10, 11)]


@pytest.mark.parametrize(("spike_in", "reduce_dtype"), [("loss", FP16), ("shard", FP32)])
def test_all_ranks_skip_the_step_in_which_one_overflows(
    world, spike_in: str, reduce_dtype: torch.dtype
) -> None:
    run = Run(param_dtype=FP16, reduce_dtype=reduce_dtype)
    world(2).run(scaled_training_of_both, run, spike_in)


def test_all_replicas_skip_the_step_in_which_one_rank_overflows(world) -> None:
    run = Run(param_dtype=FP16, reduce_dtype=FP32, replicas=2)
    world(4).run(scaled_training_of_both, run, "loss")


def half_masters_cannot_be_scaled(api: str) -> str:
    model = sharded(api, Run(master_dtype=FP16))
    scaler = GradScaler(device="cpu")
    scaler.scale(model(mine(batch_of(0)))).backward()
    with pytest.raises(ValueError) as refusal:
        scaler.unscale_(torch.optim.SGD(model.parameters()))
    return str(refusal.value)


def test_the_scaler_refuses_fp16_masters_as_with_torch(world) -> None:
    ours = world(2).run(half_masters_cannot_be_scaled, FULLSHARD)
    assert ours == world(2).run(half_masters_cannot_be_scaled, TORCH)


# --- dtypes ------------------------------------------------------------------------------------------

POLICIES = {
    "fp16": (Run(param_dtype=FP16), FP32),
    "fp16, reduced in fp32": (Run(param_dtype=FP16, reduce_dtype=FP32), FP32),
    "fp16 masters": (Run(master_dtype=FP16), FP16),
    "bf16 masters": (Run(master_dtype=BF16), BF16),
    "bf16 masters, reduced in fp32": (Run(master_dtype=BF16, reduce_dtype=FP32), BF16),
    "bf16 masters, fp32 compute": (Run(master_dtype=BF16, param_dtype=FP32), BF16),
    "fp32 masters, reduced in bf16": (Run(reduce_dtype=BF16), FP32),
}


def dtypes(api: str, run: Run) -> dict[str, set[torch.dtype]]:
    """Of what is seen in forward, of gradients before and after reduction, of the masters."""
    model = sharded(api, run)
    seen: dict[str, set[torch.dtype]] = {"parameters": set(), "inputs": set(), "unreduced": set()}

    def look(module: Any, args: tuple[Tensor, ...]) -> None:
        seen["parameters"] |= {param.dtype for param in module.parameters()}
        seen["inputs"].add(args[0].dtype)
        for param in module.parameters():
            param.register_hook(lambda gradient: seen["unreduced"].add(gradient.dtype))

    for block in model.blocks:
        block.register_forward_pre_hook(look)
    model(mine(batch_of(0))).backward()
    seen["gradients"] = {param.grad.dtype for param in model.parameters()}
    seen["local gradients"] = {param.grad.to_local().dtype for param in model.parameters()}
    seen["masters"] = {param.dtype for param in model.parameters()}
    return seen


@pytest.mark.parametrize("name", POLICIES)
def test_dtypes_are_those_of_torch_all_along(world, name: str) -> None:
    run, resting = POLICIES[name]
    ours = world(2).run(dtypes, FULLSHARD, run)
    assert ours == world(2).run(dtypes, TORCH, run)
    compute = run.param_dtype or resting
    assert ours[0]["parameters"] == {compute}
    if not torch_border.REDUCES_IN_GRAD_DTYPE:  # since then, a narrower reduce dtype is seen there
        assert ours[0]["unreduced"] == {compute}
    assert ours[0]["gradients"] == ours[0]["local gradients"] == {resting}


# --- accumulation ------------------------------------------------------------------------------------

MICROBATCHES = 4


def accumulate(api: str, run: Run) -> dict[str, Tensor]:
    model = sharded(api, run)
    for step in range(MICROBATCHES):
        last = step == MICROBATCHES - 1
        model.set_requires_gradient_sync(last)
        model(mine(batch_of(step))).backward()
        assert all((param.grad is not None) is last for param in model.parameters())
    return gradients(model)


def accumulate_by_hand(sum_in: torch.dtype) -> dict[str, Tensor]:
    """Sum this rank's bf16 gradients in ``sum_in``, average over ranks in fp32."""
    model = make_decoder(SMALL).to(BF16)
    sums = {name: torch.zeros_like(p, dtype=sum_in) for name, p in model.named_parameters()}
    for step in range(MICROBATCHES):
        model.zero_grad()
        model(mine(batch_of(step))).backward()
        for name, gradient in gradients(model).items():
            sums[name] += gradient
    result = {}
    for name, local in sums.items():
        total = local.float()
        dist.all_reduce(total)
        result[name] = (total / dist.get_world_size()).to(BF16)
    return result


def accumulation_of_both(run: Run, sum_in: torch.dtype) -> None:
    ours = accumulate(FULLSHARD, run)
    assert_equal(ours, accumulate(TORCH, run))
    if run.master_dtype is BF16:
        assert_equal(ours, accumulate_by_hand(sum_in))
        other = accumulate_by_hand(BF16 if sum_in is FP32 else FP32)
        assert any(not torch.equal(ours[name], other[name]) for name in ours)


@pytest.mark.parametrize(
    ("run", "sum_in"),
    [
        (Run(master_dtype=BF16, reduce_dtype=FP32), FP32),
        (Run(param_dtype=BF16, reduce_dtype=FP32), FP32),
        (Run(param_dtype=FP16, reduce_dtype=FP32), FP32),
        (Run(master_dtype=BF16), BF16),
    ],
    ids=["bf16 masters", "bf16", "fp16", "bf16 masters, reduced in bf16"],
)
def test_microbatches_are_summed_in_the_reduce_dtype(world, run: Run, sum_in: torch.dtype) -> None:
    world(2).run(accumulation_of_both, run, sum_in)
