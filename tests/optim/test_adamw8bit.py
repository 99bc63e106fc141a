"""`AdamW8bit` has the same bits of state on every mesh, and AdamW's state in checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.optim import AdamW8bit
from fullshard.wrap import ModuleWrapPolicy

STEPS = 3
SIZE = 16
"""Of blocks."""


class Part(nn.Module):
    """A matrix whose rows are no multiple of blocks, one with less rows than ranks, and fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(7, 11))
        self.stack = nn.Parameter(torch.randn(3, 5, 4))
        self.narrow = nn.Parameter(torch.randn(2, 9))
        self.one = nn.Parameter(torch.randn(1))

    def forward(self, step: int) -> Tensor:
        return product(self, ("wide", "stack", "narrow", "one"), step)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Part()
        self.second = Part()
        self.rows = nn.Parameter(torch.randn(6, 32))  # two blocks each
        self.up = nn.Linear(5, 12)
        self.down = nn.Linear(12, 5)

    def forward(self, step: int) -> Tensor:
        linears = sum(product(each, ("weight", "bias"), step) for each in (self.up, self.down))
        return self.first(step) + self.second(step) + product(self, ("rows",), step) + linears


def product(module: Any, names: tuple[str, ...], step: int) -> Tensor:
    """Return a loss whose gradients are `gradient_of`. The wrapper's flat parameters leave no parameters on modules."""
    tensors = {name: getattr(module, name) for name in names}
    return sum((t * gradient_of(name, t.shape, step)).sum() for name, t in tensors.items())


def gradient_of(name: str, shape: Any, step: int) -> Tensor:
    """Return values with few bits, so that averages over ranks are exact."""
    seed = torch.Generator().manual_seed(1000 * step + len(name))
    values = (
        torch.randn(tuple(shape), generator=seed) * torch.randn(tuple(shape), generator=seed).exp()
    )
    return values.bfloat16().float()


def along_the_last_dimension(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


def sharded(kind: str) -> nn.Module:
    model: Any = Model()
    if kind == "plain":
        return model
    if kind.endswith("wrapper"):
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Part}),
            device_id=torch.device("cpu"),
            use_orig_params=kind == "wrapper",
        )
    mesh, placement = None, None
    if kind == "replicas":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    elif kind == "tensor parallel":
        axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh = axes["dp"]
        parallelize_module(model, axes["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    elif kind == "last dimension":
        placement = along_the_last_dimension
    for part in (model.first, model.second):
        fully_shard(part, mesh=mesh, shard_placement_fn=placement)
    return fully_shard(model, mesh=mesh, shard_placement_fn=placement)


def set_gradients(model: nn.Module, step: int) -> None:
    if isinstance(model, FullyShardedDataParallel):
        model.zero_grad()
        model(step).backward()
        return
    for name, param in model.named_parameters():
        value = gradient_of(name.rpartition(".")[2], param.shape, step)
        if isinstance(param, DTensor):
            whole = (Replicate(),) * param.device_mesh.ndim
            value = DTensor.from_local(value, param.device_mesh, whole, run_check=False)
            value = value.redistribute(placements=param.placements)
        param.grad = value


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Any) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()


def full(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Return parameters and averages."""
    if isinstance(model, FullyShardedDataParallel):
        states = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)
        found = {f"{n}.{k}": v for n, s in states["state"].items() for k, v in s.items()}
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            found |= {
                name.replace("_fsdp_wrapped_module.", ""): param.detach().clone()
                for name, param in model.named_parameters()
            }
        return found
    found = dict(model.named_parameters())
    for name, param in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[param].items()}
    return {
        n: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone()
        for n, v in found.items()
    }


def trained(kind: str, steps: int = STEPS) -> dict[str, Tensor]:
    model = sharded(kind)
    optimizer = AdamW8bit(model.parameters(), lr=0.02, weight_decay=0.1, block_size=SIZE)
    train(model, optimizer, range(steps))
    return full(model, optimizer)


def different(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def several(*kinds: str) -> dict[str, dict[str, Tensor]]:
    return {kind: trained(kind) for kind in kinds}


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [
        (1, ("wrapper", "shards")),
        (2, ("wrapper", "shards")),
        (3, ("wrapper", "flat wrapper", "shards", "last dimension")),
        (4, ("wrapper", "shards", "last dimension", "replicas", "tensor parallel")),
    ],
    ids=str,
)
def test_every_mesh_has_the_same_bits(world, ranks: int, kinds: tuple[str, ...]) -> None:
    expected = trained("plain")
    for of_rank in world(ranks).run(several, *kinds):
        for kind, found in of_rank.items():
            assert different(found, expected) == [], kind
