"""The bytes of a memory that a tensor covers, with its strides: interleaved tensors have no byte in common."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

from torch import Tensor

_MOST_RUNS = 1 << 16
"""Regions of more runs of bytes count as one range: to compare them would take longer than a step."""


class Region(NamedTuple):
    """Bytes of a memory."""

    begin: int
    end: int
    """The byte behind the last one."""
    run: int
    """Number of bytes that follow each other; the whole range if there are no gaps."""
    steps: tuple[tuple[int, int], ...] = ()
    """Number of runs and the bytes from one to the next, for each dimension with gaps, largest step first."""

    def covers(self, other: Region) -> bool:
        """Return whether all bytes of another region are among these; False also where that takes long to find out."""
        return not self.steps and self.begin <= other.begin and other.end <= self.end


EVERYTHING = Region(0, 1 << 62, 1 << 62)
"""All bytes of a memory, whatever its size."""


def region_of(tensor: Tensor) -> Region | None:
    """Return the bytes that a strided tensor covers; None if it has no elements."""
    item = tensor.element_size()
    run = item
    steps: list[tuple[int, int]] = []
    begin = int(tensor.storage_offset()) * item
    dims = sorted(zip(map(int, tensor.stride()), map(int, tensor.shape), strict=True))
    for stride, size in dims:
        if size == 0:
            return None
        if size == 1 or stride == 0:
            continue
        if stride * item <= run and not steps:
            run = stride * item * (size - 1) + run  # rows that touch, or overlap
        else:
            steps.append((size, stride * item))
    end = begin + run + sum((size - 1) * step for size, step in steps)
    return Region(begin, end, run, tuple(reversed(steps)))


def overlap(one: Region, other: Region) -> bool:
    """Return whether two regions of one memory have a byte in common."""
    if one.end <= other.begin or other.end <= one.begin:
        return False
    if not one.steps and not other.steps:
        return True
    return _have_common_bytes(one, other)


@functools.lru_cache(maxsize=4096)
def _have_common_bytes(one: Region, other: Region) -> bool:
    first, second = _runs(one), _runs(other)
    if first is None or second is None:
        return True
    return _meet(first, one.run, second, other.run)


def _meet(first: list[int], first_run: int, second: list[int], second_run: int) -> bool:
    """Return whether runs that begin at sorted places have a byte in common."""
    at = 0
    for begin in first:
        while at < len(second) and second[at] + second_run <= begin:
            at += 1
        if at == len(second):
            return False
        if second[at] < begin + first_run:
            return True
    return False


@functools.lru_cache(maxsize=1024)
def _runs(region: Region) -> list[int] | None:
    """Return where the runs of a region begin, in order; None if there are too many."""
    count = 1
    for size, _ in region.steps:
        count *= size
    if count > _MOST_RUNS:
        return None
    places = itertools.product(*(range(0, size * step, step) for size, step in region.steps))
    return sorted({region.begin + sum(place) for place in places})
