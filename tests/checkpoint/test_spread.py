"""Every element is in one cell, and whoever wants a block is told where to find each of its elements."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from hypothesis import given, settings, strategies as st

from fullshard.checkpoint.blocks import Block, whole
from fullshard.checkpoint.spread import Spread, undivided
from tests.helpers.spreads import blocks_in, spreads

quickly = settings(deadline=None, max_examples=150)


def elements_of_cell(spread: Spread, cell: int) -> list[int]:
    """Numbers of the whole tensor's elements in a cell, by its extent alone."""
    numbers = torch.arange(math.prod(spread.shape))
    if not spread.flat:
        numbers = numbers.reshape(spread.shape)
    extent = spread.extent(cell)
    return numbers[extent.slices_in(whole(numbers.shape))].flatten().tolist()


def elements(spread: Spread, block: Block) -> list[int]:
    numbers = torch.arange(math.prod(spread.shape)).reshape(spread.shape)
    return numbers[block.slices_in(whole(spread.shape))].flatten().tolist()


@quickly
@given(spreads())
def test_every_element_is_in_exactly_one_cell(spread: Spread) -> None:
    found = [i for cell in range(spread.cells) for i in elements_of_cell(spread, cell)]
    assert sorted(found) == list(range(math.prod(spread.shape)))


@quickly
@given(spreads())
def test_the_blocks_of_a_cell_are_the_cell_in_order(spread: Spread) -> None:
    for cell in range(spread.cells):
        expected = elements_of_cell(spread, cell)
        found: list[int] = []
        for block, offset in spread.blocks(cell):
            assert offset == len(found)
            found += elements(spread, block)
        assert found == expected
        assert spread.extent(cell).numel == len(expected)


@quickly
@given(spreads(), st.data())
def test_a_block_is_found_in_parts_of_cells(spread: Spread, data: st.DataObject) -> None:
    wanted = data.draw(blocks_in(spread.shape))
    found: list[int] = []
    for part in spread.overlapping(wanted):
        assert (part.block, part.offset) in list(spread.blocks(part.cell))
        assert part.wanted.intersection(part.block) == part.wanted
        found += elements(spread, part.wanted)
    assert sorted(found) == elements(spread, wanted)


@quickly
@given(spreads())
def test_ranks_know_their_cells(spread: Spread) -> None:
    (ranks,) = spread.holders
    for place, rank in enumerate(ranks):
        assert spread.cell_of(rank) == (place if place < spread.cells else None)
    assert spread.cell_of(len(ranks)) is None


def cells_seen(spread: Spread, wanted: Block) -> Iterator[int]:
    return (part.cell for part in spread.overlapping(wanted))


def test_what_is_wanted_of_very_many_cells_is_found_without_a_look_at_the_others() -> None:
    rows = Spread(shape=(2**50, 8), cuts=(range(0, 2**50, 2**10), (0,)), holders=(tuple(range(4)),))
    assert list(cells_seen(rows, Block((2**30 - 1, 0), (2, 1)))) == [2**20 - 1, 2**20]
    flat = Spread(shape=(2**50, 8), flat=True, cuts=(range(-3, 2**53, 2**13),), holders=((0,),))
    # Element 2**33 is cell 2**20, whose first element is 2**33 - 3.
    assert list(cells_seen(flat, Block((2**30, 0), (1, 8)))) == [2**20]
    assert rows.cells == 2**40


def test_the_drawing_in_the_docstring_is_right() -> None:
    rows = Spread(shape=(5, 2), cuts=(range(0, 5, 3), (0,)), holders=((0, 1),))
    assert [rows.extent(cell) for cell in range(2)] == [
        Block((0, 0), (3, 2)),
        Block((3, 0), (2, 2)),
    ]
    flat = Spread(shape=(12,), flat=True, cuts=(range(-4, 12, 8),), holders=((0, 1),))
    assert [flat.extent(cell) for cell in range(2)] == [Block((0,), (4,)), Block((4,), (8,))]


def test_an_undivided_tensor_is_one_cell_of_every_rank() -> None:
    for shape in ((), (3,), (2, 0)):
        spread = undivided(shape, (2, 5))
        assert spread.cells == 1
        assert spread.extent(0) == whole(shape)
        assert [spread.cell_of(rank) for rank in (2, 3, 5)] == [0, None, 0]
