"""Two tensors of one memory have bytes in common, or have not: the regions say so."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st

from fullshard.checks.regions import EVERYTHING, overlap, region_of

MEMORY = torch.empty(64, dtype=torch.uint8)


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.int32]))
    whole = MEMORY.view(dtype)
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    strides = [draw(st.integers(0, 5)) for _ in shape]
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
    begin = draw(st.integers(0, max(whole.numel() - 1 - reach, 0)))
    if begin + reach >= whole.numel():
        return whole[:1]
    return whole.as_strided(shape, strides, begin)


def bytes_of(tensor: torch.Tensor) -> set[int]:
    """Return the bytes of a tensor, each element looked up by itself."""
    item = tensor.element_size()
    numbers = torch.arange(MEMORY.numel() // item).as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )
    return {number * item + i for number in numbers.flatten().tolist() for i in range(item)}


@settings(max_examples=300, deadline=None)
@given(views(), views())
def test_regions_overlap_if_and_only_if_tensors_have_bytes_in_common(one, other) -> None:
    first, second = region_of(one), region_of(other)
    assert (first is None) == (one.numel() == 0)
    if first is None or second is None:
        return
    assert overlap(first, second) == bool(bytes_of(one) & bytes_of(other))
    assert overlap(first, EVERYTHING)
    if first.covers(second):
        assert bytes_of(other) <= bytes_of(one)
    assert region_of(MEMORY).covers(first)


def test_columns_of_a_matrix_do_not_overlap_but_their_rows_do() -> None:
    matrix = MEMORY.view(8, 8)
    left, right, row = (region_of(each) for each in (matrix[:, :4], matrix[:, 4:], matrix[3]))
    assert not overlap(left, right)
    assert overlap(left, row) and overlap(row, right)
