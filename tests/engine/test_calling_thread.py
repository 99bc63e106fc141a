"""Backward passes that may come through a sharded model run on the thread that calls them; others are left alone.

On the CPU they do so anyway, so these tests look at what autograd was told. `tests/gpu/test_calling_thread.py` looks at threads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullshard import fully_shard
from tests.helpers.fake import fake_world

is_on_default = torch.autograd.is_multithreading_enabled


class Noted(torch.autograd.Function):
    """Notes in its backward whether autograd may use threads of its own."""

    seen: list[bool]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Noted.seen.append(is_on_default())
        return gradient


@pytest.fixture(autouse=True)
def seen() -> list[bool]:
    Noted.seen = []
    return Noted.seen


def loss_of(model: nn.Module) -> Tensor:
    return Noted.apply(model(torch.ones(2, 4))).sum()


def test_passes_through_a_sharded_model_run_on_the_calling_thread(seen: list[bool]) -> None:
    with fake_world(2):
        model = fully_shard(nn.Linear(4, 4))
        loss_of(model).backward()
        first, second = loss_of(model), loss_of(model)
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        assert seen == [False] * 4
        assert is_on_default()


def test_passes_of_other_models_are_left_alone_once_the_graph_is_gone(seen: list[bool]) -> None:
    with fake_world(2):
        model, other = fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)
        loss_of(other).backward()
        loss = loss_of(model)
        loss_of(other).backward()
        del loss
        loss_of(other).backward()
        with torch.no_grad():
            model(torch.ones(2, 4))
        loss_of(other).backward()
        assert seen == [True, False, True, True]


def test_reentrant_checkpoints_hide_the_graph_only_around_a_whole_model(seen: list[bool]) -> None:
    with fake_world(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        x = torch.ones(2, 4, requires_grad=True)
        Noted.apply(checkpoint(model, x, use_reentrant=True)).sum().backward()
        model[1].forward = partial(checkpoint, model[1].forward, use_reentrant=True)
        loss_of(model).backward()
        assert seen == [True, False]


def test_a_failed_pass_leaves_autograd_as_it_was() -> None:
    with fake_world(2):
        model = fully_shard(nn.Linear(4, 4))
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        assert is_on_default()
        model.reset_iter_state()


def test_what_a_user_has_told_autograd_stays() -> None:
    with fake_world(2), torch.autograd.set_multithreading_enabled(False):
        model = fully_shard(nn.Linear(4, 4))
        loss_of(model).backward()
        assert not is_on_default()
