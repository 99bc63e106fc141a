"""Layouts: which rank has which elements of a group, and at which offsets.

A group's **gather buffer** holds its unsharded parameters one after the other, each contiguous. A
**segment** is a range of it that splits evenly into ``world`` pieces. Rank r keeps piece r in its
**shard buffer**. Segments can be gathered in place: afterwards there is nothing to copy.

    per row, 2 ranks: weight (3, 4) and bias (4,)
    gather buffer   | w row 0 | w row 1 | w row 2 | pad | b 0..3 |     segments [0, 16) and [16, 20)
    shard, rank 0   | w row 0 | w row 1 | b 0..1 |
    shard, rank 1   | w row 2 | pad     | b 2..3 |

    flat, 2 ranks: the same parameters in one segment of 16 elements
    gather buffer   | w 0..11 | b 0..3 |
    shard, rank 0   | w 0..7  |
    shard, rank 1   | w 8..11 | b 0..3 |

Padding always follows the real elements of a segment, so a parameter's elements stay contiguous.

A parameter's elements are divided in one of four ways (`Division`):

    ROWS         consecutive rows along the first dimension that has more than one row; zero-copy
    CHUNKS       blocks along a later dimension (`Shard(d)`): a piece is not contiguous in the parameter, so
                 gathering needs a staging buffer and one copy
    REPLICATED   0-d: every rank holds the one element
    FLAT         elements of the flattened parameter, cut wherever a rank's piece of the segment ends; zero-copy

Everything here is arithmetic over shapes and world size, computed once. It allocates no tensor and asks
no process group, so the engine, checkpoints and reports share it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from fullshard.errors import LayoutError

ALIGNMENT = 64
"""Unsharded parameters start at multiples of this many elements: whole cache lines, any vector load."""

ROW_ALIGNMENT = 8
"""Pieces in a shard buffer start at multiples of this many elements: what one vector load takes, and no more.

Most pieces are multiples of it, so a shard buffer has few gaps. It counts elements, not bytes: pieces have the same
offsets in every dtype, so shards can be cast, sent and updated as one array.
"""

IN_PLACE_FROM = 1 << 20
"""A group is gathered in place if its pieces have at least this many bytes on average; see `gathers_in_place`."""


class Division(enum.Enum):
    """The division of one parameter's elements over ranks; see the module docstring."""

    ROWS = "rows"
    CHUNKS = "chunks"
    REPLICATED = "replicated"
    FLAT = "flat"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One rank's part of one parameter."""

    shape: tuple[int, ...]
    """Shape of the local tensor; 1-D under FLAT."""

    start: int
    """First index held: along the sharded dimension, or of the flattened parameter under FLAT."""

    offset: int
    """Elements between the beginning of the rank's piece of the segment and the first one held."""

    @property
    def numel(self) -> int:
        """Elements held, padding not counted."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A range of the gather buffer that splits evenly over the ranks."""

    piece_numel: int
    """Elements of one rank's piece, padding counted; the segment has ``world`` times as many."""

    params: tuple[int, ...]
    """Indices of the parameters that live here, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one parameter: its segment, its offset there, and how it is divided."""

    shape: tuple[int, ...]
    division: Division
    dim: int
    """The sharded dimension; 0 where the division has none."""

    segment: int
    start: int
    """Elements of the segment before this parameter; 0 unless FLAT."""
    strides: tuple[int, ...]
    """Strides of the unsharded parameter in the gather buffer, without gaps; under FLAT in any order of dimensions."""

    @property
    def numel(self) -> int:
        """Elements of the unsharded parameter."""
        return math.prod(self.shape)

    @property
    def zero_copy(self) -> bool:
        """Whether the gathered segment is the parameter itself, with nothing to rearrange."""
        return self.division is not Division.CHUNKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The division of a group's parameters over ``world`` ranks, whatever their dtypes."""

    world: int
    segments: tuple[Segment, ...]
    slots: tuple[Slot, ...]

    def piece(self, param: int, rank: int) -> Piece:
        """Return the part of parameter number ``param`` that ``rank`` holds."""
        slot = self.slots[param]
        if slot.division is Division.REPLICATED:
            return Piece(shape=(), start=0, offset=0)
        if slot.division is Division.FLAT:
            return self._flat_piece(slot, rank)
        size = slot.shape[slot.dim]
        chunk = chunk_size(size, self.world)
        start = min(rank * chunk, size)
        length = min(chunk, size - start)
        shape = (*slot.shape[: slot.dim], length, *slot.shape[slot.dim + 1 :])
        return Piece(shape=shape, start=start, offset=0)

    def _flat_piece(self, slot: Slot, rank: int) -> Piece:
        piece_numel = self.segments[slot.segment].piece_numel
        begin, end = rank * piece_numel, (rank + 1) * piece_numel
        first = min(max(slot.start, begin), end)
        last = max(min(slot.start + slot.numel, end), first)
        start = min(max(first - slot.start, 0), slot.numel)
        return Piece(shape=(last - first,), start=start, offset=first - begin)

    def memory_order(self, segments: Sequence[int]) -> list[int]:
        """Return the indices of ``segments`` in the order of their pieces in memory: matrices first, then the others.

        Optimizers often have other options for matrices (weight decay, for one), and can update as one tensor
        what lies together.
        """

        def has_no_matrix(index: int) -> bool:
            return all(len(self.slots[p].shape) < 2 for p in self.segments[segments[index]].params)

        return sorted(range(len(segments)), key=has_no_matrix)

    def held_numels(self, segment: int) -> list[int]:
        """Return how many elements of a flat segment each rank holds, without the padding at its end."""
        numel = self.segments[segment].piece_numel
        last = self.slots[self.segments[segment].params[-1]]
        end = last.start + last.numel
        return [min(max(end - rank * numel, 0), numel) for rank in range(self.world)]

    def padding(self, segment: int) -> int:
        """Elements of a segment that belong to no parameter; copies of a 0-d parameter count as one element."""
        owned = sum(self.slots[param].numel for param in self.segments[segment].params)
        return self.segments[segment].piece_numel * self.world - owned


def chunk_size(size: int, world: int) -> int:
    """Return the rows of a full chunk when ``size`` rows are divided over ``world`` ranks; the last may have fewer."""
    return -(-size // world)


def per_row_layout(
    shapes: Sequence[Sequence[int]], *, world: int, dims: Sequence[int] | None = None
) -> Layout:
    """Make one segment per parameter, divided along dimension ``dims[i]`` (0 by default).

    >>> layout = per_row_layout([(3, 4), (4,)], world=2)
    >>> [segment.piece_numel for segment in layout.segments]
    [8, 2]
    >>> layout.piece(0, rank=1).shape, layout.piece(1, rank=1).shape
    ((1, 4), (2,))
    """
    _check_world(world)
    dims = [0] * len(shapes) if dims is None else dims
    if len(dims) != len(shapes):
        raise LayoutError(f"One dim per shape is needed, got {len(dims)} for {len(shapes)} shapes.")
    slots, segments = [], []
    for index, (raw_shape, dim) in enumerate(zip(shapes, dims, strict=True)):
        shape = tuple(raw_shape)
        division = _division(shape, dim)
        if division is Division.REPLICATED:
            piece_numel = 1
        else:
            rows = chunk_size(shape[dim], world)
            piece_numel = rows * math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
        slots.append(
            Slot(
                shape=shape,
                division=division,
                dim=dim,
                segment=index,
                start=0,
                strides=contiguous_strides(shape),
            )
        )
        segments.append(Segment(piece_numel=piece_numel, params=(index,)))
    return Layout(world=world, segments=tuple(segments), slots=tuple(slots))


def flat_layout(
    shapes: Sequence[Sequence[int]],
    *,
    world: int,
    kinds: Sequence[Hashable] | None = None,
    multiple: int = 1,
    strides: Sequence[Sequence[int]] | None = None,
) -> Layout:
    """Make one segment for all parameters of one kind (usually: dtype), cut regardless of rows.

    Every parameter starts at a multiple of ``multiple`` elements. ``strides`` say
    how parameters lie in memory (channels last, for example); they are cut in that order.

    >>> layout = flat_layout([(3, 4), (4,)], world=2)
    >>> layout.piece(0, rank=1), layout.piece(1, rank=0).numel
    (Piece(shape=(4,), start=8, offset=0), 0)
    """
    _check_world(world)
    if multiple < 1:
        raise LayoutError(f"multiple must be at least 1, got {multiple}.")
    kinds = [None] * len(shapes) if kinds is None else kinds
    strides = [contiguous_strides(shape) for shape in shapes] if strides is None else strides
    if len(kinds) != len(shapes) or len(strides) != len(shapes):
        raise LayoutError(
            f"One kind and one set of strides per shape are needed, got {len(kinds)} and {len(strides)} "
            f"for {len(shapes)} shapes."
        )
    order = list(dict.fromkeys(kinds))
    filled = dict.fromkeys(order, 0)
    slots = []
    for raw_shape, kind, raw_strides in zip(shapes, kinds, strides, strict=True):
        shape, own_strides = tuple(raw_shape), tuple(raw_strides)
        if not has_no_gaps(shape, own_strides):
            raise LayoutError(f"Strides {own_strides} of shape {shape} leave gaps or overlap.")
        start = chunk_size(filled[kind], multiple) * multiple
        slots.append(
            Slot(
                shape=shape,
                division=Division.FLAT,
                dim=0,
                segment=order.index(kind),
                start=start,
                strides=own_strides,
            )
        )
        filled[kind] = start + math.prod(shape)
    segments = tuple(
        Segment(
            piece_numel=chunk_size(filled[kind], world),
            params=tuple(index for index, other in enumerate(kinds) if other == kind),
        )
        for kind in order
    )
    return Layout(world=world, segments=segments, slots=tuple(slots))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    result, step = [], 1
    for size in reversed(shape):
        result.append(step)
        step *= max(size, 1)
    return tuple(reversed(result))


def has_no_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor's elements fill a range of memory, each address once, in any order."""
    if 0 in shape:
        return True
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferOffsets:
    """Aligned byte offsets of typed blocks in one buffer."""

    starts: tuple[int, ...]
    nbytes: int


def block_offsets(
    numels: Sequence[int],
    dtypes: Sequence[torch.dtype],
    *,
    alignment: int = ALIGNMENT,
    order: Sequence[int] | None = None,
) -> BufferOffsets:
    """Return the offsets of blocks of ``numels[i]`` elements of ``dtypes[i]``, one after the other.

    Each start is a multiple of ``alignment`` elements of its dtype. Block ``order[0]`` comes first, and so on;
    without ``order`` they come as given.

    >>> block_offsets([16, 4], [torch.float32, torch.float32], alignment=4)
    BufferOffsets(starts=(0, 64), nbytes=80)
    >>> block_offsets([16, 4], [torch.float32, torch.float32], alignment=4, order=[1, 0])
    BufferOffsets(starts=(16, 0), nbytes=80)
    """
    blocks = list(zip(numels, dtypes, strict=True))
    starts, end = [0] * len(blocks), 0
    for index in range(len(blocks)) if order is None else order:
        numel, dtype = blocks[index]
        starts[index] = _rounded_up(end, alignment * dtype.itemsize)
        end = starts[index] + numel * dtype.itemsize
    # The buffer's own length is aligned too, so that a byte buffer can be viewed in any of the dtypes.
    widest = max((dtype.itemsize for dtype in dtypes), default=1)
    return BufferOffsets(starts=tuple(starts), nbytes=_rounded_up(end, alignment * widest))


def shard_offsets(
    layout: Layout, segments: Sequence[int], dtypes: Sequence[torch.dtype]
) -> BufferOffsets:
    """Return the offsets of one rank's pieces of ``segments``, the i-th of them in ``dtypes[i]``, in memory order.

    Shards, messages and reduced gradients all have these offsets, so an optimizer can update a range of shards with
    the same range of gradients (`fullshard.optim.fused_shards`).
    """
    numels = [layout.segments[index].piece_numel for index in segments]
    order = layout.memory_order(segments)
    return block_offsets(numels, dtypes, alignment=ROW_ALIGNMENT, order=order)


def _rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def gathers_in_place(layout: Layout, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether to gather segment by segment in place, or all in one message that a copy distributes.

    Gathering in place copies nothing, but needs a collective per segment: right for pieces large enough to
    fill the wire. For small pieces, calls and latency cost more than a copy. A single segment is one message
    either way.
    """
    if len(layout.segments) == 1 and layout.slots[0].zero_copy:
        return True
    return has_large_pieces(layout, dtypes)


def has_large_pieces(layout: Layout, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether a collective per segment costs no more than one for all."""
    nbytes = sum(
        segment.piece_numel * dtypes[segment.params[0]].itemsize for segment in layout.segments
    )
    return nbytes >= IN_PLACE_FROM * len(layout.segments)


def _division(shape: tuple[int, ...], dim: int) -> Division:
    if not shape:
        if dim != 0:
            raise LayoutError(f"A 0-d parameter has no dimension {dim} to shard.")
        return Division.REPLICATED
    if not 0 <= dim < len(shape):
        raise LayoutError(
            f"Shape {shape} has no dimension {dim} to shard; allowed: 0 to {len(shape) - 1}."
        )
    return Division.ROWS if math.prod(shape[:dim]) == 1 else Division.CHUNKS


def _check_world(world: int) -> None:
    if world < 1:
        raise LayoutError(f"world must be at least 1, got {world}.")
