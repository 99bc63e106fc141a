"""`graphed` without a GPU: steps run eagerly, and what decides about captures is what it should be."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import ConfigurationError, fully_shard, graphed
from fullshard.engine.captures import obstacles_to_capture
from fullshard.engine.state import named_states
from fullshard.features.graphs.baked_in import baked_in, changes, kind_of, modes
from fullshard.features.graphs.graphed_step import (
    GraphedStep,
    Plan,
    _Entry,
    obstacles_of_optimizer,
)
from fullshard.features.graphs.step_hook import StepHook
from fullshard.optim import ShardedOptimizer
from tests.helpers.fake import fake_world
from tests.helpers.ranks import World


class Messages(logging.Handler):
    """What the logger was told."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    fully_shard(model[2])
    return fully_shard(model)


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    def step(x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        loss = model(x).pow(2).mean() * scale
        loss.backward()
        optimizer.step()
        return {"loss": loss, "scale": scale}

    return step


def eager_and_graphed(plans: list[tuple[Plan, str]]) -> tuple[list[str], int, tuple[Plan, str]]:
    """Train the same model twice; compare, and decide with the other rank."""
    batches = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(1))
    runs = []
    messages = Messages()
    logging.getLogger("fullshard").addHandler(messages)
    for is_graphed in (False, True):
        model = make_model()
        optimizer = ShardedOptimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
        step: Any = make_step(model, optimizer)
        if is_graphed:
            step = graphed(step, (batches[0],), model=model, optimizer=optimizer)
        losses = []
        for x in batches:
            optimizer.zero_grad()
            found = step(x, scale=2.0)
            assert found["scale"] == 2.0
            assert found["loss"].requires_grad is not is_graphed
            losses.append(found["loss"].detach())
        runs.append([*losses, *(param.to_local() for param in model.parameters())])  # type: ignore[attr-defined]
    logging.getLogger("fullshard").removeHandler(messages)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert isinstance(step, GraphedStep)
    rank = torch.distributed.get_rank()
    obstacles = obstacles_to_capture(g for state in named_states(model) for g in state.groups)
    assert all("run on gloo" in each for each in obstacles) and len(obstacles) == 2
    return messages.texts, step.num_graphs + step.pool_bytes, step._decide(*plans[rank])


class Replayed:
    """In the place of a captured step, which needs a GPU."""

    def __init__(self, num_journals: int) -> None:
        self.optimizer_steps = [1] * num_journals

    def replay(self, inputs: Any) -> str:
        return "results"


def journals_after_replays() -> list[tuple[int, int, int]]:
    """Count what four replays note; the capture has counted the optimizer's step of the first."""
    model: Any = make_model()
    optimizer = ShardedOptimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
    make_step(model, optimizer)(torch.ones(3, 4))
    step: Any = graphed(model, (), model=model, optimizer=optimizer)
    [journal] = step._journals
    count, steps, version = journal.count, journal.step, model[0].weight._version
    entry = _Entry()
    entry.captured = Replayed(1)  # type: ignore[assignment]
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("a user's hook"))
    handle = optimizer.register_step_pre_hook(StepHook(lambda: called.append("a checkpoint's")))
    assert [step._replay(entry, ((), {})) for _ in range(3)] == ["results"] * 3
    handle.remove()
    step._replay(entry, ((), {}))
    assert called == ["a checkpoint's"] * 3  # as long as it is there, before each
    assert journal.last_tag is not None
    assert journal.last_tag.text == "replay of a graphed step"
    return [(journal.count - count, journal.step - steps, model[0].weight._version - version)]


def test_on_the_cpu_a_graphed_step_is_the_step_and_ranks_do_what_the_most_careful_one_wants(
    world: Callable[[int], World],
) -> None:
    reason = "the model is on cpu, and graphs are CUDA's"
    plans = [(Plan.REPLAY, ""), (Plan.EAGER, "it could not be captured: no memory")]
    for texts, size, decision in world(2).run(eager_and_graphed, plans):
        assert texts == [f"A graphed step runs eagerly: {reason}."]
        assert size == 0
        assert decision == plans[1]
    for noted in world(2).run(journals_after_replays):
        assert noted == [(4, 3, 4)]


def test_arguments_that_cannot_be_used_are_named() -> None:
    with fake_world(2):
        model = make_model()
        with pytest.raises(ConfigurationError, match="warmup must be a number of calls"):
            graphed(model, (), model=model, warmup=0)
        with pytest.raises(ConfigurationError, match="nothing in model is sharded"):
            graphed(model, (), model=nn.Linear(1, 1))
        with pytest.raises(ConfigurationError, match="not object"):
            graphed(model, ({"x": [object()]},), model=model)
        adamw = ShardedOptimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
        assert obstacles_of_optimizer(adamw) == [
            "AdamW was made without capturable=True, so its step needs the host"
        ]
        sgd = ShardedOptimizer(torch.optim.SGD, model.parameters(), lr=0.1, fused=True)
        assert not obstacles_of_optimizer(sgd)


def test_inputs_are_of_one_kind_if_only_the_elements_of_their_tensors_differ() -> None:
    one = kind_of(([torch.zeros(2, 3)], {"scale": 1.0, "mask": None}))
    assert one == kind_of(([torch.ones(2, 3)], {"scale": 1.0, "mask": None}))
    for other in (
        ([torch.zeros(3, 2)], {"scale": 1.0, "mask": None}),
        ([torch.zeros(2, 3).double()], {"scale": 1.0, "mask": None}),
        ([torch.zeros(2, 3)], {"scale": 2.0, "mask": None}),
        ([torch.zeros(2, 3)], {"scale": 1, "mask": None}),
        ((torch.zeros(2, 3),), {"scale": 1.0, "mask": None}),
    ):
        assert one != kind_of(other)


def test_what_is_baked_into_a_graph_is_noticed_when_it_changes() -> None:
    with fake_world(2):
        model: Any = make_model()
        optimizer = ShardedOptimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
        step = make_step(model, optimizer)
        step(torch.randn(3, 4))
        states = list(named_states(model))

        def now() -> dict[str, Any]:
            return baked_in(model, states, optimizer)

        before = now()
        step(torch.randn(3, 4))
        assert not changes(before, now())
        optimizer.state_dict()
        optimizer.fuse_state()
        assert not changes(before, now())  # reading the state moves nothing
        mode = modes(model)
        assert modes(model.eval()) != mode

        def replace() -> None:
            model[0].weight = nn.Parameter(model[0].weight.detach().clone())

        def load_state() -> None:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

        def new_buffer() -> None:
            model[1].running_mean = torch.zeros(6)

        done: dict[str, Callable[[], Any]] = {
            "buffers and parameters that are not sharded": new_buffer,
            "options of the model": lambda: model[2].set_requires_gradient_sync(False),
            "the optimizer's state": load_state,
            "options of the optimizer": lambda: optimizer.param_groups[0].update(eps=1e-3),
            "the parameters": replace,
        }
        for name, change in done.items():
            before = now()
            change()
            assert name in changes(before, now())


def test_the_numbers_of_a_fused_state_stay_where_they_are_when_it_is_read() -> None:
    with fake_world(2):
        model = make_model()
        optimizer = ShardedOptimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
        step = make_step(model, optimizer)
        step(torch.randn(3, 4))
        inner = [dict(state) for state in optimizer.inner.state.values()]
        for state in optimizer.state.values():
            state["step"].fill_(7.0)
        optimizer.fuse_state()
        for state, before in zip(optimizer.inner.state.values(), inner, strict=True):
            assert state["step"] is before["step"]
            assert float(state["step"]) == 7.0
            assert state["exp_avg"].data_ptr() == before["exp_avg"].data_ptr()
