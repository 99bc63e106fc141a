"""Groups of parameters made directly, without `fully_shard` or the wrapper."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard.engine.param_group import FSDPParamGroup
from fullshard.layout.placement import DTensorPlacer, ParamPlacement
from fullshard.mesh.axes import sharding_mesh_info
from fullshard.policies import MixedPrecisionPolicy, OffloadPolicy
from fullshard.storage.param import FSDPParam
from fullshard.storage.shard_formats import FlatFormat, FlatParameterFormat, RowFormat, ShardFormat
from fullshard.storage.sharded_params import ParamModuleInfo

FORMATS: dict[str, Callable[[nn.Module], ShardFormat]] = {
    "rows": lambda module: RowFormat(),
    "flat": lambda module: FlatFormat(alignment=1),
    "flat parameter": lambda module: FlatParameterFormat(ParamModuleInfo(module, "_flat_param")),
}
"""Shard formats by name, made for a module."""


def make_group(
    module: nn.Module,
    *,
    shard_format: str = "rows",
    dims: dict[str, int] | None = None,
    param_dtype: torch.dtype | None = None,
    post_forward_size: int | None = None,
) -> FSDPParamGroup:
    """One group of all parameters of a module over the default process group, on the CPU.

    ``dims`` has dimensions to shard rows along, by names of parameters; 0 for all others. A parameter that several
    modules share is one parameter with several owners.
    """
    mesh_info = sharding_mesh_info(init_device_mesh("cpu", (dist.get_world_size(),)))
    owners: dict[nn.Parameter, list[tuple[str, ParamModuleInfo]]] = {}
    for path, owner in module.named_modules():
        for name, param in owner.named_parameters(recurse=False):
            full_name = f"{path}.{name}" if path else name
            owners.setdefault(param, []).append((full_name, ParamModuleInfo(owner, name)))
    placer, params = DTensorPlacer(), []
    for param, found in owners.items():
        full_name, dim = found[0][0], (dims or {}).get(found[0][0], 0)
        placement = ParamPlacement(shape=tuple(param.shape))
        if shard_format == "rows":
            placement = placer.place(param, dim, mesh_info)
        params.append(FSDPParam(full_name, [info for _, info in found], param, placement, dim))
    return FSDPParamGroup(
        params,
        mesh_info,
        torch.device("cpu"),
        MixedPrecisionPolicy(param_dtype=param_dtype),
        OffloadPolicy(),
        "group",
        shard_format=FORMATS[shard_format](module),
        post_forward_size=post_forward_size,
    )
