"""Gradients of backwards without synchronisation: seen as torch shows them, cleared by every `zero_grad`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import (
    FullyShardedDataParallel,
    LifecycleError,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    replicate,
)
from fullshard.optim import ShardedOptimizer
from fullshard.sharded_grad_scaler import ShardedGradScaler
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.training import FULLSHARD, TORCH, gradients
from tests.helpers.wrapping import CPU, library

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
NO_SHARD = ShardingStrategy.NO_SHARD
REFUSED = -1


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def batch(step: int, scale: float = 1.0) -> Tensor:
    """This rank's rows."""
    rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(step)) * scale
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(model: Any, step: int) -> Tensor:
    result: Tensor = model(batch(step)).square().sum()
    return result


# --- the wrapper ----------------------------------------------------------------------------------


def wrapped(lib: Any, strategy: str, use_orig_params: bool, **options: Any) -> Any:
    if "HYBRID" in strategy:
        shape = (2, dist.get_world_size() // 2)
        options["device_mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("r", "s"))
    return lib.FSDP(
        net(),
        sharding_strategy=getattr(lib.ShardingStrategy, strategy),
        use_orig_params=use_orig_params,
        device_id=CPU,
        **options,
    )


def shown(model: Any) -> dict[str, Tensor]:
    params = enumerate(model.parameters())
    return {str(i): p.grad.detach().clone() for i, p in params if p.grad is not None}


def what_is_seen(lib: Any, strategy: str, use_orig_params: bool) -> list[Any]:
    """All that a user can see of gradients while they are added up and cleared."""
    model = wrapped(lib, strategy, use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []

    def backward(step: int, *, sync: bool = False) -> None:
        with nullcontext() if sync else model.no_sync():
            loss_of(model, step).backward()
        seen.append(shown(model))

    backward(0)
    backward(1)
    seen.append(model.clip_grad_norm_(1e-3, norm_type=3))
    seen.append(shown(model))
    backward(2, sync=True)
    backward(3)  # beside what has been reduced
    backward(4, sync=True)
    optimizer.step()
    optimizer.zero_grad()
    backward(5)
    optimizer.zero_grad(set_to_none=False)
    seen.append(shown(model))
    backward(6, sync=True)
    model.zero_grad()
    backward(7)
    for param in model.parameters():
        param.grad = None  # by hand
    backward(8, sync=True)
    optimizer.zero_grad()
    backward(9)
    try:
        optimizer.step()  # right where nothing is sharded
    except RuntimeError:
        seen.append(REFUSED)
    with lib.FSDP.summon_full_params(model, writeback=False):
        seen.append([p.detach().clone() for p in model.parameters()])
    return seen


def seen_as_torch_shows_it() -> None:
    for strategy, use_orig_params in itertools.product(STRATEGIES, (False, True)):
        if ("HYBRID" in strategy) != (dist.get_world_size() == 4):
            continue
        ours, torchs = (
            what_is_seen(library(api), strategy, use_orig_params) for api in (FULLSHARD, TORCH)
        )
        assert_close(ours, torchs, rtol=1e-5, atol=1e-6)
        assert (ours[-2] == REFUSED) is (strategy != "NO_SHARD"), strategy


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_wrapper_shows_what_torch_s_shows(world, ranks: int) -> None:
    world(ranks).run(seen_as_torch_shows_it)


def precise(lib: Any, strategy: str, use_orig_params: bool, dtypes: Any) -> list[Any]:
    """What `.grad` shows of two microbatches, of a third that is reduced, and of one more."""
    policy = lib.MixedPrecision(**dtypes)
    model, seen = wrapped(lib, strategy, use_orig_params, mixed_precision=policy), list[Any]()
    for step in range(4):
        with nullcontext() if step == 2 else model.no_sync():
            loss_of(model, step).backward()
        seen.append(shown(model))
    return seen


def dtypes_as_in_torch(dtypes: Any) -> None:
    for strategy, use_orig_params in itertools.product(STRATEGIES[:3], (False, True)):
        ours, torchs = (
            precise(library(api), strategy, use_orig_params, dtypes) for api in (FULLSHARD, TORCH)
        )
        assert_equal(ours, torchs)


@pytest.mark.parametrize(
    "dtypes",
    [
        {"param_dtype": torch.float16, "reduce_dtype": torch.float32},
        {"param_dtype": torch.bfloat16},
        {"reduce_dtype": torch.bfloat16},
    ],
    ids=["wider", "equal", "narrower"],
)
def test_the_wrapper_adds_up_microbatches_in_torch_s_dtype(world, dtypes: Any) -> None:
    world(2).run(dtypes_as_in_torch, dtypes)


def no_step_with_half_of_the_gradients() -> None:
    model = wrapped(library(FULLSHARD), "FULL_SHARD", use_orig_params=True)
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=0.1),
        ShardedOptimizer(torch.optim.AdamW, model.parameters(), lr=0.1),
    ]
    before = [p.detach().clone() for p in model.parameters()]
    with model.no_sync():
        loss_of(model, 0).backward()
    for optimizer in optimizers:
        with pytest.raises(LifecycleError, match=r"outside of no_sync\(\)") as refused:
            optimizer.step()
        assert "0.weight" in str(refused.value) and "1.bias" in str(refused.value)
    with pytest.raises(LifecycleError, match="with_grads"):
        FullyShardedDataParallel.summon_full_params(model, with_grads=True).__enter__()
    torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1).step()  # another's
    for param, expected in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, expected)
    loss_of(model, 1).backward()
    optimizers[0].step()


def test_no_optimizer_updates_pieces_with_gradients_that_were_not_reduced(world) -> None:
    world(2).run(no_step_with_half_of_the_gradients)


# --- both APIs -----------------------------------------------------------------------------------


def per_layer(**options: Any) -> Any:
    model = net()
    for module in (*model.children(), model):
        fully_shard(module, **options)
    return model


def replicated() -> Any:
    model = net()
    for module in (*model.children(), model):
        replicate(module)
    return model


def hybrid() -> Any:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
    return per_layer(mesh=mesh)


def on_a_narrow_wire() -> Any:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, wire_dtype=torch.bfloat16)
    return per_layer(mp_policy=policy)


def by_wrapper(strategy: str, use_orig_params: bool) -> Any:
    return wrapped(library(FULLSHARD), strategy, use_orig_params)


class Outside(nn.Module):
    """Contains a sharded model and is not sharded itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


MODELS: dict[str, Callable[[], Any]] = {
    "fully_shard": per_layer,
    "fully_shard, kept gathered": lambda: per_layer(reshard_after_forward=False),
    "replicate": replicated,
    "HSDP": hybrid,
    "wire_dtype": on_a_narrow_wire,
    "a plain module around": lambda: Outside(per_layer()),
    "flat": lambda: by_wrapper("FULL_SHARD", False),
    "pieces": lambda: by_wrapper("SHARD_GRAD_OP", True),
    "nothing sharded": lambda: by_wrapper("NO_SHARD", True),
}

CLEARINGS: dict[str, Callable[[Any, Any], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model, to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
}


def without_sync(model: Any, step: int) -> None:
    """One backward that communicates no gradients, or with replicas leaves sums of a part of the ranks."""
    for module in model.modules():
        if hasattr(module, "no_sync"):
            with module.no_sync():
                loss_of(model, step).backward()
            return
    (sharded,) = [m for m in (model, *model.children()) if hasattr(m, "reshard")][:1]
    sharded.set_requires_gradient_sync(False)
    loss_of(model, step).backward()
    sharded.set_requires_gradient_sync(True)


def without_all_reduce(model: Any, step: int) -> None:
    model.set_requires_all_reduce(False)
    loss_of(model, step).backward()
    model.set_requires_all_reduce(True)


def gradients_of(model: Any) -> list[Tensor]:
    return list(gradients(model).values())


def expected_gradients(make: Callable[[], Any]) -> list[Tensor]:
    model = make()
    loss_of(model, 3).backward()
    return gradients_of(model)


def cleared_gradients_do_not_come_back(names: list[str]) -> None:
    for model_index, name in enumerate(names):
        make = MODELS[name]
        expected = expected_gradients(make)
        assert len(expected) > 0
        # Half of all triples: every clearing meets both cases, and so does every model.
        for index, clearing in enumerate(CLEARINGS, model_index):
            reduced_before = between = index % 2 == 1
            model = make()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if reduced_before:
                loss_of(model, 0).backward()
            waits = without_all_reduce if name == "HSDP" and reduced_before else without_sync
            waits(model, 1)
            if between:  # forward and backward
                loss = loss_of(model, 3)
                CLEARINGS[clearing](model, optimizer)
            else:
                CLEARINGS[clearing](model, optimizer)
                loss = loss_of(model, 3)
            loss.backward()
            where = name, clearing, reduced_before, between
            actual = gradients_of(model)
            assert len(actual) == len(expected), where
            for found, each in zip(actual, expected, strict=True):
                assert torch.allclose(found, each, rtol=1e-5, atol=1e-6), where


def test_cleared_gradients_do_not_come_back(world) -> None:
    world(2).run(cleared_gradients_do_not_come_back, [name for name in MODELS if name != "HSDP"])
    world(4).run(cleared_gradients_do_not_come_back, ["HSDP"])


def only_what_is_cleared_is_dropped() -> None:
    reference = net()
    for step in (1, 3):
        loss = reference(torch.randn(8, 3, generator=torch.Generator().manual_seed(step))).square()
        (loss.sum() / dist.get_world_size()).backward()
        if step == 1:
            reference[0].weight.grad = reference[1].bias.grad = None
    expected = [p.grad for p in reference.parameters()]
    for name, make in MODELS.items():
        if name == "flat":  # has one parameter
            continue
        model = make()
        params = list(model.parameters())
        without_sync(model, 1)
        torch.optim.SGD([params[0], params[3]], lr=0.1).zero_grad()
        loss_of(model, 3).backward()
        if name == "pieces":
            with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
                found = [p.grad.clone() for p in model.parameters()]
        else:
            found = gradients_of(model)
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if name == "wire_dtype" else {"rtol": 1e-5}
        assert_close(found, expected, **{"atol": 1e-6, **tolerance})


def test_an_optimizer_of_some_parameters_drops_theirs_only(world) -> None:
    world(2).run(only_what_is_cleared_is_dropped)


def left_alone_otherwise() -> None:
    """Freezing, a loss scaler, a failed step and backwards without all parameters."""
    for make in (per_layer, lambda: by_wrapper("FULL_SHARD", False), on_a_narrow_wire):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = ShardedGradScaler("cpu", init_scale=4.0)
        without_sync(model, 0)
        scaler.scale(loss_of(model, 1)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        found = gradients_of(model)
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        assert_close(found, gradients_of(model), rtol=1e-6, atol=1e-7)
    lib = library(FULLSHARD)
    low = lib.MixedPrecision(param_dtype=torch.bfloat16)
    model = lib.FSDP(net(), device_id=CPU, mixed_precision=low, sharding_strategy=NO_SHARD)
    loss_of(model, 0).backward()
    reduced = shown(model)["0"]
    without_sync(model, 1)  # adds bf16 to fp32
    added = shown(model)["0"] - reduced
    assert added.dtype is torch.float32
    assert torch.allclose(added, added.bfloat16().float(), rtol=1e-4)
    model = per_layer()
    without_sync(model, 1)
    model[0].weight.requires_grad_(False)  # its gradient waits all the same
    loss_of(model, 3).backward()
    found = gradients_of(model)
    reference = per_layer()
    without_sync(reference, 1)
    loss_of(reference, 3).backward()
    assert_close(found[1:], gradients_of(reference)[1:], rtol=1e-5, atol=1e-6)
    alone = per_layer()
    loss_of(alone, 1).backward()
    assert_close(found[0], gradients_of(alone)[0], rtol=1e-5, atol=1e-6)
    without_sync(model, 0)
    model.reset_iter_state()
    assert_close(found, gradients_of(model), rtol=0.0, atol=0.0)


def test_other_calls_leave_what_waits_as_it_should_be(world) -> None:
    world(2).run(left_alone_otherwise)
