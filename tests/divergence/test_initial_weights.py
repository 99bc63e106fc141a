"""Ranks that have built a model with different seeds are told so, and no others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fullshard import (
    FullyShardedDataParallel as FSDP,
    ShardingStrategy,
    checkpoint,
    fully_shard,
    replicate,
)
from tests.helpers.models import ModelOptions, make_decoder, tokens_for

SMALL = ModelOptions(depth=1)


def build(seed: int | None = None) -> Any:
    """A decoder of its own on each rank, unless there is a seed for all."""
    return make_decoder(SMALL, seed=dist.get_rank() if seed is None else seed)


def said(model: Any) -> list[str]:
    """Warnings of two forwards."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            model(tokens_for(step, 2))
    return [str(each.message) for each in caught if "initialised" in str(each.message)]


def sharded(model: Any, **options: Any) -> Any:
    for module in (*model.blocks, model):
        fully_shard(module, **options)
    return model


def replicated(model: Any) -> Any:
    for module in (*model.blocks, model):
        replicate(module)
    return model


def wrapped(model: Any, **options: Any) -> Any:
    return FSDP(model, device_id=torch.device("cpu"), **options)


def hybrid(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("r", "s"))
    return sharded(model, mesh=mesh)


WAYS: dict[str, Callable[[Any], Any]] = {
    "fully_shard": sharded,
    "replicas": hybrid,
    "replicate": replicated,
    "wrapper": lambda m: wrapped(m, use_orig_params=True),
    "flat": wrapped,
    "NO_SHARD": lambda m: wrapped(m, sharding_strategy=ShardingStrategy.NO_SHARD),
}


def of_other_seeds() -> dict[str, list[str]]:
    return {name: said(way(build())) for name, way in WAYS.items()}


def test_other_seeds_are_told_once_with_the_parameters_and_the_remedy(world) -> None:
    for found in world(2).run(of_other_seeds):
        for way, messages in found.items():
            assert len(messages) == 1, way
            assert "initialised 6 parameters differently" in messages[0], (way, messages)
            assert "embed.weight" in messages[0] and "blocks.0.up.weight" in messages[0]
            assert "norm" not in messages[0], "those are ones and zeros everywhere"
            assert "torch.manual_seed" in messages[0] and "sync_module_states" in messages[0]


def _warnings_of(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught]


# --- what is right ----------------------------------------------------------------------------------


def of_one_seed() -> list[str]:
    return [text for way in WAYS.values() for text in said(way(build(0)))]


def loaded(folder: str) -> list[str]:
    """Checkpoints replace what each rank had drawn."""
    first = sharded(build(0))
    checkpoint.save(f"{folder}/own", first)
    dcp.save(first.state_dict(), checkpoint_id=f"{folder}/dcp")
    full = build(0).state_dict()
    found = []
    for load in (
        lambda m: checkpoint.load(f"{folder}/own", m),
        lambda m: dcp.load(m.state_dict(), checkpoint_id=f"{folder}/dcp"),
        lambda m: m.load_state_dict(first.state_dict()),
        lambda m: m.load_state_dict(first.state_dict(), assign=True),
    ):
        model = sharded(build())
        load(model)
        found += said(model)
    model = wrapped(build(), use_orig_params=True)
    model.load_state_dict(full)
    return found + said(model)


def initialised_afterwards() -> list[str]:
    """Each rank draws its own shards."""
    found = []
    for on_meta in (True, False):
        with torch.device("meta" if on_meta else "cpu"):
            model = build()
        sharded(model)
        if on_meta:
            model.to_empty(device="cpu")
        torch.manual_seed(100 + dist.get_rank())
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().normal_()
        found += said(model)
    return found


def from_rank_0() -> list[str]:
    """Rank 0 alone has weights; or it sends its own before they are sharded."""
    found = said(wrapped(build(), sync_module_states=True))
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = build()
    sharded(model)
    if dist.get_rank():
        model.to_empty(device="cpu")
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().fill_(0.5)
    return found + said(model)


def parts_of_other_ranks() -> list[str]:
    """Tensor-parallel ranks have different parts by right."""
    size = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (size, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return _warnings_of(lambda: model(torch.ones(1, 4)))


@pytest.mark.parametrize(
    ("run", "ranks"),
    [(of_one_seed, 2), (initialised_afterwards, 2), (from_rank_0, 2), (parts_of_other_ranks, 4)],
)
def test_nothing_is_said_of_weights_that_are_equal_or_different_by_right(
    world, run: Callable[[], list[str]], ranks: int
) -> None:
    assert world(ranks).run(run) == [[]] * ranks


def test_nothing_is_said_of_weights_that_were_loaded(world, tmp_path: Path) -> None:
    assert world(2).run(loaded, str(tmp_path)) == [[], []]


def with_another_shape() -> str:
    model = sharded(make_decoder(ModelOptions(depth=1 + dist.get_rank()), seed=dist.get_rank()))
    with pytest.raises(RuntimeError) as error:
        model(tokens_for(0, 2))
    return str(error.value)


def test_different_models_are_still_an_error(world) -> None:
    for message in world(2).run(with_another_shape):
        assert "group blocks.1 is missing" in message and "initialised" not in message
