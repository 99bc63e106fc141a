"""A torch that is built for CUDA, on a machine without a GPU: nothing may ask CUDA for a stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fullshard import CPUOffloadPolicy, clip_grad_norm_, fully_shard
from fullshard.optim import EMA, AdamW8bit, Muon, ShardedOptimizer
from tests.helpers.fake import fake_world


@pytest.fixture
def cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch say what its CUDA build says on a machine without a driver."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    def accelerator(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", accelerator)
    for name in ("is_initialized", "is_available"):
        monkeypatch.setattr(torch.cuda, name, lambda: False)
    for name in ("is_current_stream_capturing", "current_stream", "current_device", "Stream"):
        monkeypatch.setattr(torch.cuda, name, fail)
    monkeypatch.setattr(torch.accelerator, "current_stream", fail)
    monkeypatch.setattr(torch.accelerator, "synchronize", fail)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", ["ShardedOptimizer", "Muon", "AdamW8bit", "AdamW"])
def test_a_cuda_build_without_a_gpu_trains_on_the_cpu(
    cuda_without_a_gpu: None, name: str, offload: bool
) -> None:
    policy = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    with fake_world(2):
        layers = [fully_shard(nn.Linear(8, 8), **policy) for _ in range(2)]
        model = fully_shard(nn.Sequential(*layers), **policy)
        optimizer: Any = {
            "ShardedOptimizer": lambda: ShardedOptimizer(torch.optim.AdamW, model.parameters()),
            "Muon": lambda: Muon(model),
            "AdamW8bit": lambda: AdamW8bit(model.parameters()),
            "AdamW": lambda: torch.optim.AdamW(model.parameters()),
        }[name]()
        average = EMA(model)
        before = [param.detach().clone() for param in model.parameters()]
        for _ in range(2):
            model(torch.randn(3, 8)).sum().backward()
            clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
            optimizer.step()
            optimizer.zero_grad()
            average.update()
        with average.averaged(), torch.no_grad():
            model(torch.randn(3, 8))
        pairs = zip(before, model.parameters(), strict=True)
        assert all(not torch.equal(old.to_local(), new.to_local()) for old, new in pairs)  # type: ignore[operator]
