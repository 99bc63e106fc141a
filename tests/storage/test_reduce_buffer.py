"""Gradients of all ranks are added up piece by piece, in whichever order they lie until then."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from fullshard.engine.reduction import fill as laid_into
from fullshard.engine.reduction_state import joined
from fullshard.layout.segments import (
    ALIGNMENT,
    ROW_ALIGNMENT,
    Division,
    flat_layout,
    per_row_layout,
)
from fullshard.storage.reduce_buffer import OutputView, ReduceBucket, ReduceBuffer, cause_of_pieces
from tests.helpers.compare import assert_equal
from tests.storage.test_buffers import (
    CPU,
    DOUBLE,
    HALF,
    MIXED,
    SINGLE,
    Group,
    assert_absent,
    every_group,
    flat,
    full_params,
    groups,
    held_by,
    per_row,
    quickly,
)

RUBBISH = 77

both_arrangements = pytest.mark.parametrize(
    "rank_major", [False, True], ids=["segment after segment", "rank after rank"]
)


def reduce_buffers(
    group: Group,
    params: Sequence[int],
    reduce_dtypes: Sequence[torch.dtype] | None = None,
    *,
    rank_major: bool = False,
    wire_dtype: torch.dtype | None = None,
) -> list[ReduceBuffer]:
    """The reduce buffers of all ranks, full of rubbish where allocation does not clear them."""
    buffers = []
    for rank in group.ranks:
        dtypes = reduce_dtypes or group.dtypes
        buffer = ReduceBuffer(
            group.layout,
            rank,
            params,
            dtypes,
            group.dtypes,
            CPU,
            by_segment=False,
            rank_major=rank_major,
            wire_dtype=wire_dtype,
        )
        storage = memory_of(buffer)
        if storage.nbytes():
            torch.tensor([], dtype=torch.uint8).set_(storage).fill_(RUBBISH)
        buffer.allocate()
        laid_into(buffer, {}, (), ())
        buffers.append(buffer)
    return buffers


def memory_of(buffer: ReduceBuffer) -> torch.UntypedStorage:
    return next(iter(buffer.targets.values()))[0].untyped_storage()


def message(buffer: ReduceBuffer) -> Tensor:
    """The one message in which a group travels."""
    (bucket,) = buffer.buckets(frozenset(buffer.targets))
    (tensor,) = bucket.inputs
    return tensor


def fill(buffer: ReduceBuffer, gradients: dict[int, Tensor]) -> None:
    if gradients:
        laid_into(buffer, gradients, (), buffer.buckets(frozenset(gradients)))


def inputs_of(bucket: ReduceBucket) -> tuple[Tensor, ...]:
    return tuple(bucket.inputs) or (joined(bucket),)


def views_of(output: Tensor, views: Sequence[OutputView]) -> list[Tensor]:
    return [output.as_strided(view.shape, view.strides, view.start) for view in views]


def reduce_scatter(
    buffers: Sequence[ReduceBuffer], used: frozenset[int]
) -> list[dict[int, Tensor]]:
    """What a reduction does, for all ranks: per rank and parameter, the local gradient."""
    for buffer in buffers:
        for bucket in buffer.buckets(used):
            for tensor in bucket.unfilled:
                tensor.zero_()
    all_buckets = [buffer.buckets(used) for buffer in buffers]
    results = []
    for rank, buckets in enumerate(all_buckets):
        local: dict[int, Tensor] = {}
        for number, bucket in enumerate(buckets):
            output = torch.full((bucket.numel,), -1, dtype=bucket.reduce_dtype)
            inputs = zip(*(inputs_of(each[number]) for each in all_buckets), strict=True)
            for piece, of_ranks in zip(bucket.outputs_in(output), inputs, strict=True):
                numel = piece.numel()
                total = torch.stack(of_ranks).sum(0, dtype=bucket.reduce_dtype)
                piece.copy_(total[rank * numel : (rank + 1) * numel])
            if bucket.has_copies:
                bucket.sum_copies(output)
            local |= zip(bucket.params, views_of(output, bucket.gradients), strict=True)
        results.append(local)
    return results


def floating(group: Group) -> list[int]:
    return [index for index in group.params if group.dtypes[index].is_floating_point]


@every_group
@both_arrangements
def test_every_rank_gets_its_piece_of_the_sum_of_all_gradients(
    group: Group, rank_major: bool
) -> None:
    params = floating(group)
    buffers = reduce_buffers(group, params, rank_major=rank_major)
    per_rank = [full_params(group, seed=rank) for rank in group.ranks]
    for buffer, gradients in zip(buffers, per_rank, strict=True):
        fill(buffer, {param: gradients[param] for param in params})
    totals = [torch.stack(each).sum(0) for each in zip(*per_rank, strict=True)]
    for rank, local in enumerate(reduce_scatter(buffers, frozenset(params))):
        assert sorted(local) == params
        for param in params:
            assert_equal(local[param], held_by(group.layout, param, rank, totals[param]))


@quickly
@given(groups(), st.booleans(), st.data())
def test_whatever_part_of_a_group_is_used_its_sums_arrive(
    group: Group, rank_major: bool, data: st.DataObject
) -> None:
    params = floating(group)
    if not params:
        return
    used = data.draw(st.sets(st.sampled_from(params)))
    buffers = reduce_buffers(group, params, rank_major=rank_major)
    per_rank = [full_params(group, seed=rank) for rank in group.ranks]
    for buffer, gradients in zip(buffers, per_rank, strict=True):
        fill(buffer, {param: gradients[param] for param in used})
    totals = [torch.stack(each).sum(0) for each in zip(*per_rank, strict=True)]
    for rank, local in enumerate(reduce_scatter(buffers, frozenset(used))):
        for param in used:
            assert_equal(local[param], held_by(group.layout, param, rank, totals[param]))


@every_group
@both_arrangements
def test_padding_is_cleared_whatever_the_memory_held(group: Group, rank_major: bool) -> None:
    layout, params = group.layout, floating(group)
    (buffer, *_) = reduce_buffers(group, params, rank_major=rank_major)
    gradients = full_params(group)  # without a zero among them
    fill(buffer, {param: gradients[param] for param in params})
    for bucket in buffer.buckets(frozenset(params)):
        slots = [layout.slots[param] for param in bucket.params]
        copies = sum(
            layout.world if slot.division is Division.REPLICATED else slot.numel for slot in slots
        )
        sent = torch.cat([tensor.view(layout.world, -1) for tensor in bucket.inputs], dim=1)
        if bucket.output_ranges != bucket.ranges:
            sent = torch.cat([sent.narrow(1, *each) for each in bucket.ranges], dim=1)
        assert int((sent != 0).sum()) == copies


@every_group
def test_inputs_in_the_shapes_of_parameters_are_reduced_into_their_gradients(group: Group) -> None:
    buffer, *_ = reduce_buffers(group, floating(group))
    for bucket in buffer.buckets(frozenset(buffer.targets)):
        if bucket.shaped_inputs:
            found = zip(
                bucket.inputs, bucket.shaped_inputs, bucket.ranges, bucket.gradients, strict=True
            )
            for flat_input, shaped, (start, numel), view in found:
                assert_equal(shaped.flatten(), flat_input)
                assert shaped.data_ptr() == flat_input.data_ptr()
                assert (view.start, math.prod(view.shape)) == (start, numel)


def test_inputs_have_the_shapes_of_parameters_unless_one_is_padded() -> None:
    even, padded = ((4, 3), 0, SINGLE), ((3, 3), 0, SINGLE)
    for params, shapes in (((even, even), [(4, 3), (4, 3)]), ((even, padded), [])):
        buffer, _ = reduce_buffers(per_row(*params, world=2), [0, 1])
        (bucket,) = buffer.buckets(frozenset({0, 1}))
        assert [tuple(shaped.shape) for shaped in bucket.shaped_inputs] == shapes


def test_rank_after_rank_all_that_is_reduced_alike_is_one_message() -> None:
    group = per_row(((3, 4), 0, SINGLE), ((4,), 0, SINGLE), ((2, 5), 1, SINGLE), world=2)
    (buffer, _) = reduce_buffers(group, [0, 1, 2], rank_major=True)
    fill(buffer, {0: torch.full((3, 4), 1.0), 1: torch.full((4,), 2.0), 2: torch.full((2, 5), 3.0)})
    first, second = message(buffer).view(2, -1)
    assert first[:8].tolist() == [1.0] * 8 and second[:8].tolist() == [1.0] * 4 + [0.0] * 4
    # The vector lies behind the matrices.
    assert first[8:14].tolist() == [3.0] * 6 and second[8:14].tolist() == [3.0] * 4 + [0.0] * 2
    assert first[16:18].tolist() == second[16:18].tolist() == [2.0] * 2


@every_group
def test_between_reduced_gradients_there_are_zeros_if_one_asks(group: Group) -> None:
    params, world = floating(group), group.layout.world
    (buffer, *_) = reduce_buffers(group, params)
    for bucket in buffer.buckets(frozenset(params)):
        output = torch.ones(bucket.numel)
        bucket.zero_gaps(output)
        starts = [view.start for view in bucket.gradients]
        slots = zip(starts, [group.layout.slots[param] for param in bucket.params], strict=True)
        copied = [start for start, slot in slots if slot.division is Division.REPLICATED]
        # Contributions to copies are no gradients any longer; each sum is one element.
        kept = bucket.ranges[: len(bucket.ranges) - len(copied)] if world > 1 else bucket.ranges
        sums = copied if world > 1 else []
        assert int(output.sum()) == sum(numel for _, numel in kept) + len(sums)
        assert all(output[start : start + numel].all() for start, numel in kept)
        assert all(output[start] == 1 for start in sums)


def test_gradients_are_cast_to_the_reduce_dtype_on_their_way_in() -> None:
    group = per_row(((3, 4), 0, HALF), ((2, 3), 1, HALF), world=2)
    buffers = reduce_buffers(group, [0, 1], reduce_dtypes=[SINGLE, SINGLE])
    gradients = full_params(group)
    for buffer in buffers:
        fill(buffer, dict(enumerate(gradients)))
    (bucket,) = buffers[0].buckets(frozenset([0, 1]))
    assert (bucket.reduce_dtype, bucket.gradient_dtype) == (SINGLE, HALF)
    assert all(tensor.dtype is SINGLE for tensor in bucket.inputs)
    for rank, local in enumerate(reduce_scatter(buffers, frozenset([0, 1]))):
        for param, gradient in enumerate(gradients):
            expected = held_by(group.layout, param, rank, 2 * gradient.to(SINGLE))
            assert_equal(local[param], expected)


def test_there_is_one_bucket_per_pair_of_dtypes_and_outputs_of_a_bucket_do_not_overlap() -> None:
    group = per_row(
        *(((3, 2), 0, dtype) for dtype in (SINGLE, HALF, SINGLE, DOUBLE, HALF)), world=2
    )
    reduce_dtypes = [SINGLE, SINGLE, SINGLE, SINGLE, HALF]
    (buffer, _) = reduce_buffers(group, range(5), reduce_dtypes)
    buckets = buffer.buckets(frozenset(range(5)))
    assert [(bucket.reduce_dtype, bucket.gradient_dtype) for bucket in buckets] == [
        (SINGLE, SINGLE),
        (SINGLE, HALF),
        (SINGLE, DOUBLE),
        (HALF, HALF),
    ]
    assert [bucket.params for bucket in buckets] == [(0, 2), (1,), (3,), (4,)]
    for bucket in buckets:
        end = 0
        for start, numel in bucket.ranges:
            assert start % ROW_ALIGNMENT == 0 and start >= end
            end = start + numel
        assert end <= bucket.numel


def test_buckets_of_the_same_parameters_are_planned_once() -> None:
    (buffer, *_) = reduce_buffers(MIXED, floating(MIXED))
    used = frozenset([0, 1])
    assert buffer.buckets(used) is buffer.buckets(frozenset([1, 0]))
    assert buffer.buckets(used) is not buffer.buckets(frozenset([0]))


def test_per_row_a_parameter_without_gradient_does_not_travel() -> None:
    group = per_row(((3, 4), 0, SINGLE), ((4,), 0, SINGLE), ((2, 2), 0, SINGLE), world=2)
    (buffer, _) = reduce_buffers(group, [0, 1, 2])
    (bucket,) = buffer.buckets(frozenset([0, 2]))
    assert bucket.params == (0, 2)
    assert len(bucket.inputs) == len(bucket.ranges) == 2
    assert not bucket.unfilled
    assert buffer.buckets(frozenset()) == ()


def test_rank_after_rank_a_part_of_a_group_is_one_message_too() -> None:
    group = per_row(((3, 4), 0, SINGLE), ((4,), 0, SINGLE), ((2, 2), 0, SINGLE), world=2)
    (buffer, _) = reduce_buffers(group, [0, 1, 2], rank_major=True)
    fill(buffer, {0: torch.ones(3, 4), 2: 2 * torch.ones(2, 2)})
    (bucket,) = buffer.buckets(frozenset([0, 2]))
    assert not bucket.inputs  # they are copied into one message
    sent = joined(bucket)
    assert sent.numel() == 2 * bucket.numel
    assert [int((row == 1).sum()) for row in sent.view(2, -1)] == [8, 4]
    assert [int((row == 2).sum()) for row in sent.view(2, -1)] == [2, 2]


@every_group
@both_arrangements
def test_what_was_accumulated_is_sent_in_another_dtype(group: Group, rank_major: bool) -> None:
    params = floating(group)
    wide = [DOUBLE] * len(group.dtypes)
    narrow = reduce_buffers(group, params, wide, rank_major=rank_major, wire_dtype=HALF)
    gradients = full_params(group)
    for sent in narrow:
        fill(sent, {param: gradients[param].to(DOUBLE) for param in params})
    buckets = narrow[0].buckets(frozenset(params))
    assert all(bucket.reduce_dtype is DOUBLE for bucket in buckets)
    assert all(tensor.dtype is HALF for bucket in buckets for tensor in bucket.inputs)
    for rank, local in enumerate(reduce_scatter(narrow, frozenset(params))):
        for param in params:
            total = group.layout.world * gradients[param].to(DOUBLE)  # whole numbers: exact in HALF
            assert_equal(local[param], held_by(group.layout, param, rank, total))


def test_flat_a_parameter_without_gradient_travels_as_zeros_with_its_segment() -> None:
    group = flat(((3, 4), SINGLE), ((3,), SINGLE), ((4,), SINGLE), world=2)
    buffers = reduce_buffers(group, [0, 1, 2])
    gradients = full_params(group)
    for buffer in buffers:
        buffer.targets[1][0].fill_(77)  # what an earlier step left
        fill(buffer, {0: gradients[0], 2: gradients[2]})
    used = frozenset([0, 2])
    (bucket,) = buffers[0].buckets(used)
    assert [tensor.shape for tensor in bucket.unfilled] == [(3,)]
    assert bucket.unfilled[0].data_ptr() == buffers[0].targets[1][0].data_ptr()
    locals_ = reduce_scatter(buffers, used)
    for rank, local in enumerate(locals_):
        # It gets a gradient, too: other ranks may have used it, and all have shards of its gradient then.
        for param, times in ((0, 2), (1, 0), (2, 2)):
            expected = held_by(group.layout, param, rank, times * gradients[param])
            assert_equal(local.pop(param), expected)
        assert not local
    assert bucket.inputs[0][12:15].tolist() == [0.0] * 3


def test_flat_a_frozen_parameter_is_padding() -> None:
    group = flat(((3, 4), SINGLE), ((3,), SINGLE), ((4,), SINGLE), world=2)
    (buffer, _) = reduce_buffers(group, [0, 2])
    fill(buffer, {0: torch.ones(3, 4), 2: torch.ones(4)})
    assert sorted(buffer.targets) == [0, 2]
    assert message(buffer).tolist() == [1.0] * 12 + [0.0] * 3 + [1.0] * 4 + [0.0]
    (bucket,) = buffer.buckets(frozenset([0, 2]))
    assert not bucket.unfilled


def test_segments_without_trainable_parameters_have_no_memory() -> None:
    group = per_row(((300, 4), 0, SINGLE), ((4,), 0, SINGLE), world=2)
    (buffer, _) = reduce_buffers(group, [1])
    assert list(buffer.targets) == [1]
    assert memory_of(buffer).nbytes() == ALIGNMENT * SINGLE.itemsize


def test_a_reduce_buffer_gives_its_memory_back_and_takes_it_again_under_its_views() -> None:
    (buffer, *_) = reduce_buffers(MIXED, floating(MIXED))
    states = [buffer.allocated]
    buffer.release()
    assert_absent([target for targets in buffer.targets.values() for target in targets])
    states.append(buffer.allocated)
    buffer.allocate()
    states.append(buffer.allocated)
    assert states == [True, False, True]
    fill(buffer, {0: torch.ones(3, 4)})
    assert buffer.targets[0][0].tolist() == [[1.0] * 4] * 3


def test_the_cause_is_named_for_which_a_gradient_is_not_one_piece() -> None:
    by_rows, by_columns = per_row_layout([(4, 4), (4, 4)], world=2, dims=[0, 1]).slots
    assert cause_of_pieces(by_rows, rank_major=False) == ""
    assert "rank after rank" in cause_of_pieces(by_rows, rank_major=True)
    assert cause_of_pieces(by_columns, rank_major=False) == "its shard dimension is not 0"
    (transposed,) = flat_layout([(4, 4)], world=2, strides=[(1, 4)]).slots
    assert "order of its dimensions" in cause_of_pieces(transposed, rank_major=False)
