"""Backward takes memory for a reduction when it has given back that of the parameters, and does so at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import fully_shard
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.reduction import Reduction
from tests.helpers.fake import fake_world


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What groups do in backward, in order."""
    events: list[str] = []

    def logged(cls: Any, verb: str, group_of: Callable[[Any], FSDPParamGroup]) -> None:
        original = getattr(cls, verb)

        def call(self: Any, **options: bool) -> None:
            group = group_of(self)
            events.append(f"{verb} {group.name}{' (gathered)' if group.gathered else ''}")
            original(self, **options)

        monkeypatch.setattr(cls, verb, call)

    logged(Reduction, "reduce", lambda reduction: reduction._group())
    logged(FSDPParamGroup, "wait", lambda group: group)
    return events


def test_parameters_are_given_back_before_their_gradients_are_reduced(log: list[str]) -> None:
    with fake_world(2):
        model = Stack()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        loss = model(torch.ones(1, 4)).sum()
        log.clear()
        loss.backward()
    assert log == [
        "wait layers.2 (gathered)",
        "wait root (gathered)",
        "reduce layers.2",
        "wait layers.1 (gathered)",
        "reduce layers.1",
        "wait layers.0 (gathered)",
        # Nothing sharded comes before it in forward, and what there is should not make it wait.
        "reduce layers.0 (gathered)",
        "reduce root",
    ]
