"""All ranks issue their collectives in one order, though they use modules differently.

Of the ways in which ranks may differ without a collective more or less (see [Note: one order of collectives] in
`engine/schedule.py`), each is run on real ranks. Every layer has a size of its own, so that a collective is known by its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import fully_shard
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.transport.streams import FSDPCommContext

WIDTH = 8


class Layer(nn.Module):
    """A layer with hidden width of its own, and so with a size of its own."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class NoParams(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class Net(nn.Module):
    """Layers run in the order of ``order``; "*" is a collective of the user."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order = ""
        self.layers = nn.ModuleDict({name: Layer(4 + i) for i, name in enumerate("abcd")})
        self.layers["k"] = Layer(16)
        self.layers["e"] = NoParams()

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            if name == "*":
                dist.all_reduce(torch.ones(3))
            else:
                x = self.layers[name](x)
        return x


def sharded(kept: str = "") -> Any:
    """Each layer sharded on its own; those in ``kept`` are frozen and stay unsharded."""
    net = Net()
    for layer in net.layers.values():
        fully_shard(layer)
    for name in kept:
        layer = net.layers[name].requires_grad_(False)
        layer.set_reshard_after_forward(False)
        layer.set_reshard_after_backward(False)
    return fully_shard(net)


def step(net: Any, order: str, *, train: bool = True) -> None:
    net.order = order
    x = torch.full((2, WIDTH), 0.1 * (dist.get_rank() + 1))
    if train:
        net(x).square().sum().backward()
    else:
        with torch.no_grad():
            net(x)


def one_rank_resets(order: str) -> None:
    net = sharded()
    for number in range(4):
        step(net, order)
        if number == dist.get_rank():
            net.reset_iter_state()


def the_forecast_outlasts_a_reset_of_one_rank() -> None:
    one_rank_resets("a*b*c*d")


def layers_repeat_and_one_rank_resets() -> None:
    one_rank_resets("aab*bccd")


def ranks_differ(net: Any, orders: list[str]) -> None:
    for number in range(5):
        step(net, orders[(dist.get_rank() + number) % len(orders)])


def ranks_use_kept_layers_differently() -> None:
    """A frozen layer that stays unsharded causes no collectives, wherever it is used."""
    net = sharded(kept="k")
    step(net, "kabcd")  # gathers it
    ranks_differ(net, ["a*bcd", "a*kbckd", "ka*kbkckdk", "a*bcdk"])


def ranks_use_modules_without_parameters_differently() -> None:
    ranks_differ(sharded(), ["a*bcd", "a*ebced", "ea*eebceede", "a*ebcd"])


def evaluation_has_another_order() -> None:
    net = sharded(kept="k")
    for order in ("abc*d", "dc*ba", "bdk*k", "cab*d"):
        step(net, order, train=False)
        step(net, "abck*d")
        step(net, "abck*d")


PROGRAMS = [
    the_forecast_outlasts_a_reset_of_one_rank,
    layers_repeat_and_one_rank_resets,
    ranks_use_kept_layers_differently,
    ranks_use_modules_without_parameters_differently,
    evaluation_has_another_order,
]


def recorded(program: Callable[[], None]) -> list[str]:
    """Run a program, and return its gathers, reductions and all-reduces, those of the user, too."""
    events: list[str] = []
    unshard, note, all_reduce = (
        FSDPParamGroup.unshard,
        FSDPCommContext.note_reduction,
        dist.all_reduce,
    )

    def noting_unshard(self: FSDPParamGroup, **options: Any) -> bool:
        issued = unshard(self, **options)
        if issued:
            events.append(f"gather {self.name}")
        return issued

    def noting_reduction(self: FSDPCommContext, reduction: Any) -> None:
        events.append(f"reduce {reduction.buffer.nbytes} bytes")
        note(self, reduction)

    def noting_all_reduce(*args: Any, **options: Any) -> Any:
        events.append("all-reduce")
        return all_reduce(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPParamGroup, "unshard", noting_unshard)
        patch.setattr(FSDPCommContext, "note_reduction", noting_reduction)
        patch.setattr(dist, "all_reduce", noting_all_reduce)
        program()
    return events


def events_of_all() -> list[list[str]]:
    return [recorded(program) for program in PROGRAMS]


def test_ranks_that_use_modules_differently_issue_the_same_collectives(world: Any) -> None:
    first, *others = world(3).run(events_of_all)
    for other in others:
        for program, mine, theirs in zip(PROGRAMS, first, other, strict=True):
            assert mine == theirs, program.__name__
            assert "all-reduce" in mine
