"""Ranks that know different things find out, once, what there is to save; and that they cannot agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fullshard import CheckpointError
from fullshard.checkpoint.agreement import Outline, agreed
from fullshard.checkpoint.manifest import StoredTensor
from fullshard.checkpoint.source import TensorRef
from fullshard.checkpoint.spread import Spread, undivided
from tests.helpers.checkpoints import agreed_outline

FLAT = Spread(shape=(8,), flat=True, cuts=(range(0, 8, 4),), holders=((0, 1, 2, 3),))
LATER = Spread(shape=(4,), flat=True, cuts=(range(-8, 4, 4),), holders=((0, 1, 2, 3),))


def of(spread: Spread, dtype: torch.dtype = torch.float32) -> StoredTensor:
    return StoredTensor(dtype, spread)


def outline(known: dict[str, float], **options: Any) -> Outline:
    """Of a rank that has state of some of two parameters: how often they were updated."""
    params = {"first": FLAT, "later": LATER}
    tensors = {f"model/{name}": of(spread) for name, spread in params.items()}
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


def test_everything_is_told_once_by_the_first_who_has_elements() -> None:
    ranks = [outline({"first": 1.0})] * 2 + [outline({"later": 1.0}), outline({})]
    told = [each.told_by(rank) for rank, each in enumerate(ranks)]
    assert set(told[0].tensors) == {"model/first", "optimizer/first/exp_avg"}
    assert set(told[2].tensors) == {"model/later", "optimizer/later/exp_avg"}
    assert (
        told[1]
        == told[3]
        == Outline(tensors={}, optimizer={"state": {}, "param_groups": [{"params": []}]})
    )
    assert told[0].tied == {"again": "first"} and not told[2].tied
    result = agreed_outline(ranks)
    both = outline({"first": 1.0, "later": 1.0})
    assert (
        result.digest()
        == replace(both, tensors={key: both.tensors[key] for key in result.tensors}).digest()
    )


def test_ranks_of_several_meshes_hold_replicas() -> None:
    """As of parameters that tensor parallelism leaves alone: each rank knows its own data-parallel mesh."""
    rows = Spread(shape=(4,), cuts=(range(0, 4, 2),), holders=((0, 2),))
    others = replace(rows, holders=((1, 3),))
    views = [Outline(tensors={"model/x": of(spread)}) for spread in (rows, others) * 2]
    assert agreed_outline(views).tensors["model/x"].spread.holders == ((0, 2), (1, 3))


def test_stages_of_a_pipeline_add_up() -> None:
    stages = [
        Outline(tensors={f"model/{name}": of(undivided((2,), ranks))})
        for name, ranks in (("a", (0, 1)), ("a", (0, 1)), ("b", (2, 3)), ("b", (2, 3)))
    ]
    assert set(agreed_outline(stages).tensors) == {"model/a", "model/b"}


def test_conflicts_are_named() -> None:
    """Two meshes, whose ranks have been told different things."""
    views = []
    for ranks, step, lr, size in (((0, 2), 1.0, 0.1, 4), ((1, 3), 2.0, 0.2, 6)):
        spread = Spread(shape=(size,), cuts=((0, 2),), holders=(ranks,))
        tree = {
            "state": {"x": {"step": torch.tensor(step), "agreed": 1}},
            "param_groups": [{"params": ["x"], "lr": lr}],
        }
        views.append(Outline(tensors={"model/x": of(spread)}, optimizer=tree))
    told = [views[rank % 2].told_by(rank) for rank in range(4)]
    errors = []
    for rank in range(4):
        with pytest.raises(CheckpointError) as error:
            agreed(views[rank % 2], told)
        errors.append(str(error.value))
    assert len(set(errors)) == 1
    for line in ("x: step", "group 0: lr", "model/x: torch.float32 (4,), torch.float32 (6,)"):
        assert line in errors[0]
    assert "agreed" not in errors[0]


def test_what_nobody_tells_of_is_named() -> None:
    with_it = Outline(tensors={"model/x": of(undivided((2,), (0,)))})
    without = Outline(tensors={})
    told = [without.told_by(0), with_it.told_by(1)]
    with pytest.raises(CheckpointError, match=r"has not got these:\n  model/x"):
        agreed(with_it, told)
