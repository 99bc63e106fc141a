"""With `shard_over_replicas`, replicas divide the state among them, and compute the same bits as without.

Where a program is given a maker of optimizers, it runs twice on the same ranks: with torch's optimizer, and with ours. What
this rank holds of parameters and states afterwards is compared to the last bit.
"""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fullshard.checkpoint
from fullshard import (
    ConfigurationError,
    FullyShardedDataParallel,
    LifecycleError,
    ShardingStrategy,
    fully_shard,
    replicate,
)
from fullshard.engine.tensor_trees import map_tensors
from fullshard.mesh.backends import NOTHING
from fullshard.optim import EMA, AdamW8bit, Muon, ShardedOptimizer, param_cuts
from fullshard.optim.eight_bit import strips as block_strips
from fullshard.optim.fused_shards import local_of
from fullshard.sharded_grad_scaler import ShardedGradScaler
from fullshard.wrap import ModuleWrapPolicy
from tests.helpers.compare import assert_equal
from tests.helpers.models import Block, ModelOptions, make_decoder, tokens_for
from tests.helpers.training import batch_of

STEPS = 20
FEW = 3
APIS = ("fully_shard", "orig", "flat")
ODD = ModelOptions(width=22, hidden=51, depth=1, scalar=True, tied=True, frozen=("norm.bias",))
"""Shards that are not divisible, 0-d, tied and frozen parameters."""


def mesh() -> Any:
    size = dist.get_world_size()
    return init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))


def sharded(api: str, options: ModelOptions = ODD) -> Any:
    model = make_decoder(options)
    if api == "fully_shard":
        grid = mesh()
        for block in model.blocks:
            fully_shard(block, mesh=grid)
        return fully_shard(model, mesh=grid)
    if api == "flat":
        model = make_decoder(ModelOptions(width=22, hidden=51, depth=1))
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=mesh(),
        device_id=torch.device("cpu"),
        use_orig_params=api == "orig",
    )


def over_replicas(optimizer_class: Any, params: Any, **options: Any) -> ShardedOptimizer:
    return ShardedOptimizer(
        optimizer_class, params, shard_over_replicas=True, bucket_numel=700, **options
    )


def train(model: Any, optimizer: Any, steps: Any, batch: Any = batch_of) -> list[float]:
    losses = []
    for step in steps:
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def local(tensor: Any) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def held(model: Any, optimizer: optim.Optimizer) -> Any:
    """What this rank has of parameters and states."""
    states = optimizer.state_dict()["state"]
    return {
        "params": {name: local(param) for name, param in model.named_parameters()},
        "states": {
            str(index): {key: local(value) for key, value in state.items()}
            for index, state in states.items()
        },
    }


def state_bytes(optimizer: optim.Optimizer) -> int:
    holder = getattr(optimizer, "inner", optimizer)
    return sum(
        local(value).nbytes
        for state in holder.state.values()
        for value in state.values()
        if isinstance(value, DTensor) or (isinstance(value, Tensor) and value.ndim)
    )


# --- numbers --------------------------------------------------------------------------------------


def groups(model: Any) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2], "lr": 0.02}]


def twice(api: str, steps: int) -> tuple[int, int]:
    """Train with and without, compare, and return the bytes of state."""
    runs = []
    for make in (optim.AdamW, partial(over_replicas, optim.AdamW)):
        model = sharded(api)
        optimizer = make(groups(model), lr=0.01)
        losses = train(model, optimizer, range(steps))
        runs.append((losses, held(model, optimizer), state_bytes(optimizer)))
    assert runs[0][0] == runs[1][0]
    assert_equal(runs[1][1], runs[0][1])
    return runs[0][2], runs[1][2]


def every_api() -> list[tuple[int, int]]:
    return [twice(api, FEW if api == "flat" else STEPS) for api in APIS]


def test_twenty_steps_give_the_same_bits_with_half_of_the_state(world) -> None:
    found = world(4).run(every_api)
    for api in range(len(APIS)):
        for rank in (0, 1):
            usual, one = found[rank][api]
            other = found[rank + 2][api][1]
            assert one + other == usual
            assert abs(one - other) <= 0.1 * usual, (one, other)


CHOICES: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.AdamW, {"fused": True}),
    (optim.Adam, {"amsgrad": True, "foreach": True}),
    (optim.Adagrad, {"initial_accumulator_value": 0.1}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.ASGD, {"t0": 1}),
]


class Odd(nn.Module):
    """Memory in another order, two dtypes, a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 14, 3).to(memory_format=torch.channels_last)
        self.short = nn.Linear(14, 9, dtype=torch.bfloat16)
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.short(self.convolution(x).sum((2, 3)).bfloat16()).float().sum() * self.one


def odd(make: Any, is_wrapped: bool) -> Any:
    model: Any = Odd()
    if is_wrapped:
        model = FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy.NO_SHARD,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    else:
        grid = init_device_mesh("cpu", (3, 1), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=grid)
    optimizer = make(model.parameters(), lr=0.03)
    for step in range(FEW):
        torch.manual_seed(step + dist.get_rank())
        model(torch.randn(2, 3, 5, 5)).backward()
        optimizer.step()
        optimizer.zero_grad()
        saved = optimizer.state_dict()
        for state in saved["state"].values():  # in the usual order of memory
            state.update({key: v.contiguous() for key, v in state.items()})
        optimizer.load_state_dict(saved)
    return held(model, optimizer)


def replicated(make: Any) -> Any:
    model = replicate(make_decoder(SMALL))
    optimizer = make(model.parameters(), lr=0.03)
    train(model, optimizer, range(FEW))
    return held(model, optimizer)


def three_replicas() -> None:
    for number, (optimizer_class, options) in enumerate(CHOICES):
        # Not wrapped with fused=True: torch takes states in another order than the parameter's for ones in the same order.
        compare(odd, optimizer_class, number % 2 == 0, **options)
    compare(replicated, optim.AdamW)


def test_elementwise_optimizers_of_torch_do_the_same_over_three_replicas(world) -> None:
    world(3).run(three_replicas)


# --- all that is done to optimizers -----------------------------------------------------------------

SMALL = ModelOptions(width=10, hidden=27, depth=1, scalar=True, frozen=("up.bias",))


def compare(program: Any, optimizer_class: Any, *args: Any, **options: Any) -> None:
    expected = program(partial(optimizer_class, **options), *args)
    actual = program(partial(over_replicas, optimizer_class, **options), *args)
    assert_equal(actual, expected)


def with_holes(make: Any) -> Any:
    """Gradients are missing in some steps, parameters are frozen and freed, weights decay."""
    model = sharded("fully_shard", SMALL)
    optimizer = make(model.parameters(), lr=0.03, weight_decay=0.1)
    named = list(model.named_parameters())
    for step in range(4):
        named[4][1].requires_grad_(step != 2)
        model(batch_of(step)).backward()
        for index, (_, param) in enumerate(named):
            if index == 2 or (step and (step + index) % 3 == 0):
                param.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return held(model, optimizer)


def with_tools(make: Any) -> Any:
    """A scheduler, clipping, averages, a loss scaler that skips a step, a closure."""
    model = sharded("orig", SMALL)
    optimizer = make(model.parameters(), lr=0.03)
    schedule = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    ema = EMA(model, decay=0.9)
    for step in range(FEW):
        scaler.scale(model(batch_of(step))).backward()
        if step == 1 and dist.get_rank() == 2:
            next(p for p in model.parameters() if p.grad is not None and p.numel()).grad[0] = (
                torch.inf
            )
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(0.1)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        ema.update()
        optimizer.zero_grad()

    def closure() -> Tensor:
        loss = model(batch_of(FEW))
        loss.backward()
        return loss

    optimizer.step(closure)
    averages = [local(average) for average in ema.averages_by_param().values()]
    return {
        "averages": averages,
        "scale": torch.tensor(scaler.get_scale()),
        **held(model, optimizer),
    }


def with_changes(make: Any) -> Any:
    """States are written and loaded, a group is added, shards come to other memory."""
    model = sharded("orig", SMALL)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = make(params[:3], lr=0.03)
    train(model, optimizer, range(2))
    for param in params[:2]:  # a rank may have nothing of one
        state = optimizer.state.get(param)
        if state:
            state["exp_avg"].zero_()
            state["step"] += 3
    train(model, optimizer, range(2, 3))
    optimizer.add_param_group({"params": params[3:], "lr": 0.01})
    train(model, optimizer, range(3, 4))
    assert_is_divided(optimizer)
    other = make([{"params": params[:3]}, {"params": params[3:]}])
    other.load_state_dict(optimizer.state_dict())
    for param in params:
        param.data = param.data.clone()
    train(model, other, range(4, 6))
    return held(model, other)


def assert_is_divided(optimizer: Any) -> None:
    """Find less state than there are shards, if replicas divide it."""
    usual = 2 * sum(param.nbytes for g in optimizer.param_groups for param in g["params"])
    divided = isinstance(optimizer, ShardedOptimizer)
    assert state_bytes(optimizer) <= (0.7 if divided else 1) * usual


class Strange(nn.Module):
    """Complex parameters, fewer rows than ranks, and an embedding with sparse gradients, which is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 5, sparse=True)
        self.complex = nn.Linear(5, 33, dtype=torch.complex64)
        self.small = nn.Linear(33, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.small(self.complex(self.embedding(tokens).to(torch.complex64)).abs()).sum()


def strange() -> Any:
    model: Any = Strange()
    return fully_shard(model, mesh=mesh(), ignored_params={model.embedding.weight})


def with_bad_input(make: Any) -> Any:
    """Complex parameters, empty shards, gradients with NaN and infinity."""
    model = strange()
    params = [param for name, param in model.named_parameters() if "embedding" not in name]
    optimizer = make(params, lr=0.03)
    for step in range(FEW):
        model(torch.arange(9)).backward()
        if step == FEW - 1:
            for param, value in zip(params[:3], (torch.nan, torch.inf, torch.nan), strict=True):
                local_of(param.grad).flatten()[-1:] = value
        optimizer.step()
        optimizer.zero_grad()
    found = held(model, optimizer)
    nans = [int(local(param).isnan().sum()) for param in params]
    assert nans[:2] == [1, 1], "only the elements whose gradients are not finite"
    return {"NaN": torch.tensor(nans), **map_tensors(comparable, found)}


def comparable(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.nan_to_num(nan=-7.0)


def sparse_gradients() -> str:
    """Return the error. Nothing is updated, and no rank waits for another one."""
    model = strange()
    optimizer = over_replicas(optim.AdamW, model.parameters(), lr=0.03)
    before = [local(param) for param in model.parameters()]
    model(torch.arange(9)).backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert_equal([local(param) for param in model.parameters()], before)
    return str(caught.value)


class Counting(optim.SGD):
    """An optimizer that is not torch's: it must be stepped once in a step."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1
        return super().step(closure)


def counted() -> int:
    model = sharded("fully_shard", SMALL)
    optimizer = over_replicas(Counting, model.parameters(), lr=0.1, momentum=0.9, elementwise=True)
    train(model, optimizer, range(2))
    return optimizer.param_groups[0]["steps"]


def gathered_is_released() -> None:
    """What a state dict was gathered into is free when the state dict is, although `state` was read before."""
    model = sharded("fully_shard", SMALL)
    optimizer = over_replicas(optim.AdamW, model.parameters(), lr=0.1)
    train(model, optimizer, range(1))
    assert optimizer.state
    found = optimizer.state_dict()["state"]
    gathered = [weakref.ref(state["exp_avg"]) for state in found.values()]
    assert len(gathered) > 4
    del found
    assert not any(each() is not None for each in gathered)
    # The last step made it: nothing of it is to be fused again.
    assert not optimizer._is_split


def everything_else() -> None:
    gathered_is_released()
    compare(with_holes, optim.AdamW)
    compare(with_tools, optim.AdamW, fused=True)
    compare(with_changes, optim.AdamW)
    compare(with_bad_input, optim.AdamW)
    assert counted() == 2


def test_holes_tools_and_changes_work_as_with_the_usual_optimizer(world) -> None:
    world(4).run(everything_else)


# --- checkpoints ----------------------------------------------------------------------------------


def same_batch(step: int) -> Tensor:
    """The same on all ranks, so that their number changes nothing."""
    return tokens_for(step, 4)


def begun(kind: str, folder: Path, first: int, last: int) -> list[float]:
    """Go on with a run from a checkpoint, if there is one, up to a step; save it there."""
    model = fully_shard(make_decoder(SMALL)) if kind == "shards" else sharded(kind, SMALL)
    # Without replicas the option does nothing.
    optimizer = over_replicas(optim.AdamW, model.parameters(), lr=0.03)
    assert optimizer.shards_over_replicas is (kind != "shards")
    if first:
        fullshard.checkpoint.load(folder / str(first), model, optimizer)
    losses = train(model, optimizer, range(first, last), same_batch)
    fullshard.checkpoint.save(folder / str(last), model, optimizer)
    assert kind == "shards" or not optimizer._is_split, (
        "the states of all replicas would stay in memory"
    )
    return losses


def test_a_run_goes_on_over_other_ranks_and_by_the_other_api(world, tmp_path: Path) -> None:
    model = make_decoder(SMALL)
    expected = train(model, optim.AdamW(model.parameters(), lr=0.03), range(6), same_batch)
    for kind, ranks, first in (("fully_shard", 4, 0), ("shards", 3, 2), ("orig", 4, 4)):
        for found in world(ranks).run(begun, kind, tmp_path, first, first + 2):
            assert found == pytest.approx(expected[first : first + 2], rel=1e-5)


def exchanged(folder: Path) -> None:
    """States go from ours to torch's optimizer and back, by all ways there are."""
    for api in ("fully_shard", "orig"):
        runs = {}
        for name, make in (("usual", optim.AdamW), ("ours", partial(over_replicas, optim.AdamW))):
            model = sharded(api, SMALL)
            runs[name] = model, make(model.parameters(), lr=0.03)
            train(*runs[name], range(2))
        expected = held(*runs["usual"])
        for source, target in (("ours", "usual"), ("usual", "ours")):
            if api == "orig":
                by_wrapper(*runs[source], *runs[target])
            else:
                by_torch(folder / source, *runs[source], *runs[target])
            assert_equal(held(*runs[target]), expected)
        for model, optimizer in runs.values():
            train(model, optimizer, range(2, 3))
        assert_equal(held(*runs["ours"]), held(*runs["usual"]))


def by_torch(folder: Path, model: Any, optimizer: Any, other: Any, into: Any) -> None:
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder)
    spoil(into)
    state = get_optimizer_state_dict(other, into)
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(other, into, state)


def by_wrapper(model: Any, optimizer: Any, other: Any, into: Any) -> None:
    saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    spoil(into)
    into.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(other, into, saved))


def spoil(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.fill_(7)


def test_states_are_those_of_the_usual_optimizer_for_torch_and_the_wrapper(world, tmp_path) -> None:
    world(4).run(exchanged, tmp_path)


# --- what is refused ------------------------------------------------------------------------------


def matrices_of(model: Any) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.ndim == 2]


def refusals() -> list[str]:
    found = []

    def refuse(make: Any, kind: type[Exception]) -> None:
        with pytest.raises(kind) as caught:
            make()
        found.append(str(caught.value))

    model = sharded("fully_shard", SMALL)
    for each in (optim.LBFGS, optim.Adafactor, optim.Muon, Muon, AdamW8bit):
        refuse(lambda each=each: over_replicas(each, model.parameters()), ConfigurationError)
    refuse(
        lambda: ShardedOptimizer(
            optim.SGD, model.parameters(), shard_over_replicas=True, bucket_numel=0
        ),
        ConfigurationError,
    )
    with (
        patch.object(param_cuts, "backend_of", return_value=NOTHING),
        patch.object(block_strips, "backend_of", return_value=NOTHING),
    ):
        for make in (partial(over_replicas, optim.AdamW), Muon):
            refuse(lambda make=make: make(matrices_of(model)), ConfigurationError)
    optimizer = over_replicas(optim.AdamW, model.parameters())
    train(model, optimizer, range(1))
    if dist.get_rank() > 1:  # one replica takes a step more
        for state in optimizer.inner.state.values():
            state["step"] += 1
    refuse(optimizer.state_dict, LifecycleError)
    return [sparse_gradients(), *found]


def test_other_optimizers_and_replicas_that_differ_are_refused_alike_on_every_rank(world) -> None:
    found = world(4).run(refusals)
    assert found[0][:-1] == found[1][:-1] == found[2][:-1] == found[3][:-1]
    sparse, *classes, muon, eight, bucket, gathers, sends, differing = found[0]
    assert "sparse gradients" in sparse
    assert all("each element's update must depend on this element only" in text for text in classes)
    assert muon.startswith("Muon updates shards by itself")
    assert eight.startswith("AdamW8bit updates shards by itself")
    for text in (gathers, sends):
        assert "they are on cpu, for which the process group has no backend" in text
    assert "bucket_numel" in bucket
    assert "by replica" in differing and "step 1.0" in differing and "step 2.0" in differing
    assert found[0][-1] == found[2][-1]
