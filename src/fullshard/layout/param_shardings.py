"""The shardings of DTensors, from mesh and placements, and of flat-sharded parameters, from a group's layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from fullshard import torch_border
from fullshard.layout.blocks import Block
from fullshard.layout.segments import Layout, chunk_size
from fullshard.layout.sharding import Cuts, Sharding


def dtensor_sharding(
    shape: Sequence[int], placements: Sequence[Placement], mesh: DeviceMesh
) -> Sharding:
    """Return the sharding of a DTensor without partial placements.

    Axes that cut the same dimension cut one after the other, in the order of the mesh. An axis that torch calls strided
    comes after the axes that have cut before it (see `placement`).
    """
    replicating = [
        axis
        for axis, placement in enumerate(placements)
        if torch_border.sharded_dim(placement) is None
    ]
    cutting: list[list[int]] = [[] for _ in shape]
    for axis, placement in enumerate(placements):
        dim = torch_border.sharded_dim(placement)
        if dim is not None:
            cutting[dim].append(axis)
    for axes in cutting:
        axes.sort(key=lambda axis: torch_border.split_factor(placements[axis]))
    parts = [[mesh.size(axis) for axis in axes] for axes in cutting]
    cuts = tuple(_cuts(size, each) for size, each in zip(shape, parts, strict=True))
    ranks = mesh.mesh.permute(*replicating, *itertools.chain(*cutting))
    ranks = ranks.reshape(-1, *map(math.prod, parts))
    for dim, each in enumerate(cuts):
        ranks = ranks.narrow(dim + 1, 0, len(each))  # the others hold nothing
    holders = ranks.reshape(len(ranks), math.prod(map(len, cuts))).tolist()
    return Sharding(shape=tuple(shape), cuts=cuts, holders=tuple(map(tuple, holders)))


def _cuts(size: int, parts: Sequence[int]) -> Cuts:
    """Return the cuts of a dimension that is divided into ``parts[0]``, each of these into ``parts[1]``, and so on."""
    if not parts or not size:
        return (0,)
    if len(parts) == 1:
        return range(0, size, chunk_size(size, parts[0]))
    spans = [(0, size)]
    for count in parts:
        spans = [
            (min(begin + index * chunk, end), min(begin + (index + 1) * chunk, end))
            for begin, end in spans
            for chunk in [chunk_size(end - begin, count)]
            for index in range(count)
        ]
    starts = tuple(begin for begin, _ in spans)
    regular = range(0, size, max(spans[0][1], 1))
    return regular if tuple(regular) == starts else starts


def flat_sharding(layout: Layout, param: int, holders: tuple[tuple[int, ...], ...]) -> Sharding:
    """Return the sharding of a flat-sharded parameter: rank r of ``layout`` holds cell r."""
    slot = layout.slots[param]
    piece_numel = layout.segments[slot.segment].piece_numel
    order = tuple(sorted(range(len(slot.shape)), key=lambda dim: (-slot.strides[dim], dim)))
    return Sharding(
        shape=tuple(slot.shape[dim] for dim in order),
        order=None if order == tuple(range(len(order))) else order,
        flat=True,
        cuts=(range(-slot.start, slot.numel, piece_numel) if slot.numel else (0,),),
        holders=holders,
    )


def in_model_order(sharding: Sharding, block: Block) -> Block:
    """Return the block of the model's tensor that a block of the stored tensor is."""
    if sharding.order is None:
        return block
    dims = inverse(sharding.order)
    return Block(tuple(block.start[dim] for dim in dims), tuple(block.shape[dim] for dim in dims))


def parts_of_cell(sharding: Sharding, cell: int, local: Tensor) -> Iterator[tuple[Block, Tensor]]:
    """Yield the blocks of the model's tensor that make up a cell, each with its view of ``local``, the cell's elements."""
    for block, offset in sharding.blocks(cell):
        view = local
        if sharding.flat:
            view = view.narrow(0, offset, block.numel).view(block.shape)
        if sharding.order is not None:
            view = view.permute(inverse(sharding.order))
        yield in_model_order(sharding, block), view


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """Return the index of each of the model's dimensions in ``order``."""
    return tuple(sorted(range(len(order)), key=lambda dim: order[dim]))
