"""Programs that torch's FSDP runs, and that guards of fullshard have refused once: both libraries train them alike."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from examples.int8_gather import Int8Gathered
from fullshard import (
    ConfigurationError,
    DivergenceError,
    FullyShardedDataParallel,
    LifecycleError,
    ShardingStrategy,
    UsageError,
    fully_shard,
)
from fullshard.api import MixedPrecision
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.training import needs_torch_2_13

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


# --- modules with a forward of their own, of torch.jit --------------------------------------------------


class Stack(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


class Choice(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        return self["used"](x)


class Bare(nn.Module):
    """Has no forward of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)
        self.forward = self.both

    def both(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


def with_a_forward(library: ModuleType) -> list[Any]:
    torch.manual_seed(0)
    stack = Stack([nn.Linear(3, 3), nn.Linear(3, 3)])
    net = nn.Sequential(stack, Choice({"used": nn.Linear(3, 3)}), Bare())
    return losses_of(shard(library, net, (0, 1, 2)))


def traced_child(library: ModuleType) -> list[Any]:
    torch.manual_seed(0)
    traced = torch.jit.trace(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3))
    model = shard(library, nn.Sequential(nn.Linear(3, 3), traced, nn.Linear(3, 2)), (0, 2))
    found = losses_of(model)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    loss_of(model).backward()
    return found + gradients_of(model)


def refused_modules() -> None:
    traced = torch.jit.trace(nn.Linear(3, 3), torch.randn(2, 3))
    bare = nn.Module()
    bare.layer = nn.Linear(3, 3)
    for module in (nn.ModuleList([nn.Linear(3, 3)]), nn.ModuleDict(), bare):
        with pytest.raises(ConfigurationError, match="these modules have none"):
            fully_shard(module)
    with pytest.raises(ConfigurationError, match=r"modules of torch\.jit cannot have: \['TopLevel"):
        fully_shard(traced)
    with pytest.raises(
        ConfigurationError, match=r"those of torch\.jit do not allow: \['1\.weight'"
    ):
        FullyShardedDataParallel(nn.Sequential(nn.Linear(3, 3), traced), device_id=CPU)
    net = nn.Sequential(nn.Linear(3, 3), traced)
    model = FullyShardedDataParallel(net, device_id=CPU, use_orig_params=True)  # torch refuses it
    loss_of(model).backward()


def test_a_forward_makes_a_container_a_module_that_can_be_sharded(world):
    world(2).run(alike, traced_child)
    world(2).run(refused_modules)


@needs_torch_2_13
def test_containers_with_a_forward_train_like_torch_s(world):
    world(2).run(alike, with_a_forward)


# --- full parameters between a forward and its backward ---------------------------------------------------


def summoned_between(library: ModuleType, *, again: bool = False) -> list[Any]:
    """Nothing was written: the weights of the backward are those of the forward."""
    found = []
    for orig in (True, False):
        model = wrap(library, make_net(), use_orig_params=orig)
        loss = loss_of(model)
        with library.FullyShardedDataParallel.summon_full_params(model):
            found.append(sum(param.sum() for param in model.parameters()))
        if again:
            loss = loss_of(model)
        loss.backward()
        found += gradients_of(model)
    return found


def both_backwards() -> None:
    """Torch's FSDP reads freed memory here."""
    for orig in (True, False):
        model, twin = (
            wrap(importlib.import_module("fullshard"), make_net(), use_orig_params=orig)
            for _ in range(2)
        )
        first = loss_of(model)
        with FullyShardedDataParallel.summon_full_params(model):
            pass
        loss_of(model).backward()
        first.backward()
        for _ in range(2):
            loss_of(twin).backward()
        assert_close(gradients_of(model), gradients_of(twin), rtol=1e-6, atol=1e-6)


def written_between(how: str) -> None:
    for orig in (True, False):
        model = wrap(importlib.import_module("fullshard"), make_net(), use_orig_params=orig)
        pending = loss_of(model)
        with FullyShardedDataParallel.summon_full_params(model):
            # A write that reaches the shards of one rank only is one on all ranks.
            weight = model.module[2].module.weight.data
            if how == "all":
                weight.mul_(2)
            else:
                weight.view(-1)[0] += 1
        with pytest.raises(LifecycleError, match="must not change between a forward"):
            pending.backward()


def failed_within() -> None:
    """An error in the block on all ranks, or on one of them, which goes on."""
    model = wrap(importlib.import_module("fullshard"), make_net(), use_orig_params=True)
    for ranks in ((0, 1), (1,)):
        with contextlib.suppress(ValueError), FullyShardedDataParallel.summon_full_params(model):
            model.module[0].module.weight.data.fill_(2.0)
            if dist.get_rank() in ranks:
                raise ValueError
        loss_of(model).backward()
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            assert (model.module[0].module.weight == 2.0).all()


@pytest.mark.filterwarnings("ignore:The last forward or backward pass did not finish")
def test_full_parameters_that_were_only_read_leave_a_backward_legal(world):
    world(2).run(alike, summoned_between, partial(summoned_between, again=True))
    world(2).run(both_backwards)
    for how in ("all", "one element"):
        world(2).run(written_between, how)
    world(2).run(failed_within)


def gradients_of_replicas() -> None:
    """Of NO_SHARD with mixed precision, within no_sync, gradients have another dtype than parameters."""
    model = FullyShardedDataParallel(
        make_net(),
        device_id=CPU,
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.NO_SHARD,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
    )
    loss_of(model).backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        pass
    assert all(param.grad is not None for param in model.parameters())


def test_gradients_of_another_dtype_come_back_after_summoning(world):
    world(2).run(gradients_of_replicas)


# --- ranks with other ignored modules -----------------------------------------------------------------------


class Own(nn.Module):
    """Something that only this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def make_net_with_own() -> tuple[nn.Sequential, list[nn.Module]]:
    """A net in which a rank has as many modules of its own as its number says, and one more."""
    torch.manual_seed(0)
    first, second, third = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    own: list[nn.Module] = [Own() for _ in range(dist.get_rank() + 1)]
    return nn.Sequential(first, nn.Sequential(second, *own, third), nn.Linear(4, 2)), own


def own_modules_wrapped(library: ModuleType) -> list[Any]:
    found = []
    for orig in (True, False):
        net, own = make_net_with_own()
        wrapper, options = library.FullyShardedDataParallel, {"use_orig_params": orig}
        net[1] = wrapper(net[1], device_id=CPU, ignored_modules=own, **options)
        found += losses_of(wrapper(net, device_id=CPU, **options))
    return found


def own_modules_ignored(library: ModuleType) -> list[Any]:
    net, own = make_net_with_own()
    ignored = {param for module in own for param in module.parameters()}
    inner: Any = net[1]
    library.fully_shard(inner[-1])  # a group whose name is another one on each rank
    library.fully_shard(net[1], ignored_params=ignored)
    return losses_of(library.fully_shard(net, ignored_params=ignored))


def blocks_left_out(library: ModuleType) -> list[Any]:
    """Each rank leaves another block of equal ones out."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    left_out = dist.get_rank() + 1
    ignored = set(net[left_out].parameters())
    for index in range(4):
        if index != left_out:
            library.fully_shard(net[index])
    return losses_of(library.fully_shard(net, ignored_params=ignored))


def other_names() -> None:
    """What is not ignored has other names."""
    net = nn.Sequential()
    for name in ("a", "b") if dist.get_rank() else ("b", "a"):
        net.add_module(name, nn.Linear(3, 3))
    model = fully_shard(net, ignored_params=set(net[1].parameters()))
    with pytest.raises(DivergenceError, match=r"a\.weight"):
        loss_of(model)


def test_ranks_may_ignore_different_modules_if_the_rest_is_the_same(world):
    world(2).run(alike, own_modules_wrapped, own_modules_ignored, blocks_left_out)
    world(2).run(other_names)


# --- shards that are made again ------------------------------------------------------------------------------


class Kept(Int8Gathered):
    """Stays what it is in `to_empty`, which makes plain tensors of an `Int8Gathered`."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.empty_like.default:
            return cls(func(args[0].data_, **kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)


def fill(model: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    for param in model.parameters():
        local = param.to_local().detach()
        data = local.data_ if isinstance(local, Int8Gathered) else local
        full = torch.randn(param.shape, generator=generator)
        data.copy_(full.chunk(dist.get_world_size())[dist.get_rank()])


def on_meta(library: ModuleType, kind: type[Int8Gathered] | None) -> Any:
    """A sharded model of which memory was taken with `to_empty`, and whose shards may have been of a subclass before."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(3, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False))
    for index in (0, 2) if kind is not None else ():
        net[index].weight = nn.Parameter(cast(Any, kind)(net[index].weight.detach()))
    model = shard(library, net).to_empty(device="cpu")
    fill(model)
    return model


def kinds(model: Any) -> list[str]:
    return [type(param.to_local()).__name__ for param in model.parameters()]


def made_again(library: ModuleType, kind: type[Int8Gathered]) -> list[Any]:
    model = on_meta(library, kind)
    losses = losses_of(model)
    assert kinds(model) == ["Tensor" if kind is Int8Gathered else "Kept"] * 2
    model.to_empty(device="cpu")
    fill(model)
    return [*losses, *losses_of(model)] if library.__name__ == "fullshard" else losses * 2


def made_by_hand() -> None:
    """Plain shards are replaced by ones with an extension; before, the extension was lost without a word."""
    model, twin = (
        on_meta(importlib.import_module("fullshard"), None),
        on_meta(importlib.import_module("fullshard"), Kept),
    )
    for index in (0, 2):
        old = model[index].weight
        local = Kept(old.to_local().detach())
        model[index].weight = nn.Parameter(
            DTensor.from_local(local, old.device_mesh, old.placements, run_check=False)
        )
    assert_equal(losses_of(model), losses_of(twin))
    assert kinds(model) == ["Kept"] * 2
    for index in (0, 2):  # and back again
        old = model[index].weight
        model[index].weight = nn.Parameter(
            DTensor.from_local(old.to_local().data_.detach(), old.device_mesh, old.placements)
        )
    losses_of(model)
    assert kinds(model) == ["Tensor"] * 2
    wrong = nn.Parameter(DTensor.from_local(torch.zeros(4, 3), old.device_mesh, old.placements))
    with torch.no_grad():
        model[0].weight = wrong
    with pytest.raises(ConfigurationError, match=r"weight: expected shape \(6, 3\)"):
        loss_of(model)


def partly_on_meta(library: ModuleType, *, all_again: bool) -> list[Any]:
    """Adapters with values beside a base without any, as it is loaded later."""
    net = make_net()
    with torch.device("meta"):
        net.append(nn.Linear(3, 4))
    model = library.fully_shard(net)
    (model if all_again else model[3]).to_empty(device="cpu")
    fill(model if all_again else model[3])
    return losses_of(model)


def partly_on_meta_in_full() -> None:
    """With what is on the meta device made alone, the rest keeps its values; torch's FSDP2 runs that, too."""
    alike(partial(partly_on_meta, all_again=True), partial(partly_on_meta, all_again=False))
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    model = fully_shard(net)
    with pytest.raises(
        UsageError, match=r"at the first forward:\n  1\.weight is on meta\n  1\.bias"
    ):
        loss_of(model)


def test_a_group_may_have_parameters_on_the_meta_device_beside_others(world):
    world(2).run(partly_on_meta_in_full)


def test_shards_that_are_made_again_may_be_of_another_kind(world):
    world(2).run(alike, partial(made_again, kind=Int8Gathered), partial(made_again, kind=Kept))
    world(2).run(made_by_hand)
