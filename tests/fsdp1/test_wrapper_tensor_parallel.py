"""Wrappers of tensor-parallel modules: DTensors on one axis of a mesh, flattened and sharded over another."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fullshard
from fullshard import (
    ConfigurationError,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    UnsupportedError,
    fully_shard,
)
from fullshard.wrap import ModuleWrapPolicy
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.training import FULLSHARD, TORCH, all_whole
from tests.helpers.wrapped_nets import library

CPU = torch.device("cpu")
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


class Layer(nn.Module):
    """Sizes that tensor parallelism divides evenly, as torch wants it, and data parallelism does not."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 6)
        self.down = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.tanh(self.up(x))))  # type: ignore[no-any-return]


def make(mesh: DeviceMesh | None = None, *, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(Layer(), nn.Linear(5, 3))
    if mesh is not None:
        parallelize_module(model[0], mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def batch(place: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * place + step))


def policy() -> ModuleWrapPolicy:
    return ModuleWrapPolicy({Layer})


def wrapped(mesh: DeviceMesh, *, seed: int = 0, **options: Any) -> Any:
    hybrid = options.get("sharding_strategy") is ShardingStrategy.HYBRID_SHARD
    return FSDP(
        make(mesh["tp"], seed=seed),
        device_mesh=mesh["replicate", "dp"] if hybrid else mesh["dp"],
        auto_wrap_policy=policy(),
        device_id=CPU,
        **options,
    )


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def wholes(values: Any) -> dict[str, Any]:
    return all_whole(dict(values.items()))


def alone(steps: int, *, clips: bool) -> tuple[nn.Module, torch.optim.Optimizer, list[Tensor]]:
    """One process that sees the batches of both data-parallel ranks."""
    model = make()
    optimizer, norms = torch.optim.Adam(model.parameters(), lr=0.05), []
    for step in range(steps):
        optimizer.zero_grad()
        for place in range(2):
            (model(batch(place, step)).square().sum() / 2).backward()
        if clips:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
    return model, optimizer, norms


def train(
    model: Any, place: int, steps: int, *, clips: bool = False
) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    optimizer, norms = torch.optim.Adam(model.parameters(), lr=0.05), []
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(place, step)).square().sum().backward()
        if clips:
            norms.append(model.clip_grad_norm_(0.5))
        optimizer.step()
    return optimizer, norms


def mesh_of_four() -> tuple[DeviceMesh, int]:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "dp", "tp"))
    return mesh, mesh["dp"].get_local_rank()


# --- training ---------------------------------------------------------------------------------------


def train_as_one_process() -> None:
    mesh, place = mesh_of_four()
    expected, _, norms = alone(2, clips=True)
    for options in (
        {"use_orig_params": True},
        {"use_orig_params": False},
        {"use_orig_params": False, "sharding_strategy": ShardingStrategy.NO_SHARD},
        {
            "use_orig_params": True,
            "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
            "sync_module_states": True,
        },
    ):
        seed = dist.get_rank() // 2 if "sync_module_states" in options else 0
        model = wrapped(mesh, seed=seed, **options)
        _, found = train(model, place, 2, clips=True)
        assert_close(found, norms, rtol=1e-4, atol=1e-6)
        assert_close(wholes(model.state_dict()), expected.state_dict(), rtol=1e-4, atol=1e-5)
    for order in (1.0, float("inf")):
        model = wrapped(mesh, use_orig_params=False)
        model(batch(place, 0)).square().sum().backward()
        reference = make()
        for each in range(2):
            (reference(batch(each, 0)).square().sum() / 2).backward()
        assert_close(
            fullshard.clip_grad_norm_(model, 1.0, order),
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0, order),
            rtol=1e-4,
            atol=1e-6,
        )


def train_as_torch() -> None:
    mesh, place = mesh_of_four()
    found = {}
    for name in (TORCH, FULLSHARD):
        of = library(name)
        model = of.FullyShardedDataParallel(
            make(mesh["tp"]),
            device_mesh=mesh["dp"],
            use_orig_params=True,
            auto_wrap_policy=of.wrap.ModuleWrapPolicy({Layer}),
            mixed_precision=of.MixedPrecision(reduce_dtype=torch.float64),
            device_id=CPU,
        )
        train(model, place, 2)
        values = model.state_dict()
        kinds = {
            key: (value.placements, value.device_mesh.mesh_dim_names)
            for key, value in values.items()
            if isinstance(value, DTensor)
        }
        found[name] = (wholes(values), kinds)
    assert_equal(found[FULLSHARD][0], found[TORCH][0])
    assert found[FULLSHARD][1] == found[TORCH][1]
    assert len(found[TORCH][1]) == 4


def test_tensor_parallel_modules_in_wrappers_train_as_one_process(world) -> None:
    world(4).run(train_as_one_process)


def test_tensor_parallel_modules_in_wrappers_train_as_in_torch(world) -> None:
    world(4).run(train_as_torch)


# --- parameters, gradients, misuse ------------------------------------------------------------------


def show_whole_parameters() -> None:
    mesh, place = mesh_of_four()
    reference = make()
    for each in range(2):
        (reference(batch(each, 0)).square().sum() / 2).backward()
    gradients = {name: param.grad for name, param in reference.named_parameters()}
    for use_orig_params in (True, False):
        model = wrapped(mesh, use_orig_params=use_orig_params)
        with FSDP.summon_full_params(model):
            shown = dict(model.named_parameters())
            assert_equal(wholes(shown), dict(reference.state_dict()))
            weight = shown["0.up.weight"]
            assert isinstance(weight, DTensor) and weight.device_mesh == mesh["tp"]
            with torch.no_grad():
                weight.mul_(2.0)
        assert_equal(whole(model.state_dict()["0.up.weight"]), 2 * reference[0].up.weight.detach())
        model.load_state_dict(reference.state_dict())  # of a model that is not parallel
        assert_equal(wholes(model.state_dict()), dict(reference.state_dict()))
        assert not any(isinstance(param, DTensor) for param in model.parameters())
        assert model.module[0].up.weight.device.type == "cpu"
        model.double()
        model(batch(place, 0).double())
        model.float()
        model(batch(place, 0)).square().sum().backward()
        if use_orig_params:
            with FSDP.summon_full_params(model, with_grads=True):
                found = {name: param.grad for name, param in model.named_parameters()}
                assert_close(wholes(found), gradients, rtol=1e-4, atol=1e-6)
                found["0.up.weight"].zero_()
            written, kept = model.module[0].up.weight.grad, model.module[0].down.weight.grad
            assert written is None or written.count_nonzero() == 0  # its piece may be empty
            assert kept is None or kept.count_nonzero() > 0
    low = wrapped(mesh, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    low(batch(place, 0)).float().square().sum().backward()
    # What the wrapper cannot do.
    with pytest.raises(ConfigurationError, match=r"0\.up\.weight: .*there is no device_mesh"):
        FSDP(make(mesh["tp"]), process_group=mesh["dp"].get_group())
    with pytest.raises(ConfigurationError, match=r"0\.up\.weight: .*data-parallel mesh already"):
        FSDP(make(mesh["tp"]), device_mesh=mesh["tp"])
    with pytest.raises(UnsupportedError, match=r"SHARDED_STATE_DICT"):
        fullshard.checkpoint.save("never", model=low)


def test_whole_parameters_of_parallel_modules_are_dtensors(world) -> None:
    world(4).run(show_whole_parameters)


# --- state dicts ------------------------------------------------------------------------------------


def save_and_load(folder: str) -> None:
    mesh, place = mesh_of_four()
    expected, reference, _ = alone(2, clips=False)
    states = {
        name: state["exp_avg"]
        for (name, _), state in zip(
            expected.named_parameters(), reference.state_dict()["state"].values(), strict=True
        )
    }
    for use_orig_params in (True, False):
        model = wrapped(mesh, use_orig_params=use_orig_params)
        optimizer, _ = train(model, place, 2)
        rank0 = (FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=True))
        whole_ones = (FULL, *(rank0 if use_orig_params else (None, None)))
        for kind, config, optim_config in (whole_ones, (SHARDED, None, None)):
            with FSDP.state_dict_type(model, kind, config, optim_config):
                saved = model.state_dict()
                saved_states = FSDP.optim_state_dict(model, optimizer)
            assert_close(wholes(saved), expected.state_dict(), rtol=1e-4, atol=1e-5)
            keeps = optim_config is None or place == 0
            if keeps:
                averages = {n: s["exp_avg"] for n, s in saved_states["state"].items()}
                assert_close(wholes(averages), states, rtol=1e-4, atol=1e-5)
            if kind is SHARDED:
                names = {n: v.device_mesh.mesh_dim_names for n, v in saved.items()}
                assert names["0.up.weight"] == names["0.down.weight"] == ("dp", "tp")
            other = wrapped(mesh, use_orig_params=use_orig_params, seed=1)
            again = torch.optim.Adam(other.parameters(), lr=0.05)
            with FSDP.state_dict_type(other, kind, config, optim_config):
                other.load_state_dict(saved)
                FSDP.optim_state_dict_to_load(other, again, saved_states, load_directly=True)
                assert_equal(wholes(other.state_dict()), wholes(saved))
            for trained, its_optimizer in ((model, optimizer), (other, again)):
                its_optimizer.zero_grad()
                trained(batch(place, 5)).square().sum().backward()
                its_optimizer.step()
            assert_equal([*other.parameters()], [*model.parameters()])
            model.load_state_dict(saved)
            with FSDP.state_dict_type(model, kind, config, optim_config):
                FSDP.optim_state_dict_to_load(model, optimizer, saved_states, load_directly=True)
    # Through a checkpoint of torch's, into fully_shard over other axes.
    with FSDP.state_dict_type(model, SHARDED):
        saved = model.state_dict()
        dcp.save(saved, checkpoint_id=folder)
    other_mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    target = make(other_mesh["tp"], seed=3)
    fully_shard(target, mesh=other_mesh["dp"])
    loaded = target.state_dict()
    dcp.load(loaded, checkpoint_id=folder)
    assert_equal(wholes(loaded), wholes(saved))


def test_state_dicts_of_parallel_modules_are_saved_and_loaded(world) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world(4).run(save_and_load, folder)
