"""Where numbers of an optimizer's state are kept: where its kernels read them, whoever has saved them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

from tests.helpers.checkpoints import load_into, snapshot, source_of
from tests.helpers.compare import assert_equal

pytestmark = pytest.mark.gpu

ON_HOST = partial(optim.Adam, foreach=True)
ON_DEVICE = partial(optim.Adam, capturable=True)
FUSED = partial(optim.Adam, fused=True)


def stepped(make: Any) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, device="cuda")
    optimizer = make(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 4, device="cuda")).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("there", [ON_HOST, ON_DEVICE, FUSED])
@pytest.mark.parametrize("here", [ON_HOST, ON_DEVICE, FUSED])
def test_counts_are_where_the_optimizer_reads_them(there: Any, here: Any) -> None:
    source = source_of([snapshot(*stepped(there))])
    model, optimizer = stepped(here)
    load_into(model, optimizer, source)
    for state in optimizer.state.values():
        assert state["step"].device.type == ("cpu" if here is ON_HOST else "cuda")
        assert state["exp_avg"].device.type == "cuda"
    (group,) = optimizer.param_groups
    assert bool(group["capturable"]) == (here is ON_DEVICE)
    model(torch.ones(2, 4, device="cuda")).square().sum().backward()
    optimizer.step()  # it goes on


@pytest.mark.parametrize("make", [optim.ASGD, optim.NAdam])  # which has them on the device, or not
def test_other_numbers_are_where_they_were(make: Any) -> None:
    model, optimizer = stepped(make)
    source = source_of([snapshot(model, optimizer)])
    other, again = stepped(make)
    load_into(other, again, source)
    for old, new in zip(optimizer.state.values(), again.state.values(), strict=True):
        assert {key: value.device for key, value in old.items()} == {
            key: value.device for key, value in new.items()
        }
        assert_equal(new, old)
