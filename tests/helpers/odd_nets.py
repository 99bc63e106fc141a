"""A small model with everything that a checkpoint may meet, sharded in all ways that there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

import fullshard
from fullshard import FullyShardedDataParallel, ShardingStrategy, fully_shard, replicate
from fullshard.wrap import ModuleWrapPolicy


class Middle(nn.Module):
    """Uneven rows, a 0-d parameter, one without elements, all kinds of buffers, and a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("shift", torch.linspace(0.5, 1.5, 5))
        self.register_buffer("cache", torch.ones(5), persistent=False)
        self.register_buffer("count", torch.tensor(3))
        self.seen: Any = {"words": ["a", (1, 2.5)]}

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(x))) + self.shift + self.nothing.sum()

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class OddNet(nn.Module):
    """A convolution in another memory format, tied parameters, a module with two names, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels = nn.Conv2d(3, 5, 2)
        self.pixels.weight.data = self.pixels.weight.data.to(memory_format=torch.channels_last)
        self.middle = Middle()
        self.norm = nn.LayerNorm(5)
        self.alias = self.norm
        self.head = nn.Linear(5, 5, bias=False)
        self.tail = nn.Linear(5, 5)
        self.tail.weight = self.head.weight
        self.norm.bias.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pixels(images).flatten(2).mean(2)
        result: Tensor = self.tail(self.head(self.alias(self.middle(x))))
        return result


def make_odd_net(seed: int = 0) -> OddNet:
    torch.manual_seed(seed)
    net = OddNet()
    for param in net.parameters():
        nn.init.normal_(param)
    net.middle.shift.add_(seed)
    net.middle.seen = {"words": ["a", (1, 2.5)], "seed": seed}
    return net


def odd_loss(net: nn.Module, step: int) -> Tensor:
    """Of the same images on every rank, so that ranks that share nothing stay alike."""
    images = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(step))
    result: Tensor = net(images).square().mean()
    return result


def train_odd_net(net: nn.Module, optimizer: Optimizer, steps: int = 2, first: int = 0) -> None:
    for step in range(first, first + steps):
        if any(isinstance(p, DTensor) and p.device_mesh.ndim > 1 for p in net.parameters()):
            for param in net.parameters():  # other parallelism needs another forward
                param.grad = param.detach() * (step + 1)
        else:
            odd_loss(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def _fully_sharded(net: OddNet, **options: Any) -> nn.Module:
    fully_shard(net.middle, **options)
    return fully_shard(net, **options)


def _replicated(net: OddNet) -> nn.Module:
    replicate(net.middle)
    return replicate(net)


def _along_last_dim(net: OddNet) -> nn.Module:
    return _fully_sharded(net, shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.ndim else None)


def _hsdp(net: OddNet) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return _fully_sharded(net, mesh=mesh)


def _with_tensor_parallelism(net: OddNet) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for linear, dim in ((net.middle.up, 0), (net.middle.down, 1), (net.tail, 0)):
        spread = distribute_tensor(linear.weight.data, mesh["tp"], [Shard(dim)])
        linear.weight = nn.Parameter(spread)
    net.head.weight = net.tail.weight
    scale = distribute_tensor(net.middle.scale.data, mesh["tp"], [Replicate()])
    net.middle.scale = nn.Parameter(scale)
    return _fully_sharded(net, mesh=mesh["dp"])


def wrapped_odd_net(net: OddNet, **options: Any) -> Any:
    return FullyShardedDataParallel(
        net,
        auto_wrap_policy=ModuleWrapPolicy({Middle}),
        device_id=torch.device("cpu"),
        ignored_states=[net.pixels.bias],
        **{"use_orig_params": True, **options},
    )


def _hybrid(net: OddNet, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    strategy = ShardingStrategy.HYBRID_SHARD
    return wrapped_odd_net(net, device_mesh=mesh, sharding_strategy=strategy, **options)


def _hybrid_of_groups(net: OddNet) -> nn.Module:
    group = fullshard.mesh.axes.default_group()
    shard = fullshard.mesh.axes.block_group(group, 2)
    across = fullshard.mesh.axes._companion(group, "stride", 2)
    strategy = ShardingStrategy.HYBRID_SHARD
    return wrapped_odd_net(net, process_group=(shard, across), sharding_strategy=strategy)


APIS: dict[str, Callable[[OddNet], nn.Module]] = {
    "none": lambda net: net,
    "fully_shard": _fully_sharded,
    "last dim": _along_last_dim,
    "replicate": _replicated,
    "wrapper": wrapped_odd_net,
    "flat wrapper": lambda net: wrapped_odd_net(_without_frozen(net), use_orig_params=False),
    "no_shard": lambda net: wrapped_odd_net(net, sharding_strategy=ShardingStrategy.NO_SHARD),
    "flat no_shard": lambda net: wrapped_odd_net(
        _without_frozen(net),
        use_orig_params=False,
        sharding_strategy=ShardingStrategy.NO_SHARD,
    ),
}
"""For any number of ranks."""

APIS_OF_FOUR: dict[str, Callable[[OddNet], nn.Module]] = {
    "hsdp": _hsdp,
    "tensor parallel": _with_tensor_parallelism,
    "hybrid": _hybrid,
    "hybrid of groups": _hybrid_of_groups,
    "flat hybrid": lambda net: _hybrid(_without_frozen(net), use_orig_params=False),
}


def _without_frozen(net: OddNet) -> OddNet:
    """A FlatParameter is frozen as a whole or not at all."""
    return net.requires_grad_(True)


def odd_net_behind(api: str, seed: int = 0, *, frozen: bool = True) -> nn.Module:
    net = make_odd_net(seed)
    return {**APIS, **APIS_OF_FOUR}[api](net if frozen else _without_frozen(net))
