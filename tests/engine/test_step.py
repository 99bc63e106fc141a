"""The order of a step: what is gathered when, what is prefetched, what is given back, how backward ends.

A fake group of two ranks; what groups do is noted in order:

    gather a     the all-gather of a is issued         use a       its unsharded parameters are on the modules
    compute a    its forward runs                      release a   its memory is given back
    reduce a     its gradients are sent off
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import fully_shard
from fullshard.engine.lazy_init import lazy_init
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.reduction import Reduction
from fullshard.engine.sharded_state import Retention, ShardedState
from fullshard.engine.state import FSDPState, state_of
from fullshard.engine.step import Step
from fullshard.errors import LifecycleError, UsageError
from tests.helpers.fake import fake_world


class Layer(nn.Linear):
    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__(4, 4)
        self.name, self.log = name, log

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(f"compute {self.name}")
        return super().forward(x)


class Net(nn.Module):
    """Layers that are run in the order of ``order``; the root has no parameters of its own."""

    def __init__(self, log: list[str], names: str = "abc") -> None:
        super().__init__()
        self.order = names
        self.layers = nn.ModuleDict({name: Layer(name, log) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = self.layers[name](x)
        return x


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    events: list[str] = []

    def name(group: FSDPParamGroup) -> str:
        return group.name.rpartition(".")[2]

    unshard, wait = FSDPParamGroup.unshard, FSDPParamGroup.wait
    reshard, reduce = FSDPParamGroup.reshard, Reduction.reduce

    def noting_unshard(self: FSDPParamGroup, **options: bool) -> bool:
        issued = unshard(self, **options)
        if issued:
            events.append(f"gather {name(self)}")
        return issued

    def noting_wait(self: FSDPParamGroup) -> None:
        if self.sharded_state is not ShardedState.UNSHARDED:
            events.append(f"use {name(self)}")
        wait(self)

    def noting_reshard(self: FSDPParamGroup) -> None:
        if self.gathered:
            events.append(f"release {name(self)}")
        reshard(self)

    def noting_reduce(self: Reduction, **options: bool) -> None:
        events.append("reduce")
        reduce(self, **options)

    monkeypatch.setattr(FSDPParamGroup, "unshard", noting_unshard)
    monkeypatch.setattr(FSDPParamGroup, "wait", noting_wait)
    monkeypatch.setattr(FSDPParamGroup, "reshard", noting_reshard)
    monkeypatch.setattr(Reduction, "reduce", noting_reduce)
    with fake_world(2):
        yield events


def sharded(log: list[str], names: str = "abc", **options: Any) -> Any:
    net = Net(log, names)
    for layer in net.layers.values():
        fully_shard(layer, **options)
    return fully_shard(net, **options)


def state(module: nn.Module) -> FSDPState:
    found = state_of(module)
    assert found is not None
    return found


def step_of(net: nn.Module) -> Step:
    found = state(net).step
    assert found is not None
    return found


def step(net: nn.Module, log: list[str]) -> tuple[list[str], list[str]]:
    """Run one step; return what happened in forward and in backward."""
    log.clear()
    loss = net(torch.ones(1, 4)).sum()
    forward = list(log)
    log.clear()
    loss.backward()
    return forward, list(log)


def test_without_a_forecast_a_layer_is_released_when_the_next_has_been_gathered(
    log: list[str],
) -> None:
    forward, _ = step(sharded(log), log)
    assert forward == [
        *("gather a", "use a", "compute a"),
        *("gather b", "release a", "use b", "compute b"),
        *("gather c", "release b", "use c", "compute c"),
        "release c",
    ]


def test_with_a_forecast_the_next_layer_is_gathered_before_this_one_computes(
    log: list[str],
) -> None:
    net = sharded(log)
    step(net, log)
    forward, _ = step(net, log)
    assert forward == [
        *("gather a", "use a", "gather b", "compute a", "release a"),
        *("use b", "gather c", "compute b", "release b"),
        *("use c", "compute c", "release c"),
    ]


def test_backward_gathers_the_layer_before_and_releases_a_layer_before_it_reduces(
    log: list[str],
) -> None:
    _, backward = step(sharded(log), log)
    assert backward == [
        *("gather c", "use c", "gather b"),
        *("release c", "reduce", "use b", "gather a"),
        *("release b", "reduce", "use a"),
        # Nothing comes before it in forward, so it is left when backward ends.
        *("reduce", "release a"),
    ]


def test_a_forecast_that_was_wrong_is_given_back_when_forward_ends(log: list[str]) -> None:
    net = sharded(log)
    step(net, log)
    net.order = "acb"
    forward, _ = step(net, log)
    assert forward == [
        *("gather a", "use a", "gather b", "compute a", "release a"),
        *("gather c", "use c", "compute c"),
        *("release c", "use b", "compute b"),
        "release b",
    ]
    net.order = "ac"
    step(net, log)  # learns it
    net.order = "ab"
    forward, _ = step(net, log)
    assert forward[-2:] == ["release c", "release b"]
    assert not any(state(layer).gathered for layer in net.layers.values())


def test_a_layer_used_twice_in_a_row_is_gathered_once_with_and_without_a_forecast(
    log: list[str],
) -> None:
    net = sharded(log)
    net.order = "aabc"
    gathers = [
        [event for event in step(net, log)[0] if event.startswith("gather")] for _ in range(2)
    ]
    assert gathers == [["gather a", "gather b", "gather c"]] * 2


def test_layers_that_need_no_gather_do_not_delay_those_that_do(log: list[str]) -> None:
    net = sharded(log, "abcd")
    kept = net.layers["c"].requires_grad_(False)
    kept.set_reshard_after_forward(False)
    kept.set_reshard_after_backward(False)
    step(net, log)
    for order in ("acbd", "abd", "abcd", "acbccd", "acbd"):
        net.order = order
        forward, backward = step(net, log)
        assert [event for event in forward if event in ("gather b", "compute a")] == [
            "gather b",
            "compute a",
        ]
        assert [event for event in backward if event.startswith("gather")] == [
            "gather d",
            "gather b",
            "gather a",
        ]
        assert backward.index("gather b") < backward.index("release d")


def test_prefetch_lists_replace_the_forecast(log: list[str]) -> None:
    net = sharded(log)
    a, b, c = net.layers.values()
    a.set_modules_to_forward_prefetch([b, c])
    b.set_modules_to_forward_prefetch([])
    c.set_modules_to_backward_prefetch([b, a])
    b.set_modules_to_backward_prefetch([])
    forward, backward = step(net, log)
    assert forward[:5] == ["gather a", "use a", "gather b", "gather c", "compute a"]
    assert [event for event in backward if "gather" in event] == [
        "gather c",
        "gather b",
        "gather a",
    ]
    assert backward[:4] == ["gather c", "use c", "gather b", "gather a"]


def test_layers_that_stay_unsharded_are_not_gathered_for_backward(log: list[str]) -> None:
    net = sharded(log, reshard_after_forward=False)
    forward, backward = step(net, log)
    assert not any(event.startswith("release") for event in forward)
    assert not any(event.startswith("gather") for event in backward)
    assert backward[-1] == "release a"


def test_nothing_is_left_when_backward_ends(log: list[str]) -> None:
    net = sharded(log)
    loss = net(torch.ones(1, 4)).sum()
    running = step_of(net)
    loss.backward()
    assert not running.busy and not running.passes and not running.reached
    for each in running.states:
        assert each.call is None and each.retention is Retention.NONE and not each.gathered


def test_a_reset_gives_everything_back_and_keeps_the_forecast(log: list[str]) -> None:
    net = sharded(log)
    step(net, log)
    order = list(step_of(net).schedule.forecast)
    loss = net(torch.ones(1, 4)).sum()
    state(net.layers["c"]).groups[0].unshard()
    net.reset_iter_state()
    running = step_of(net)
    assert not any(each.gathered for each in running.states)
    assert not running.busy and running.schedule.forecast == order
    del loss


def test_weights_that_changed_after_forward_are_refused_before_a_gather(log: list[str]) -> None:
    net = sharded(log)
    loss = net(torch.ones(1, 4)).sum()
    with torch.no_grad():
        next(net.layers["c"].parameters()).add_(1)
    log.clear()
    with pytest.raises(LifecycleError, match="must not change between a forward and its backward"):
        loss.backward()
    assert log == []


def test_the_root_is_the_state_whose_forward_comes_first(log: list[str]) -> None:
    net = sharded(log)
    running = lazy_init(state(net))
    layers = [state(layer) for layer in net.layers.values()]
    assert running.root is state(net) and set(running.states) == {state(net), *layers}
    assert [each.name for each in layers] == ["layers.a", "layers.b", "layers.c"]
    assert all(each.step is running for each in running.states)
    # The root is needed again at once, so it is not resharded after forward.
    assert [each.options.reshard_after_forward for each in (state(net), *layers)] == [False] + [
        True
    ] * 3
    outer = fully_shard(nn.Sequential(net))
    outer(torch.ones(1, 4))
    assert all(each.step is step_of(outer) for each in layers)
    assert state(net).options.reshard_after_forward


class Scaled(nn.Module):
    """A module that uses a parameter of its own behind a module that is sharded by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def test_memory_of_modules_that_have_gone_to_another_root_is_left_alone() -> None:
    with fake_world(2), torch.no_grad():
        shared = Scaled()
        first, second = nn.Sequential(shared), nn.Sequential(shared)
        for module in (shared.inner, shared, first, second):
            fully_shard(module)
        for root in (first, second, first, first, second, first):
            root(torch.ones(1, 4))
        state(first).step.forget(together=False)  # type: ignore[union-attr]
        first(torch.ones(1, 4))


def test_a_list_of_modules_is_no_root(log: list[str]) -> None:
    layers = [Layer(name, log) for name in "ab"]
    fully_shard(layers)
    with pytest.raises(UsageError, match="must be sharded on its own"):
        layers[0](torch.ones(1, 4))
