"""A checkpoint that any ranks have made behind any door is loaded by any others, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from fullshard.checkpoint.agreement import Outline, outline_of
from fullshard.checkpoint.holdings import Held, ModelHoldings
from fullshard.checkpoint.optimizer_holdings import optimizer_tree
from fullshard.checkpoint.optimizer_target import OptimizerTarget
from fullshard.checkpoint.targets import ModelTarget
from tests.helpers.checkpoints import MemorySource, agreed_outline, assembled, fill
from tests.helpers.compare import assert_equal
from tests.helpers.odd_nets import odd_loss, odd_net_behind

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

Saved = tuple[Outline, list[Held]]


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        odd_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def adam(model: nn.Module, **options: Any) -> optim.Optimizer:
    """Two groups that every door can have: a FlatParameter is in one of them."""
    middle = [p for name, p in model.named_parameters() if "middle" in name]
    others = [p for name, p in model.named_parameters() if "middle" not in name]
    return optim.AdamW([{"params": others, "lr": 0.01}, {"params": middle}], **options)


def saved(model: nn.Module, optimizer: optim.Optimizer) -> Saved:
    holdings = ModelHoldings(model, "save")
    tree, tensors = optimizer_tree(optimizer, holdings)
    copies = [
        Held(
            each.key,
            each.dtype,
            each.shape,
            each.spread,
            None if each.local is None else each.local.clone(),
        )
        for each in (*holdings.tensors, *tensors)
    ]
    return outline_of(copies, holdings.tied, tree), copies


def save(door: str, frozen: bool) -> Saved:
    model = odd_net_behind(door, seed=1, frozen=frozen)
    optimizer = adam(model)
    train(model, optimizer, 2)
    return saved(model, optimizer)


def source_of(of_ranks: list[Saved]) -> MemorySource:
    outlines, tensors = zip(*of_ranks, strict=True)
    outline = agreed_outline(outlines)
    return MemorySource(assembled(outline, tensors), outline.tied, outline.optimizer)


def load(door: str, source: MemorySource, trained_before: bool) -> Saved:
    model = odd_net_behind(door, seed=2)
    optimizer = adam(model, lr=torch.tensor(0.5) if trained_before else 0.5)
    if trained_before:
        train(model, optimizer, 1)
    load_into(model, optimizer, source)
    result = saved(model, optimizer)
    train(model, optimizer, 1)
    return result


def load_into(model: nn.Module, optimizer: optim.Optimizer, source: MemorySource) -> None:
    holdings = ModelHoldings(model, "load")
    targets = [ModelTarget(holdings, source), OptimizerTarget(optimizer, holdings, source)]
    for target in targets:
        assert not target.faults, target.faults
        fill(source, target.wants)
    for target in targets:
        target.install()


WAYS = [
    (("none", 1), ("fully_shard", 2)),
    (("fully_shard", 3), ("wrapper", 2)),
    (("fully_shard", 2), ("flat wrapper", 3)),
    (("flat wrapper", 2), ("flat wrapper", 3)),
    (("flat wrapper", 3), ("fully_shard", 4)),
    (("flat wrapper", 1), ("none", 1)),
    (("wrapper", 2), ("wrapper", 3)),
    (("wrapper", 4), ("hsdp", 4)),
    (("hybrid", 4), ("last dim", 3)),
    (("no_shard", 2), ("flat hybrid", 4)),
    (("flat no_shard", 2), ("replicate", 2)),
    (("last dim", 2), ("flat no_shard", 1)),
]


@pytest.mark.parametrize(("there", "here"), WAYS)
def test_what_was_saved_is_what_is_loaded(world, there: Any, here: Any) -> None:
    source = source_of(world(there[1]).run(save, there[0], "flat" not in here[0]))
    again = source_of(world(here[1]).run(load, here[0], source, here[1] > 2))
    assert again.tied == source.tied
    # Not every optimizer has a state of what has no elements.
    of_nothing = {key for key in (*again.whole, *source.whole) if "optimizer/middle.nothing" in key}
    assert again.whole.keys() - of_nothing == source.whole.keys() - of_nothing
    common = again.whole.keys() & source.whole.keys()
    assert_equal({k: again.whole[k] for k in common}, {k: source.whole[k] for k in common})
    assert again.optimizer is not None and source.optimizer is not None
    for name, state in again.optimizer["state"].items():
        if name == "middle.nothing":
            continue
        assert_equal(state["step"], source.optimizer["state"][name]["step"])
    groups = again.optimizer["param_groups"], source.optimizer["param_groups"]
    for group, expected in zip(*groups, strict=True):
        assert sorted(group["params"]) == sorted(expected["params"])
        assert float(group["lr"]) == pytest.approx(expected["lr"])
