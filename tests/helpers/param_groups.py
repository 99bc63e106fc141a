"""Groups of parameters made directly, without `fully_shard` or the wrapper."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard.engine.param_group import FSDPParamGroup
from fullshard.plan.mesh import sharding_mesh_info
from fullshard.plan.placement import DTensorPlacer
from fullshard.plan.policies import MixedPrecisionPolicy, OffloadPolicy
from fullshard.storage.param import FSDPParam
from fullshard.storage.shard_formats import RowFormat
from fullshard.storage.sharded_params import ParamModuleInfo


def make_group(
    module: nn.Module,
    *,
    dims: dict[str, int] | None = None,
    param_dtype: torch.dtype | None = None,
    post_forward_size: int | None = None,
) -> FSDPParamGroup:
    """One group of all parameters of a module, as DTensors over the default process group, on the CPU.

    ``dims`` has dimensions to shard along, by names of parameters; 0 for all others.
    """
    mesh_info = sharding_mesh_info(init_device_mesh("cpu", (dist.get_world_size(),)))
    placer, params = DTensorPlacer(), []
    for path, owner in module.named_modules():
        for name, param in owner.named_parameters(recurse=False):
            full_name = f"{path}.{name}" if path else name
            dim = (dims or {}).get(full_name, 0)
            placement = placer.place(param, dim, mesh_info)
            infos = [ParamModuleInfo(owner, name)]
            params.append(FSDPParam(full_name, infos, param, placement, dim))
    return FSDPParamGroup(
        params,
        mesh_info,
        torch.device("cpu"),
        MixedPrecisionPolicy(param_dtype=param_dtype),
        OffloadPolicy(),
        "group",
        shard_format=RowFormat(),
        post_forward_size=post_forward_size,
    )
