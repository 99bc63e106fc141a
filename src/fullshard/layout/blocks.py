"""Parts of tensors: rectangular blocks and ranges of elements, and their intersections.

A **block** is a rectangle of a tensor: its start and its shape. Whatever a rank holds, a file stores or a reader
wants is a block, or a range of elements in row-major order. Such a range is at most ``2 * ndim - 1`` blocks:

    shape (4, 3), elements 1 to 11        . x x      1 block: row 0, from column 1
                                          x x x      1 block: rows 1 and 2
                                          x x x
                                          x x .      1 block: row 3, to column 2

So the intersection of two blocks is enough to read a tensor that was cut in one way into one that is cut in another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

MAX_DIMS = 64
"""Dimensions of a tensor that torch can copy."""


def are_sizes(values: Any) -> TypeGuard[list[int] | tuple[int, ...]]:
    """Return whether a value from a file is a list of sizes that a tensor can have. Ask before computing with them."""
    # The exact type: JSON's true is an int in Python.
    return (
        type(values) in (list, tuple)
        and len(values) <= MAX_DIMS
        and all(type(size) is int and 0 <= size < 1 << 63 for size in values)
    )


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of a tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """The first index after the block, for each dimension."""
        return tuple(s + n for s, n in zip(self.start, self.shape, strict=True))

    def intersection(self, other: Block) -> Block | None:
        """Return the block that both have in common, or None."""
        start = tuple(map(max, self.start, other.start))
        shape = tuple(min(a, b) - s for a, b, s in zip(self.stop, other.stop, start, strict=True))
        return Block(start, shape) if all(n > 0 for n in shape) else None

    def slices_in(self, outer: Block) -> tuple[slice, ...]:
        """Return the slices that pick this block out of a tensor that holds the block ``outer``."""
        return tuple(
            slice(s - o, s - o + n)
            for s, o, n in zip(self.start, outer.start, self.shape, strict=True)
        )

    def ranges_in(self, outer: Block, *, largest_gap: int = 0) -> Iterator[tuple[int, int]]:
        """Yield the ranges of ``outer``'s elements, in row-major order, that have this block: (first, count).

        Ranges are as long as they can be.

        Args:
            outer: A block around this one.
            largest_gap: Two ranges with no more elements than that between them are yielded as one.
        """
        if not self.numel:
            return
        strides = row_major_strides(outer.shape)
        inner = [s - o for s, o in zip(self.start, outer.start, strict=True)]
        first = sum(i * stride for i, stride in zip(inner, strides, strict=True))
        # From the last dimension to the first, ranges get longer and the gaps between them larger.
        length = 1
        split = len(self.shape)
        while split and strides[split - 1] - length <= largest_gap:
            split -= 1
            length += (self.shape[split] - 1) * strides[split]
        for index in itertools.product(*map(range, self.shape[:split])):
            yield first + sum(i * stride for i, stride in zip(index, strides, strict=False)), length


def whole(shape: Sequence[int]) -> Block:
    """Return the block that is all of a tensor."""
    return Block((0,) * len(shape), tuple(shape))


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return how many elements lie between neighbours along each dimension."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def blocks_of_range(shape: Sequence[int], begin: int, end: int) -> list[Block]:
    """Return the elements from ``begin`` to ``end`` of a tensor, in row-major order, as blocks in that order.

    >>> [(block.start, block.shape) for block in blocks_of_range((4, 3), 1, 11)]
    [((0, 1), (1, 2)), ((1, 0), (2, 3)), ((3, 0), (1, 2))]
    """
    if begin >= end:
        return []
    if not shape:
        return [Block((), ())]
    row = math.prod(shape[1:])
    first, first_rest = divmod(begin, row)
    last, last_rest = divmod(end, row)

    def in_row(index: int, begin: int, end: int) -> list[Block]:
        return [
            Block((index, *block.start), (1, *block.shape))
            for block in blocks_of_range(shape[1:], begin, end)
        ]

    if first == last:
        return in_row(first, first_rest, last_rest)
    found = in_row(first, first_rest, row) if first_rest else []
    first += bool(first_rest)
    if first < last:
        rest = tuple(shape[1:])
        found.append(Block((first, *[0] * len(rest)), (last - first, *rest)))
    return found + in_row(last, 0, last_rest)


def slabs(shape: Sequence[int], limit: int) -> Iterator[Block]:
    """Yield blocks of at most ``limit`` elements that together are the tensor, in row-major order.

    They are whole rows unless a single row is too large.
    """
    numel = math.prod(shape)
    if not numel:
        return
    row = math.prod(shape[1:])
    step = limit // row * row or limit
    for begin in range(0, numel, step):
        yield from blocks_of_range(shape, begin, min(begin + step, numel))
