"""ShardedTensors, torch's older class of tensors that are sharded over ranks. Importing the class takes time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class ShardedTensorParts:
    """The parts of a ShardedTensor, flat."""

    local: Tensor | None
    """This rank's part."""
    numels: list[int]
    """Elements of each rank of the group."""
    size: torch.Size
    dtype: torch.dtype
    group: ProcessGroup


def is_sharded_tensor(value: object) -> bool:
    """Whether a value is a ShardedTensor, torch's older class of sharded tensors."""
    return type(value).__name__ == "ShardedTensor"  # importing the class takes time


def sharded_tensor(whole: Tensor, shapes: Sequence[Sequence[int]], group: ProcessGroup) -> Any:
    """Make a ShardedTensor: rank r of the group has as many rows of ``whole`` as ``shapes[r]`` says.

    The last ranks may have none.
    """
    rows = [shape[0] if shape else 1 for shape in shapes]
    rank = group.rank()
    local = None
    if rank < len(shapes):
        local = whole.narrow(0, sum(rows[:rank]), rows[rank]) if whole.ndim else whole
        local = local.clone(memory_format=torch.contiguous_format)  # the class knows no other
    return _sharded_tensor(whole, local, shapes, whole.shape, group)


def local_sharded_tensor(piece: Tensor, numels: Sequence[int], group: ProcessGroup) -> Any:
    """Make a ShardedTensor of flat pieces that follow each other."""
    local = piece.detach() if piece.numel() else None
    shapes = [(numel,) for numel in numels if numel]
    return _sharded_tensor(piece, local, shapes, (sum(numels),), group)


def _sharded_tensor(
    like: Tensor,
    local: Tensor | None,
    shapes: Sequence[Sequence[int]],
    size: Sequence[int],
    group: ProcessGroup,
) -> Any:
    from torch.distributed._shard.sharded_tensor import (
        Shard as LocalShard,
        ShardedTensor,
        ShardedTensorMetadata,
        TensorProperties,
    )
    from torch.distributed._shard.sharding_spec import ShardMetadata

    parts, row = [], 0
    for rank, shape in zip(dist.get_process_group_ranks(group), shapes, strict=False):
        offsets = [row, *[0] * (len(size) - 1)] if size else []
        place = f"rank:{rank}/{like.device}"
        parts.append(ShardMetadata(offsets, list(shape), place))
        row += shape[0] if shape else 1
    properties = TensorProperties(dtype=like.dtype)
    metadata = ShardedTensorMetadata(parts, torch.Size(size), properties)
    shards = [] if local is None else [LocalShard(local, parts[group.rank()])]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=group
    )


def parts_of_sharded_tensor(value: Any) -> ShardedTensorParts:
    """Return the parts of a ShardedTensor that is sharded by rows."""
    group = value._process_group
    numels = dict.fromkeys(dist.get_process_group_ranks(group), 0)
    metadata = value.metadata()  # asking the tensor itself warns
    for part in metadata.shards_metadata:
        numels[part.placement.rank()] += math.prod(part.shard_sizes)
    shards = value.local_shards()
    return ShardedTensorParts(
        shards[0].tensor if shards else None,
        list(numels.values()),
        metadata.size,
        metadata.tensor_properties.dtype,
        group,
    )
