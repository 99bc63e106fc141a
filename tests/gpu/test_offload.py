"""Shards, gradients and optimizer in host memory, compute on the GPU."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import ConfigurationError, CPUOffloadPolicy
from fullshard.transport.streams import FSDPCommContext
from tests.gpu.test_streams import WIDTH, disturbed, equal, make_model, nothing, train
from tests.helpers.compare import assert_close
from tests.helpers.fake import fake_world

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("reduce_scatter_that_reduces")]


def make_offloaded(pin: bool = True, **options: Any) -> nn.Module:
    return make_model(offload=CPUOffloadPolicy(pin_memory=pin), **options)


@pytest.mark.parametrize("pin", [True, False])
def test_offloaded_training_equals_training_on_the_device(pin: bool) -> None:
    with fake_world(4):
        expected, actual = train(make_model()), train(make_offloaded(pin))
    # The optimizer rounds differently on the two devices.
    assert_close(actual, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("hsdp", [False, True])
def test_disturbed_streams_give_the_same_bits(hsdp: bool) -> None:
    with fake_world(4):
        expected = train(make_offloaded(hsdp=hsdp))
        for seed in range(12):
            with disturbed(seed) as rng:
                result = train(make_offloaded(hsdp=hsdp), rng)
            assert equal(result, expected), f"seed {seed}"


def test_a_host_that_does_not_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(4):
        expected = train(make_offloaded())
        monkeypatch.setattr(FSDPCommContext, "synchronize", nothing)
        for seed in range(20):
            with disturbed(seed) as rng:
                result = train(make_offloaded(), rng)
            if not equal(result, expected):
                return
    pytest.fail("no seed showed a difference")


def gradients_of_two_backwards(model: Any) -> list[Tensor]:
    for seed in range(2):
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(64, WIDTH, device="cuda", generator=generator)
        model(x).float().pow(2).mean().backward()
    return [param.grad.to_local().cuda() for param in model.parameters()]


def test_gradients_are_added_on_the_host() -> None:
    with fake_world(4):
        expected = gradients_of_two_backwards(make_model())
        actual = gradients_of_two_backwards(make_offloaded())
    assert_close(actual, expected, rtol=1e-5, atol=1e-7)


def test_hooks_of_parameters_see_complete_gradients() -> None:
    with fake_world(4):
        expected = gradients_of_two_backwards(make_model())
        model = make_offloaded()
        seen: dict[int, Tensor] = {}

        def keep(param: Any) -> None:
            seen[id(param)] = param.grad.to_local().clone()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(keep)
        with disturbed(3):
            gradients_of_two_backwards(model)
        actual = [seen[id(param)].cuda() for param in model.parameters()]
    assert_close(actual, expected, rtol=1e-5, atol=1e-7)


def test_everything_rests_on_the_host_and_is_pinned() -> None:
    torch.cuda.synchronize()
    gc.collect()
    with fake_world(4):
        x = torch.randn(64, WIDTH, device="cuda")
        nn.Linear(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)(x.bfloat16()).sum().backward()
        gc.collect()
        before = torch.cuda.memory_allocated()
        model: Any = make_offloaded()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).float().pow(2).mean().backward()
            optimizer.step()
        torch.cuda.synchronize()
        # What distributes small gathers: a quarter of a group's parameters, for groups that are alike.
        indices = 2 * sum(param.numel() for param in model[1].parameters()) // 4
        assert torch.cuda.memory_allocated() <= before + 2 * indices
        for param in model.parameters():
            assert param.to_local().is_pinned() and param.grad.to_local().device.type == "cpu"
        assert all(
            value.to_local().device.type == "cpu"
            for state in optimizer.state.values()
            for key, value in state.items()
            if key != "step"
        )


def test_parameters_moved_to_the_device_are_refused_by_name() -> None:
    with fake_world(4):
        model = make_offloaded()
        model.to("cuda")
        with pytest.raises(ConfigurationError, match="must be on cpu") as error:
            model(torch.randn(2, WIDTH, device="cuda"))
    assert "1.up.weight is on cuda:0" in str(error.value)
