"""The entries of SHARDED_STATE_DICT: DTensors or ShardedTensors, cut into rows.

DTensor         if the wrapper has a device mesh
ShardedTensor   if it has process groups
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard import torch_border
from fullshard.fsdp1.wrapper_base import WrapperBase
from fullshard.layout.placement import ParamPlacement
from fullshard.transport import collectives
from fullshard.transport.tags import tag

_FULL_TENSOR = tag("all-gather of an entry of a sharded state dict")


def shard_rows(
    wrapper: WrapperBase,
    full: Tensor,
    placement_before: ParamPlacement | None = None,
    *,
    as_dtensor: bool,
) -> Any:
    """Return a DTensor or ShardedTensor whose local tensor is this rank's rows of a full tensor.

    A DTensor of tensor parallelism, or the state of one, is divided further along its other axes.
    """
    full = full.detach()
    axes = wrapper._fsdp_state.groups[0].mesh_info
    group = axes.shard_process_group
    assert group is not None, "only sharded wrappers have sharded tensors"
    if placement_before is not None and placement_before.parallel:
        local = placement_before.local_part(full)
        return placement_before.rows(local, group.rank(), group.size())
    if as_dtensor:
        mesh = wrapper._device_mesh
        assert mesh is not None, "settings ask for DTensors only if there is a mesh"
        placement = Shard(0) if full.ndim else Replicate()
        placements = (*[Replicate()] * (mesh.ndim - 1), placement)
        chunks = full.chunk(group.size()) if full.ndim else (full,) * group.size()
        rank = group.rank()
        local = chunks[rank] if rank < len(chunks) else full[:0]
        made = DTensor.from_local(
            local.clone(memory_format=torch.contiguous_format),
            mesh,
            placements,
            run_check=False,
            shape=full.shape,
            stride=full.contiguous().stride(),
        )
        return made if made.device == full.device else made.to(full.device)  # offloaded
    parts = full.chunk(group.size()) if full.ndim else (full,)
    return torch_border.sharded_tensor(full, [part.shape for part in parts], group)


def is_sharded(value: object) -> bool:
    """Return whether a value is a tensor of which every rank has a shard."""
    return isinstance(value, DTensor) or torch_border.is_sharded_tensor(value)


def unshard_rows(value: Any, device: torch.device) -> Any:
    """Return the full tensor of a DTensor or ShardedTensor, and any other value as it is. Collective."""
    if isinstance(value, DTensor):
        if value.device.type != device.type:
            value = value.to(device)
        return collectives.whole_of_dtensor(value, _FULL_TENSOR)
    if torch_border.is_sharded_tensor(value):
        return _full_sharded_tensor(value, device)
    return value


def _full_sharded_tensor(value: Any, device: torch.device) -> Tensor:
    parts = torch_border.parts_of_sharded_tensor(value)
    largest = max(parts.numels)
    own = torch.zeros(largest, dtype=parts.dtype, device=device)
    if largest == 0:
        return own.view(parts.size)
    if parts.local is not None:
        own[: parts.local.numel()] = parts.local.reshape(-1)
    gathered = own.new_empty(largest * len(parts.numels))
    collectives.all_gather(
        [gathered.view(torch.uint8)],
        [own.view(torch.uint8)],
        parts.group,
        _FULL_TENSOR,
        async_op=False,
    )
    rows = gathered.view(-1, largest)
    flat = torch.cat([row[:numel] for row, numel in zip(rows, parts.numels, strict=True)])
    return flat.view(parts.size)
