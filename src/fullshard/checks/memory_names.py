"""Names of memory by purpose: shards, gather buffers, reduce buffers and gradients of the groups of this process."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from fullshard import torch_border
from fullshard.engine import known_groups
from fullshard.engine.param_group import FSDPParamGroup


def named_storages() -> Iterator[tuple[int, str]]:
    """Yield the storages of all groups, as `torch_border.id_of_storage` numbers them, each with what it holds."""
    for group in known_groups.living_groups():
        for storage, name in _storages_of(group):
            yield torch_border.id_of_storage(storage), name


def _storages_of(group: FSDPParamGroup) -> Iterator[tuple[UntypedStorage, str]]:
    name = group.name or "the root"
    route = group.routes.from_shards
    if route is not None and route.codec.full is not None:
        yield route.codec.full.storage, f"the gather buffer of {name}"
    for buffer in group.reduction.buffers():
        yield buffer.storage, f"the reduce buffer of {name}"
    for each in group.sharded_params:
        yield _storage_of(each.param), f"the shards of {name}"
        if each.param.grad is not None:
            yield _storage_of(each.param.grad), f"the gradients of {name}"


def _storage_of(tensor: Tensor) -> UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
