"""Owners of matrices, and the messages that give each owner whole matrices.

Sharding cuts matrices, and an update that needs a whole one is computed once, by its owner:

    every rank   pieces of all matrices   --- gather: all-to-all --->   whole matrices, each at its owner
    owners       update of each matrix    --- scatter: all-to-all -->   pieces of all updates, at every rank

Matrices are exchanged in **buckets**. In each, every rank owns about as much as any other, so that all compute at the same
time, while the next bucket is on its way. Replicas hold equal pieces: one of them is sent to the owner, all of them get
the update, and the replicas share the work of owners.

All of this follows from shapes and shardings. Every rank computes the same plan, without communication. Blocks and shapes
are those of tensors as they are stored (`Sharding.order`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fullshard.layout.blocks import Block, whole
from fullshard.layout.sharding import CellPart, Sharding


@dataclass(frozen=True, slots=True, eq=False)
class CutParam:
    """A parameter that is a matrix, or a stack of matrices, and how it is cut over ranks."""

    sharding: Sharding
    stack: int | None
    """The dimension, as stored, that numbers the matrices of a stack; None for one matrix."""
    anyone_owns: bool
    """Whether ranks that hold nothing of a matrix may own it. Ranks of a wrapper do not know of gradients of others."""


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """One matrix, with the rank that computes its update."""

    param: int
    block: Block
    """Its place in the parameter."""
    owner: int
    replica: int
    """The replica that sends its pieces to the owner."""
    shape: tuple[int, int]
    """Rows and columns, as stored."""


class Window(NamedTuple):
    """A piece of a tensor, as `Tensor.as_strided` takes it."""

    tensor: int
    """Number of the tensor."""
    size: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """Pieces of tensors that this rank sends to all ranks, or gets from them, rank after rank."""

    windows: tuple[Window, ...]
    sizes: tuple[int, ...]
    """Number of elements, by rank of the process group."""

    def views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the pieces in the tensors, which are contiguous."""
        return [
            tensors[number].as_strided(size, strides, int(tensors[number].storage_offset()) + start)
            for number, size, strides, start in self.windows
        ]

    def split(self, buffer: Tensor) -> list[Tensor]:
        """Return the pieces in the message."""
        parts = buffer.split([window.numel for window in self.windows])
        return [part.view(window.size) for part, window in zip(parts, self.windows, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Matrices that are exchanged together, seen from one rank. Pieces are those of parameters' local tensors."""

    text: str
    """Description of the exchange; the same text on all ranks."""
    owned: tuple[Matrix, ...]
    """Matrices of this rank. They are the tensors of `gathered` and `scattered`, in this order."""
    sent: Message
    """Pieces of parameters, to the owners."""
    gathered: Message
    """Pieces of owned matrices, from their holders."""
    scattered: Message
    """Pieces of owned matrices' updates, to their holders."""
    received: Message
    """Pieces of parameters' updates, from the owners."""


def plan_buckets(
    params: Sequence[CutParam], ranks: Sequence[int], rank: int, bucket_numel: int
) -> list[Bucket]:
    """Return the buckets of parameters, as one rank takes part in them.

    Args:
        params: In the same order on all ranks.
        ranks: The global ranks of the process group, in its order.
        rank: This rank, a global one.
        bucket_numel: Most elements that an owner has in a bucket, unless one matrix has more.
    """
    matrices = assign_owners(params, ranks)
    places = _Places(rank)
    return [
        _bucket(params, bucket, ranks, rank, places) for bucket in _buckets(matrices, bucket_numel)
    ]


def assign_owners(params: Sequence[CutParam], ranks: Sequence[int]) -> list[Matrix]:
    """Give each matrix to the rank with the least work so far, the most expensive ones first.

    A matrix that one rank holds whole stays there, and needs no exchange.
    """
    loads = _Loads(ranks)
    found = []
    in_order = sorted(
        _matrices(params), key=lambda each: (-_cost(each[2]), each[2], each[0], each[1].start)
    )
    for number, (index, block, shape) in enumerate(in_order):
        param = params[index]
        sharding = param.sharding
        if param.anyone_owns and _is_cut(sharding, block):
            owner = loads.lightest()
        else:
            cells = {part.cell for part in sharding.overlapping(block)}
            owner = loads.lightest({row[cell] for row in sharding.holders for cell in cells})
        loads.add(owner, _cost(shape))
        replica = next(
            (at for at, row in enumerate(sharding.holders) if owner in row),
            number % len(sharding.holders),
        )
        found.append(Matrix(index, block, owner, replica, shape))
    return found


def _matrices(params: Sequence[CutParam]) -> Iterator[tuple[int, Block, tuple[int, int]]]:
    """Yield the matrices that have elements: the parameter, the block in it, rows and columns."""
    for index, param in enumerate(params):
        shape, stack = param.sharding.shape, param.stack
        rows, columns = (size for dim, size in enumerate(shape) if dim != stack)
        if not rows * columns:
            continue
        if stack is None:
            yield index, whole(shape), (rows, columns)
            continue
        one = tuple(1 if dim == stack else size for dim, size in enumerate(shape))
        for number in range(shape[stack]):
            start = tuple(number if dim == stack else 0 for dim in range(len(shape)))
            yield index, Block(start, one), (rows, columns)


def _cost(shape: tuple[int, int]) -> int:
    """Return the arithmetic of Newton-Schulz, up to a factor."""
    return math.prod(shape) * min(shape)


def _is_cut(sharding: Sharding, block: Block) -> bool:
    """Return whether several ranks hold parts of a block."""
    return len(list(itertools.islice(sharding.cells_near(block), 2))) > 1


class _Loads:
    """The load that each rank owns."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._loads = dict.fromkeys(ranks, 0)
        self._heap = [(0, rank) for rank in sorted(ranks)]

    def add(self, rank: int, cost: int) -> None:
        self._loads[rank] += cost
        heapq.heappush(self._heap, (self._loads[rank], rank))

    def lightest(self, among: Iterable[int] | None = None) -> int:
        """Return the rank that owns least, of some ranks or of all; the first one of several."""
        if among is not None:
            return min(among, key=lambda rank: (self._loads[rank], rank))
        while self._heap[0][0] != self._loads[self._heap[0][1]]:
            heapq.heappop(self._heap)  # from before more was added
        return self._heap[0][1]


def _buckets(matrices: Sequence[Matrix], bucket_numel: int) -> list[list[Matrix]]:
    """Return the first matrices of each owner, then their next ones, and so on, each time up to a number of elements."""
    buckets: list[list[Matrix]] = []
    last: dict[int, int] = {}
    filled: dict[int, int] = {}
    for matrix in matrices:  # those of an owner begin with the most expensive one
        owner, numel = matrix.owner, matrix.block.numel
        if owner not in last:
            last[owner], filled[owner] = 0, 0
        elif filled[owner] + numel > bucket_numel:
            last[owner], filled[owner] = last[owner] + 1, 0
        filled[owner] += numel
        if last[owner] == len(buckets):
            buckets.append([])
        buckets[last[owner]].append(matrix)
    return buckets


class _Places:
    """A rank's places in shardings. All matrices of a stack have the same one."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._found: dict[int, tuple[int, int] | None] = {}

    def of(self, sharding: Sharding) -> tuple[int, int] | None:
        """Return the replica and the cell of the rank, or None if it holds nothing."""
        if id(sharding) not in self._found:
            self._found[id(sharding)] = next(
                (
                    (replica, row.index(self._rank))
                    for replica, row in enumerate(sharding.holders)
                    if self._rank in row[: sharding.cells]
                ),
                None,
            )
        return self._found[id(sharding)]


def _bucket(
    params: Sequence[CutParam],
    matrices: Sequence[Matrix],
    ranks: Sequence[int],
    rank: int,
    places: _Places,
) -> Bucket:
    position = {each: at for at, each in enumerate(ranks)}
    owned = tuple(matrix for matrix in matrices if matrix.owner == rank)
    sent: list[tuple[int, Window]] = []
    received: list[tuple[int, Window]] = []
    for matrix in matrices:
        sharding = params[matrix.param].sharding
        place = places.of(sharding)
        if place is None:
            continue
        replica, cell = place
        for part in _parts(sharding, cell, matrix.block):
            piece = position[matrix.owner], _in_cell(matrix.param, sharding, part)
            received.append(piece)
            if replica == matrix.replica:
                sent.append(piece)
    gathered: list[tuple[int, Window]] = []
    scattered: list[tuple[int, Window]] = []
    for number, matrix in enumerate(owned):
        sharding = params[matrix.param].sharding
        for part in sharding.overlapping(matrix.block):
            window = _window(number, matrix.block.shape, part.wanted.slices_in(matrix.block))
            for replica, row in enumerate(sharding.holders):
                scattered.append((position[row[part.cell]], window))
                if replica == matrix.replica:
                    gathered.append((position[row[part.cell]], window))
    messages = (_message(pieces, len(ranks)) for pieces in (sent, gathered, scattered, received))
    numel = sum(matrix.block.numel for matrix in matrices)
    return Bucket(f"{len(matrices)} matrices of {numel} elements", owned, *messages)


def _parts(sharding: Sharding, cell: int, wanted: Block) -> Iterator[CellPart]:
    """Yield the parts of one cell that are in a block, in the order of `Sharding.overlapping`."""
    for block, offset in sharding.blocks(cell):
        common = block.intersection(wanted)
        if common is not None:
            yield CellPart(cell, block, offset, common)


def _in_cell(param: int, sharding: Sharding, part: CellPart) -> Window:
    """Return a part of a cell as a piece of the local tensor, which is contiguous."""
    window = _window(param, part.block.shape, part.wanted.slices_in(part.block))
    return window._replace(start=window.start + part.offset) if sharding.flat else window


def _window(tensor: int, shape: Sequence[int], slices: tuple[slice, ...]) -> Window:
    view = torch.empty(shape, device="meta")[slices]
    return Window(tensor, tuple(view.shape), view.stride(), int(view.storage_offset()))


def _message(pieces: Sequence[tuple[int, Window]], world: int) -> Message:
    """Return a message of pieces, each with the position of the rank on the other side."""
    sizes = [0] * world
    for position, window in pieces:
        sizes[position] += window.numel
    in_order = sorted(pieces, key=lambda piece: piece[0])  # of one rank in the order they have
    return Message(tuple(window for _, window in in_order), tuple(sizes))
