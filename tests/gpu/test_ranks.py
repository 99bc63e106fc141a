"""Several ranks as threads of one GPU, and NCCL with one rank: the numbers of an unsharded run."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed import multi_threaded_pg

import fullshard.layout.segments
from fullshard import MixedPrecisionPolicy, fully_shard
from tests.gpu.lone_rank import lone_rank
from tests.gpu.test_streams import pause
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.threads import run_threads
from tests.helpers.training import gradients

pytestmark = pytest.mark.gpu


@contextmanager
def synchronised_collectives() -> Iterator[None]:
    """Thread ranks copy on rank 0's stream only: let data be there before, and done after."""
    original_join = multi_threaded_pg.Collective.join
    original_init = multi_threaded_pg.Collective.__init__

    def join(self: Any, rank: int, data: Any) -> Any:
        torch.cuda.current_stream().synchronize()
        return original_join(self, rank, data)

    def init(self: Any, world_size: int, collective: Any, pg: Any) -> None:
        original_init(self, world_size, collective, pg)
        work = collective.work

        def synchronised(data: Any) -> None:
            work(data)
            torch.cuda.current_stream().synchronize()

        collective.work = synchronised

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multi_threaded_pg.Collective, "join", join)
        patch.setattr(multi_threaded_pg.Collective, "__init__", init)
        yield


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(37, 64),
        *(nn.Sequential(nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 64)) for _ in range(3)),
    ).cuda()


def losses_and_gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    for _ in range(3):
        model.zero_grad()
        model(x).pow(2).mean().backward()
    return gradients(model)


def train_on_thread(
    model: nn.Sequential,
    x: Tensor,
    replicas: int,
    seed: int | None,
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
) -> dict[str, Tensor]:
    torch.cuda.set_device(0)
    world, rank = dist.get_world_size(), dist.get_rank()
    rng = random.Random(None if seed is None else 100 * seed + rank)
    shape = (replicas, world // replicas) if replicas > 1 else (world,)
    names = ("replicate", "shard") if replicas > 1 else ("shard",)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)
    mine = copy.deepcopy(model)
    for module in mine.modules():
        if not list(module.children()) and seed is not None:
            module.register_forward_hook(lambda *_: pause(rng))
            module.register_full_backward_hook(lambda *_: pause(rng))
    for block in mine[1:]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(mine, mesh=mesh, mp_policy=policy)
    result = losses_and_gradients(mine, x.chunk(world)[rank].clone().requires_grad_())
    torch.cuda.synchronize()
    return result


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (3, 1), (4, 2)])
def test_thread_ranks_on_one_gpu_equal_one_process(
    monkeypatch: pytest.MonkeyPatch, ranks: int, replicas: int, in_place: bool
) -> None:
    monkeypatch.setattr(fullshard.layout.segments, "IN_PLACE_FROM", 0 if in_place else 1 << 40)
    model = make_model()
    x = torch.randn(12, 37, device="cuda")
    expected = losses_and_gradients(copy.deepcopy(model), x)
    with synchronised_collectives():
        undisturbed = run_threads(ranks, train_on_thread, model, x, replicas, None)
        for result in undisturbed:
            assert_close(result, expected, rtol=1e-4, atol=1e-6)
        for seed in range(6):
            disturbed = run_threads(ranks, train_on_thread, model, x, replicas, seed)
            assert_equal(disturbed, undisturbed)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 2)])
def test_bf16_on_the_wire_between_thread_ranks_sums_as_fp32_does(
    monkeypatch: pytest.MonkeyPatch, ranks: int, replicas: int, in_place: bool
) -> None:
    monkeypatch.setattr(fullshard.layout.segments, "IN_PLACE_FROM", 0 if in_place else 1 << 40)
    model = make_model()
    x = torch.randn(12, 37, device="cuda")
    wide = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    narrow = replace(wide, wire_dtype=torch.bfloat16)
    with synchronised_collectives():
        expected = run_threads(ranks, train_on_thread, model, x, replicas, None, wide)
        for seed in (None, 0, 1, 2):
            result = run_threads(ranks, train_on_thread, model, x, replicas, seed, narrow)
            assert_equal(result, expected)


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.usefixtures("communicates_with_itself")
def test_nccl_with_one_rank_equals_no_sharding(
    monkeypatch: pytest.MonkeyPatch, in_place: bool, backend: str
) -> None:
    monkeypatch.setattr(fullshard.layout.segments, "IN_PLACE_FROM", 0 if in_place else 1 << 40)
    model = make_model()
    x = torch.randn(12, 37, device="cuda")
    expected = losses_and_gradients(copy.deepcopy(model), x)
    with lone_rank(backend):
        for block in model[1:]:
            fully_shard(block)
        fully_shard(model)
        assert_close(losses_and_gradients(model, x), expected, rtol=0, atol=0)
