"""Backward that the user ends: `set_manual_backward_finalization`, `finalize_backward` and its handle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard import GradientReductionHandle, LifecycleError, fully_shard
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.traffic import REDUCE_SCATTER, Traffic
from tests.helpers.training import FULLSHARD, TORCH, gradients, of_both, weights
from tests.helpers.wrapped_nets import library

BACKWARDS = 3
TORCH_HAS_IT = hasattr(library(TORCH).FSDPModule, "finalize_backward")


def sharded(api: str = FULLSHARD, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    for module in (model[0], model[2], model):
        library(api).fully_shard(module, **options)
    return model


def batch(step: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def loss_of(model: Any, step: int) -> Tensor:
    loss: Tensor = model(batch(step)).square().sum()
    return loss


def train(api: str, way: str, **options: Any) -> list[Any]:
    """Gradients of two steps of several backwards each, and the weights."""
    model = sharded(api, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    record: list[Any] = []
    model.set_manual_backward_finalization(way != "automatic")
    for step in range(2):
        for number in range(BACKWARDS):
            last = number == BACKWARDS - 1
            model.set_requires_gradient_sync(way == "reduced" or (way == "automatic" and last))
            loss_of(model, BACKWARDS * step + number).backward()
        if way != "automatic":
            model.set_requires_gradient_sync(True)
            handle = model.finalize_backward(async_op=way == "asynchronous")
            if handle is not None:
                handle.wait()
        assert all(isinstance(param, DTensor) for param in model.parameters())
        record.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return [record, weights(model)]


def all_ways() -> None:
    expected = {way: train(FULLSHARD, way) for way in ("automatic", "added up", "asynchronous")}
    assert_equal(expected["added up"], expected["automatic"])
    assert_equal(expected["asynchronous"], expected["automatic"])
    if TORCH_HAS_IT:
        for way in ("added up", "asynchronous"):
            assert_equal(*of_both(train, way))
        # Torch adds the gradients of the first layer up, because its inputs need none, and reduces them at the end.
        assert_close(*of_both(train, "reduced"), rtol=1e-5, atol=1e-6)
    for reshard in (False, 1, 2):
        assert_equal(
            train(FULLSHARD, "added up", reshard_after_forward=reshard), expected["automatic"]
        )


@pytest.mark.filterwarnings("ignore:reshard_after_forward=1")
def test_gradients_are_those_of_a_backward_that_ends_by_itself_and_of_torch(world) -> None:
    world(2).run(all_ways)


def once() -> None:
    model = sharded()
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    with Traffic() as traffic:
        for number in range(BACKWARDS):
            loss_of(model, number).backward()
        assert not traffic.sizes(REDUCE_SCATTER)
        model.finalize_backward()  # gradients wait, as these settings say
        assert not traffic.sizes(REDUCE_SCATTER)
        assert all(param.grad is None for param in model.parameters())
        model.set_requires_gradient_sync(True)
        for _ in range(2):
            model.finalize_backward()
            assert traffic.sizes(REDUCE_SCATTER).total() == 2
    assert all(param.grad is not None for param in model.parameters())


def test_what_was_added_up_is_reduced_once_as_soon_as_it_may_be(world) -> None:
    world(2).run(once)


def in_flight() -> None:
    model = sharded()
    assert model.finalize_backward() is None  # before the first forward
    model.set_manual_backward_finalization(True)
    model.finalize_backward(async_op=True).wait()
    loss_of(model, 0).backward()
    # Of the group that was reduced last, nothing has waited for the reduction.
    assert any(param.grad is None for param in model.parameters())
    handle = model.finalize_backward(async_op=True)
    assert isinstance(handle, GradientReductionHandle)
    loss = loss_of(model, 1)  # a forward may begin meanwhile
    handle.wait()
    handle.wait()
    first = gradients(model)
    loss.backward()
    model.finalize_backward()
    second = gradients(model)
    expected = sharded()
    for step, found in enumerate((first, second)):
        loss_of(expected, step).backward()
        assert_equal(found, gradients(expected))


def test_reductions_are_in_flight_until_the_handle_waits(world) -> None:
    world(2).run(in_flight)


class Branches(nn.Module):
    """Each rank computes with a layer of its own; what a third one computes is used on one rank only."""

    def __init__(self, use_third: bool) -> None:
        super().__init__()
        self.uses_third = use_third or dist.get_rank() == 0
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.third = fully_shard(nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        third = self.third(x)
        result: Tensor = self.layers[dist.get_rank()](x)
        return result + third * (dist.get_rank() == 0) if self.uses_third else result


def unused(manual: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model: Any = fully_shard(Branches(use_third=not manual))  # both ranks gather all layers
    model.set_reduce_scatter_unused_params(True)
    model.set_manual_backward_finalization(manual)
    for number in range(BACKWARDS):
        model.set_requires_gradient_sync(not manual and number == BACKWARDS - 1)
        loss_of(model, number).backward()
    if manual:
        model.set_requires_gradient_sync(True)
        model.finalize_backward()
    found = gradients(model)
    assert len(found) == 6
    return found


def unused_of_both() -> None:
    assert_equal(unused(True), unused(False))


def test_parameters_that_some_ranks_do_not_use_take_part(world) -> None:
    world(2).run(unused_of_both)


def partial_sums(manual: bool) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh)
    model.set_manual_backward_finalization(manual)
    for number in range(BACKWARDS):
        model.set_requires_all_reduce(not manual and number == BACKWARDS - 1)
        loss_of(model, number).backward()
    if manual:
        model.set_requires_all_reduce(True)
        model.finalize_backward()
    return gradients(model)


def partial_sums_of_both() -> None:
    assert_equal(partial_sums(True), partial_sums(False))


def test_partial_sums_are_summed_over_replicas_which_torch_refuses(world) -> None:
    world(4).run(partial_sums_of_both)


# --- what is refused -----------------------------------------------------------------------------------


def misuse() -> None:
    model = sharded()
    loss_of(model, 0).backward()
    with pytest.raises(LifecycleError, match="does not finalize itself"):
        model.finalize_backward()
    for method in ("finalize_backward", "set_manual_backward_finalization"):
        with pytest.raises(LifecycleError, match=f"{method} must be called on the root"):
            getattr(model[0], method)(*([True] if "set" in method else []))
    model.set_manual_backward_finalization(True)
    loss = loss_of(model, 0)
    within = list[str]()

    def finalize(_: Any) -> None:
        with pytest.raises(LifecycleError, match="outside of forward and backward"):
            model.finalize_backward()
        within.append("refused")

    loss.register_hook(finalize)
    model.set_manual_backward_finalization(True)
    handle = model[1].register_forward_hook(lambda *_: finalize(None))
    model(batch(0))
    handle.remove()
    loss.backward()
    assert within == ["refused", "refused"]
    model.set_manual_backward_finalization(True)  # no other value
    with pytest.raises(LifecycleError, match="not finalized"):
        model.set_manual_backward_finalization(False)
    pending = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    with pytest.raises(LifecycleError, match="has dropped since"):
        pending.wait()
    model.set_manual_backward_finalization(False)
    loss_of(model, 0).backward()


def test_calls_at_the_wrong_place_are_refused(world) -> None:
    world(2).run(misuse)


def below_the_root() -> None:
    model = sharded()
    model[0].set_manual_backward_finalization(True)
    with pytest.raises(LifecycleError, match=r"modules below it: \['0'\]"):
        model(batch(0))
    model[0].set_manual_backward_finalization(False)
    loss_of(model, 0).backward()
    assert all(param.grad is not None for param in model.parameters())


def test_modules_below_the_root_are_named_at_the_first_forward(world) -> None:
    world(2).run(below_the_root)


def step_too_early() -> None:
    model, other = sharded(), sharded()
    model.set_manual_backward_finalization(True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
    loss_of(model, 0).backward()
    loss_of(other, 0).backward()
    optimizers[1].step()
    with pytest.raises(LifecycleError, match=r"may be incomplete: \['0.weight'"):
        optimizers[0].step()
    handle = model.finalize_backward(async_op=True)
    with pytest.raises(LifecycleError, match="may be incomplete"):
        optimizers[0].step()
    handle.wait()
    optimizers[0].step()
    assert_equal(weights(model), weights(other))


def test_no_optimizer_steps_before_backward_is_finalized(world) -> None:
    world(2).run(step_too_early)
