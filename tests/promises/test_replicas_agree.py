"""Ranks that hold copies of the same parameter hold the same bits, whatever is summed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard import MixedPrecisionPolicy, fully_shard, replicate
from fullshard.engine.state import state_of
from fullshard.transport import comm_objects
from tests.helpers.compare import assert_close
from tests.helpers.training import FULLSHARD, ShardOptimizer, gradients
from tests.helpers.wrapping import CPU, library

SCALARS, STEPS = 6, 2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Scales(nn.Module):
    """Parameters whose gradients are given: scalars between others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(5, 3))
        self.scales = nn.ParameterList(torch.ones(()) for _ in range(SCALARS))
        self.last = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        scales = torch.stack(list(self.scales))
        vector = torch.cat([self.first.flatten(), self.last, scales])
        return (vector * x.to(vector.dtype)).sum()


def gradient(step: int, rank: int, limit: float) -> Tensor:
    """One that loses bits in another order: much, little and much less, by rank and element."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    numbers = torch.rand(15 + SCALARS + 7, generator=generator)
    sizes = torch.tensor([limit, 1.0, -limit, 1e-3])[
        (torch.arange(len(numbers)) + rank) % min(4, dist.get_world_size())
    ]
    return sizes * (1 + numbers)


def sharded(**options: Any) -> Any:
    return fully_shard(Scales(), **options)


def with_replicas(replicas: int) -> Any:
    shape = (replicas, dist.get_world_size() // replicas)
    return sharded(mesh=init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")))


def with_a_policy(**dtypes: Any) -> Any:
    return sharded(mp_policy=MixedPrecisionPolicy(**dtypes))


def with_a_comm_object() -> Any:
    model = sharded()
    model.set_custom_reduce_scatter(comm_objects.DefaultReduceScatter())
    return model


def wrapped() -> Any:
    lib = library(FULLSHARD)
    strategy = lib.ShardingStrategy.NO_SHARD
    return lib.FSDP(Scales(), sharding_strategy=strategy, device_id=CPU, use_orig_params=True)


def segments_apart() -> Any:
    """Messages that lie as on accelerators."""
    model = sharded()
    reduction: Any = state_of(model).groups[0].reduction
    reduction._new_buffer = functools.partial(reduce_buffer_of_an_accelerator, reduction)
    return model


def reduce_buffer_of_an_accelerator(reduction: Any, *args: Any) -> Any:
    reduction._device = torch.device("meta")
    try:
        return type(reduction)._new_buffer(reduction, *args)
    finally:
        reduction._device = CPU


MODELS: dict[str, Callable[[], Any]] = {
    "shards": sharded,
    "segments apart": segments_apart,
    "fp32 sums of bf16": lambda: with_a_policy(reduce_dtype=FP32, wire_dtype=BF16),
    "bf16": lambda: with_a_policy(param_dtype=BF16),
    "fp16": lambda: with_a_policy(param_dtype=FP32, reduce_dtype=FP16),
    "a comm object": with_a_comm_object,
    "replicas": lambda: replicate(Scales()),
    "nothing sharded": wrapped,
    "2 replicas": lambda: with_replicas(2),
    "all replicas of one": lambda: with_replicas(dist.get_world_size()),
}


def copies_are_equal(name: str) -> None:
    limit = 1e3 if name == "fp16" else 1e8
    model = MODELS[name]()
    optimizer = ShardOptimizer("SGD", list(model.parameters()), lr=1e-3)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(STEPS):
        for micro in range(2):
            if name == "2 replicas":
                model.set_requires_all_reduce(micro == 1)
            model(gradient(2 * step + micro, rank, limit)).backward()
        total = torch.zeros(15 + SCALARS + 7, dtype=torch.float64)
        for number in (2 * step, 2 * step + 1):
            total += sum(gradient(number, each, limit).double() for each in range(ranks)) / ranks
        found = torch.cat([each.flatten().double() for each in gradients(model).values()])
        precision = {"bf16": 2e-2, "fp32 sums of bf16": 2e-2, "fp16": 2e-3}.get(name, 1e-6)
        assert_close(found, torch.cat([total]), rtol=precision, atol=limit * precision)
        optimizer.step()
        optimizer.zero_grad()
        for local, held in zip(of_all_ranks(model), held_alike(model), strict=True):
            for others in held:
                for other in others:
                    assert torch.equal(local[other], local[others[0]]), (name, step, others)


def of_all_ranks(model: Any) -> list[list[Tensor]]:
    """Per parameter, what each rank holds of it."""
    locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, [local.detach() for local in locals_])
    return list(map(list, zip(*everybody, strict=True)))


def held_alike(model: Any) -> list[list[list[int]]]:
    """Per parameter, which ranks hold the same of it."""
    everybody = list(range(dist.get_world_size()))
    result = []
    for param in model.parameters():
        if not isinstance(param, DTensor) or not param.ndim:
            result.append([everybody])
        elif param.device_mesh.ndim == 2:
            result.append(param.device_mesh.mesh.t().tolist())
        elif param.placements[0].is_replicate():
            result.append([everybody])
        else:
            result.append([[each] for each in everybody])
    return result


def all_copies_are_equal(names: list[str]) -> None:
    for name in names:
        copies_are_equal(name)


def test_copies_are_equal_to_the_last_bit(world) -> None:
    world(3).run(all_copies_are_equal, [name for name in MODELS if name != "2 replicas"])
    world(4).run(all_copies_are_equal, ["shards", "replicas", "2 replicas"])
