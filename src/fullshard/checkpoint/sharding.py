"""How a tensor is divided over ranks, as arithmetic: who holds which part, for any number of ranks at once.

A tensor is cut along its dimensions into a grid of **cells**, numbered row-major; each cell is a block. Or it
is cut as one range of elements, and a cell is a part of that range:

    Shard(0) over 2 ranks, 5 rows      cuts: (range(0, 5, 3), (0,))      cells: rows 0 to 3, rows 3 to 5
    flat, in a segment of pieces       cuts: (range(-4, 12, 8),)         cells: elements 0 to 4, 4 to 12
    of 8 elements, 4 before it

Regular cuts are `range`s: a sharding over thousands of ranks takes no more room than one over two, and whoever
wants a block finds the cells it needs without looking at the others. That is why a checkpoint needs no
global plan: what is where follows from shapes and ranks, on every rank alike.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fullshard.checkpoint.blocks import Block, blocks_of_range, row_major_strides

Cuts = range | tuple[int, ...]
"""Where cells begin along one dimension; they end where the next begins. What is before 0 is cut off: cells may be empty."""


@dataclass(frozen=True, slots=True)
class CellPart:
    """A block that lies in one cell, without gaps, and is wanted in part."""

    cell: int
    block: Block
    offset: int
    """Elements of the cell before the block."""
    wanted: Block
    """The part of the block that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The cells of one tensor and the ranks that hold them."""

    shape: tuple[int, ...]
    """Of the whole tensor, as it is stored: see `order`."""

    order: tuple[int, ...] | None = None
    """Dimensions of the model's tensor in the order in which `shape` has them; None for the same order.

    Memory formats such as channels last: what is stored is ``tensor.permute(order)``.
    """

    flat: bool = False
    """Whether the elements are cut as one range, in row-major order of `shape`; then there is one entry in `cuts`."""

    cuts: tuple[Cuts, ...]

    holders: tuple[tuple[int, ...], ...]
    """Ranks that hold the cells, by cell. Several such lists where there are replicas; they may be longer than
    there are cells: ranks that hold nothing."""

    @property
    def grid(self) -> tuple[int, ...]:
        """Cells along each dimension that is cut."""
        return tuple(map(len, self.cuts))

    @property
    def cells(self) -> int:
        """How many there are."""
        return math.prod(self.grid)

    def cell_of(self, rank: int) -> int | None:
        """The cell a rank holds, or None."""
        for ranks in self.holders:
            if rank in ranks:
                cell = ranks.index(rank)
                return cell if cell < self.cells else None
        return None

    def extent(self, cell: int) -> Block:
        """A cell: a block of the tensor or, if it is cut flat, of the one dimension of its elements."""
        index = []
        for count in reversed(self.grid):
            cell, place = divmod(cell, count)
            index.append(place)
        sizes = (math.prod(self.shape),) if self.flat else self.shape
        spans = [
            _span(cuts, place, size)
            for cuts, place, size in zip(self.cuts, reversed(index), sizes, strict=True)
        ]
        return Block(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))

    def blocks(self, cell: int) -> Iterator[tuple[Block, int]]:
        """A cell as blocks of the tensor, each with the number of the cell's elements before it."""
        extent = self.extent(cell)
        if not self.flat:
            yield extent, 0
            return
        offset = 0
        for block in blocks_of_range(self.shape, extent.start[0], extent.stop[0]):
            yield block, offset
            offset += block.numel

    def overlapping(self, wanted: Block) -> Iterator[CellPart]:
        """Where a block of the tensor is to be found: parts of cells, which together are the block."""
        if not wanted.numel:
            return
        for cell in self._cells_near(wanted):
            for block, offset in self.blocks(cell):
                common = block.intersection(wanted)
                if common is not None:
                    yield CellPart(cell, block, offset, common)

    def _cells_near(self, wanted: Block) -> Iterator[int]:
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
    """A tensor that each of ``ranks`` holds whole."""
    return Sharding(
        shape=tuple(shape), cuts=((0,),) * len(shape), holders=tuple((rank,) for rank in ranks)
    )


def _span(cuts: Cuts, place: int, size: int) -> tuple[int, int]:
    end = cuts[place + 1] if place + 1 < len(cuts) else size
    return max(cuts[place], 0), max(min(end, size), 0)


def _cells_between(cuts: Cuts, first: int, last: int) -> range:
    """Cells from the one that has index ``first`` to the one that has ``last``."""
    return range(bisect.bisect_right(cuts, first) - 1, bisect.bisect_right(cuts, last))
