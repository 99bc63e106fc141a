"""Every element is in one cell, and the parts of cells that make up a block are found."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from hypothesis import given, settings, strategies as st

from fullshard.layout.blocks import Block, whole
from fullshard.layout.sharding import Sharding, replicated
from tests.helpers.shardings import blocks_in, shardings

quickly = settings(max_examples=60)


def elements_of_cell(sharding: Sharding, cell: int) -> list[int]:
    """Numbers of the whole tensor's elements in a cell, by its extent alone."""
    numbers = torch.arange(math.prod(sharding.shape))
    if not sharding.flat:
        numbers = numbers.reshape(sharding.shape)
    extent = sharding.extent(cell)
    return numbers[extent.slices_in(whole(numbers.shape))].flatten().tolist()


def elements(sharding: Sharding, block: Block) -> list[int]:
    numbers = torch.arange(math.prod(sharding.shape)).reshape(sharding.shape)
    return numbers[block.slices_in(whole(sharding.shape))].flatten().tolist()


@quickly
@given(shardings())
def test_every_element_is_in_exactly_one_cell(sharding: Sharding) -> None:
    found = [i for cell in range(sharding.cells) for i in elements_of_cell(sharding, cell)]
    assert sorted(found) == list(range(math.prod(sharding.shape)))


@quickly
@given(shardings())
def test_the_blocks_of_a_cell_are_the_cell_in_order(sharding: Sharding) -> None:
    for cell in range(sharding.cells):
        expected = elements_of_cell(sharding, cell)
        found: list[int] = []
        for block, offset in sharding.blocks(cell):
            assert offset == len(found)
            found += elements(sharding, block)
        assert found == expected
        assert sharding.extent(cell).numel == len(expected)


@quickly
@given(shardings(), st.data())
def test_a_block_is_found_in_parts_of_cells(sharding: Sharding, data: st.DataObject) -> None:
    wanted = data.draw(blocks_in(sharding.shape))
    found: list[int] = []
    for part in sharding.overlapping(wanted):
        assert (part.block, part.offset) in list(sharding.blocks(part.cell))
        assert part.wanted.intersection(part.block) == part.wanted
        found += elements(sharding, part.wanted)
    assert sorted(found) == elements(sharding, wanted)


@quickly
@given(shardings())
def test_ranks_know_their_cells(sharding: Sharding) -> None:
    (ranks,) = sharding.holders
    for place, rank in enumerate(ranks):
        assert sharding.cell_of(rank) == (place if place < sharding.cells else None)
    assert sharding.cell_of(len(ranks)) is None


def cells_seen(sharding: Sharding, wanted: Block) -> Iterator[int]:
    return (part.cell for part in sharding.overlapping(wanted))


def test_what_is_wanted_of_very_many_cells_is_found_without_a_look_at_the_others() -> None:
    rows = Sharding(
        shape=(2**50, 8), cuts=(range(0, 2**50, 2**10), (0,)), holders=(tuple(range(4)),)
    )
    assert list(cells_seen(rows, Block((2**30 - 1, 0), (2, 1)))) == [2**20 - 1, 2**20]
    flat = Sharding(shape=(2**50, 8), flat=True, cuts=(range(-3, 2**53, 2**13),), holders=((0,),))
    # Element 2**33 is cell 2**20, whose first element is 2**33 - 3.
    assert list(cells_seen(flat, Block((2**30, 0), (1, 8)))) == [2**20]
    assert rows.cells == 2**40


def test_the_drawing_in_the_docstring_is_right() -> None:
    rows = Sharding(shape=(5, 2), cuts=(range(0, 5, 3), (0,)), holders=((0, 1),))
    assert [rows.extent(cell) for cell in range(2)] == [
        Block((0, 0), (3, 2)),
        Block((3, 0), (2, 2)),
    ]
    flat = Sharding(shape=(12,), flat=True, cuts=(range(-4, 12, 8),), holders=((0, 1),))
    assert [flat.extent(cell) for cell in range(2)] == [Block((0,), (4,)), Block((4,), (8,))]


def test_a_replicated_tensor_is_one_cell_of_every_rank() -> None:
    for shape in ((), (3,), (2, 0)):
        sharding = replicated(shape, (2, 5))
        assert sharding.cells == 1
        assert sharding.extent(0) == whole(shape)
        assert [sharding.cell_of(rank) for rank in (2, 3, 5)] == [0, None, 0]
