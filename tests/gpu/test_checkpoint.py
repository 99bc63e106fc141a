"""Checkpoints of a GPU's memory: copied beside what is computed, and never of a later step."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from fullshard import FullyShardedDataParallel, checkpoint, fully_shard
from fullshard.checkpoint.host_copies import HostMemory, Snapshot
from fullshard.optim import ShardedOptimizer
from tests.gpu.test_optim import plain

pytestmark = pytest.mark.gpu

Make = Callable[..., optim.Optimizer]

MAKERS: dict[str, Make] = {
    "foreach": partial(optim.AdamW, foreach=True),
    "fused": partial(optim.AdamW, fused=True),
    "capturable": partial(optim.NAdam, capturable=True),
    "ASGD": optim.ASGD,
    "view": partial(ShardedOptimizer, optim.AdamW),
}


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(api: str, make: Make, width: int = 256) -> tuple[nn.Module, optim.Optimizer]:
    layers = [nn.Linear(width, width, device="cuda") for _ in range(4)]
    model: Any = nn.Sequential(*layers)
    if api == "functional":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = FullyShardedDataParallel(model, use_orig_params=api == "wrapper")
    return model, make(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    width = 256
    for _ in range(steps):
        x = torch.randn(8, width, device="cuda", generator=generator)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: optim.Optimizer) -> list[Tensor]:
    values = [v for p in model.parameters() for v in optimizer.state[p].values()]
    return [plain(value).clone() for value in [*model.parameters(), *values]]


def places_of(optimizer: optim.Optimizer) -> list[torch.device]:
    return [v.device for state in optimizer.state.values() for v in state.values()]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("api", ["functional", "wrapper", "flat"])
def test_a_resumed_run_is_the_same_run(tmp_path: Path, api: str, make: Make) -> None:
    model, optimizer = build(api, make)
    train(model, optimizer, 2)
    checkpoint.save(tmp_path / "a", model, optimizer)
    places = places_of(optimizer)
    train(model, optimizer, 2)
    expected = state_of(model, optimizer)
    again, its_optimizer = build(api, make)
    checkpoint.load(tmp_path / "a", again, its_optimizer)
    assert places_of(its_optimizer) == places
    train(again, its_optimizer, 2)
    for found, known in zip(state_of(again, its_optimizer), expected, strict=True):
        assert torch.equal(found, known)


def big_step(model: nn.Module, optimizer: optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


@pytest.mark.parametrize("make", [MAKERS["foreach"], MAKERS["view"]], ids=["AdamW", "view"])
def test_the_next_step_waits_for_the_copies(tmp_path: Path, make: Make) -> None:
    model, optimizer = build("functional", make, width=6000)
    big_step(model, optimizer)
    for turn in range(3):
        expected = state_of(model, optimizer)
        pending = checkpoint.async_save(tmp_path / "a", model, optimizer)
        for _ in range(3):
            big_step(model, optimizer)
        pending.wait()
        checkpoint.load(tmp_path / "a", model, optimizer)
        for found, known in zip(state_of(model, optimizer), expected, strict=True):
            assert torch.equal(found, known), turn


def test_without_the_wait_the_copies_are_of_later_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail."""
    monkeypatch.setattr(Snapshot, "hold_back", lambda *_: None)
    with pytest.raises(AssertionError):
        test_the_next_step_waits_for_the_copies(tmp_path, MAKERS["foreach"])


def test_without_an_optimizer_the_device_waits_at_once(tmp_path: Path) -> None:
    model, optimizer = build("functional", MAKERS["foreach"], width=6000)
    expected = [plain(param).clone() for param in model.parameters()]
    pending = checkpoint.async_save(tmp_path / "a", model)
    big_step(model, optimizer)
    pending.wait()
    checkpoint.load(tmp_path / "a", model)
    for param, known in zip(model.parameters(), expected, strict=True):
        assert torch.equal(plain(param), known)


def test_the_host_goes_on_while_the_device_computes(tmp_path: Path) -> None:
    model, optimizer = build("functional", MAKERS["foreach"])
    train(model, optimizer, 1)
    checkpoint.async_save(tmp_path / "a", model, optimizer).wait()  # has pinned its memory
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    busy = torch.cuda.Event()
    busy.record()
    pending = checkpoint.async_save(tmp_path / "a", model, optimizer)
    assert not busy.query(), "the host has waited for the device"
    pending.wait()
    assert busy.query()


def test_a_snapshot_that_nobody_waits_for_does_not_end_up_in_the_next() -> None:
    memory = HostMemory()
    old, new = (torch.full((2**24,), value, device="cuda") for value in (1.0, 2.0))
    Snapshot([new], memory).wait()  # the memory is pinned, which would wait for the device
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)
    Snapshot([old], memory)  # dropped, with its copies behind the sleep
    with torch.cuda.stream(torch.cuda.Stream()):
        snapshot = Snapshot([new], memory)
    snapshot.wait()
    torch.cuda.synchronize()
    assert torch.equal(snapshot.copies[0], new.cpu())


def test_a_part_of_a_state_dict_is_saved_without_the_rest_of_its_group() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 4)).cuda()
    fully_shard(model)
    gc.collect()  # what tests before have left
    before = torch.cuda.memory_allocated()
    # Nothing waits for the device, and nothing is copied.
    torch.cuda.set_sync_debug_mode("error")
    try:
        state: dict[str, Any] = model.state_dict()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() == before
    file = io.BytesIO()
    torch.save({"1.weight": state["1.weight"]}, file)
    assert file.tell() < 512 * 4 * 4 + 5000
    with torch.no_grad():
        state["1.weight"].fill_(3.0)
    assert bool((model[1].weight.to_local() == 3).all())  # type: ignore[operator, union-attr]
    del model
    gc.collect()
    # The state dict keeps the memory of the shards; samples of the initial weights went with the model.
    assert torch.cuda.memory_allocated() > before - 512 * 512 * 4
    assert bool((state["1.weight"].to_local() == 3).all())
    state.clear()
    gc.collect()
    assert torch.cuda.memory_allocated() < before
