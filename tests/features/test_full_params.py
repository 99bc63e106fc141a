"""Full parameters stay on the modules until they are uninstalled, with or without writing them to the shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard.engine.state import FSDPState, state_of
from fullshard.features import full_params
from tests.helpers.fake import fake_world


def wrapped(orig: bool) -> tuple[Any, FSDPState, Any]:
    """A linear module of 6 elements on rank 0 of 2, its state, and its group."""
    linear = nn.Linear(2, 2)
    torch.nn.init.zeros_(linear.weight)
    torch.nn.init.zeros_(linear.bias)
    model = FSDP(linear, use_orig_params=orig)
    state = state_of(model)
    assert state is not None
    return model, state, state.groups[0]


def full_values() -> list[Tensor]:
    return [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([5.0, 6.0])]


def shards(group: Any) -> list[float]:
    """The elements that this rank holds, without padding."""
    return [value for local in group.shards.buffer.locals for value in local.flatten().tolist()]


@pytest.mark.parametrize("orig", [True, False])
def test_full_parameters_are_on_the_module_while_they_are_installed(orig: bool) -> None:
    with fake_world(2):
        model, state, group = wrapped(orig)
        values = full_values()
        assert not full_params.installed_on_modules(state)
        full_params.install_full_params(group, values)
        found = full_params.installed_on_modules(state)
        assert [each.data_ptr() for each in found] == [each.data_ptr() for each in values]
        assert torch.equal(model.module.weight, values[0])
        assert torch.equal(model.module.bias, values[1])
        assert group.full_params_installed


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("write", [True, False])
def test_shards_take_the_values_only_if_they_are_to_be_written(orig: bool, write: bool) -> None:
    with fake_world(2):
        model, state, group = wrapped(orig)
        full_params.install_full_params(group, full_values())
        with torch.no_grad():
            model.module.weight.mul_(10)  # what a load does: it writes to what is on the module
        full_params.uninstall_all(state, write=write)
        assert not group.full_params_installed
        held = shards(group)
        assert held == (
            [10.0, 20.0, 30.0, 40.0, 5.0, 6.0][: len(held)] if write else [0.0] * len(held)
        )
        full_params.uninstall_all(state)  # there is nothing left to uninstall
        assert shards(group) == held
