"""Every element of a group has one home, and gathering what was sharded gives it back.

Sharding and gathering are simulated here with plain tensors and the layout's own arithmetic; nothing of
the engine takes part.
"""

from __future__ import annotations

import dataclasses
import doctest
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fullshard.errors import LayoutError
from fullshard.layout import segments as layout_module
from fullshard.layout.segments import (
    ALIGNMENT,
    IN_PLACE_FROM,
    BufferOffsets,
    Division,
    Layout,
    Piece,
    Segment,
    Slot,
    block_offsets,
    chunk_size,
    flat_layout,
    gathers_in_place,
    per_row_layout,
)
from tests.helpers.compare import assert_equal
from tests.helpers.fake import fake_world

PAD = -1
"""What is in a simulated buffer where no element was put."""

worlds = st.integers(1, 9)
shapes = st.lists(st.integers(0, 7) | st.just(1), max_size=4).map(tuple)
quickly = settings(max_examples=60)


@st.composite
def shapes_and_dims(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    shape = draw(shapes)
    return shape, draw(st.integers(0, max(len(shape) - 1, 0)))


@st.composite
def per_row_layouts(draw: st.DrawFn) -> Layout:
    params = draw(st.lists(shapes_and_dims(), max_size=4))
    return per_row_layout(
        [shape for shape, _ in params], world=draw(worlds), dims=[dim for _, dim in params]
    )


@st.composite
def flat_layouts(draw: st.DrawFn) -> Layout:
    params = draw(st.lists(st.tuples(shapes, st.sampled_from(["a", "b"])), max_size=6))
    return flat_layout(
        [shape for shape, _ in params], world=draw(worlds), kinds=[kind for _, kind in params]
    )


layouts = per_row_layouts() | flat_layouts()


def numbered(layout: Layout) -> list[Tensor]:
    """The whole parameters; no number occurs twice among their elements."""
    wholes, first = [], 0
    for slot in layout.slots:
        wholes.append(torch.arange(first, first + slot.numel).reshape(slot.shape))
        first += slot.numel
    return wholes


def block(slot: Slot, piece: Piece, whole: Tensor) -> Tensor:
    """What of a whole parameter lies in a piece."""
    if slot.division is Division.REPLICATED:
        return whole
    if slot.division is Division.FLAT:
        return whole.flatten()[piece.start : piece.start + piece.numel]
    index = torch.arange(piece.start, piece.start + piece.shape[slot.dim])
    return whole.index_select(slot.dim, index)


def shard(layout: Layout, wholes: Sequence[Tensor]) -> list[list[Tensor]]:
    """Per rank and segment, the rank's piece; fails where two elements claim one place."""
    ranks = []
    for rank in range(layout.world):
        pieces = [torch.full((segment.piece_numel,), PAD) for segment in layout.segments]
        for index, (slot, whole) in enumerate(zip(layout.slots, wholes, strict=True)):
            piece = layout.piece(index, rank)
            place_in_piece = pieces[slot.segment][piece.offset : piece.offset + piece.numel]
            assert place_in_piece.numel() == piece.numel, "a piece ends before its last element"
            assert (place_in_piece == PAD).all(), "two elements have one place"
            held = block(slot, piece, whole)
            assert held.shape == piece.shape
            place_in_piece.copy_(held.flatten())
        ranks.append(pieces)
    return ranks


def gather_segments(layout: Layout, ranks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The segments as an all-gather leaves them: rank after rank."""
    return [torch.cat([rank[i] for rank in ranks]) for i in range(len(layout.segments))]


def gather(layout: Layout, ranks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The whole parameters, from the pieces of all ranks."""
    segments = gather_segments(layout, ranks)
    wholes = []
    for index, slot in enumerate(layout.slots):
        if slot.zero_copy:
            whole = segments[slot.segment][slot.start : slot.start + slot.numel].reshape(slot.shape)
        else:
            held = [layout.piece(index, rank) for rank in range(layout.world)]
            blocks = [
                rank[slot.segment][piece.offset : piece.offset + piece.numel].reshape(piece.shape)
                for rank, piece in zip(ranks, held, strict=True)
            ]
            whole = torch.cat(blocks, dim=slot.dim)
        wholes.append(whole)
    return wholes


# --- properties ------------------------------------------------------------------------------------------


@quickly
@given(layouts)
def test_every_element_has_exactly_one_home_and_a_0d_parameter_one_on_every_rank(
    layout: Layout,
) -> None:
    wholes = numbered(layout)
    ranks = shard(layout, wholes)
    homes = torch.cat([torch.tensor([PAD]), *(piece for rank in ranks for piece in rank)])
    counts = torch.bincount(homes[homes != PAD], minlength=sum(w.numel() for w in wholes))
    expected = [
        layout.world if slot.division is Division.REPLICATED else 1
        for slot in layout.slots
        for _ in range(slot.numel)
    ]
    assert counts.tolist() == expected


@quickly
@given(layouts)
def test_gathering_what_was_sharded_is_the_identity(layout: Layout) -> None:
    wholes = numbered(layout)
    assert_equal(gather(layout, shard(layout, wholes)), wholes)


@quickly
@given(layouts)
def test_padding_follows_the_elements_of_its_segment_and_is_counted(layout: Layout) -> None:
    segments = gather_segments(layout, shard(layout, numbered(layout)))
    for index, (segment, gathered) in enumerate(zip(layout.segments, segments, strict=True)):
        slots = [layout.slots[param] for param in segment.params]
        if any(slot.division is Division.REPLICATED for slot in slots):
            assert layout.padding(index) == layout.world - 1
            continue
        is_pad = gathered == PAD
        assert layout.padding(index) == int(is_pad.sum())
        if all(slot.zero_copy for slot in slots):
            owned = sum(slot.numel for slot in slots)
            assert not is_pad[:owned].any() and is_pad[owned:].all()


@quickly
@given(layouts)
def test_pieces_of_all_ranks_have_the_same_size_and_hold_what_they_claim(layout: Layout) -> None:
    for index, slot in enumerate(layout.slots):
        size = layout.segments[slot.segment].piece_numel
        for rank in range(layout.world):
            piece = layout.piece(index, rank)
            assert piece.numel == math.prod(piece.shape)
            assert 0 <= piece.offset <= piece.offset + piece.numel <= size


@quickly
@given(flat_layouts())
def test_an_empty_piece_of_a_flat_parameter_starts_within_the_parameter(layout: Layout) -> None:
    # As an empty piece of rows does: what holds nothing can still be cut out with `narrow`.
    for index, slot in enumerate(layout.slots):
        for rank in range(layout.world):
            piece = layout.piece(index, rank)
            assert 0 <= piece.start <= slot.numel - piece.numel, (slot, piece)


@quickly
@given(layouts)
def test_segments_and_slots_refer_to_each_other_and_keep_the_order(layout: Layout) -> None:
    members = [param for segment in layout.segments for param in segment.params]
    assert sorted(members) == list(range(len(layout.slots)))
    for index, segment in enumerate(layout.segments):
        assert list(segment.params) == sorted(segment.params)
        end = 0
        for param in segment.params:
            slot = layout.slots[param]
            assert slot.segment == index
            assert slot.start == end
            end += slot.numel


@quickly
@given(shapes_and_dims(), worlds)
def test_rows_and_chunks_are_divided_as_torch_chunk_divides(
    shape_and_dim: tuple[tuple[int, ...], int], world: int
) -> None:
    shape, dim = shape_and_dim
    layout = per_row_layout([shape], world=world, dims=[dim])
    slot = layout.slots[0]
    whole = numbered(layout)[0]
    if not shape:
        assert slot.division is Division.REPLICATED
        return
    assert slot.division in (Division.ROWS, Division.CHUNKS)
    assert slot.zero_copy is (math.prod(shape[:dim]) == 1)
    chunks = list(torch.chunk(whole, world, dim))
    empty = whole.narrow(dim, 0, 0)
    chunks += [empty] * (world - len(chunks))
    pieces = [layout.piece(0, rank) for rank in range(world)]
    assert_equal([block(slot, piece, whole) for piece in pieces], chunks)


@quickly
@given(st.lists(shapes, max_size=6), worlds)
def test_a_flat_layout_pads_less_than_one_element_per_rank(
    shapes: list[tuple[int, ...]], world: int
) -> None:
    layout = flat_layout(shapes, world=world)
    assert [layout.padding(index) < world for index in range(len(layout.segments))] == [True] * (
        1 if shapes else 0
    )


DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]
blocks = st.lists(st.tuples(st.integers(0, 300), st.sampled_from(DTYPES)), max_size=8)


@quickly
@given(blocks, st.sampled_from([16, 64, ALIGNMENT]))
def test_blocks_are_placed_in_order_aligned_and_as_close_as_that_allows(
    blocks: list[tuple[int, torch.dtype]], alignment: int
) -> None:
    placement = block_offsets(
        [n for n, _ in blocks], [dtype for _, dtype in blocks], alignment=alignment
    )
    end = 0
    for start, (numel, dtype) in zip(placement.starts, blocks, strict=True):
        unit = alignment * dtype.itemsize
        assert start % unit == 0
        assert end <= start < end + unit
        end = start + numel * dtype.itemsize
    units = [alignment * dtype.itemsize for _, dtype in blocks] or [1]
    assert all(placement.nbytes % unit == 0 for unit in units)
    assert end <= placement.nbytes < end + max(units)


@quickly
@given(st.lists(st.integers(0, 300), min_size=1, max_size=8))
def test_blocks_lie_in_the_same_places_whatever_their_dtype(numels: list[int]) -> None:
    places = [
        (tuple(start // dtype.itemsize for start in made.starts), made.nbytes // dtype.itemsize)
        for dtype in DTYPES
        for made in [block_offsets(numels, [dtype] * len(numels))]
    ]
    assert len(set(places)) == 1


# --- the worked example of the module docstring ----------------------------------------------------------

WEIGHT = torch.arange(12).reshape(3, 4)
BIAS = torch.arange(100, 104)


def test_the_worked_example_per_row() -> None:
    layout = per_row_layout([(3, 4), (4,)], world=2)
    assert layout == Layout(
        world=2,
        segments=(Segment(piece_numel=8, params=(0,)), Segment(piece_numel=2, params=(1,))),
        slots=(
            Slot(shape=(3, 4), division=Division.ROWS, dim=0, segment=0, start=0, strides=(4, 1)),
            Slot(shape=(4,), division=Division.ROWS, dim=0, segment=1, start=0, strides=(1,)),
        ),
    )
    assert [layout.piece(0, rank) for rank in range(2)] == [
        Piece(shape=(2, 4), start=0, offset=0),
        Piece(shape=(1, 4), start=2, offset=0),
    ]
    assert [layout.piece(1, rank) for rank in range(2)] == [
        Piece(shape=(2,), start=0, offset=0),
        Piece(shape=(2,), start=2, offset=0),
    ]
    ranks = shard(layout, [WEIGHT, BIAS])
    assert torch.cat(ranks[0]).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 100, 101]
    assert torch.cat(ranks[1]).tolist() == [8, 9, 10, 11, *[PAD] * 4, 102, 103]
    gathered = gather_segments(layout, ranks)
    assert torch.cat(gathered).tolist() == [*range(12), *[PAD] * 4, 100, 101, 102, 103]
    assert [layout.padding(segment) for segment in range(2)] == [4, 0]
    # Segments [0, 16) and [16, 20), in elements of four bytes.
    assert block_offsets([16, 4], [torch.float32] * 2, alignment=4) == BufferOffsets(
        starts=(0, 64), nbytes=80
    )


def test_the_worked_example_flat() -> None:
    layout = flat_layout([(3, 4), (4,)], world=2)
    assert layout == Layout(
        world=2,
        segments=(Segment(piece_numel=8, params=(0, 1)),),
        slots=(
            Slot(shape=(3, 4), division=Division.FLAT, dim=0, segment=0, start=0, strides=(4, 1)),
            Slot(shape=(4,), division=Division.FLAT, dim=0, segment=0, start=12, strides=(1,)),
        ),
    )
    ranks = shard(layout, [WEIGHT, BIAS])
    assert ranks[0][0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert ranks[1][0].tolist() == [8, 9, 10, 11, 100, 101, 102, 103]
    assert layout.piece(0, 1) == Piece(shape=(4,), start=8, offset=0)
    assert layout.piece(1, 0).numel == 0
    assert layout.piece(1, 1) == Piece(shape=(4,), start=0, offset=4)
    assert layout.padding(0) == 0


def test_the_examples_in_the_docstrings_hold() -> None:
    results = doctest.testmod(layout_module)
    assert results.attempted >= 5
    assert results.failed == 0


# --- cases -----------------------------------------------------------------------------------------------


def test_uneven_rows_leave_the_last_rank_empty() -> None:
    layout = per_row_layout([(5, 2)], world=4)
    assert [layout.piece(0, rank).shape for rank in range(4)] == [(2, 2), (2, 2), (1, 2), (0, 2)]
    assert [layout.piece(0, rank).start for rank in range(4)] == [0, 2, 4, 5]
    assert layout.padding(0) == 6


def test_more_ranks_than_rows_leave_the_rest_empty() -> None:
    layout = per_row_layout([(2, 3)], world=5)
    assert [layout.piece(0, rank).numel for rank in range(5)] == [3, 3, 0, 0, 0]
    assert layout.segments[0].piece_numel == 3


def test_a_later_dimension_is_zero_copy_only_where_all_before_it_have_one_row() -> None:
    layout = per_row_layout([(1, 1, 6), (2, 6), (6,), ()], world=2, dims=[2, 1, 0, 0])
    assert [slot.division for slot in layout.slots] == [
        Division.ROWS,
        Division.CHUNKS,
        Division.ROWS,
        Division.REPLICATED,
    ]
    assert [slot.zero_copy for slot in layout.slots] == [True, False, True, True]


def test_a_0d_parameter_is_whole_on_every_rank_per_row_and_on_one_rank_flat() -> None:
    layout = per_row_layout([()], world=3)
    assert [layout.piece(0, rank) for rank in range(3)] == [Piece(shape=(), start=0, offset=0)] * 3
    assert layout.segments[0].piece_numel == 1
    flat = flat_layout([(), (2,)], world=3)
    assert [flat.piece(0, rank).shape for rank in range(3)] == [(1,), (0,), (0,)]


def test_kinds_have_segments_of_their_own_in_the_order_of_their_first_parameter() -> None:
    layout = flat_layout([(3,), (5,), (4,)], world=2, kinds=["half", "single", "half"])
    assert layout.segments == (
        Segment(piece_numel=4, params=(0, 2)),
        Segment(piece_numel=3, params=(1,)),
    )
    assert [slot.start for slot in layout.slots] == [0, 0, 3]
    assert [layout.padding(segment) for segment in range(2)] == [1, 1]


def test_no_parameters_make_an_empty_layout() -> None:
    for layout in (per_row_layout([], world=2), flat_layout([], world=2)):
        assert layout == Layout(world=2, segments=(), slots=())


def test_shapes_may_be_any_sequence_and_are_stored_as_tuples() -> None:
    layout = per_row_layout([torch.Size([3, 4]), [4]], world=2)
    assert layout == per_row_layout([(3, 4), (4,)], world=2)
    assert all(type(slot.shape) is tuple for slot in layout.slots)


@pytest.mark.parametrize(
    ("size", "world", "rows"), [(0, 3, 0), (1, 3, 1), (3, 3, 1), (4, 3, 2), (7, 1, 7)]
)
def test_the_largest_chunk_is_the_quotient_rounded_up(size: int, world: int, rows: int) -> None:
    assert chunk_size(size, world) == rows


@pytest.mark.parametrize(
    ("shape", "dim", "world"),
    [((5, 3), 0, 4), ((3, 7), 1, 3), ((1, 4), 1, 3), ((2, 0, 3), 0, 3), ((2, 3, 2), 2, 5)],
)
def test_pieces_are_what_dtensor_has_on_each_rank(
    shape: tuple[int, ...], dim: int, world: int
) -> None:
    layout = per_row_layout([shape], world=world, dims=[dim])
    whole = numbered(layout)[0]
    for rank in range(world):
        with fake_world(world, rank):
            mesh = init_device_mesh("cpu", (world,))
            sharded = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)
            assert_equal(block(layout.slots[0], layout.piece(0, rank), whole), sharded.to_local())


def test_pieces_that_are_large_on_average_are_gathered_in_place() -> None:
    rows, single = IN_PLACE_FROM // 4, [torch.float32] * 2
    exactly = per_row_layout([(3 * rows,), (3 * rows,)], world=3)
    assert gathers_in_place(exactly, single)
    assert not gathers_in_place(exactly, [torch.float32, torch.bfloat16])
    assert not gathers_in_place(per_row_layout([(3 * rows,), (3 * rows - 3,)], world=3), single)
    assert gathers_in_place(per_row_layout([(6 * rows,), (3,)], world=3), single)
    # What counts is a rank's piece, not the whole.
    assert not gathers_in_place(per_row_layout([(3 * rows,), (3 * rows,)], world=4), single)


# --- values and errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        per_row_layout([(3, 4)], world=2),
        per_row_layout([(3, 4)], world=2).segments[0],
        per_row_layout([(3, 4)], world=2).slots[0],
        per_row_layout([(3, 4)], world=2).piece(0, 0),
        block_offsets([1], [torch.float32]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plans_cannot_be_changed_and_can_be_keys(value: object) -> None:
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, None)
    assert {value: 1}[dataclasses.replace(value)] == 1  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: per_row_layout([(3,)], world=0), "world must be at least 1, got 0."),
        (lambda: flat_layout([(3,)], world=-1), "world must be at least 1, got -1."),
        (
            lambda: per_row_layout([(3, 4)], world=2, dims=[2]),
            "Shape (3, 4) has no dimension 2 to shard; allowed: 0 to 1.",
        ),
        (
            lambda: per_row_layout([(3, 4)], world=2, dims=[-1]),
            "Shape (3, 4) has no dimension -1 to shard; allowed: 0 to 1.",
        ),
        (
            lambda: per_row_layout([()], world=2, dims=[1]),
            "A 0-d parameter has no dimension 1 to shard.",
        ),
        (
            lambda: per_row_layout([(3,), (4,)], world=2, dims=[0]),
            "One dim per shape is needed, got 1 for 2 shapes.",
        ),
        (
            lambda: flat_layout([(3,)], world=2, kinds=["a", "b"]),
            "One kind and one set of strides per shape are needed, got 2 and 1 for 1 shapes.",
        ),
    ],
)
def test_what_cannot_be_laid_out_is_said(make: Callable[[], Layout], message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        make()
    assert str(caught.value) == message


def test_matrices_lie_before_all_others_and_otherwise_the_order_is_kept() -> None:
    layout = per_row_layout([(4,), (4, 4), (), (2, 1), (6,), (3, 3, 3)], world=2)
    assert layout.memory_order(range(6)) == [1, 3, 5, 0, 2, 4]
    assert layout.memory_order([4, 5, 0]) == [1, 0, 2]
    flat = flat_layout([(4,), (4, 4)], world=2, kinds=[0, 1])
    assert flat.memory_order([0, 1]) == [1, 0]


def test_as_many_dtypes_as_blocks_are_needed() -> None:
    with pytest.raises(ValueError, match="shorter"):
        block_offsets([1, 2], [torch.float32])
