"""Sharding of a tensor over ranks, as arithmetic: which rank holds which part.

A tensor is cut along its dimensions into a grid of **cells**, numbered row-major; each cell is a block. Or it
is cut as one range of elements, and a cell is a part of that range:

    Shard(0) over 2 ranks, 5 rows      cuts: (range(0, 5, 3), (0,))      cells: rows 0 to 3, rows 3 to 5
    flat, in a segment with shards     cuts: (range(-4, 12, 8),)         cells: elements 0 to 4, 4 to 12
    of 8 elements, 4 before it

Regular cuts are `range`s: a sharding over thousands of ranks takes no more room than one over two, and a reader
of a block finds the cells it needs without looking at the others. That is why a checkpoint needs no
global plan: every rank computes what is where from shapes and ranks.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fullshard.layout.blocks import Block, blocks_of_range, row_major_strides

Cuts = range | tuple[int, ...]
"""The first indices of cells along one dimension. A cell ends where the next begins. Indices below 0 do not count, so cells may
be empty."""


@dataclass(frozen=True, slots=True)
class CellPart:
    """A block within one cell whose elements lie next to each other, and the part of it that a reader wants."""

    cell: int
    block: Block
    offset: int
    """Number of the cell's elements before the block."""
    wanted: Block
    """The part of the block that the reader wants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The cells of one tensor and the ranks that hold them."""

    shape: tuple[int, ...]
    """Shape of the whole tensor as it is stored: see `order`."""

    order: tuple[int, ...] | None = None
    """The model's dimensions in the order in which they are stored; None for the same order.

    Used for memory formats such as channels last: the stored tensor is ``tensor.permute(order)``.
    """

    flat: bool = False
    """Whether the tensor is cut as one range of elements, in row-major order of `shape`. `cuts` then has one entry."""

    cuts: tuple[Cuts, ...]

    holders: tuple[tuple[int, ...], ...]
    """The rank of each cell; one such list for each replica. A list may be longer than there are cells: the last ranks hold
    nothing."""

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of cells along each dimension that is cut."""
        return tuple(map(len, self.cuts))

    @property
    def cells(self) -> int:
        """Number of cells."""
        return math.prod(self.grid)

    def cell_of(self, rank: int) -> int | None:
        """Return the cell that a rank holds, or None."""
        for ranks in self.holders:
            if rank in ranks:
                cell = ranks.index(rank)
                return cell if cell < self.cells else None
        return None

    def extent(self, cell: int) -> Block:
        """Return a cell as a block of the tensor or, if it is cut flat, of its one dimension of elements."""
        index = []
        for count in reversed(self.grid):
            cell, along = divmod(cell, count)
            index.append(along)
        sizes = (math.prod(self.shape),) if self.flat else self.shape
        spans = [
            _span(cuts, along, size)
            for cuts, along, size in zip(self.cuts, reversed(index), sizes, strict=True)
        ]
        return Block(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))

    def blocks(self, cell: int) -> Iterator[tuple[Block, int]]:
        """Yield the blocks of the tensor that make up a cell, each with the number of the cell's elements before it."""
        extent = self.extent(cell)
        if not self.flat:
            yield extent, 0
            return
        offset = 0
        for block in blocks_of_range(self.shape, extent.start[0], extent.stop[0]):
            yield block, offset
            offset += block.numel

    def overlapping(self, wanted: Block) -> Iterator[CellPart]:
        """Yield the parts of cells that together are the block ``wanted``."""
        if not wanted.numel:
            return
        for cell in self.cells_near(wanted):
            for block, offset in self.blocks(cell):
                common = block.intersection(wanted)
                if common is not None:
                    yield CellPart(cell, block, offset, common)

    def cells_near(self, wanted: Block) -> Iterator[int]:
        """Yield the cells that may have elements of a block that is not empty; of a flat one also cells between its rows."""
        if self.flat:
            strides = row_major_strides(self.shape)
            first = sum(s * stride for s, stride in zip(wanted.start, strides, strict=True))
            last = sum((s - 1) * stride for s, stride in zip(wanted.stop, strides, strict=True))
            yield from _cells_between(self.cuts[0], first, last)
            return
        ranges = [
            _cells_between(cuts, start, stop - 1)
            for cuts, start, stop in zip(self.cuts, wanted.start, wanted.stop, strict=True)
        ]
        strides = row_major_strides(self.grid)
        for index in itertools.product(*ranges):
            yield sum(i * stride for i, stride in zip(index, strides, strict=True))


def replicated(shape: Sequence[int], ranks: Sequence[int]) -> Sharding:
    """Return the sharding of a tensor that each of ``ranks`` holds whole."""
    return Sharding(
        shape=tuple(shape), cuts=((0,),) * len(shape), holders=tuple((rank,) for rank in ranks)
    )


def _span(cuts: Cuts, index: int, size: int) -> tuple[int, int]:
    end = cuts[index + 1] if index + 1 < len(cuts) else size
    return max(cuts[index], 0), max(min(end, size), 0)


def _cells_between(cuts: Cuts, first: int, last: int) -> range:
    """Return the cells from the one with index ``first`` to the one with index ``last``."""
    return range(bisect.bisect_right(cuts, first) - 1, bisect.bisect_right(cuts, last))
