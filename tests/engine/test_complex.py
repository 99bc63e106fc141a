"""Complex parameters are trained as real ones are: gathered, reduced, accumulated, clipped, saved."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    checkpoint,
    clip_grad_norm_,
    fully_shard,
    replicate,
)
from fullshard.optim import ShardedOptimizer
from fullshard.sharded_grad_scaler import ShardedGradScaler
from tests.helpers.compare import assert_close, assert_equal


class Net(nn.Module):
    """Complex parameters with rows that do not divide, with one row, and without dimensions; and a real one."""

    def __init__(self, *, with_real: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def make(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, dtype=torch.complex128, generator=generator))

        self.matrix, self.row, self.scale = make(5, 4), make(1, 4), make()
        self.real = nn.Parameter(torch.full((5,), 0.5, dtype=torch.float64)) if with_real else 1.0

    def forward(self, x: Tensor) -> Any:
        phases = ((x * self.real).to(self.matrix.dtype) @ self.matrix) * self.scale + self.row
        return phases.abs().square().mean()


def wrapped(net: nn.Module, **options: Any) -> Any:
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), **options)


def hybrid(net: nn.Module) -> Any:
    shape = (2, dist.get_world_size() // 2)
    return fully_shard(net, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")))


APIS: dict[str, Any] = {
    "fully_shard": fully_shard,
    "replicate": replicate,
    "hybrid": hybrid,
    # A policy is about real parameters.
    "policy": partial(
        fully_shard,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, cast_forward_inputs=False),
    ),
    "wrapper": partial(wrapped, use_orig_params=True),
    "flat": wrapped,
    "no shard": partial(wrapped, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD),
}


@contextlib.contextmanager
def accumulating(model: Any) -> Any:
    if isinstance(model, FullyShardedDataParallel):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def train(model: Any, optimizer: Any, ranks: int, rank: int | None) -> list[float]:
    """Two steps of two microbatches, with clipping; returns the norms."""
    norms = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(2, 2 * ranks, 5, dtype=torch.float64, generator=generator)
        mine = batch if rank is None else batch[:, 2 * rank : 2 * rank + 2]
        with contextlib.nullcontext() if rank is None else accumulating(model):
            model(mine[0]).backward()
        model(mine[1]).backward()
        clip = torch.nn.utils.clip_grad_norm_ if rank is None else clip_grad_norm_
        norms.append(float(clip(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def whole(model: Any) -> dict[str, Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return {name: param.detach().clone() for name, param in model.named_parameters()}
    return {
        name: (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone()
        for name, param in model.named_parameters()
    }


def trained(apis: list[str]) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for api in apis:
        for adam in (False, True):
            alone, net = (Net(with_real=api not in ("flat", "policy")) for _ in "ab")
            model = APIS[api](net)
            make: Any = optim.AdamW if adam else partial(optim.SGD, momentum=0.9)
            # Also where a parameter is 0-d, of which torch cannot view a DTensor as real numbers.
            fused = adam and api in ("wrapper", "replicate")
            own = partial(ShardedOptimizer, optim.AdamW) if fused else make
            expected = train(alone, make(alone.parameters(), lr=0.1), ranks, None)
            norms = train(model, own(model.parameters(), lr=0.1), ranks, rank)
            assert norms == pytest.approx(expected, rel=1e-9), api
            assert_close(whole(model), whole(alone), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("ranks", "apis"),
    [
        (2, ["fully_shard", "replicate", "wrapper", "flat", "no shard"]),
        (3, ["fully_shard", "policy", "wrapper", "flat"]),
        (4, ["hybrid"]),
    ],
)
def test_complex_parameters_are_trained_as_in_one_process(ranks, apis, world):
    world(ranks).run(trained, apis)


def saved(api: str, folder: str) -> None:
    """Files have single precision only."""
    models = []
    for seed in range(2):
        net = Net(with_real=False)
        for param in net.parameters():
            param.data = param.data.to(torch.complex64) * (seed + 1)
        model = APIS[api](net)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if seed == 0:
            model(torch.ones(2, 5)).backward()
            optimizer.step()
            checkpoint.save(folder, model, optimizer)
        else:
            checkpoint.load(folder, model, optimizer)
        models.append((model, optimizer))
    (first, trained_), (second, loaded) = models
    assert_equal(whole(second), whole(first))
    for before, after in zip(trained_.state.values(), loaded.state.values(), strict=True):
        for key, value in before.items():
            if value is not None:
                assert_equal(_local(after[key]), _local(value))


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("api", ["fully_shard", "wrapper"])
def test_complex_parameters_and_their_optimizer_state_are_saved(api, world, tmp_path: Path):
    world(2).run(saved, api, str(tmp_path / "step"))


def scaled() -> list[Any]:
    """Scaled gradients, unscaled; then one rank has an infinite one."""
    model: Any = fully_shard(Net())
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    scaler = ShardedGradScaler(device="cpu", init_scale=4.0)
    before = whole(model)
    scaler.scale(model(torch.ones(2, 5, dtype=torch.float64))).backward()
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model, math.inf).item()
    if dist.get_rank() == 0:
        model.matrix.grad.to_local()[0, 0] = complex(0.0, math.inf)
    scaler = ShardedGradScaler(device="cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert_equal(whole(model), before)
    return [norm]


def test_scaled_complex_gradients_are_unscaled_and_checked(world):
    alone = Net()
    alone(torch.ones(2, 5, dtype=torch.float64)).backward()
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), math.inf).item()
    for (norm,) in world(2).run(scaled):
        assert norm == pytest.approx(expected)
