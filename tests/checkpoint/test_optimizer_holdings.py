"""What ranks hold of an optimizer, put together, is its whole state by names, for every optimizer that runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from fullshard import FullyShardedDataParallel
from fullshard.checkpoint.agreement import Outline, outline_of
from fullshard.checkpoint.holdings import Held, ModelHoldings
from fullshard.checkpoint.optimizer_holdings import optimizer_tree
from fullshard.checkpoint.source import TensorRef
from fullshard.optim import ShardedOptimizer
from tests.helpers.checkpoints import agreed_outline, assembled
from tests.helpers.compare import assert_equal
from tests.helpers.odd_nets import odd_loss, odd_net_behind

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

Make = Callable[..., optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "Adadelta": optim.Adadelta,
    "Adagrad": optim.Adagrad,
    "Adam amsgrad": partial(optim.Adam, amsgrad=True),
    "AdamW fused": partial(optim.AdamW, fused=True),
    "Adamax": optim.Adamax,
    "ASGD": optim.ASGD,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "RMSprop": partial(optim.RMSprop, momentum=0.9, centered=True),
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "ours": partial(ShardedOptimizer, optim.AdamW),
    "Rprop": partial(ShardedOptimizer, optim.Rprop),
}


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        odd_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with options of their own, one of which is a tensor."""
    params = list(model.parameters())
    return [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.25}]


def whole_state(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    """By names, as the doors' own state dicts have it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if isinstance(model, FullyShardedDataParallel):
            result = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        else:
            options = StateDictOptions(full_state_dict=True)
            result = get_optimizer_state_dict(model, optimizer, options=options)
    return {
        name: {
            key: value.full_tensor() if isinstance(value, DTensor) else value
            for key, value in own.items()
        }
        for name, own in result["state"].items()
    }


def trained(door: str, kind: str) -> tuple[Outline, list[Held], dict[str, Any]]:
    model = odd_net_behind(door)
    optimizer = OPTIMIZERS[kind](groups_of(model))
    train(model, optimizer)
    holdings = ModelHoldings(model, "save")
    tree, tensors = optimizer_tree(optimizer, holdings)
    outline = outline_of([*holdings.tensors, *tensors], holdings.tied, tree)
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
    return outline, copies, whole_state(model, optimizer)


def with_tensors(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, TensorRef):
        return tensors[tree.key]
    if isinstance(tree, dict):
        return {key: with_tensors(value, tensors) for key, value in tree.items()}
    return tree


CASES = [
    *((door, "ours", ranks) for door in ("fully_shard", "wrapper") for ranks in (1, 2)),
    *((door, "Adam amsgrad", 3) for door in ("fully_shard", "wrapper", "flat wrapper")),
    *((door, "AdamW fused", 2) for door in ("no_shard", "flat no_shard", "replicate", "last dim")),
    *((door, "SGD", 4) for door in ("hsdp", "hybrid", "flat hybrid", "tensor parallel")),
    *(
        (door, kind, 2)
        for kind in OPTIMIZERS
        for door in ("wrapper", "flat wrapper")
        if kind != "ours"
    ),
    *(("fully_shard", kind, 2) for kind in OPTIMIZERS),
]


@pytest.mark.parametrize(("door", "kind", "ranks"), CASES)
def test_what_ranks_hold_is_the_whole_state(world, door: str, kind: str, ranks: int) -> None:
    outlines, tensors, expected = zip(*world(ranks).run(trained, door, kind), strict=True)
    outline = agreed_outline(outlines)
    assert outline.optimizer is not None
    found = with_tensors(outline.optimizer["state"], assembled(outline, tensors))
    assert found.keys() == expected[0].keys() - {"middle.nothing"} | found.keys()
    assert len(found) >= 7
    assert_equal(found, {name: expected[0][name] for name in found})
