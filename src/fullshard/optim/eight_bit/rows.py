"""Blocks of a whole tensor that a rank holds: as rows of its memory, and as fragments.

Blocks are laid out on the whole tensor, as it is stored: block n has its elements ``n * size`` to ``(n + 1) * size``. So they do
not depend on the number of ranks. What a rank holds is one run of elements, or several of the same length:

    Shard(0), flat cuts      one run           | frag |   block   |   block   | fr |
    Shard(1)                 one for each row  | frag | fr |  | frag | fr |  | frag | fr |

    rows        whole blocks that follow each other in memory, so a view with one row for each
    fragments   parts of blocks, and blocks between such parts. They are copied to be computed with

Other ranks may have elements of the same block: it is **shared**. The ranks must find its scale together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fullshard.layout.blocks import row_major_strides
from fullshard.layout.sharding import Sharding


@dataclass(frozen=True, slots=True, eq=False)
class CellBlocks:
    """The blocks of one cell. Elements are counted from the first one of the cell."""

    row_start: int
    """The first element that is in a row."""
    row_blocks: Tensor
    """The block of each row."""
    starts: Tensor
    """The first element of each fragment."""
    lengths: Tensor
    firsts: Tensor
    """The same element's index in the whole tensor."""

    def all_starts(self, size: int) -> Tensor:
        """Return the first elements of rows and of fragments."""
        return torch.cat([self.starts, self._row_starts(size)])

    def _row_starts(self, size: int) -> Tensor:
        return self.row_start + torch.arange(len(self.row_blocks)) * size

    def between(self, begin: int, end: int, size: int) -> CellBlocks:
        """Return the rows and fragments that begin within a range of elements."""
        starts = self._row_starts(size)
        rows = (starts >= begin) & (starts < end)
        held = (self.starts >= begin) & (self.starts < end)
        return CellBlocks(
            row_start=int(starts[rows][0]) if bool(rows.any()) else 0,
            row_blocks=self.row_blocks[rows],
            starts=self.starts[held],
            lengths=self.lengths[held],
            firsts=self.firsts[held],
        )


def blocks_of_cell(sharding: Sharding, cell: int | None, size: int) -> CellBlocks:
    """Return the blocks of ``size`` elements that a cell has elements of; None for no cell."""
    firsts, length = _runs(sharding, cell)
    # For each run, all blocks that it may have elements of.
    count = -(-length // size) + 1 if length else 0
    blocks = firsts[:, None] // size + torch.arange(count)
    begins = torch.maximum(blocks * size, firsts[:, None])
    lengths = torch.minimum((blocks + 1) * size, firsts[:, None] + length) - begins
    starts = begins - firsts[:, None] + torch.arange(len(firsts))[:, None] * length
    held = lengths > 0
    blocks, begins, lengths, starts = (each[held] for each in (blocks, begins, lengths, starts))
    is_row = lengths == size
    if len(firsts) > 1 and not bool(is_row.all()):
        is_row = torch.zeros_like(is_row)  # rows would not follow each other
    rest = ~is_row
    return CellBlocks(
        row_start=int(starts[is_row][0]) if bool(is_row.any()) else 0,
        row_blocks=blocks[is_row],
        starts=starts[rest],
        lengths=lengths[rest],
        firsts=begins[rest],
    )


def _runs(sharding: Sharding, cell: int | None) -> tuple[Tensor, int]:
    """Return the runs of elements of a cell: the index of each first one in the whole tensor, and their length."""
    extent = None if cell is None else sharding.extent(cell)
    if extent is None or not extent.numel:
        return torch.zeros(0, dtype=torch.int64), 0
    if sharding.flat:
        return torch.tensor([extent.start[0]]), extent.numel
    strides = row_major_strides(sharding.shape)
    split, length = len(extent.shape), 1
    while split and strides[split - 1] == length:
        split -= 1
        length *= extent.shape[split]
        if extent.shape[split] < sharding.shape[split]:
            break
    firsts = torch.tensor([sum(s * n for s, n in zip(extent.start, strides, strict=True))])
    for dim in range(split):
        steps = torch.arange(extent.shape[dim]) * strides[dim]
        firsts = (firsts[:, None] + steps).flatten()
    return firsts, length


def shared_blocks(sharding: Sharding, size: int) -> Tensor:
    """Return the blocks that several cells have elements of, in order. Every rank finds the same."""
    cuts = [_cuts(sharding, dim) for dim in range(len(sharding.cuts))]
    found = torch.cat([torch.zeros(0, dtype=torch.int64), *cuts])
    numel = math.prod(sharding.shape)
    inside = (found > 0) & (found < numel) & (found % size != 0)
    blocks: Tensor = torch.unique(found[inside] // size)
    return blocks


def _cuts(sharding: Sharding, dim: int) -> Tensor:
    """Return the elements at which cells begin along a dimension."""
    if len(sharding.cuts[dim]) < 2 or not math.prod(sharding.shape):
        return torch.zeros(0, dtype=torch.int64)
    cuts = torch.tensor(list(sharding.cuts[dim]))
    if sharding.flat:
        return cuts
    cuts = cuts[(cuts >= 0) & (cuts < sharding.shape[dim])]
    before, stride = (
        math.prod(sharding.shape[:dim]),
        row_major_strides(sharding.shape)[dim],
    )
    outer = torch.arange(before) * (stride * sharding.shape[dim])
    return (outer[:, None] + cuts * stride).flatten()
