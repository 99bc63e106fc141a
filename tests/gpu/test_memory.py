"""Memory on a real device: no growth, no leak, never more than torch's FSDP2."""

from __future__ import annotations

import gc
import importlib

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.gpu.test_streams import WIDTH, make_model
from tests.helpers.fake import fake_world

pytestmark = pytest.mark.gpu

SIZE = 4096


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).float().pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_two_hundred_steps_do_not_grow() -> None:
    with fake_world(4):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x = torch.randn(64, WIDTH, device="cuda")
        for _ in range(5):
            step(model, optimizer, x)
        gc.collect()
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        step(model, optimizer, x)
        peak = torch.cuda.max_memory_allocated()
        for _ in range(200):
            step(model, optimizer, x)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == allocated
        assert torch.cuda.memory_reserved() == reserved
        assert torch.cuda.max_memory_allocated() == peak


def test_after_deleting_the_model_memory_is_where_it_was() -> None:
    torch.empty(1, device="cuda") @ torch.empty(1, device="cuda")  # cuBLAS takes its workspace
    with fake_world(4):
        x = torch.randn(64, WIDTH, device="cuda")
        nn.Linear(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)(x.bfloat16()).sum().backward()
        gc.collect()
        before = torch.cuda.memory_allocated()
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            step(model, optimizer, x)
        assert torch.cuda.memory_allocated() > before
        del model, optimizer
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before


def peak_of(library: str, **dtypes: torch.dtype) -> tuple[int, int]:
    """Peak allocated bytes of a step over what was there before, and bytes at rest."""
    module = importlib.import_module(library)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    # Large enough that the allocator's rounding of single blocks does not count.
    with torch.device("cuda"):
        layers = (nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)) for _ in range(6))
        model = nn.Sequential(nn.Linear(SIZE, SIZE), *layers)
    mesh = init_device_mesh("cuda", (8,))
    policy = module.MixedPrecisionPolicy(torch.bfloat16, torch.float32, **dtypes)
    for layer in model[1:]:
        module.fully_shard(layer, mesh=mesh, mp_policy=policy)
    module.fully_shard(model, mesh=mesh, mp_policy=policy)
    x = torch.randn(128, SIZE, device="cuda")
    for _ in range(3):
        model(x).float().pow(2).mean().backward()
        model.zero_grad()
    gc.collect()
    torch.cuda.synchronize()
    at_rest = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    model(x).float().pow(2).mean().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, at_rest


def test_peak_is_at_most_that_of_torch() -> None:
    with fake_world(8):
        theirs = peak_of("torch.distributed.fsdp")
        ours = peak_of("fullshard")
    assert ours[0] <= theirs[0] * 1.01, (ours, theirs)
    assert ours[1] <= theirs[1] * 1.01, (ours, theirs)


def test_bf16_on_the_wire_takes_no_more_than_fp32_did() -> None:
    with fake_world(8):
        wide = peak_of("fullshard")
        narrow = peak_of("fullshard", wire_dtype=torch.bfloat16)
    assert narrow[0] <= wide[0] * 1.01, (narrow, wide)
    assert narrow[1] <= wide[1] * 1.01, (narrow, wide)
