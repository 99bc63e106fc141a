"""Blocks and ranges of elements, compared with torch's own indexing."""

from __future__ import annotations

import doctest
import itertools
import math

import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fullshard.layout import blocks as blocks_module
from fullshard.layout.blocks import Block, blocks_of_range, slabs, whole
from tests.helpers.shardings import blocks_in, shapes

quickly = settings(max_examples=60)


@st.composite
def nested_blocks(draw: st.DrawFn) -> tuple[Block, Block]:
    """A block, and one within it."""
    outer = draw(blocks_in(draw(shapes)))
    inner = draw(blocks_in(outer.shape))
    return outer, Block(
        tuple(a + b for a, b in zip(outer.start, inner.start, strict=True)), inner.shape
    )


@st.composite
def two_blocks(draw: st.DrawFn) -> tuple[tuple[int, ...], Block, Block]:
    shape = draw(shapes)
    return shape, draw(blocks_in(shape)), draw(blocks_in(shape))


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def elements(shape: tuple[int, ...], block: Block) -> list[int]:
    """Of a block of a tensor, in row-major order."""
    return numbered(shape)[block.slices_in(whole(shape))].flatten().tolist()


@quickly
@given(two_blocks())
def test_an_intersection_has_what_both_have(case: tuple[tuple[int, ...], Block, Block]) -> None:
    shape, a, b = case
    common = a.intersection(b)
    assert common == b.intersection(a)
    expected = set(elements(shape, a)) & set(elements(shape, b))
    assert (set(elements(shape, common)) if common else set()) == expected


@quickly
@given(nested_blocks())
def test_ranges_are_the_elements_of_a_block_in_order(case: tuple[Block, Block]) -> None:
    outer, inner = case
    runs = list(inner.ranges_in(outer))
    found = [i for first, count in runs for i in range(first, first + count)]
    assert found == numbered(outer.shape)[inner.slices_in(outer)].flatten().tolist()
    assert all(first + count < later for (first, count), (later, _) in itertools.pairwise(runs))


@quickly
@given(nested_blocks(), st.integers(0, 9))
def test_ranges_with_gaps_are_as_long_as_the_gaps_allow(
    case: tuple[Block, Block], largest_gap: int
) -> None:
    outer, inner = case
    joined: list[tuple[int, int]] = []
    for first, count in inner.ranges_in(outer):
        if joined and first - sum(joined[-1]) <= largest_gap:
            begin = joined.pop()[0]
            joined.append((begin, first + count - begin))
        else:
            joined.append((first, count))
    assert list(inner.ranges_in(outer, largest_gap=largest_gap)) == joined


@quickly
@given(shapes, st.data())
def test_a_range_of_elements_is_a_few_blocks(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    begin, end = sorted(data.draw(st.tuples(st.integers(0, numel), st.integers(0, numel))))
    found = blocks_of_range(shape, begin, end)
    assert [i for block in found for i in elements(shape, block)] == list(range(begin, end))
    assert all(block.numel for block in found)
    assert len(found) <= max(2 * len(shape) - 1, 1)


@quickly
@given(shapes, st.integers(1, 30))
def test_slabs_are_all_of_a_tensor_in_order(shape: tuple[int, ...], limit: int) -> None:
    found = list(slabs(shape, limit))
    assert all(block.numel <= limit for block in found)
    assert [x for block in found for x in elements(shape, block)] == list(range(math.prod(shape)))


def test_slabs_are_whole_rows_where_a_row_is_not_too_large() -> None:
    assert list(slabs((5, 3), 7)) == [
        Block((0, 0), (2, 3)),
        Block((2, 0), (2, 3)),
        Block((4, 0), (1, 3)),
    ]


def test_the_examples_in_the_docstrings_are_right() -> None:
    assert doctest.testmod(blocks_module).failed == 0
    assert doctest.testmod(blocks_module).attempted > 0
