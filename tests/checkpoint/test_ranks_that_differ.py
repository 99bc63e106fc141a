"""Ranks that do not have the same optimizer are told so before anything is written, and the last checkpoint stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard import (
    CheckpointError,
    FullyShardedDataParallel,
    ShardingStrategy,
    checkpoint,
    fully_shard,
)
from tests.helpers.training import whole

ODD_PLACES = {"last": -1, "first": 0}
"""Which rank is unlike the others: also the one that tells them what is to be saved."""


def build(api: str, replicas: int) -> nn.Module:
    """Two matrices of which every rank has a part."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 6, bias=False), nn.Linear(6, 7, bias=False))
    if api == "plain":
        return model
    sizes = (replicas, dist.get_world_size() // replicas) if replicas > 1 else None
    mesh = None if sizes is None else init_device_mesh("cpu", sizes, mesh_dim_names=("r", "s"))
    if api == "functional":
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    options: dict[str, Any] = {"use_orig_params": api == "wrapper", "device_mesh": mesh}
    if replicas > 1:
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    for index, layer in enumerate(model):
        model[index] = FullyShardedDataParallel(layer, **options)
    return FullyShardedDataParallel(model, **options)


def step(optimizer: optim.Optimizer, *, without: int | None = None) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, param in enumerate(params):
        param.grad = None if index == without else torch.ones_like(param)
    optimizer.step()


def adam(model: nn.Module, **options: Any) -> optim.Optimizer:
    optimizer = optim.Adam(model.parameters(), lr=0.1, **options)
    step(optimizer)
    return optimizer


def stepped_again(model: nn.Module) -> optim.Optimizer:
    optimizer = adam(model)
    step(optimizer)
    return optimizer


def without_a_gradient(model: nn.Module) -> optim.Optimizer:
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    step(optimizer, without=1)
    return optimizer


def with_another_rate(model: nn.Module) -> optim.Optimizer:
    optimizer = adam(model)
    optimizer.param_groups[0]["lr"] = 0.2
    return optimizer


def with_another_option(model: nn.Module) -> optim.Optimizer:
    optimizer = adam(model)
    optimizer.param_groups[0]["note"] = "here"
    return optimizer


def in_two_groups(model: nn.Module) -> optim.Optimizer:
    optimizer = optim.Adam([{"params": [param]} for param in model.parameters()], lr=0.1)
    step(optimizer)
    return optimizer


def of_one_parameter(model: nn.Module) -> optim.Optimizer:
    optimizer = optim.Adam([next(model.parameters())], lr=0.1)
    step(optimizer)
    return optimizer


def of_another_class(model: nn.Module) -> optim.Optimizer:
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step(optimizer)
    return optimizer


ODD_OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], optim.Optimizer | None], list[str]]] = {
    "no optimizer": (lambda model: None, ["no optimizer: rank "]),
    "no step": (
        lambda model: optim.Adam(model.parameters(), lr=0.1),
        ["state of 0.weight: exp_avg, exp_avg_sq, step ", "state of 1.weight: exp_avg, exp_avg_sq"],
    ),
    "no gradient": (without_a_gradient, ["state of 1.weight: exp_avg, exp_avg_sq, step "]),
    "another step": (stepped_again, ["state of 0.weight: step is ", "state of 1.weight: step is "]),
    "amsgrad": (
        lambda model: adam(model, amsgrad=True),
        ["state of 0.weight: max_exp_avg_sq ", "group 0: amsgrad is "],
    ),
    "another rate": (with_another_rate, ["group 0: lr is "]),
    "another option": (with_another_option, ["group 0: note "]),
    "two groups": (in_two_groups, ["1.weight: in group "]),
    "one parameter": (of_one_parameter, ["1.weight: in "]),
    "another class": (of_another_class, ["torch.optim.SGD: rank ", "torch.optim.Adam: rank"]),
}


def save_what_differs(folder: Path, api: str, replicas: int) -> dict[str, str]:
    """Errors by case, and by which rank was the odd one."""
    model = build(api, replicas)
    checkpoint.save(folder / "good", model, adam(model), extra=1, keep_last=1)
    errors = {}
    for place, index in ODD_PLACES.items():
        is_odd = dist.get_rank() == range(dist.get_world_size())[index]
        for case, (make, _) in ODD_OPTIMIZERS.items():
            optimizer = make(model) if is_odd else adam(model)
            save = checkpoint.save if place == "last" else checkpoint.async_save
            with pytest.raises(CheckpointError) as error:
                save(folder / "bad", model, optimizer, extra=2, keep_last=1)
            errors[f"{case}, {place}"] = str(error.value)
    with pytest.raises(CheckpointError) as error:
        extra = None if dist.get_rank() == 0 else 3
        checkpoint.save(folder / "bad", model, extra=extra, keep_last=1)
    errors["extra"] = str(error.value)
    # It takes no more than the same state, in any order, and an extra on the first rank.
    params = list(model.parameters())
    optimizer = optim.Adam(params[::-1] if is_odd else params, lr=0.1)
    for number, param in enumerate(params):
        param.grad = torch.full_like(param, number + 1)
    optimizer.step()
    extra = 1 if dist.get_rank() == 0 else None
    checkpoint.save(folder / "good", model, optimizer, extra=extra)
    optimizer.state.clear()
    assert checkpoint.load(folder / "good", model, optimizer).extra == 1
    for number, param in enumerate(params):
        average = whole(optimizer.state[param]["exp_avg"])
        assert average.unique().tolist() in ([], [pytest.approx((number + 1) * 0.1)])
    # And those who load must be alike.
    for case in ("no optimizer", "another class"):
        other = ODD_OPTIMIZERS[case][0](model) if is_odd else optimizer
        with pytest.raises(CheckpointError, match="together must all pass an optimizer") as error:
            checkpoint.load(folder / "good", model, other, without_optimizer=other is None)
        errors[f"{case}, load"] = str(error.value)
    return errors


@pytest.mark.parametrize(
    ("api", "ranks", "replicas"),
    [
        ("plain", 2, 1),
        ("wrapper", 2, 1),
        ("flat", 3, 1),
        ("functional", 4, 2),
    ],
)
def test_no_rank_saves_what_another_has_otherwise(
    world: Any, tmp_path: Path, api: str, ranks: int, replicas: int
) -> None:
    errors, *others = world(ranks).run(save_what_differs, tmp_path, api, replicas)
    assert all(other == errors for other in others), "the same on every rank"
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
    for case, (_, expected) in ODD_OPTIMIZERS.items():
        for place in ODD_PLACES:
            text = errors[f"{case}, {place}"]
            assert all(line in text for line in expected), (case, place, text)
            assert "Nothing was saved" in text and "rank " in text
    assert "\n  no optimizer: rank 0\n" in errors["no optimizer, load"]
    assert f"rank{'s' if ranks > 2 else ''} 1" in errors["extra"]


def save_a_flat_parameter_of_two(folder: Path) -> None:
    """One rank has elements of the weight only, the other of the bias; to the optimizer they are one."""
    model = FullyShardedDataParallel(nn.Linear(2, 4))
    optimizer = adam(model)
    checkpoint.save(folder / "good", model, optimizer)
    if dist.get_rank() == 1:
        step(optimizer)
    with pytest.raises(CheckpointError, match=r"rank 1: (?s:.*)state of weight: step is 2.0 here"):
        checkpoint.save(folder / "bad", model, optimizer)


def test_a_flat_parameter_has_one_state_also_if_ranks_share_no_parameter(
    world: Any, tmp_path: Path
) -> None:
    world(2).run(save_a_flat_parameter_of_two, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


def save_stages(folder: Path) -> None:
    """Of a pipeline: one stage is frozen, so that its rank has nothing to optimize."""
    rank = dist.get_rank()
    stage = nn.ModuleDict({f"stage{rank}": nn.Linear(3, 3)})
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    fully_shard(stage[f"stage{rank}"], mesh=DeviceMesh.from_group(groups[rank], "cpu"))
    optimizer = optim.Adam([{"params": [] if rank else list(stage.parameters())}], lr=0.1)
    step(optimizer)
    checkpoint.save(folder / "a", stage, optimizer)
    optimizer.state.clear()
    checkpoint.load(folder / "a", stage, optimizer)
    assert [state["step"] for state in optimizer.state.values()] == [1.0, 1.0][rank * 2 :]


def test_a_rank_without_parameters_to_optimize_passes_an_empty_group(
    world: Any, tmp_path: Path
) -> None:
    world(2).run(save_stages, tmp_path)
