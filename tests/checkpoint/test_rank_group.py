"""What one rank cannot do, none does, and all say the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fullshard import CheckpointError, LifecycleError
from fullshard.checkpoint.rank_group import RankGroup


def fail(error: Exception) -> Any:
    raise error


def error_of(function: Callable[[], Any]) -> tuple[str, str]:
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def outcomes() -> list[Any]:
    rank_group, rank = RankGroup(), dist.get_rank()
    return [
        rank_group.on_each(lambda: rank),
        rank_group.on_first(lambda: ["first", rank]),
        rank_group.collect(rank),
        error_of(
            lambda: rank_group.on_each(lambda: fail(CheckpointError("no")) if rank == 1 else rank)
        ),
        error_of(lambda: rank_group.on_each(lambda: fail(LifecycleError("not now")))),
        error_of(lambda: rank_group.on_each(lambda: fail(KeyError(f"{rank > 0}")))),
        error_of(lambda: rank_group.on_first(lambda: fail(OSError("disk")))),
        rank_group.on_each(lambda: rank),  # still in step
    ]


def test_ranks_agree(world: Any) -> None:
    results = world(3).run(outcomes)
    for rank, (own, first, everybody, one, every, several, only_first, again) in enumerate(results):
        assert own == again == rank
        assert first == ["first", 0]
        assert everybody == [0, 1, 2]
        assert one == ("CheckpointError", "rank 1: no")
        assert every == ("LifecycleError", "not now")
        assert several == (
            "CheckpointError",
            "rank 0: KeyError: 'False'\nranks 1, 2: KeyError: 'True'",
        )
        assert only_first == ("CheckpointError", "OSError: disk")


def part_of_the_ranks() -> Any:
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    mine = groups[0] if dist.get_rank() != 1 else groups[1]
    rank_group = RankGroup(mine)
    return rank_group.ranks, rank_group.is_first, rank_group.on_first(dist.get_rank)


def test_a_group_of_some_ranks(world: Any) -> None:
    assert world(3).run(part_of_the_ranks) == [
        ([0, 2], True, 0),
        ([1], True, 1),
        ([0, 2], False, 0),
    ]


def test_one_process_is_a_group() -> None:
    rank_group = RankGroup()
    assert (
        rank_group.rank,
        rank_group.ranks,
        rank_group.on_each(lambda: 5),
        rank_group.on_first(lambda: 6),
    ) == (0, [0], 5, 6)
    assert error_of(lambda: rank_group.on_first(lambda: fail(CheckpointError("no")))) == (
        "CheckpointError",
        "no",
    )
