"""Memory comes and goes under its views, and what was put in by ranks comes out whole.

All ranks live in this process: each has buffers of its own, and collectives are copies between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import fullshard.storage.buffers
from fullshard.layout.segments import (
    ALIGNMENT,
    ROW_ALIGNMENT,
    Division,
    Layout,
    contiguous_strides,
    flat_layout,
    per_row_layout,
)
from fullshard.storage.buffers import (
    Buffer,
    GatherBuffer,
    rank_chunks,
)
from fullshard.storage.copy_out import CELL, CELL_DTYPE, Indices
from fullshard.storage.shard_buffer import ShardBuffer
from tests.helpers.compare import assert_equal

CPU = torch.device("cpu")
HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


@dataclass(frozen=True, kw_only=True)
class Group:
    """A layout and the dtypes of its parameters."""

    layout: Layout
    dtypes: tuple[torch.dtype, ...]

    @property
    def ranks(self) -> range:
        return range(self.layout.world)

    @property
    def params(self) -> range:
        return range(len(self.layout.slots))


def per_row(
    *params: tuple[tuple[int, ...], int, torch.dtype],
    world: int,
) -> Group:
    layout = per_row_layout([p[0] for p in params], world=world, dims=[p[1] for p in params])
    return Group(layout=layout, dtypes=tuple(p[2] for p in params))


def flat(*params: tuple[tuple[int, ...], torch.dtype], world: int) -> Group:
    dtypes = [p[1] for p in params]
    layout = flat_layout([p[0] for p in params], world=world, kinds=dtypes)
    return Group(layout=layout, dtypes=tuple(dtypes))


MIXED = per_row(
    ((3, 4), 0, SINGLE),
    ((4,), 0, HALF),
    ((), 0, DOUBLE),
    ((2, 5, 3), 1, SINGLE),
    ((0, 4), 0, SINGLE),
    ((3, 2), 1, HALF),
    ((7,), 0, torch.int64),
    world=3,
)
GROUPS = {
    "the worked example": per_row(((3, 4), 0, SINGLE), ((4,), 0, SINGLE), world=2),
    "the worked example, flat": flat(((3, 4), SINGLE), ((4,), SINGLE), world=2),
    "everything at once": MIXED,
    "one rank": per_row(((3, 4), 1, SINGLE), ((), 0, HALF), ((2,), 0, HALF), world=1),
    "more ranks than rows": per_row(((2, 3), 0, SINGLE), ((4, 2), 1, HALF), world=5),
    "flat, two dtypes, 0-d": flat(
        ((3, 4), SINGLE), ((), HALF), ((5,), HALF), ((0, 2), SINGLE), ((2, 2), SINGLE), world=3
    ),
    "nothing but empty parameters": per_row(((0, 3), 0, SINGLE), ((2, 0), 1, HALF), world=2),
}
every_group = pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS.keys())
in_place_and_packed = pytest.mark.parametrize("packed", [False, True], ids=["in place", "packed"])


@st.composite
def groups(draw: st.DrawFn) -> Group:
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=4))
    dtypes = [draw(st.sampled_from([HALF, SINGLE, DOUBLE, torch.uint8])) for _ in shapes]
    world = draw(st.integers(1, 5))
    if draw(st.booleans()):
        layout = flat_layout(shapes, world=world, kinds=dtypes)
    else:
        dims = [draw(st.integers(0, max(len(shape) - 1, 0))) for shape in shapes]
        layout = per_row_layout(shapes, world=world, dims=dims)
    return Group(layout=layout, dtypes=tuple(dtypes))


quickly = settings(max_examples=60)


def full_params(group: Group, seed: int = 0) -> list[Tensor]:
    """Whole numbers in every dtype, so that sums are exact, too."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(1, 60, slot.shape, generator=generator).to(dtype)
        for slot, dtype in zip(group.layout.slots, group.dtypes, strict=True)
    ]


def held_by(layout: Layout, index: int, rank: int, whole: Tensor) -> Tensor:
    """What of a whole parameter a rank holds."""
    slot, piece = layout.slots[index], layout.piece(index, rank)
    if slot.division is Division.REPLICATED:
        return whole
    if slot.division is Division.FLAT:
        return whole.flatten()[piece.start : piece.start + piece.numel]
    return whole.narrow(slot.dim, piece.start, piece.shape[slot.dim])


def sharded(group: Group, wholes: Sequence[Tensor]) -> list[ShardBuffer]:
    """The shard buffers of all ranks, filled."""
    shards = []
    for rank in group.ranks:
        shard = ShardBuffer(group.layout, rank, group.dtypes, CPU)
        for index, (local, whole) in enumerate(zip(shard.locals, wholes, strict=True)):
            local.copy_(held_by(group.layout, index, rank, whole))
        shards.append(shard)
    return shards


def gather_buffers(group: Group, *, packed: bool) -> list[GatherBuffer]:
    return [
        GatherBuffer(group.layout, rank, group.dtypes, CPU, packed=packed) for rank in group.ranks
    ]


def all_gather(buffers: Sequence[GatherBuffer], shards: Sequence[ShardBuffer]) -> None:
    """What a group does to unshard, for all ranks."""
    for buffer, shard in zip(buffers, shards, strict=True):
        shard.flat_shard.copy_into(buffer.own_shard)
    for message in range(len(buffers[0].outputs)):
        gathered = torch.cat([buffer.inputs[message] for buffer in buffers])
        for buffer in buffers:
            buffer.outputs[message].copy_(gathered)
    for buffer in buffers:
        if buffer.packed:
            buffer.allocate_params()
        buffer.copy_out()


def address(tensor: Tensor) -> int:
    """Where a tensor begins in its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.dtype.itemsize


# Hidden, and without a tensor in what fails: pytest prints arguments, and whoever reads absent memory
# is killed.


def assert_present(tensors: Iterable[Tensor]) -> None:
    __tracebackhide__ = True
    absent = [index for index, there in _presence(tensors) if not there]
    if absent:
        pytest.fail(f"tensors {absent} have no memory")


def assert_absent(tensors: Iterable[Tensor]) -> None:
    __tracebackhide__ = True
    present = [index for index, there in _presence(tensors) if there]
    if present:
        pytest.fail(f"tensors {present} still have memory")


def _presence(tensors: Iterable[Tensor]) -> list[tuple[int, bool]]:
    """Which tensors have memory; those without elements are left out."""
    return [
        (index, tensor.untyped_storage().nbytes() > 0)
        for index, tensor in enumerate(tensors)
        if tensor.numel()
    ]


# --- Buffer ----------------------------------------------------------------------------------------------


def test_a_buffer_begins_with_its_memory_and_gives_it_back_and_takes_it_again() -> None:
    buffer = Buffer(256, CPU)
    states = [(buffer.allocated, buffer.data_ptr != 0, buffer.nbytes)]
    buffer.release()
    states.append((buffer.allocated, buffer.data_ptr != 0, buffer.nbytes))
    buffer.allocate()
    states.append((buffer.allocated, buffer.data_ptr != 0, buffer.nbytes))
    assert states == [(True, True, 256), (False, False, 256), (True, True, 256)]


def test_a_buffer_that_has_memory_takes_no_other() -> None:
    buffer = Buffer(1 << 20, CPU)
    address, view = buffer.data_ptr, buffer.view(SINGLE, 0, (6,))
    view.copy_(torch.arange(6.0))
    before = torch.empty(1 << 20, dtype=torch.uint8)  # so that other memory would lie elsewhere
    buffer.allocate()
    assert buffer.data_ptr == address
    assert view.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    del before


def test_views_stay_valid_objects_while_the_memory_comes_and_goes() -> None:
    buffer = Buffer(256, CPU)
    view, twin = buffer.view(SINGLE, 128, (2, 3)), buffer.view(SINGLE, 128, (6,))
    view.fill_(1)
    assert twin.tolist() == [1.0] * 6
    buffer.release()
    assert_absent([view, twin])
    geometry = tuple(view.shape), view.stride()
    assert geometry == ((2, 3), (3, 1))
    buffer.allocate()
    assert_present([view, twin])
    twin.copy_(torch.arange(6.0))
    assert view.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert view.data_ptr() == buffer.data_ptr + 128


def test_what_autograd_saved_sees_the_next_contents_and_no_change_of_version() -> None:
    buffer = Buffer(128, CPU)
    weight, filler = buffer.view(SINGLE, 0, (3,)), buffer.view(SINGLE, 0, (3,))
    filler.copy_(torch.tensor([1.0, 2.0, 3.0]))
    x = torch.ones(3, requires_grad=True)
    y = (x * torch.nn.Parameter(weight)).sum()
    buffer.release()
    buffer.allocate()
    filler.copy_(torch.tensor([4.0, 5.0, 6.0]))
    y.backward()
    assert x.grad is not None and x.grad.tolist() == [4.0, 5.0, 6.0]


def test_views_have_version_counters_of_their_own() -> None:
    buffer = Buffer(128, CPU)
    view, twin = buffer.view(SINGLE, 0, (3,)), buffer.view(SINGLE, 0, (3,))
    before = view._version
    twin.zero_()
    buffer.release()
    buffer.allocate()
    assert view._version == before
    view.zero_()
    assert view._version == before + 1
    assert not view._is_view() and view.grad_fn is None


def test_a_view_of_absent_memory_is_refused_since_it_would_allocate() -> None:
    buffer = Buffer(128, CPU)
    buffer.release()
    with pytest.raises(AssertionError, match="absent memory"):
        buffer.view(SINGLE, 0, (3,))
    assert not buffer.allocated


def test_views_of_several_dtypes_share_one_storage() -> None:
    buffer = Buffer(64, CPU)
    number, bytes_ = buffer.view(torch.int32, 32, ()), buffer.view(torch.uint8, 32, (4,))
    number.fill_(0x01020304)
    assert sorted(bytes_.tolist()) == [1, 2, 3, 4]
    assert number.shape == ()


def test_an_empty_buffer_has_nothing_to_give_back_and_only_empty_views() -> None:
    buffer = Buffer(0, CPU)
    view = buffer.view(SINGLE, 0, (3, 0))
    assert view.shape == (3, 0)
    buffer.release()
    buffer.allocate()
    assert not buffer.allocated


def test_a_view_of_no_elements_at_the_end_does_not_grow_the_buffer() -> None:
    buffer = Buffer(128, CPU)
    assert buffer.view(SINGLE, 128, (0, 3)).shape == (0, 3)
    assert buffer.view(SINGLE, 0, (32,)).untyped_storage().nbytes() == 128


@quickly
@given(st.lists(st.integers(0, 4), max_size=4))
def test_strides_are_those_of_a_contiguous_tensor(shape: list[int]) -> None:
    assert contiguous_strides(shape) == torch.empty(shape).stride()


def test_rank_chunks_are_the_blocks_of_all_ranks_as_views() -> None:
    layout = per_row_layout([(2, 5)], world=4, dims=[1])
    whole = torch.arange(10).reshape(2, 5)
    chunks = rank_chunks(layout, 0, whole)
    assert [tuple(chunk.shape) for chunk in chunks] == [(2, 2), (2, 2), (2, 1), (2, 0)]
    assert_equal(torch.cat(chunks, dim=1), whole)
    chunks[2].zero_()
    assert whole[:, 4].tolist() == [0, 0]


# --- ShardBuffer -----------------------------------------------------------------------------------------


@every_group
def test_locals_are_parts_of_the_pieces_which_start_aligned_in_one_storage(group: Group) -> None:
    layout = group.layout
    for rank, shard in zip(group.ranks, sharded(group, full_params(group)), strict=True):
        end = 0
        for index in layout.memory_order(range(len(layout.segments))):
            piece = shard.pieces[index]
            assert piece.shape == (layout.segments[index].piece_numel,)
            unit = ROW_ALIGNMENT * piece.itemsize
            assert address(piece) % unit == 0 and address(piece) >= end
            end = address(piece) + piece.numel() * piece.dtype.itemsize
        assert end <= shard.nbytes == shard.pieces[0].untyped_storage().nbytes()
        for index, local in enumerate(shard.locals):
            expected = layout.piece(index, rank)
            piece = shard.pieces[layout.slots[index].segment]
            assert local.shape == expected.shape and local.is_contiguous()
            assert local.dtype is piece.dtype is group.dtypes[index]
            held = piece[expected.offset : expected.offset + expected.numel]
            assert torch.equal(held.reshape(expected.shape), local)


def test_the_worked_example_has_zeros_where_it_is_padded() -> None:
    group = GROUPS["the worked example"]
    wholes = [torch.arange(1.0, 13.0).reshape(3, 4), torch.arange(101.0, 105.0)]
    first, second = sharded(group, wholes)
    assert [piece.tolist() for piece in first.pieces] == [list(range(1, 9)), [101, 102]]
    assert [piece.tolist() for piece in second.pieces] == [[9, 10, 11, 12, 0, 0, 0, 0], [103, 104]]


def test_a_shard_can_be_planned_on_the_meta_device() -> None:
    shard = ShardBuffer(MIXED.layout, 1, MIXED.dtypes, torch.device("meta"))
    assert all(local.is_meta for local in shard.locals)
    expected = [MIXED.layout.piece(index, 1).shape for index in MIXED.params]
    assert [tuple(local.shape) for local in shard.locals] == expected


# --- GatherBuffer ----------------------------------------------------------------------------------------


@in_place_and_packed
@every_group
def test_what_ranks_hold_is_gathered_bit_for_bit_again_and_again(
    group: Group, packed: bool
) -> None:
    buffers = gather_buffers(group, packed=packed)
    params = [list(buffer.params) for buffer in buffers]
    for step in range(3):
        wholes = full_params(group, seed=step)
        all_gather(buffers, sharded(group, wholes))
        for buffer, before in zip(buffers, params, strict=True):
            assert_equal(buffer.params, wholes)
            assert all(new is old for new, old in zip(buffer.params, before, strict=True))
            buffer.release()
            assert_absent(buffer.params)
            buffer.allocate()


@quickly
@given(groups(), st.booleans())
def test_any_group_is_gathered_bit_for_bit(group: Group, packed: bool) -> None:
    wholes = full_params(group)
    buffers = gather_buffers(group, packed=packed)
    all_gather(buffers, sharded(group, wholes))
    for buffer in buffers:
        assert_equal(buffer.params, wholes)


def contains(buffer: GatherBuffer, tensor: Tensor) -> bool:
    """Whether a tensor lies in the memory of the full parameters."""
    begin = buffer.full.data_ptr
    return tensor.data_ptr() in range(begin, begin + buffer.full.held_bytes)


@in_place_and_packed
@every_group
def test_params_lie_aligned_in_one_storage_and_are_contiguous(group: Group, packed: bool) -> None:
    for buffer in gather_buffers(group, packed=packed):
        buffer.allocate_params()
        begin = buffer.params[0].untyped_storage().data_ptr()
        taken: list[tuple[int, int]] = []
        for param, slot in zip(buffer.params, group.layout.slots, strict=True):
            assert param.is_contiguous() and param.shape == slot.shape
            assert param.untyped_storage().data_ptr() == begin
            assert param.untyped_storage().nbytes() == buffer.nbytes
            if slot.division is not Division.FLAT:
                assert address(param) % ALIGNMENT == 0
            if param.numel():
                assert contains(buffer, param)
                taken.append((address(param), address(param) + param.nbytes))
        taken.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(taken))
        assert all(end <= buffer.nbytes for _, end in taken)
        assert not contains(buffer, torch.ones(1))


@in_place_and_packed
@every_group
def test_a_gather_is_no_change_of_the_parameters_in_the_eyes_of_autograd(
    group: Group, packed: bool
) -> None:
    buffers = gather_buffers(group, packed=packed)
    before = [[param._version for param in buffer.params] for buffer in buffers]
    all_gather(buffers, sharded(group, full_params(group)))
    assert [[param._version for param in buffer.params] for buffer in buffers] == before


@in_place_and_packed
@every_group
def test_a_rank_sends_its_part_of_what_it_receives(group: Group, packed: bool) -> None:
    for rank, buffer in zip(group.ranks, gather_buffers(group, packed=packed), strict=True):
        assert len(buffer.own_shard.segments) == len(group.layout.segments)
        for output, own in zip(buffer.outputs, buffer.inputs, strict=True):
            assert output.dtype is own.dtype is torch.uint8
            assert output.numel() == own.numel() * group.layout.world > 0
            assert own.data_ptr() == output.data_ptr() + rank * own.numel()


def test_in_place_every_segment_with_elements_is_a_message_and_whole_rows_lie_where_they_arrive() -> (
    None
):
    buffer = GatherBuffer(MIXED.layout, 0, MIXED.dtypes, CPU, packed=False)
    assert len(buffer.outputs) == 6  # of seven parameters one is empty
    zero_copy = [slot.zero_copy for slot in MIXED.layout.slots]
    assert [contains(buffer, piece) for piece in buffer.own_shard.segments if piece.numel()] == [
        flag for flag, param in zip(zero_copy, buffer.params, strict=True) if param.numel()
    ]


def test_packed_there_is_one_message_and_nothing_of_it_in_the_gathered_memory() -> None:
    buffer = GatherBuffer(MIXED.layout, 0, MIXED.dtypes, CPU, packed=True)
    buffer.allocate_params()
    (output,), (own,) = buffer.outputs, buffer.inputs
    assert own.numel() == buffer.message_nbytes
    assert output.numel() == 3 * buffer.message_nbytes
    assert not any(contains(buffer, t) for t in [output, own, *buffer.own_shard.segments])


def test_a_group_without_elements_sends_no_message() -> None:
    for packed in (False, True):
        (buffer, _) = gather_buffers(GROUPS["nothing but empty parameters"], packed=packed)
        assert buffer.outputs == [] and buffer.inputs == []


@in_place_and_packed
def test_staging_memory_is_there_from_allocation_to_copy_out_only(packed: bool) -> None:
    buffers = gather_buffers(MIXED, packed=packed)
    chunked = next(i for i, slot in enumerate(MIXED.layout.slots) if not slot.zero_copy)
    staged = [buffer.own_shard.segments[chunked] for buffer in buffers]
    all_gather(buffers, sharded(MIXED, full_params(MIXED)))
    assert_absent(staged)
    assert_present(param for buffer in buffers for param in buffer.params)
    for buffer in buffers:
        buffer.release()
        buffer.allocate()
    assert_present(staged)
    for buffer in buffers:  # a gather that came to nothing
        buffer.release()
    assert_absent(staged)


def test_packed_the_parameters_take_memory_only_when_they_are_distributed() -> None:
    (buffer, *_) = gather_buffers(MIXED, packed=True)
    for _ in range(2):
        assert_absent(buffer.params)
        assert_present(buffer.own_shard.segments)
        buffer.allocate_params()
        assert_present(buffer.params)
        buffer.release()
        buffer.allocate()


def test_in_place_the_parameters_take_memory_with_the_gather() -> None:
    (buffer, *_) = gather_buffers(MIXED, packed=False)
    for _ in range(2):
        assert_present([*buffer.params, *buffer.own_shard.segments])
        buffer.release()
        assert_absent([*buffer.params, *buffer.own_shard.segments])
        buffer.allocate()


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_an_index_brings_gathered_rows_to_the_parameters(dtype: torch.dtype) -> None:
    # The second parameter ends within an aligned block, so something lies behind it.
    group = per_row(((24, 4), 0, dtype), ((24,), 0, dtype), ((6, 16), 0, dtype), world=3)
    buffers, wholes = gather_buffers(group, packed=True), full_params(group)
    rows = torch.zeros(3, buffers[0].message_nbytes, dtype=torch.uint8)
    for buffer, shard in zip(buffers, sharded(group, wholes), strict=True):
        shard.flat_shard.copy_into(buffer.shard_in(rows))
    indices, copies = Indices(), []
    for buffer in buffers:
        buffer.allocate_params()
        full = buffer.full.view(CELL_DTYPE, 0, (buffer.nbytes // CELL,))
        buffer._cells = rows.view(CELL_DTYPE).view(-1), full
        buffer.change_indices(indices)
        assert isinstance(buffer._copy, partial) and buffer._copy.func is torch.index_select
        buffer._copy()
        copies.append(buffer._copy)
        assert_equal(buffer.params, wholes)
    assert len({id(each.args[2]) for each in copies}) == 1, "those that are alike share one"
    buffer, others = buffers[0], Indices()
    buffer.change_indices(others)
    assert isinstance(buffer._copy, partial)
    assert buffer._copy.args[2] is next(iter(others.values()))
    assert_equal(buffer._copy.args[2], copies[0].args[2])
    buffer.change_indices(None)
    assert buffer._copy is buffer._in_pieces, "it is distributed in the other way"


@pytest.mark.parametrize("few_pieces", [0, 256])
def test_accelerators_distribute_rows_by_one_kernel_or_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch, few_pieces: int
) -> None:
    monkeypatch.setattr(fullshard.storage.buffers, "FEW_PIECES", few_pieces)
    group = per_row(((24, 4), 0, HALF), ((24,), 0, HALF), ((6, 16), 0, HALF), world=3)
    buffers, wholes = gather_buffers(group, packed=True), full_params(group)
    for buffer in buffers:
        buffer.allocate_params()
        buffer.device = torch.device("meta")  # as on a device that is not the CPU
        buffer._copy = buffer._copy_of_rows(None)
        assert isinstance(buffer._copy, partial)
        assert (buffer._copy.func is torch.split_with_sizes_copy) == (few_pieces == 0)
        assert buffer._copy is not buffer._in_pieces
    all_gather(buffers, sharded(group, wholes))
    for buffer in buffers:
        assert_equal(buffer.params, wholes)


@every_group
def test_a_message_can_be_gathered_in_memory_of_somebody_else(group: Group) -> None:
    buffers, wholes = gather_buffers(group, packed=True), full_params(group)
    rows = torch.zeros(group.layout.world, buffers[0].message_nbytes, dtype=torch.uint8)
    for buffer, shard in zip(buffers, sharded(group, wholes), strict=True):
        shard.flat_shard.copy_into(buffer.shard_in(rows))
    for buffer in buffers:
        buffer.allocate_params()
        buffer.copy_out_of(rows)
        assert_equal(buffer.params, wholes)
        assert_absent(buffer.own_shard.segments)  # memory of its own is of no use
