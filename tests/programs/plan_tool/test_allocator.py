"""The model of torch's caching allocator: numbers by hand from the documented rules, and what holds for all sequences."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from fullshard.programs.plan_tool.allocator import MIB, CachingAllocator

KIB = 1024


def test_sizes_are_rounded_and_small_requests_share_a_segment() -> None:
    memory = CachingAllocator()
    memory.allocate(1, 1)
    memory.allocate(2, 513)
    memory.allocate(3, MIB)
    assert memory.allocated == 512 + 1024 + MIB
    assert memory.reserved == 2 * MIB
    memory.allocate(4, MIB)  # 1 MiB - 1.5 KiB is left
    assert memory.reserved == 4 * MIB
    memory.allocate(5, MIB - 2048)
    assert memory.reserved == 4 * MIB


@pytest.mark.parametrize(
    ("nbytes", "reserved"),
    [
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (21 * MIB, 22 * MIB),
    ],
)
def test_large_requests_have_segments_of_20_mib_or_of_their_own(nbytes: int, reserved: int) -> None:
    memory = CachingAllocator()
    memory.allocate(1, nbytes)
    assert memory.reserved == reserved


def test_a_large_block_is_not_split_for_a_mebibyte() -> None:
    memory = CachingAllocator()
    memory.allocate(1, 11 * MIB)
    assert (memory.allocated, memory.reserved) == (12 * MIB, 12 * MIB), "the rest counts too"
    memory.free(1)
    memory.allocate(1, 11 * MIB - 512)
    assert memory.allocated == 11 * MIB - 512, "more than a mebibyte is left"
    memory.allocate(2, MIB)
    assert memory.reserved == 14 * MIB, "small requests have a pool of their own"


def test_the_best_fit_is_taken_and_neighbours_merge() -> None:
    memory = CachingAllocator()
    for number, mebibytes in enumerate((4, 2, 6, 2, 6)):  # one segment of 20 MiB
        memory.allocate(number, mebibytes * MIB)
    assert memory.reserved == 20 * MIB
    memory.free(0)
    memory.free(2)
    memory.allocate(5, 3 * MIB)  # into the hole of 4, which is not split for a mebibyte
    memory.allocate(6, 6 * MIB)
    assert (memory.allocated, memory.reserved) == (20 * MIB, 20 * MIB)
    for number in (1, 5):
        memory.free(number)
    memory.allocate(7, 6 * MIB)
    assert memory.reserved == 20 * MIB, "4 and 2 became 6"
    assert memory.peak_allocated == 20 * MIB


def test_streams_do_not_share_memory() -> None:
    memory = CachingAllocator()
    memory.allocate(1, 30 * MIB, stream=0)
    memory.free(1)
    memory.allocate(2, 30 * MIB, stream=1)
    assert memory.reserved == 60 * MIB
    memory.use_meanwhile(30 * MIB, stream=0)
    assert (memory.reserved, memory.allocated) == (60 * MIB, 30 * MIB)
    assert memory.peak_allocated == 60 * MIB


def test_nothing_goes_back_to_the_device_until_it_is_full() -> None:
    memory = CachingAllocator(capacity=100 * MIB)
    memory.allocate(1, 60 * MIB)
    memory.allocate(2, 8 * MIB)
    memory.free(1)
    assert memory.reserved == 80 * MIB
    memory.allocate(3, 70 * MIB)  # the 60 go back; the 20 are in use
    assert (memory.reserved, memory.retries, memory.missing) == (90 * MIB, 1, 0)
    memory.allocate(4, 30 * MIB)
    assert memory.missing == 20 * MIB
    assert memory.peak_reserved == 120 * MIB


def test_fragments_are_reserved_though_they_are_of_no_use() -> None:
    memory = CachingAllocator()
    for number in range(10):
        memory.allocate(number, 2 * MIB)
    for number in range(0, 10, 2):
        memory.free(number)
    memory.allocate(11, 4 * MIB)
    assert (memory.allocated, memory.reserved) == (14 * MIB, 40 * MIB)


def test_expandable_segments_grow_at_their_end() -> None:
    memory = CachingAllocator(expandable_segments=True)
    memory.allocate(1, 30 * MIB)
    assert memory.reserved == 40 * MIB
    memory.allocate(2, 15 * MIB)  # 10 are there
    assert memory.reserved == 60 * MIB
    memory.free(2)
    memory.allocate(3, 50 * MIB)  # 30 are there
    assert (memory.allocated, memory.reserved) == (80 * MIB, 80 * MIB)
    memory.free(1)
    memory.allocate(4, 512)
    assert memory.reserved == 82 * MIB
    memory.allocate(5, 30 * MIB)
    assert memory.reserved == 82 * MIB


def test_the_end_of_an_expandable_segment_is_taken_last() -> None:
    memory = CachingAllocator(expandable_segments=True)
    memory.allocate(1, 20 * MIB)
    memory.allocate(2, 10 * MIB)
    memory.free(1)
    memory.allocate(3, 8 * MIB)  # the 10 at the end would fit better
    memory.allocate(4, 12 * MIB)
    memory.allocate(5, 10 * MIB)
    assert (memory.allocated, memory.reserved) == (40 * MIB, 40 * MIB)


def test_a_full_device_takes_back_parts_of_expandable_segments() -> None:
    memory = CachingAllocator(capacity=100 * MIB, expandable_segments=True)
    memory.allocate(1, 50 * MIB)
    memory.allocate(2, 30 * MIB)
    memory.free(1)
    memory.allocate(3, 60 * MIB)  # of the 50 that are free, 40 go back
    assert (memory.reserved, memory.missing) == (100 * MIB, 0)
    memory.free(3)
    memory.free(2)
    memory.allocate(4, 20 * MIB, stream=1)
    assert (memory.reserved, memory.missing) == (20 * MIB, 0), "10 before and 30 after a hole"


SIZES = st.one_of(
    st.integers(1, 4 * KIB), st.integers(MIB // 2, 3 * MIB), st.integers(9 * MIB, 45 * MIB)
)
STEPS = st.lists(
    st.tuples(st.integers(0, 1), SIZES, st.lists(st.integers(0, 30), max_size=2)), max_size=25
)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.booleans(), st.sampled_from([None, 64 * MIB]))
def test_blocks_never_overlap_and_sums_are_right(
    steps: list[tuple[int, int, list[int]]], expands: bool, capacity: int | None
) -> None:
    memory = CachingAllocator(capacity=capacity, expandable_segments=expands)
    live: dict[int, int] = {}
    for number, (stream, size, freed) in enumerate(steps):
        memory.allocate(number, size, stream)
        live[number] = size
        for each in freed:
            if live.pop(each, None) is not None:
                memory.free(each)
        rounded = sum(-(-size // 512) * 512 for size in live.values())
        large = sum(size > MIB - 512 for size in live.values())
        assert rounded <= memory.allocated <= rounded + (0 if expands else large * MIB)
        assert memory.allocated <= memory.reserved <= memory.peak_reserved
        blocks = sorted(memory.blocks())
        for (address, length, _), (following, *_) in pairwise(blocks):
            assert address + length <= following
        assert sum(length for _, length, _ in blocks) == memory.reserved
        assert sum(length for _, length, used in blocks if used) == memory.allocated
    for number in live:
        memory.free(number)
    assert memory.allocated == 0


def test_memory_is_not_allocated_twice() -> None:
    memory = CachingAllocator()
    memory.allocate(1, 0)
    with pytest.raises(ValueError, match="memory 1 is allocated already"):
        memory.allocate(1, 5)
    memory.free(1)
    memory.use_meanwhile(0)
    assert memory.reserved == 0
