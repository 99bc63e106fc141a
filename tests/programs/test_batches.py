"""Which windows each rank sees: arithmetic, and the windows themselves."""

import pytest
import torch

from fullshard.train.batches import Batches, BatchPlan, HeldOutRows
from fullshard.train.text import Text


def plan(*, batch: int, rank: int = 0, world: int = 1, seed: int = 0) -> BatchPlan:
    return BatchPlan(context=9, batch=batch, seed=seed, rank=rank, world=world)


@pytest.mark.parametrize("world", [2, 3, 6])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(world: int) -> None:
    for step in range(5):
        together = plan(batch=6).training_offsets(step, 1000)
        shares = [
            plan(batch=6 // world, rank=rank, world=world).training_offsets(step, 1000)
            for rank in range(world)
        ]
        assert sum(shares, ()) == together


def test_seed_and_step_decide_the_windows() -> None:
    assert plan(batch=8).training_offsets(3, 1000) == plan(batch=8).training_offsets(3, 1000)
    assert plan(batch=8).training_offsets(3, 1000) != plan(batch=8).training_offsets(4, 1000)
    assert plan(batch=8).training_offsets(3, 1000) != plan(batch=8, seed=1).training_offsets(
        3, 1000
    )


def test_windows_start_anywhere_that_leaves_room_for_them() -> None:
    # 12 bytes, windows of 10: they can start at 0, 1 and 2.
    assert set(plan(batch=100).training_offsets(0, 12)) == {0, 1, 2}
    assert set(plan(batch=100).training_offsets(0, 10)) == {0}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_held_out_window_counts_once_on_any_number_of_ranks(world: int) -> None:
    by_rank = [list(plan(batch=2, rank=r, world=world).held_out_rows(75)) for r in range(world)]
    assert len({len(batches) for batches in by_rank}) == 1, "each forward is a collective"
    counted = [
        offset
        for batches in by_rank
        for rows in batches
        for offset, weight in zip(rows.offsets, rows.weights, strict=True)
        if weight
    ]
    assert sorted(counted) == [0, 10, 20, 30, 40, 50, 60]


def test_rows_beyond_the_last_window_weigh_nothing() -> None:
    assert list(plan(batch=2, rank=1, world=2).held_out_rows(30)) == [
        HeldOutRows(offsets=(20, 0), weights=(1.0, 0.0))
    ]


def test_batches_are_cut_from_the_right_part_of_the_text() -> None:
    text = Text(source="a test", training=bytes(range(100)), held_out=bytes(range(100, 120)))
    batches = Batches(plan(batch=3), text, torch.device("cpu"))
    windows = batches.training(0)
    starts = plan(batch=3).training_offsets(0, 100)
    assert windows.tolist() == [list(range(start, start + 10)) for start in starts]
    [(held_out, weights)] = batches.held_out()
    assert held_out[:2].tolist() == [list(range(100, 110)), list(range(110, 120))]
    assert weights.tolist() == [1.0, 1.0, 0.0]
