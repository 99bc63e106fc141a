"""Ranks that know different things find out, once, what there is to save; and that they cannot agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fullshard import CheckpointError
from fullshard.checkpoint.agreement import Outline, agreed, parts_to_write
from fullshard.checkpoint.manifest import StoredTensor
from fullshard.checkpoint.source import TensorRef
from fullshard.checkpoint.state.local_state import LocalTensor
from fullshard.layout.sharding import Sharding, replicated
from tests.helpers.checkpoints import agreed_outline

FLAT = Sharding(shape=(8,), flat=True, cuts=(range(0, 8, 4),), holders=((0, 1, 2, 3),))
LATER = Sharding(shape=(4,), flat=True, cuts=(range(-8, 4, 4),), holders=((0, 1, 2, 3),))


def of(sharding: Sharding, dtype: torch.dtype = torch.float32) -> StoredTensor:
    return StoredTensor(dtype, sharding)


def outline(known: dict[str, float], **options: Any) -> Outline:
    """Of a rank that has state of some of two parameters: how often they were updated."""
    params = {"first": FLAT, "later": LATER}
    tensors = {f"model/{name}": of(sharding) for name, sharding in params.items()}
    state = {}
    for name, step in known.items():
        key = f"optimizer/{name}/exp_avg"
        tensors[key] = of(params[name])
        state[name] = {"step": torch.tensor(step), "exp_avg": TensorRef(key)}
    groups = [{"params": list(params), "lr": 0.1, **options}]
    return Outline(
        tensors=tensors,
        tied={"again": "first"},
        optimizer={"state": state, "param_groups": groups},
    )


def test_equal_outlines_have_equal_digests_and_others_have_not() -> None:
    one = outline({"first": 1.0})
    assert one.digest() == outline({"first": 1.0}).digest()
    others = [
        outline({"first": 2.0}),
        outline({"later": 1.0}),
        outline({"first": 1.0}, lr=0.2),
        replace(one, tied={}),
        replace(one, tensors={**one.tensors, "model/first": of(FLAT, torch.float16)}),
        replace(one, tensors={**one.tensors, "model/first": of(replace(FLAT, holders=((1, 0),)))}),
        replace(one, tensors={**one.tensors, "model/first": of(replace(FLAT, cuts=((0, 4),)))}),
    ]
    assert len({one.digest(), *(other.digest() for other in others)}) == len(others) + 1


def test_everything_is_reported_once_by_the_first_rank_that_has_elements() -> None:
    ranks = [outline({"first": 1.0})] * 2 + [outline({"later": 1.0}), outline({})]
    reported = [each.part_reported_by(rank) for rank, each in enumerate(ranks)]
    assert set(reported[0].tensors) == {"model/first", "optimizer/first/exp_avg"}
    assert set(reported[2].tensors) == {"model/later", "optimizer/later/exp_avg"}
    assert (
        reported[1]
        == reported[3]
        == Outline(tensors={}, optimizer={"state": {}, "param_groups": [{"params": []}]})
    )
    assert reported[0].tied == {"again": "first"} and not reported[2].tied
    result = agreed_outline(ranks)
    both = outline({"first": 1.0, "later": 1.0})
    assert (
        result.digest()
        == replace(both, tensors={key: both.tensors[key] for key in result.tensors}).digest()
    )


def test_ranks_of_several_meshes_hold_replicas() -> None:
    """As of parameters that tensor parallelism leaves alone: each rank knows its own data-parallel mesh."""
    rows = Sharding(shape=(4,), cuts=(range(0, 4, 2),), holders=((0, 2),))
    others = replace(rows, holders=((1, 3),))
    views = [Outline(tensors={"model/x": of(sharding)}) for sharding in (rows, others) * 2]
    assert agreed_outline(views).tensors["model/x"].sharding.holders == ((0, 2), (1, 3))


def test_stages_of_a_pipeline_add_up() -> None:
    stages = [
        Outline(tensors={f"model/{name}": of(replicated((2,), ranks))})
        for name, ranks in (("a", (0, 1)), ("a", (0, 1)), ("b", (2, 3)), ("b", (2, 3)))
    ]
    assert set(agreed_outline(stages).tensors) == {"model/a", "model/b"}


def two_meshes(*facts: tuple[float, float, int]) -> list[Outline]:
    """What four ranks have of a parameter that lies on two meshes: how often it was updated, the rate, its size."""
    views = []
    for ranks, (step, lr, size) in zip(((0, 2), (1, 3)), facts, strict=True):
        sharding = Sharding(shape=(size,), cuts=((0, 2),), holders=(ranks,))
        tree = {
            "state": {"x": {"step": torch.tensor(step), "agreed": 1}},
            "param_groups": [{"params": ["x"], "lr": lr}],
        }
        views.append(
            Outline(tensors={"model/x": of(sharding)}, optimizer=tree, held=frozenset({"x"}))
        )
    return views * 2


def refusals(outlines: list[Outline]) -> dict[int, str]:
    """By rank, why each cannot agree."""
    reported = {rank: outline.part_reported_by(rank) for rank, outline in enumerate(outlines)}
    errors = {}
    for rank, outline in enumerate(outlines):
        try:
            agreed(outline, reported, rank)
        except CheckpointError as error:
            errors[rank] = str(error)
    return errors


def test_conflicts_are_named() -> None:
    """Two meshes, whose ranks have been reported different things."""
    errors = refusals(two_meshes((1.0, 0.1, 4), (2.0, 0.2, 6)))
    assert errors.keys() == {1, 3} and errors[1] == errors[3]
    for line in (
        "state of x: step is 2.0 here, 1.0 on rank 0",
        "group 0: lr is 0.2 here, 0.1 on rank 0",
        "model/x: torch.float32 (6,) here, torch.float32 (4,) on rank 0",
    ):
        assert f"  {line}\n" in errors[1]
    assert "agreed" not in errors[1]
    assert not refusals(two_meshes((1.0, 0.1, 4), (1.0, 0.1, 4)))


def test_what_no_rank_reports_is_named() -> None:
    with_it = Outline(tensors={"model/x": of(replicated((2,), (0,)))})
    errors = refusals([Outline(tensors={}), with_it])
    assert errors.keys() == {1} and "  model/x: here, not on rank 0, which" in errors[1]


def test_a_part_that_another_rank_counts_on_is_named() -> None:
    """Rank 1 has another model than rank 0, which divides a parameter over both."""
    errors = refusals([Outline(tensors={"model/first": of(FLAT)}), Outline(tensors={})])
    assert errors.keys() == {1} and "  model/first: on rank 0, sharded over ranks" in errors[1]
    # Ranks 2 and 3 are among those of its mesh, and have no elements of it.
    errors = refusals([Outline(tensors={"model/first": of(FLAT)})] * 2 + [Outline(tensors={})] * 2)
    assert not errors


def test_ranks_need_not_have_what_they_hold_no_elements_of() -> None:
    of_first, of_later = (
        replace(outline({name: 1.0}), held=frozenset({name})) for name in ("first", "later")
    )
    assert not refusals([of_first, of_first, of_later, outline({})])
    errors = refusals([of_first, replace(outline({}), held=of_first.held), of_later, outline({})])
    assert (
        errors.keys() == {1} and "  state of first: exp_avg, step on rank 0, not here" in errors[1]
    )


def test_a_rank_must_have_what_it_writes() -> None:
    tensors = {"model/first": of(FLAT), "model/later": of(LATER)}
    first, later, other = torch.ones(4), torch.ones(2), torch.ones(4, dtype=torch.float16)
    assert parts_to_write(
        tensors, [LocalTensor("model/first", first.dtype, (8,), FLAT, first)], 0
    ) == [("model/first", first)]
    for held, message in (
        ([], r"model/later: nothing, instead of torch.float32 \(4,\)"),
        (
            [LocalTensor("model/later", torch.float32, (4,), LATER, later)],
            r"float32 \(2,\), instead of",
        ),
        (
            [LocalTensor("model/later", torch.float32, (4,), LATER, other)],
            r"float16 \(4,\), instead of",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            parts_to_write(tensors, held, 2)
