"""What ranks hold of an optimizer, put together, is its whole state by names: of every optimizer, behind every API.

And what is loaded from it is the same again, whatever API and ranks load it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from fullshard import CheckpointError, FullyShardedDataParallel, fully_shard, replicate
from fullshard.checkpoint.source import TensorRef
from fullshard.checkpoint.state.local_state import LocalModelState
from fullshard.checkpoint.state.optimizer_local_state import optimizer_tree
from fullshard.checkpoint.state.optimizer_target import OptimizerTarget
from fullshard.optim import ShardedOptimizer
from tests.helpers.checkpoints import MemorySource, Snapshot, load_into, snapshot, source_of
from tests.helpers.compare import assert_equal
from tests.helpers.fake import fake_world
from tests.helpers.groups import alone
from tests.helpers.odd_nets import odd_net_behind, train_odd_net
from tests.helpers.training import all_whole

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

Make = Callable[..., optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "Adam": partial(optim.Adam, amsgrad=True),
    "Adadelta": optim.Adadelta,
    "Adagrad": optim.Adagrad,
    "AdamW": partial(optim.AdamW, fused=True),
    "Adamax": optim.Adamax,
    "ASGD": optim.ASGD,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "RMSprop": partial(optim.RMSprop, momentum=0.9, centered=True),
    "SGD": partial(optim.SGD, lr=torch.tensor(0.1), momentum=0.9, nesterov=True),
    "ours": partial(ShardedOptimizer, optim.AdamW),
    "Rprop": partial(ShardedOptimizer, optim.Rprop),
}


def optimizer_of(kind: str, model: nn.Module, lr: float = 0.01) -> optim.Optimizer:
    """With two groups that every API can have: a FlatParameter is in one of them."""
    params = dict(model.named_parameters())
    middle = [param for name, param in params.items() if "middle" in name]
    others = [param for name, param in params.items() if "middle" not in name]
    return OPTIMIZERS[kind]([{"params": others, "lr": lr}, {"params": middle}])


def whole_state(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    """By names, as the apis' own state dicts have it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if isinstance(model, FullyShardedDataParallel):
            return FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        states = get_optimizer_state_dict(model, optimizer)["state"]
    tensors = {
        (name, key): value
        for name, own in states.items()
        for key, value in own.items()
        if isinstance(value, Tensor)
    }
    result: dict[str, Any] = {name: dict(own) for name, own in states.items()}
    for (name, key), value in all_whole(tensors).items():
        result[name][key] = value
    return result


def train_each(
    api: str, kinds: Sequence[str], frozen: bool
) -> list[tuple[Snapshot, dict[str, Any]]]:
    results = []
    for kind in kinds:
        model = odd_net_behind(api, frozen=frozen)
        optimizer = optimizer_of(kind, model)
        train_odd_net(model, optimizer)
        results.append((snapshot(model, optimizer), whole_state(model, optimizer)))
    return results


def load_each(
    api: str, kinds: Sequence[str], frozen: bool, sources: Sequence[MemorySource]
) -> list[Snapshot]:
    results = []
    for kind, source in zip(kinds, sources, strict=True):
        model = odd_net_behind(api, seed=1, frozen=frozen)
        optimizer = optimizer_of(kind, model, lr=0.5)
        train_odd_net(model, optimizer, 1)
        load_into(model, optimizer, source)
        results.append(snapshot(model, optimizer))
        train_odd_net(model, optimizer, 1)  # it goes on
    return results


def sources_of(results: Sequence[Any]) -> list[MemorySource]:
    """Of each optimizer, from the ranks' results; each is compared with the apis' own state dicts."""
    sources = []
    for of_ranks in zip(*results, strict=True):
        source = source_of([taken for taken, _ in of_ranks])
        assert source.optimizer is not None
        expected = of_ranks[0][1]
        found = {
            name: {
                key: source.whole[value.key] if isinstance(value, TensorRef) else value
                for key, value in state.items()
            }
            for name, state in source.optimizer["state"].items()
        }
        # Not every optimizer has a state of what has no elements.
        assert expected.keys() - {"middle.nothing"} <= found.keys() <= expected.keys()
        assert_equal(found, {name: expected[name] for name in found})
        sources.append(source)
    return sources


def assert_same(again: MemorySource, source: MemorySource) -> None:
    def of(each: MemorySource) -> Any:
        assert each.optimizer is not None
        whole = {key: t for key, t in each.whole.items() if "optimizer/middle.nothing" not in key}
        state = copy.deepcopy(dict(each.optimizer["state"]))
        state.pop("middle.nothing", None)
        values = {
            name: {key: v for key, v in own.items() if isinstance(v, Tensor)}
            for name, own in state.items()
        }
        options = [
            {key: float(v) for key, v in group.items() if isinstance(v, float | Tensor)}
            for group in each.optimizer["param_groups"]
        ]
        return whole, values, options

    assert_equal(of(again), of(source))


ALL = tuple(OPTIMIZERS)


@pytest.mark.parametrize(
    ("there", "here", "kinds"),
    [
        (("fully_shard", 2), ("flat wrapper", 3), ALL),
        (("flat wrapper", 2), ("wrapper", 3), ("ASGD", "NAdam", "SGD", "ours")),
        (("wrapper", 3), ("fully_shard", 2), ("Adam", "NAdam", "Rprop", "ours")),
        (("none", 1), ("hsdp", 4), ("AdamW",)),
        (("tensor parallel", 4), ("no_shard", 2), ("AdamW",)),
        (("hybrid", 4), ("tensor parallel", 4), ("AdamW",)),
        (("flat no_shard", 2), ("last dim", 3), ("AdamW",)),
        (("replicate", 2), ("flat hybrid", 4), ("AdamW",)),
        (("hybrid of groups", 4), ("none", 1), ("AdamW",)),
        (("flat wrapper", 1), ("flat no_shard", 1), ("AdamW",)),
    ],
)
def test_what_ranks_have_is_what_is_loaded(world, there: Any, here: Any, kinds: Any) -> None:
    frozen = "flat" not in there[0] + here[0]  # a FlatParameter is frozen as a whole, or not at all
    sources = sources_of(world(there[1]).run(train_each, there[0], kinds, frozen))
    again = world(here[1]).run(load_each, here[0], kinds, frozen, sources)
    for of_ranks, source in zip(zip(*again, strict=True), sources, strict=True):
        assert_same(source_of(of_ranks), source)


# --- one process -------------------------------------------------------------------------------------


def matrices() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 3, bias=False))


def make_steps(model: nn.Module, optimizer: optim.Optimizer, count: int) -> None:
    for step in range(count):

        def loss(size: int = step + 1) -> Any:
            optimizer.zero_grad()
            value: Tensor = (model(torch.ones(2, 5) * size) - 1).square().sum()
            value.backward()
            return value

        if isinstance(optimizer, optim.LBFGS):
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()


@pytest.mark.parametrize(
    ("make", "shard"),
    [
        (optim.Adafactor, None),
        (optim.Rprop, None),
        (partial(optim.LBFGS, max_iter=3, lr=0.1), None),
        (partial(optim.LBFGS, max_iter=3, lr=0.1), replicate),
        (optim.Muon, None),
        (optim.Muon, fully_shard),
        (partial(optim.SGD, lr=0.1), fully_shard),
    ],
)
def test_training_goes_on_as_if_it_had_not_stopped(make: Any, shard: Any) -> None:
    """With optimizers whose state is of other shapes, in lists, or not there at all."""

    def made() -> tuple[nn.Module, optim.Optimizer]:
        model = matrices()
        if shard is not None:
            shard(model)
        return model, make(model.parameters())

    with alone():
        model, optimizer = made()
        make_steps(model, optimizer, 2)
        source = source_of([snapshot(model, optimizer)])
        make_steps(model, optimizer, 2)
        again, other = made()
        make_steps(again, other, 1)
        load_into(again, other, source)
        make_steps(again, other, 2)
        found, expected = (
            source_of([snapshot(*each)]) for each in ((again, other), (model, optimizer))
        )
        assert_equal(found.whole, expected.whole)


# --- refusals ----------------------------------------------------------------------------------------


def test_state_of_unknown_division_is_named() -> None:
    with fake_world(2):
        model = odd_net_behind("wrapper")
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        for param in model.parameters():
            optimizer.state[param]["rows"] = [torch.ones(2, 2)]
        optimizer.state["of nobody"] = {}  # type: ignore[index]
        with pytest.raises(CheckpointError) as error:
            optimizer_tree(optimizer, LocalModelState(model, "save"))
        assert "optimizer/middle.up.weight/rows/0: Tensor of shape (2, 2)" in str(error.value)
        assert "optimizer/head.weight/rows/0" in str(error.value)
        assert "optimizer/pixels.bias" not in str(error.value)  # is whole on every rank
        assert "'of nobody'" in str(error.value)


def test_parameters_that_the_model_has_not_are_named() -> None:
    with fake_world(2):
        model = matrices()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        fully_shard(model)  # has other parameters now
        source = MemorySource({}, optimizer={"state": {}, "param_groups": []})
        with pytest.raises(CheckpointError, match=r"group 0, parameter 1: shape \(3, 4\)"):
            optimizer_tree(optimizer, LocalModelState(model, "save"))
        with pytest.raises(CheckpointError, match=r"group 0, parameter 1: shape \(3, 4\)"):
            OptimizerTarget(optimizer, LocalModelState(model, "load"), source)
