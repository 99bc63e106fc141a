"""Programs that torch's FSDP runs, and that guards of fullshard have refused once: both libraries train them alike."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.compare import assert_close

Program = Callable[[ModuleType], list[Any]]
LIBRARIES = ("torch.distributed.fsdp", "fullshard")
CPU = torch.device("cpu")


def alike(*programs: Program) -> None:
    for program in programs:
        theirs, ours = (program(importlib.import_module(name)) for name in LIBRARIES)
        assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def alike_without_a_warning(*programs: Program) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="All trainable parameters")
        alike(*programs)


def make_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


def shard(library: ModuleType, net: nn.Sequential, indices: tuple[int, ...] = (0, 2)) -> Any:
    for index in indices:
        library.fully_shard(net[index])
    return library.fully_shard(net)


def wrap(library: ModuleType, net: nn.Sequential, **options: Any) -> Any:
    options = {"device_id": CPU} | options
    for index in (0, 2):
        net[index] = library.FullyShardedDataParallel(net[index], **options)
    return library.FullyShardedDataParallel(net, **options)


def loss_of(model: Any) -> Tensor:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
    loss: Tensor = model(x).square().mean()
    return loss


def losses_of(model: Any, *, after_backward: Callable[[], None] = lambda: None) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = loss_of(model)
        loss.backward()
        after_backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def gradients_of(model: Any) -> list[Tensor]:
    """The gradients of this rank's shards, those of the same kind together."""
    found = [param.grad for param in model.parameters() if param.grad is not None]
    return [
        torch.cat(
            [(each.to_local() if hasattr(each, "to_local") else each).flatten() for each in found]
        )
    ]


# --- parameters that are not sharded -------------------------------------------------------------------


def added(library: ModuleType, how: str, head: nn.Module) -> tuple[Any, nn.Module]:
    """A sharded model, and a module that joined it afterwards."""
    net = make_net()
    model = (
        shard(library, net) if how == "shard" else wrap(library, net, use_orig_params=how == "orig")
    )
    net.append(head)
    return model, head


def make_head() -> nn.Module:
    torch.manual_seed(5)
    return nn.Linear(3, 2)


def average_by_hand(module: nn.Module) -> None:
    for param in module.parameters():
        average_one(param)


def averaged_by_hand(library: ModuleType) -> list[Any]:
    found = []
    for how in ("shard", "orig", "flat"):
        model, head = added(library, how, make_head())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found += losses_of(model, after_backward=partial(average_by_hand, head))
        if library.__name__ == "fullshard":
            said = [str(each.message) for each in caught if "added afterwards" in str(each.message)]
            assert len(said) == 1 and "['3.weight', '3.bias']" in said[0]
    return found


def averaged_by_a_hook(library: ModuleType) -> list[Any]:
    model, head = added(library, "shard", make_head())
    for param in head.parameters():
        param.register_post_accumulate_grad_hook(average_one)
    return losses_of(model)


def average_one(param: Tensor) -> None:
    assert param.grad is not None
    dist.all_reduce(param.grad)
    param.grad /= dist.get_world_size()


def under_ddp(library: ModuleType) -> list[Any]:
    found = []
    for how in ("shard", "orig"):
        found += losses_of(added(library, how, DistributedDataParallel(make_head()))[0])
    return found


def under_composable_ddp(library: ModuleType) -> list[Any]:
    from torch.distributed._composable.replicate import replicate

    head = make_head()
    replicate(head)
    return losses_of(added(library, "shard", head)[0])


def beside_ddp(library: ModuleType) -> list[Any]:
    net = make_net()
    net.append(DistributedDataParallel(make_head()))
    for index in (0, 2):
        library.fully_shard(net[index])
    library.fully_shard(net, ignored_params=set(net[3].parameters()))
    return losses_of(net)


def test_parameters_that_others_reduce_may_join_a_sharded_model(world):
    world(2).run(alike, averaged_by_hand)
    world(2).run(
        alike_without_a_warning, averaged_by_a_hook, under_ddp, under_composable_ddp, beside_ddp
    )
