"""Models wrapped by torch's FullyShardedDataParallel or by ours, in the same words, to be compared."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers.training import FULLSHARD, TORCH

LIBRARIES = (TORCH, FULLSHARD)


class Layer(nn.Module):
    """A layer with rows that no world size divides, and all kinds of buffers."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 7)
        self.back = nn.Linear(7, width, bias=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.register_buffer("cache", torch.full((width,), 0.1), persistent=False)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(F.gelu(self.linear(x))) * self.scale + self.cache


class Net(nn.Module):
    """Tied parameters (embedding and head), a module with two names, a layer of its own for wrapping."""

    def __init__(self, width: int = 5, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.first = Layer(width)
        self.second = Layer(width)
        self.norm = nn.LayerNorm(width)
        self.alias = self.norm
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.second(self.first(self.embed(tokens)))
        logits: Tensor = self.head(self.alias(x))
        return logits


def make_net(seed: int = 0, **kwargs: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**kwargs)


TOKENS = torch.arange(6).view(2, 3)


def library(api: str) -> Any:
    """Where the names are: `torch.distributed.fsdp` or `fullshard`."""
    return importlib.import_module("torch.distributed.fsdp" if api == TORCH else "fullshard")


def policy(api: str, *classes: type[nn.Module]) -> Any:
    name = "torch.distributed.fsdp.wrap" if api == TORCH else "fullshard.wrap"
    return importlib.import_module(name).ModuleWrapPolicy(set(classes))


def wrap(
    api: str,
    module: nn.Module,
    *,
    strategy: str = "FULL_SHARD",
    mesh: tuple[int, ...] | None = None,
    precision: dict[str, Any] | None = None,
    layers: bool = True,
    **kwargs: Any,
) -> Any:
    """A wrapper of ``module``, on the CPU; each `Layer` below gets one of its own, too."""
    found = library(api)
    if mesh is not None:
        names = ("replicate", "shard") if len(mesh) == 2 else ("shard",)
        kwargs["device_mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    if precision is not None:
        kwargs["mixed_precision"] = found.MixedPrecision(**precision)
    if layers:
        kwargs["auto_wrap_policy"] = policy(api, Layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's NO_SHARD is deprecated, and says so
        return found.FullyShardedDataParallel(
            module,
            sharding_strategy=found.ShardingStrategy[strategy],
            device_id=torch.device("cpu"),
            **kwargs,
        )


def state_dict_type(api: str, model: nn.Module, kind: str, **config: Any) -> Any:
    """The context of state dicts of one kind: FULL, SHARDED or LOCAL."""
    found = library(api)
    cls = getattr(found, f"{kind.capitalize()}StateDictConfig")
    return found.FullyShardedDataParallel.state_dict_type(
        model, found.StateDictType[f"{kind}_STATE_DICT"], cls(**config)
    )


def state_dict(api: str, model: nn.Module, kind: str, **config: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with state_dict_type(api, model, kind, **config):
            return model.state_dict()


def described(value: Any) -> Any:
    """What of a state dict's value can be compared: kind, places and values, on this rank."""
    if type(value).__name__ == "ShardedTensor":
        places = [
            (part.shard_offsets, part.shard_sizes, str(part.placement))
            for part in value.metadata().shards_metadata
        ]
        locals_ = [shard.tensor.tolist() for shard in value.local_shards()]
        return ("ShardedTensor", tuple(value.size()), value.dtype, places, locals_)
    if type(value).__name__ == "DTensor":
        mesh = value.device_mesh.mesh.tolist()
        local = value.to_local()
        return (
            "DTensor",
            tuple(value.shape),
            value.dtype,
            value.placements,
            mesh,
            tuple(local.shape),
            local.tolist(),
        )
    return (
        type(value).__name__,
        tuple(value.shape),
        value.dtype,
        str(value.device),
        value.requires_grad,
        value.tolist(),
    )
