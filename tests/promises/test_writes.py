"""Weights that are written within a forward, or between steps, are those that the next use computes with, as in one process.

to sharded weights     by the forward of a module around them, or by a hook, before their own module runs
to gathered weights    by their own module's forward
between steps          to what backward did not reach, and was to stay gathered
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import (
    ConfigurationError,
    CPUOffloadPolicy,
    DivergenceError,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from fullshard.divergence.journal import journal_of
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.training import whole

CPU = torch.device("cpu")
WIDTH = 4
NUM_STEPS = 3


class Layer(nn.Module):
    def __init__(self, write: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH + 1, WIDTH) / 2)
        self.out = nn.Linear(WIDTH + 1, WIDTH)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        with torch.no_grad():
            if self.write == "in place":
                weight.copy_(F.normalize(weight))
            elif self.write == "by operators of several tensors":
                torch._foreach_mul_([weight, self.out.weight], 0.9)
            elif self.write == "assigned data":
                weight.data = F.normalize(weight.data)
        hidden = F.linear(x, weight.clone() if self.write == "after its use" else weight)
        if self.write == "after its use":
            with torch.no_grad():
                weight.mul_(0.9)
        return self.out(hidden.tanh())


class Net(nn.Module):
    """Two encoders, in each a layer after the other; ``write`` says what is written where."""

    def __init__(self, write: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        own = write.removeprefix("own ") if write.startswith("own ") else ""
        self.query = nn.ModuleList([Layer(), Layer(own)])
        self.key = nn.ModuleList([Layer(), Layer()])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.write = write
        self.key.requires_grad_("momentum" not in write)

    def forward(self, x: Tensor) -> Tensor:
        if self.write == "own root":
            with torch.no_grad():
                self.scale.mul_(0.8)
        query = key = x * self.scale
        for layer in self.query:
            query = layer(query)
        if self.write == "momentum":
            with torch.no_grad():
                for ours, theirs in zip(
                    self.key.parameters(), self.query.parameters(), strict=True
                ):
                    ours.lerp_(theirs, 0.5)
        elif self.write == "momentum by assigned data":
            for ours, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                ours.data = ours.data * 0.5 + theirs.data * 0.5
        elif self.write == "a later layer":
            write_the_next(self)
        with torch.set_grad_enabled("momentum" not in self.write):
            for layer in self.key:
                key = layer(key)
        return (query - key).square().mean() + query.mean()


def write_the_next(net: Net, *_: Any) -> None:
    with torch.no_grad():
        for param in net.key[1].parameters():
            param.mul_(0.7)


def plain(write: str) -> Net:
    net = Net(write)
    if write == "a hook writes a later layer":
        net.key[0].register_forward_pre_hook(partial(write_the_next, net))
    return net


def layers_of(net: Net) -> Iterator[tuple[nn.ModuleList, int]]:
    yield from ((layers, index) for layers in (net.query, net.key) for index in range(2))


def functional(net: Net, **options: Any) -> Any:
    for layers, index in layers_of(net):
        fully_shard(layers[index], **options)
    return fully_shard(net, **options)


def with_a_user_s_prefetches(net: Net) -> Any:
    model = functional(net)
    net.query[0].set_modules_to_forward_prefetch([net.query[1], net.key[0], net.key[1]])
    return model


def replicated(net: Net) -> Any:
    for layers, index in layers_of(net):
        fullshard.replicate(layers[index])
    return fullshard.replicate(net)


def hybrid(net: Net) -> Any:
    return functional(net, mesh=init_device_mesh("cpu", (dist.get_world_size(), 1)))


def in_the_wide(net: Net) -> Any:
    """Master weights are in float64, so in another dtype than the gathered ones."""
    return functional(net.double(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))


def wrapped(net: Net, **options: Any) -> Any:
    options = {"use_orig_params": True, "device_id": CPU, **options}
    for layers, index in layers_of(net):
        layers[index] = FullyShardedDataParallel(layers[index], **options)
    return FullyShardedDataParallel(net, **options)


APIS: dict[str, Callable[[Net], Any]] = {
    "fully_shard": functional,
    "kept gathered": partial(functional, reshard_after_forward=False),
    "offloaded": partial(functional, offload_policy=CPUOffloadPolicy()),
    "prefetched by the user": with_a_user_s_prefetches,
    "replicate": replicated,
    "hybrid": hybrid,
    "in another dtype": in_the_wide,
    "wrapper": wrapped,
    "flat": partial(wrapped, use_orig_params=False),
    "wrapper, kept gathered": partial(wrapped, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
}

WRITES = (
    "momentum",
    "a later layer",
    "a hook writes a later layer",
    "own in place",
    "own by operators of several tensors",
    "own assigned data",
    "own after its use",
    "own root",
)


def losses(model: Any) -> list[Tensor]:
    dtype = next(model.parameters()).dtype
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(NUM_STEPS):
        x = torch.linspace(-1, 1, 2 * WIDTH, dtype=dtype).view(2, WIDTH) + step
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().double())
        if step == 1:
            with torch.no_grad():
                found.append(model(x).double())
    return found


def check_losses(api: Callable[[Net], Any], write: str, made: Any = plain) -> None:
    assert_close(losses(api(made(write))), losses(made(write)), rtol=1e-4, atol=1e-6)


def write_everywhere(api: str) -> None:
    for write in WRITES:
        if write == "momentum" and api in ("kept gathered", "replicate"):
            continue  # of DTensors with gathered weights, which torch refuses
        try:
            check_losses(APIS[api], write)
        except Exception as error:
            error.add_note(write)
            raise


@pytest.mark.parametrize(
    ("size", "api"),
    [(2, "fully_shard"), (2, "wrapper"), *((size, api) for size in (1, 3) for api in APIS)],
)
@pytest.mark.filterwarnings("ignore:There is one rank to shard over")
def test_what_a_forward_writes_is_used_as_in_one_process(world, size: int, api: str) -> None:
    world(size).run(write_everywhere, api)


def assign_momentum() -> None:
    check_losses(wrapped, "momentum by assigned data")


def test_data_that_a_forward_assigns_to_a_later_layer_are_used(world) -> None:
    world(2).run(assign_momentum)


def write_in_recomputation() -> None:
    def with_checkpoints(write: str) -> Net:
        net = plain(write)
        layer = net.query[1]
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        return net

    for write in ("own in place", "own after its use", "own assigned data"):
        for api in (functional, partial(functional, reshard_after_forward=False)):
            check_losses(api, write, with_checkpoints)


def test_what_a_recomputation_writes_is_kept(world) -> None:
    world(2).run(write_in_recomputation)


def keep_over_fewer_ranks() -> None:
    for write in WRITES:
        check_losses(partial(functional, reshard_after_forward=2), write)


def test_a_shard_after_forward_has_what_was_written(world) -> None:
    world(4).run(keep_over_fewer_ranks)


# --- what they cost, and ranks that differ ---------------------------------------------------------


def count_gathers() -> list[int]:
    model = functional(plain("momentum"))
    (group, *_) = model.query[0].__dict__["_fullshard_state"].groups
    journal = journal_of(group.mesh_info.shard_process_group)
    x, counts = torch.ones(2, WIDTH), []
    with torch.no_grad():
        for _ in range(4):
            before = journal.count
            model(x)
            counts.append(journal.count - before)
    return counts


def test_a_module_that_was_written_late_is_gathered_twice_once(world) -> None:
    first, second = world(2).run(count_gathers)
    assert first == second
    # The second forward has a forecast, which is in vain.
    assert first == [first[0], first[0] + 1, first[0], first[0]]


def write_on_one_rank() -> str:
    model = functional(plain(""))
    x = torch.ones(2, WIDTH)
    model(x).backward()
    if dist.get_rank() == 0:
        model.key[0].register_forward_hook(partial(write_the_next, model))
    with pytest.raises(DivergenceError) as caught:
        for _ in range(2):
            model(x).backward()
    return str(caught.value)


def test_a_rank_that_writes_alone_is_told_of_on_all_ranks(world) -> None:
    for message in world(2).run(write_on_one_rank):
        assert re.search(r"key\.1", message), message


def write_after_use() -> None:
    """What is refused: a write to weights that the backward of an earlier forward needs."""
    model = functional(plain(""))
    x = torch.ones(2, WIDTH)
    for _ in range(2):
        model(x).backward()
    loss = model(x)
    with torch.no_grad():
        model.query[1].weight.mul_(2)
    with pytest.raises(fullshard.LifecycleError, match=r"Weights must not change"):
        loss.backward()
    model.reset_iter_state()
    model(x).backward()


def test_a_write_between_forward_and_backward_is_still_refused(world) -> None:
    world(2).run(write_after_use)


def keep_precision() -> None:
    model = fully_shard(nn.Linear(3, 5), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    before = whole(model.weight).clone()
    model.unshard()
    with torch.no_grad():
        model.weight[1, 2] = 7.0
    model.reshard()
    expected = before.clone()
    expected[1, 2] = 7.0
    assert_equal(whole(model.weight), expected)


def test_an_element_that_was_not_written_keeps_its_precision(world) -> None:
    world(2).run(keep_precision)


# --- between steps --------------------------------------------------------------------------------


class Frozen(nn.Module):
    """Backward does not come to its first layer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.how = how
        if how != "under no_grad":
            self.first.requires_grad_(False)
        if how == "all frozen":
            self.second.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.how != "under no_grad" and torch.is_grad_enabled()):
            x = self.first(x)
        return self.second(x).square().mean()


def keep_functional(net: Frozen) -> Any:
    for layer in (net.first, net.second):
        fully_shard(layer, reshard_after_forward=False)
    return fully_shard(net, reshard_after_forward=False)


def keep_replicated(net: Frozen) -> Any:
    fullshard.replicate(net.first)
    fullshard.replicate(net.second)
    return fullshard.replicate(net)


def keep_wrapped(net: Any) -> Any:
    options: dict[str, Any] = {
        "use_orig_params": True,
        "device_id": CPU,
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
    }
    net.first = FullyShardedDataParallel(net.first, **options)
    net.second = FullyShardedDataParallel(net.second, **options)
    return FullyShardedDataParallel(net, **options)


def write_between_steps(model: Any, *, train: bool) -> list[Tensor]:
    params = list(model.parameters())
    found = []
    for step in range(3):
        x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH) + step
        with torch.set_grad_enabled(train):
            loss = model(x)
        if loss.requires_grad:
            loss.backward()
        found.append(loss.detach())
        now = list(model.parameters())
        assert len(now) == len(params)
        assert all(a is b for a, b in zip(now, params, strict=True))
        with torch.no_grad():
            for param in now:
                param.mul_(0.9)
        model.apply(_write)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
    return found


@torch.no_grad()
def _write(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        param.add_(0.1)


def stay_gathered(train: bool) -> None:
    for how in ("under no_grad", "frozen", "all frozen"):
        expected = write_between_steps(Frozen(how), train=train)
        for api in (keep_functional, keep_replicated, keep_wrapped):
            found = write_between_steps(api(Frozen(how)), train=train)
            assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:There is one rank to shard over")
def test_what_backward_did_not_reach_is_sharded_between_steps(
    world, size: int, train: bool
) -> None:
    world(size).run(stay_gathered, train)


def write_while_gathered() -> None:
    """Between a forward and its backward, weights that stay gathered are on the modules, as with torch."""
    model, expected = keep_functional(Frozen("frozen")), Frozen("frozen")
    x = torch.ones(2, WIDTH)
    for _ in range(2):
        for net in (model, expected):
            loss = net(x)
            with torch.no_grad():
                net.first.weight.mul_(0.9)  # which the backward of the frozen layer does not need
            loss.backward()
        assert_close(whole(model.first.weight), expected.first.weight, rtol=1e-6, atol=1e-7)


def test_what_is_written_while_weights_stay_gathered_is_kept(world) -> None:
    world(2).run(write_while_gathered)


def assign_of_another_shape() -> str:
    model = functional(plain(""))
    model(torch.ones(2, WIDTH)).backward()

    def assign(layer: Layer, _: Any) -> None:
        layer.out.bias.data = torch.zeros(1)  # torch can add it, too

    model.query[1].register_forward_pre_hook(assign)
    with pytest.raises(ConfigurationError) as caught:
        model(torch.ones(2, WIDTH))
    return str(caught.value)


def test_assigned_data_must_be_like_those_that_were_there(world) -> None:
    (first, second) = world(2).run(assign_of_another_shape)
    assert first == second
    assert "out.bias, of shape (4,) on cpu, was assigned data of shape (1,) on cpu" in first
