"""The wrapper on a GPU: streams and memory, and torch's FSDP1 beside it."""

from __future__ import annotations

import copy
import gc
import random
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.wrap as torch_wrap
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
import fullshard.wrap
from fullshard.engine.reduction_state import ReduceEvents
from fullshard.transport.streams import FSDPCommContext
from tests.gpu.lone_rank import lone_rank
from tests.gpu.test_ranks import synchronised_collectives
from tests.gpu.test_streams import DEPTH, WIDTH, HostEvent, Layer, disturbed, equal, pause
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.fake import fake_world
from tests.helpers.threads import run_threads

pytestmark = pytest.mark.gpu

FULLSHARD = (fullshard, fullshard.wrap)
TORCH = (torch_fsdp, torch_wrap)


def wrapped(apis: tuple[ModuleType, ModuleType], model: nn.Module, **options: Any) -> Any:
    api, wrap = apis
    for name, enum in (
        ("sharding_strategy", "ShardingStrategy"),
        ("backward_prefetch", "BackwardPrefetch"),
    ):
        if options.get(name) is not None:
            options[name] = getattr(api, enum)[options[name]]
    if options.pop("offload", False):
        options["cpu_offload"] = api.CPUOffload(offload_params=True)
    if options.pop("low", True):
        options["mixed_precision"] = api.MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    return api.FullyShardedDataParallel(
        model,
        auto_wrap_policy=wrap.ModuleWrapPolicy({Layer}),
        device_id=torch.device("cuda", 0),
        **options,
    )


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Layer() for _ in range(DEPTH))).cuda()
    for param in model.parameters():  # all alike: the fake group repeats one rank's piece for all
        nn.init.normal_(param, std=0.02)
    return model


def train(model: Any, rng: random.Random | None = None, steps: int = 3) -> list[Tensor]:
    """A few steps; outputs, losses, all gradients and the final shards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator("cuda").manual_seed(1)
    results = []
    for step in range(steps):
        x = torch.randn(256, WIDTH, device="cuda", generator=generator)
        with torch.no_grad():
            results.append(model(x))
        if step == 1:
            with model.no_sync():
                model(x).float().pow(2).mean().backward()
        loss = model(x).float().pow(2).mean()
        loss.backward()
        results.append(loss.detach())
        results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if rng is not None:
            pause(rng)
        optimizer.step()
        optimizer.zero_grad()
    return results + [p.detach().clone() for p in model.parameters()]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"use_orig_params": True},
    {"use_orig_params": True, "backward_prefetch": "BACKWARD_POST"},
    {"backward_prefetch": None},
    {"sharding_strategy": "SHARD_GRAD_OP", "use_orig_params": True},
    {"sharding_strategy": "NO_SHARD"},
    {"sharding_strategy": "NO_SHARD", "low": False},  # computes with its shards
    {"sharding_strategy": "HYBRID_SHARD", "use_orig_params": True},
    {"offload": True},
    {"fuse_gradients": True},
    {"fuse_gradients": True, "use_orig_params": True},
    {"fuse_gradients": True, "sharding_strategy": "HYBRID_SHARD", "use_orig_params": True},
]


def options_here(options: dict[str, Any]) -> dict[str, Any]:
    """The same with a mesh where one is needed; within a world of four."""
    if options.get("sharding_strategy") == "HYBRID_SHARD":
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
        return {**options, "device_mesh": mesh}
    return dict(options)


@pytest.mark.usefixtures("reduce_scatter_that_reduces")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_disturbed_streams_give_the_same_bits(options: dict[str, Any]) -> None:
    with fake_world(4):
        expected = train(wrapped(FULLSHARD, make_model(), **options_here(options)))
        assert all(torch.isfinite(result).all() for result in expected)
        for seed in range(8):
            with disturbed(seed) as rng:
                result = train(wrapped(FULLSHARD, make_model(), **options_here(options)), rng)
            assert equal(result, expected), f"seed {seed}"


original_new_events = ReduceEvents.new


@pytest.mark.usefixtures("reduce_scatter_that_reduces")
@pytest.mark.parametrize("event", ["ready", "input_read"])
def test_a_missing_wait_of_reductions_is_seen(monkeypatch: pytest.MonkeyPatch, event: str) -> None:
    def new(context: FSDPCommContext) -> ReduceEvents:
        events = original_new_events(context)
        object.__setattr__(events, event, HostEvent())
        return events

    with fake_world(4):
        expected = train(wrapped(FULLSHARD, make_model()))
        monkeypatch.setattr(ReduceEvents, "new", new)
        for seed in range(30):
            with disturbed(seed) as rng:
                if not equal(train(wrapped(FULLSHARD, make_model()), rng), expected):
                    return
    pytest.fail("no seed showed a difference")


@pytest.mark.usefixtures("reduce_scatter_that_reduces")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_memory_does_not_grow_and_comes_back(use_orig_params: bool) -> None:
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    with fake_world(4):
        model = wrapped(FULLSHARD, make_model(), use_orig_params=use_orig_params)
        train(model)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        train(model)
        first = torch.cuda.max_memory_allocated()
        for _ in range(10):
            train(model)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() == first
        del model
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


# --- beside torch's FSDP1 ---------------------------------------------------------------------------------


def adam_run(
    apis: tuple[ModuleType, ModuleType],
    model: nn.Module,
    *,
    with_optimizer: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Some steps of AdamW; losses, the rank's parameters, and all state dicts."""
    torch.cuda.set_device(0)
    api = apis[0]
    model = wrapped(apis, copy.deepcopy(model), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank, world = dist.get_rank(), dist.get_world_size()
    losses, norms = [], []
    for step in range(3):
        generator = torch.Generator("cuda").manual_seed(step)
        x = torch.randn(8 * world, WIDTH, device="cuda", generator=generator)
        loss = model(x.chunk(world)[rank]).float().pow(2).mean()
        loss.backward()
        norms.append(model.clip_grad_norm_(1e3))  # measures only: norms differ in their last bits
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    fsdp = api.FullyShardedDataParallel
    result: dict[str, Any] = {
        "losses": losses,
        "norms": norms,
        "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
        "state_dict": model.state_dict(),
    }
    if with_optimizer:
        result["optimizer"] = fsdp.optim_state_dict(model, optimizer)
    torch.cuda.synchronize()
    return result


def check_equal_to_torch(ours: dict[str, Any], theirs: dict[str, Any], exact: bool) -> None:
    assert list(ours["parameters"]) == list(theirs["parameters"])
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    for part in ("losses", "norms", "parameters", "state_dict"):
        if exact and part != "norms":
            assert_equal(ours[part], theirs[part])
        else:
            assert_close(ours[part], theirs[part], rtol=1e-4, atol=1e-6)
    if "optimizer" not in theirs:
        return
    assert list(ours["optimizer"]["state"]) == list(theirs["optimizer"]["state"])
    assert ours["optimizer"]["param_groups"] == theirs["optimizer"]["param_groups"]
    for name, state in theirs["optimizer"]["state"].items():
        assert_close(ours["optimizer"]["state"][name], state, rtol=1e-4, atol=1e-8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("low", [True, False])
@pytest.mark.usefixtures("communicates_with_itself")
def test_one_nccl_rank_equals_torch_s_fsdp1(use_orig_params: bool, low: bool) -> None:
    options = {"use_orig_params": use_orig_params, "low": low}
    with lone_rank():
        model = make_model()
        ours, theirs = (adam_run(apis, model, **options) for apis in (FULLSHARD, TORCH))
    check_equal_to_torch(ours, theirs, exact=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_thread_ranks_equal_torch_s_fsdp1(use_orig_params: bool, strategy: str) -> None:
    options: dict[str, Any] = {
        "use_orig_params": use_orig_params,
        "sharding_strategy": strategy,
        "low": False,
        "with_optimizer": False,  # torch asks the group for a device, which thread ranks have not
    }
    model = make_model()
    with synchronised_collectives():
        ours = run_threads(2, adam_run, FULLSHARD, model, **options)
        theirs = run_threads(2, adam_run, TORCH, model, **options)
    for mine, other in zip(ours, theirs, strict=True):
        check_equal_to_torch(mine, other, exact=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_full_checkpoints_go_both_ways(use_orig_params: bool) -> None:
    """Written by one library and loaded by the other, training goes on with the same losses."""
    with lone_rank():
        options = {"use_orig_params": use_orig_params}
        saved = {apis: adam_run(apis, make_model(), **options) for apis in (FULLSHARD, TORCH)}
        losses = [
            go_on(apis, saved[source], **options)
            for source in (FULLSHARD, TORCH)
            for apis in (FULLSHARD, TORCH)
        ]
    for others in losses[1:]:
        assert_close(others, losses[0], rtol=1e-5, atol=1e-7)


def go_on(
    apis: tuple[ModuleType, ModuleType], saved: dict[str, Any], **options: Any
) -> list[Tensor]:
    fsdp = apis[0].FullyShardedDataParallel
    model = wrapped(apis, make_model(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.load_state_dict(copy.deepcopy(saved["state_dict"]))
    state = fsdp.optim_state_dict_to_load(model, optimizer, copy.deepcopy(saved["optimizer"]))
    optimizer.load_state_dict(state)
    losses = []
    for step in range(3):
        generator = torch.Generator("cuda").manual_seed(10 + step)
        x = torch.randn(8, WIDTH, device="cuda", generator=generator)
        loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("rank", range(3))
def test_layouts_are_torch_s(use_orig_params: bool, rank: int) -> None:
    """Every rank of three holds, element for element, what it would hold with torch's."""

    def parameters(apis: tuple[ModuleType, ModuleType]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), Layer(), nn.LayerNorm(3), nn.Linear(3, 2)).cuda()
        sharded = wrapped(apis, model, use_orig_params=use_orig_params)
        return {name: p.detach().clone() for name, p in sharded.named_parameters()}

    with fake_world(3, rank), nullcontext():
        assert_equal(parameters(FULLSHARD), parameters(TORCH))
