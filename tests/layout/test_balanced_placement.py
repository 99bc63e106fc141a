"""Which dimension `balanced_placement` shards, and who is told of padding."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fullshard import (
    FullyShardedDataParallel,
    balanced_placement,
    fully_shard,
    plan_groups,
)
from fullshard.layout.balanced_placement import EVEN_ENOUGH, least_padded_dim, sharding_over
from fullshard.layout.segments import per_row_layout
from tests.helpers.compare import assert_close
from tests.helpers.fake import fake_world

SHAPES = st.lists(st.integers(0, 70), min_size=1, max_size=4)


def padding(shape: list[int], dim: int, ranks: int) -> int:
    layout = per_row_layout([shape], world=ranks, dims=[dim])
    return layout.padding(0)


@given(shape=SHAPES, ranks=st.integers(1, 65))
def test_no_dimension_is_padded_less_unless_dimension_0_is_even_enough(
    shape: list[int], ranks: int
) -> None:
    dim = least_padded_dim(shape, ranks)
    least = min(padding(shape, each, ranks) for each in range(len(shape)))
    if dim == 0 and padding(shape, 0, ranks) <= EVEN_ENOUGH * math.prod(shape):
        return
    assert padding(shape, dim, ranks) == least


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [
        ((8, 4096, 1024), 64, 1),
        ((8, 100, 1024), 64, 2),
        ((50257, 768), 64, 0),  # padded by a thousandth: not worth a copy
        ((9, 9), 8, 0),  # as much along both
        ((3,), 4, 0),
        ((128, 8), 64, 0),
        ((0, 7), 2, 0),
    ],
)
def test_dimensions(shape: tuple[int, ...], ranks: int, dim: int) -> None:
    param = nn.Parameter(torch.empty(shape, device="meta"))
    assert balanced_placement(param, ranks) == Shard(dim)


def test_parameters_for_which_there_is_one_way() -> None:
    class Odd(Tensor):
        pass

    assert balanced_placement(nn.Parameter(torch.ones(())), 4) is None
    assert balanced_placement(nn.Parameter(torch.ones(3, 8).as_subclass(Odd)), 4) is None


def test_the_ranks_are_those_of_the_mesh_or_all() -> None:
    param = nn.Parameter(torch.empty(4, 8, device="meta"))
    assert balanced_placement(param) == Shard(0)
    with fake_world(8):
        assert balanced_placement(param) == Shard(1)
        with sharding_over(2):
            assert balanced_placement(param) == Shard(0)
            assert balanced_placement(param, 8) == Shard(1)
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        for given_mesh, expected in ((mesh, 0), (mesh["shard"], 0), (None, 1)):
            layer = nn.Linear(8, 4, bias=False)
            fully_shard(layer, mesh=given_mesh, shard_placement_fn=balanced_placement)
            assert layer.weight.placements[-1] == Shard(expected)


def test_ranks_of_uneven_tensor_parallelism_choose_alike() -> None:
    """Of nine rows, tensor-parallel ranks have five and four; four would be divided evenly."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        chosen = set()
        for rows in (9, 10):
            whole = distribute_tensor(torch.empty(rows, 4), mesh["tp"], [Shard(0)])
            chosen.add(balanced_placement(nn.Parameter(whole), 2))
        assert chosen == {Shard(1)}
        whole = distribute_tensor(torch.empty(9, 4), mesh["tp"], [Replicate()])
        assert balanced_placement(nn.Parameter(whole), 2) == Shard(0)


# --- models ------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Two stacked matrices for each expert; the others' parameters are divided evenly."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 2 * width, width) / width)
        self.down = nn.Parameter(torch.randn(experts, width, 2 * width) / width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bi,eoi->beo", self.norm(x), self.up).relu()
        return x + torch.einsum("beo,eio->bi", y, self.down)


def net(experts: int = 2, width: int = 6, depth: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Experts(experts, width) for _ in range(depth)))


def trained_as_alone(planned: bool) -> None:
    model, reference = net(), net()
    if planned:
        plan_groups(model, min_bytes=1).apply()
    else:
        for module in (*model, model):
            fully_shard(module, shard_placement_fn=balanced_placement)
    assert model[0].up.placements == (Shard(1),)
    assert model[0].norm.weight.placements == (Shard(0),)
    rows = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    for each, own in ((model, rows.chunk(3)[dist.get_rank()]), (reference, rows)):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            each(own).square().mean().backward()
            optimizer.step()
    found = {name: param.full_tensor() for name, param in model.named_parameters()}
    assert_close(found, reference.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("planned", [False, True])
def test_models_train_as_in_one_process(world: Any, planned: bool) -> None:
    world(3).run(trained_as_alone, planned)


# --- who is told ---------------------------------------------------------------------------------------


def said(shard: Any, model: nn.Module, ranks: int = 64) -> list[str]:
    """Warnings of two forwards, on the CPU."""
    with fake_world(ranks), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        width = next(p.shape[-1] for p in model.parameters() if p.ndim > 1)
        model = shard(model) or model
        for _ in range(2):
            model(torch.ones(1, width))
    return [str(each.message) for each in caught if "padded" in str(each.message)]


def by_layer(**options: Any) -> Any:
    def shard(model: nn.Module) -> None:
        for module in (*model.children(), model):
            fully_shard(module, **options)

    return shard


def test_a_model_that_is_padded_a_lot_is_told_once_with_all_groups_and_the_remedy() -> None:
    model = nn.Sequential(*net(8, 64), nn.Linear(64, 64))
    (text,) = said(by_layer(), model)
    assert "0, 1: 512 KiB take 4 MiB; up of shape (8, 128, 64) has 8 rows along dimension 0" in text
    assert "for 64 ranks" in text and "2:" not in text
    assert "Pass shard_placement_fn=fullshard.balanced_placement, or shard over fewer" in text


def test_padding_that_no_dimension_avoids_has_another_remedy() -> None:
    class Cube(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(65, 65, 65))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight.sum() * x

    (text,) = said(by_layer(), nn.Sequential(Cube()))
    assert "balanced" not in text and "Shard over fewer ranks, as with a 2-D mesh" in text


@pytest.mark.parametrize(
    ("shard", "model", "ranks"),
    [
        (by_layer(shard_placement_fn=balanced_placement), lambda: net(8, 64), 64),
        (by_layer(), lambda: net(8, 64), 8),
        (by_layer(), lambda: net(8, 64), 1),
        (by_layer(), lambda: nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3)), 4),
        (by_layer(), lambda: nn.Sequential(nn.Linear(512, 10)), 64),
        (fully_shard, lambda: nn.Sequential(nn.Linear(512, 8192), nn.Linear(8192, 10)), 64),
        (
            lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
            lambda: net(8, 64),
            64,
        ),
    ],
    ids=["balanced", "even", "one rank", "tiny", "small head", "within a quarter", "wrapper"],
)
def test_nothing_is_said_of_little_padding(shard: Any, model: Any, ranks: int) -> None:
    assert said(shard, model(), ranks) == []
