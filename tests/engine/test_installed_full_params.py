"""Full parameters stay on the modules until somebody uninstalls them, with or without writing them to the shards."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard.engine.installed_full_params import InstalledFullParams
from fullshard.engine.state import state_of
from tests.helpers.fake import fake_world


def wrapped(orig: bool) -> tuple[Any, InstalledFullParams, Any]:
    """A linear module of 6 elements on rank 0 of 2, its installed full parameters, and its group."""
    linear = nn.Linear(2, 2)
    torch.nn.init.zeros_(linear.weight)
    torch.nn.init.zeros_(linear.bias)
    model = FSDP(linear, use_orig_params=orig)
    state = state_of(model)
    assert state is not None
    return model, state.installed_full_params, state.groups[0]


def full_values() -> list[Tensor]:
    return [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([5.0, 6.0])]


def shards(group: Any) -> list[float]:
    """The elements that this rank holds, without padding."""
    return [value for local in group.shards.buffer.locals for value in local.flatten().tolist()]


@pytest.mark.parametrize("orig", [True, False])
def test_full_parameters_are_on_the_module_while_they_are_installed(orig: bool) -> None:
    with fake_world(2):
        model, installed, group = wrapped(orig)
        values = full_values()
        assert not installed
        installed.install(group, values)
        assert installed and list(installed.groups) == [group]
        assert all(map(operator.is_, installed.tensors, values))
        assert torch.equal(model.module.weight, values[0])
        assert torch.equal(model.module.bias, values[1])
        assert group.full_params_installed


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("write", [True, False])
def test_shards_take_the_values_only_if_they_are_to_be_written(orig: bool, write: bool) -> None:
    with fake_world(2):
        model, installed, group = wrapped(orig)
        installed.install(group, full_values())
        with torch.no_grad():
            model.module.weight.mul_(10)  # what a load does: it writes to what is on the module
        installed.uninstall(write=write)
        assert not installed and not group.full_params_installed
        held = shards(group)
        assert held == (
            [10.0, 20.0, 30.0, 40.0, 5.0, 6.0][: len(held)] if write else [0.0] * len(held)
        )
        installed.uninstall()  # there is nothing left to uninstall
        assert shards(group) == held
