"""An optimizer goes on with the state of its own class, or of one with the same state; of others it takes nothing."""

from __future__ import annotations

import inspect
import itertools
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from fullshard import CheckpointError, FullyShardedDataParallel, checkpoint, fully_shard
from fullshard.checkpoint.load_plan import load_source
from fullshard.checkpoint.source import CLASS, without_class
from fullshard.checkpoint.sources.conversion import convert
from fullshard.checkpoint.sources.formats import open_source
from fullshard.checkpoint.state.optimizer_compatibility import STATES, class_names
from fullshard.optim import ShardedOptimizer
from fullshard.programs.checkpoint_tool.contents import describe
from tests.checkpoint.test_manifest import signed
from tests.helpers.checkpoints import MemorySource, plain_source

OPTIONS: dict[type[optim.Optimizer], list[dict[str, Any]]] = {
    optim.Adam: [{"amsgrad": True}],
    optim.AdamW: [{"amsgrad": True}],
    optim.RMSprop: [{"momentum": 0.9}, {"centered": True}, {"momentum": 0.9, "centered": True}],
    optim.SGD: [{"momentum": 0.9}],
}
"""That change which state there is."""

SAME_STATE = ({optim.Adam, optim.AdamW},)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 4, bias=False)


def step(model: nn.Module, optimizer: optim.Optimizer, value: float = 1.0) -> None:
    for param in model.parameters():
        grad = torch.full_like(param, value)
        param.grad = grad.to_sparse() if isinstance(optimizer, optim.SparseAdam) else grad
    optimizer.step()


def made(kind: Any, model: nn.Module, **options: Any) -> optim.Optimizer:
    optimizer: optim.Optimizer = kind(model.parameters(), lr=0.1, **options)
    return optimizer


def saved(kind: Any, **options: Any) -> MemorySource:
    """A checkpoint of an optimizer after a step."""
    model = net()
    optimizer = made(kind, model, **options)
    step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    return plain_source(model, optimizer)


def classless(source: MemorySource) -> MemorySource:
    """As other formats have it."""
    assert source.optimizer is not None
    return MemorySource(source.whole, source.tied, without_class(source.optimizer))


def refusal(source: MemorySource, kind: Any, **options: Any) -> str | None:
    """Why an optimizer does not take a checkpoint; if it does, it makes a step."""
    model = net()
    optimizer = made(kind, model, **options)
    before = [param.clone() for param in model.parameters()]
    try:
        load_source(source, model, optimizer)
    except CheckpointError as error:
        assert all(map(torch.equal, before, model.parameters()))
        assert optimizer.param_groups[0]["lr"] == 0.1
        return str(error)
    step(model, optimizer)
    return None


def test_it_is_known_which_state_torch_s_optimizers_keep() -> None:
    classes = {
        each
        for each in vars(optim).values()
        if inspect.isclass(each) and issubclass(each, optim.Optimizer)
    }
    assert classes - {optim.Optimizer, optim.LBFGS} == STATES.keys()
    for kind, states in STATES.items():
        for options in ({}, *OPTIONS.get(kind, [])):
            for shape in ((3, 4), (3,)) if kind is not optim.Muon else ((3, 4),):
                model = nn.Module()
                model.x = nn.Parameter(torch.ones(shape))
                optimizer = made(kind, model, **options)
                step(model, optimizer)
                assert set(optimizer.state[model.x]) in states(optimizer.param_groups[0])


def test_every_optimizer_of_torch_takes_the_state_of_its_own_kind_only() -> None:
    sources = {kind: saved(kind) for kind in STATES}
    for there, here in itertools.product(STATES, repeat=2):
        text = refusal(sources[there], here)
        if there is here or {there, here} in SAME_STATE:
            assert text is None, (there, here, text)
            continue
        assert text is not None, (there, here)
        expected = (
            f"saved from torch.optim.{there.__name__}, and this is torch.optim.{here.__name__}"
        )
        assert expected in text


def test_without_a_class_names_of_states_and_options_decide() -> None:
    """No pair ends in a step that finds no state."""
    sources = {kind: classless(saved(kind)) for kind in STATES}
    taken = {
        (there, here)
        for there, here in itertools.product(STATES, repeat=2)
        if refusal(sources[there], here) is None
    }
    moments = {optim.Adam, optim.AdamW, optim.RAdam, optim.SparseAdam}
    others = {(there, here) for there, here in taken if there is not here}
    assert {(each, each) for each in STATES} <= taken
    assert {(optim.Adam, optim.AdamW), (optim.AdamW, optim.Adam)} <= others
    # The same states, and no option that the other does not have.
    assert {kind for pair in others for kind in pair} <= moments
    assert not {(optim.Adam, optim.RAdam), (optim.AdamW, optim.RAdam)} & others


@pytest.mark.parametrize("is_classless", [False, True])
def test_options_that_decide_on_state_must_be_the_same(is_classless: bool) -> None:
    for kind, choices in OPTIONS.items():
        for there, here in itertools.permutations([{}, *choices], 2):
            source = saved(kind, **there)
            text = refusal(classless(source) if is_classless else source, kind, **here)
            assert text is not None
            for option in there.keys() ^ here.keys():
                assert f"group 0: {option} is " in text, text
    text = refusal(saved(optim.AdamW), optim.AdamW, amsgrad=True) or ""
    assert "amsgrad is True here, and False in the checkpoint, which has no max_exp_avg_sq" in text
    # Values of options may differ: they are loaded.
    assert refusal(saved(optim.SGD, momentum=0.9), optim.SGD, momentum=0.5) is None


def test_states_that_are_missing_or_left_over_are_named() -> None:
    for source in (saved(optim.AdamW), classless(saved(optim.AdamW))):
        text = refusal(source, optim.RMSprop)
        assert text is not None
        assert "state of weight: missing: square_avg; left over: exp_avg, exp_avg_sq" in text
        assert "without_optimizer=True" in text


def test_state_that_one_of_the_same_class_needs_must_be_there() -> None:
    source = saved(optim.AdamW)
    assert source.optimizer is not None
    state = source.optimizer["state"]["weight"]
    state["older"] = state.pop("exp_avg")  # more than it needs is no fault
    text = refusal(source, optim.AdamW) or ""
    assert "state of weight: missing: exp_avg\n" in text
    state["exp_avg"] = state["older"]
    assert refusal(source, optim.AdamW) is None


def test_adam_and_adamw_go_on_with_each_other_and_keep_their_own_decay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As one that was AdamW from the beginning, and the other way round."""
    for there, here in ((optim.Adam, optim.AdamW), (optim.AdamW, optim.Adam)):
        for source in (
            saved(there, weight_decay=0.3, betas=(0.8, 0.9)),
            classless(saved(there, weight_decay=0.3, betas=(0.8, 0.9))),
        ):
            caplog.clear()
            results = []
            for kind, others in ((here, {"weight_decay": 0.2}), (there, {})):
                model = net()
                optimizer = made(kind, model, **others)
                with caplog.at_level(logging.WARNING, "fullshard.checkpoint"):
                    load_source(source, model, optimizer)
                (group,) = optimizer.param_groups
                if kind is there:  # the reference: converted by hand
                    group["decoupled_weight_decay"] = here is optim.AdamW
                    group["weight_decay"] = 0.2
                assert group["betas"] == (0.8, 0.9)
                assert (group["weight_decay"], group["decoupled_weight_decay"]) == (
                    0.2,
                    here is optim.AdamW,
                )
                step(model, optimizer, 0.5)
                results.append(next(model.parameters()).detach())
            assert torch.equal(*results)
            assert "weight_decay was not: it keeps its present value" in caplog.text


def test_counts_of_older_torch_are_read() -> None:
    source = saved(optim.Adam)
    assert source.optimizer is not None
    source.optimizer["state"]["weight"]["step"] = 7
    model = net()
    optimizer = made(optim.Adam, model)
    load_source(source, model, optimizer)
    step(model, optimizer)
    (state,) = optimizer.state.values()
    assert torch.equal(state["step"], torch.tensor(8.0))


class Logged(optim.AdamW):
    """A user's own, with the state of torch's."""


class More(optim.AdamW):
    """With a state beside that of torch's."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for state in self.state.values():
            state["more"] = torch.tensor(1.0)
        return result


class Momentum(optim.Optimizer):
    """Derives from none of torch's."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            self.state[param]["average"] = param.grad.clone()


def test_users_classes_take_what_they_derive_from() -> None:
    assert refusal(saved(Logged), Logged) is None
    assert refusal(saved(Logged), optim.AdamW) is None
    assert refusal(saved(optim.AdamW), Logged) is None
    assert refusal(saved(Momentum), Momentum) is None
    assert refusal(classless(saved(Momentum)), Momentum) is None
    assert "left over: more" in (refusal(saved(More), optim.AdamW) or "")
    name = f"{__name__}.Momentum"
    assert f"saved from torch.optim.SGD, and this is {name}" in (
        refusal(saved(optim.SGD), Momentum) or ""
    )
    moved = saved(Momentum)
    moved.optimizer = {**(moved.optimizer or {}), CLASS: ["another.place.Momentum"]}
    assert refusal(moved, Momentum) is None


def test_a_sharded_optimizer_is_of_the_class_that_it_was_made_with() -> None:
    model = net()
    assert class_names(ShardedOptimizer(optim.AdamW, model.parameters())) == [
        "torch.optim.AdamW",
        "torch.optim.Adam",
    ]
    sharded = partial(ShardedOptimizer, optim.AdamW)
    assert refusal(saved(sharded), optim.AdamW) is None
    assert refusal(saved(optim.AdamW), sharded) is None
    assert "and this is torch.optim.SGD" in (
        refusal(saved(optim.AdamW), partial(ShardedOptimizer, optim.SGD)) or ""
    )


def test_formats_without_a_class_and_older_manifests_are_still_read(tmp_path: Path) -> None:
    model = net()
    optimizer = made(optim.AdamW, model)
    step(model, optimizer)
    checkpoint.save(tmp_path / "own", model, optimizer)
    assert describe(open_source(tmp_path / "own"))["optimizer"]["class"] == "torch.optim.AdamW"
    convert(tmp_path / "own", tmp_path / "again", to="fullshard")
    found = open_source(tmp_path / "again").optimizer
    assert found is not None and found[CLASS] == class_names(optimizer)
    for path, form in (("dcp", "dcp"), ("file.pt", "torch")):
        convert(tmp_path / "own", tmp_path / path, to=form)
        found = open_source(tmp_path / path).optimizer
        assert found is not None and CLASS not in found
    old = json.loads((tmp_path / "again" / "manifest.json").read_bytes())
    del old["optimizer"][CLASS]
    (tmp_path / "again" / "manifest.json").write_bytes(signed(old))
    for path in ("own", "again", "dcp", "file.pt"):
        checkpoint.load(tmp_path / path, model, made(optim.AdamW, model))
        with pytest.raises(CheckpointError, match=r"left over: exp_avg, exp_avg_sq, step"):
            checkpoint.load(tmp_path / path, model, made(optim.SGD, model))


def load_into_others(folder: Path) -> list[str]:
    """What ranks say of optimizers that are not the saved one, behind both APIs."""
    errors = []
    for api in ("functional", "wrapper"):
        model = net()
        sharded = fully_shard(model) if api == "functional" else FullyShardedDataParallel(model)
        optimizer = made(optim.AdamW, sharded)
        step(sharded, optimizer)
        checkpoint.save(folder / api, sharded, optimizer)
        for kind, options in (
            (optim.SGD, {}),
            (optim.RMSprop, {}),
            (optim.Adagrad, {}),
            (optim.AdamW, {"amsgrad": True}),
        ):
            other = made(kind, sharded, **options)
            with pytest.raises(CheckpointError, match="cannot take the checkpoint") as error:
                checkpoint.load(folder / api, sharded, other)
            errors.append(str(error.value))
        checkpoint.load(folder / api, sharded, made(optim.Adam, sharded))
    return errors


def test_all_ranks_refuse_alike(world: Any, tmp_path: Path) -> None:
    first, second = world(2).run(load_into_others, tmp_path)
    assert first == second
    assert not any(text.startswith("rank ") for text in first)
