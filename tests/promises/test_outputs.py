"""What modules return beside plain tensors, and what they keep: nobody computes with memory that is gone."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributions import Distribution, Normal

from fullshard import FullyShardedDataParallel, LifecycleError, fully_shard
from fullshard.engine.state import state_of
from fullshard.wrap import ModuleWrapPolicy
from tests.helpers.compare import assert_close
from tests.helpers.training import FULLSHARD, weights
from tests.helpers.wrapping import full_params, library

WIDTH = 6


class Table(nn.Module):
    """Its parameter is all it has to give: positions, tied weights, prototypes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self) -> Any:
        return {
            "itself": self.weight,
            "view": self.weight.t()[1:],
            "cut loose": self.weight.detach(),
        }


class Slotted:
    """An object without a ``__dict__``."""

    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Policy(nn.Module):
    """Returns objects that are no containers of tensors to anybody else."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(WIDTH, WIDTH)
        self.spread = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Any:
        mean = self.mean(x)
        hidden = torch.tanh(x * self.spread)
        return Normal(mean, self.spread.exp() + hidden.square()), Slotted(
            MappingProxyType({"h": [hidden]})
        )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.policy = Policy()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Distribution, Tensor]:
        table = self.table()
        distribution, other = self.policy(self.head(x) @ table["itself"])
        penalty = (
            other.inner["h"][0].mean() + table["view"].square().sum() * table["cut loose"].sum()
        )
        return distribution, penalty


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    distribution, penalty = model(x)
    return penalty * 0.1 - distribution.log_prob(x).mean()  # type: ignore[no-any-return]


def sharded(model: Net) -> nn.Module:
    fully_shard(model.table)
    fully_shard(model.policy)
    return fully_shard(model)


def wrapped(model: Net) -> nn.Module:
    policy = ModuleWrapPolicy({Table, Policy})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))


def compare_with_one_process() -> None:
    rows = torch.randn(dist.get_world_size(), 2, WIDTH, generator=torch.Generator().manual_seed(1))
    reference = make_net()
    with torch.no_grad():
        before = loss_of(reference, rows[0])
    torch.stack([loss_of(reference, x) for x in rows]).mean().backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for api in (sharded, wrapped):
        model = api(make_net())
        with torch.no_grad():
            assert_close(loss_of(model, rows[0]), before, rtol=1e-5, atol=1e-6)
        loss_of(model, rows[dist.get_rank()]).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        found = full_params(library(FULLSHARD), model) if api is wrapped else weights(model)
        assert_close(found, weights(reference), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_returned_parameters_and_objects_train_as_in_one_process(world: Any, ranks: int) -> None:
    world(ranks).run(compare_with_one_process)


class Hiding(Table):
    """Returns its parameter where no copy can be put in its place."""

    def forward(self) -> Any:
        return Slotted(self.weight)


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Hiding()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, looks: bool) -> Tensor:
        return self.head(x @ self.table().inner if looks else x)  # type: ignore[no-any-return]


def return_a_hidden_parameter() -> str:
    model = Looking()
    fully_shard(model.table)
    fully_shard(model)
    with pytest.raises(LifecycleError) as caught:
        model(torch.ones(2, WIDTH), looks=True)
    # Nobody is left unsharded, or in the middle of a call.
    model(torch.ones(2, WIDTH), looks=False).sum().backward()
    assert model.head.weight.grad is not None
    return str(caught.value)


def test_a_parameter_returned_in_an_unknown_object_is_an_error_that_names_the_module(
    world: Any,
) -> None:
    first, second = world(2).run(return_a_hidden_parameter)
    assert first == second
    assert "table returns one" in first and "Slotted" in first and "Return a clone" in first


class Leaking(nn.Module):
    """Keeps a tensor of its forward where nobody sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [x * self.scale]
        return self.kept[0] + 1


def go_backward_from_what_was_kept() -> None:
    layers: Any = nn.Sequential(Leaking(), Leaking())
    for layer in layers:
        fully_shard(layer)
    model: Any = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), layers))
    x = torch.ones(2, WIDTH, requires_grad=True)
    too_late = r"needs the parameters of '1\.0'.*Return such a tensor"
    for _ in range(2):  # with and without a forecast of the order
        # The multiplication by the scale must not read memory that was given back: that ends the process.
        model(x)
        with pytest.raises(LifecycleError, match=too_late):
            layers[0].kept[0].sum().backward()
        model.reset_iter_state()
        # Memory that a gather is filling has not the right values yet.
        model(x)
        layers[0].unshard(async_op=True)
        with pytest.raises(LifecycleError, match=too_late):
            layers[0].kept[0].sum().backward()
        model.reset_iter_state()
        # What the error says helps.
        model(x)
        layers[0].unshard()
        layers[0].kept[0].sum().backward()
        assert not state_of(layers[0]).gathered  # type: ignore[union-attr]
        model(x).sum().backward()


def test_weights_that_are_needed_too_late_are_an_error_that_names_the_module(world: Any) -> None:
    world(2).run(go_backward_from_what_was_kept)
