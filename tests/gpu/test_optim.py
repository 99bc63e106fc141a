"""`ShardedOptimizer` on real streams: the bits of the optimizer itself, whatever the streams' timing."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from fullshard import CPUOffloadPolicy
from fullshard.optim import AdamW8bit, ShardedOptimizer
from tests.gpu.test_streams import DEPTH, WIDTH, disturbed, equal, make_model, pause
from tests.helpers.fake import fake_world

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("reduce_scatter_that_reduces")]


def train(
    model: Any,
    make: Callable[..., optim.Optimizer],
    rng: random.Random | None = None,
    **options: Any,
) -> list[Tensor]:
    """A few steps; the final shards and states. In one of them some parameters have no gradient."""
    optimizer = make(model.parameters(), lr=0.01, **options)
    generator = torch.Generator("cuda").manual_seed(1)
    for step in range(4):
        x = torch.randn(64, WIDTH, device="cuda", generator=generator)
        model(x).float().pow(2).mean().backward()
        if step == 2:
            for param in list(model.parameters())[::5]:
                param.grad = None
        if rng is not None:
            pause(rng)
        optimizer.step()
        optimizer.zero_grad()
    states = [v for state in optimizer.state.values() for v in state.values()]
    return [plain(value) for value in [*model.parameters(), *states]]


def plain(value: Any) -> Tensor:
    local: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return local.detach().cuda()


@pytest.mark.parametrize(
    "options",
    [{"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": True, "foreach": True}],
    ids=str,
)
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_the_bits_are_those_of_the_optimizer_itself(
    options: dict[str, bool], reduce_dtype: torch.dtype
) -> None:
    with fake_world(4):
        expected = train(make_model(reduce_dtype=reduce_dtype), optim.AdamW, **options)
        ours = partial(ShardedOptimizer, optim.AdamW)
        assert equal(train(make_model(reduce_dtype=reduce_dtype), ours, **options), expected)


@pytest.mark.parametrize("make", [make_model, partial(make_model, offload=CPUOffloadPolicy())])
def test_disturbed_streams_give_the_same_bits(make: Callable[[], nn.Module]) -> None:
    ours = partial(ShardedOptimizer, optim.AdamW)
    with fake_world(4):
        expected = train(make(), ours)
        for seed in range(6):
            with disturbed(seed) as rng:
                result = train(make(), ours, rng)
            assert equal(result, expected), f"seed {seed}"


@pytest.mark.parametrize("offload", [False, True])
def test_a_group_is_one_tensor_with_its_gradients_where_they_are(offload: bool) -> None:
    with fake_world(4):
        model: Any = make_model(offload=CPUOffloadPolicy()) if offload else make_model()
        optimizer = ShardedOptimizer(optim.SGD, model.parameters(), lr=0.1)
        model(torch.ones(4, WIDTH, device="cuda")).float().pow(2).mean().backward()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        assert torch.cuda.max_memory_allocated() == before, "gradients were copied"
        assert sum(len(g["params"]) for g in optimizer.inner.param_groups) == DEPTH + 1


def test_compiled_updates_in_8_bits_are_those_of_operators_also_when_they_are_repeated() -> None:
    """From the second step on, the generated code is called without the compiler's checks."""
    with fake_world(4):
        models: list[Any] = [make_model() for _ in range(2)]
        optimizers = [
            AdamW8bit(model.parameters(), lr=1e-2, compile=compile)
            for model, compile in zip(models, (True, False), strict=True)
        ]
        pairs = list(zip(*(model.parameters() for model in models), strict=True))
        start = [plain(param).clone() for param, _ in pairs]
        generator = torch.Generator("cuda").manual_seed(1)
        for step in range(5):
            x = torch.randn(8, WIDTH, device="cuda", generator=generator)
            models[0](x).float().pow(2).mean().backward()
            for number, (param, twin) in enumerate(pairs):
                if step == 3 and number % 5 == 0:
                    param.grad = None
                twin.grad = param.grad  # the same: two models would part within a few steps
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        strips = optimizers[0]._blocks.strips
        assert any(repeat is not None for strip in strips for repeat in strip.repeats.values())
        others = sum(
            int(((plain(param) - plain(twin)).abs() > 1e-5).sum()) for param, twin in pairs
        )
        assert not any(
            torch.equal(plain(param), old) for (param, _), old in zip(pairs, start, strict=True)
        )
    # Codes are rounded at random, so where the last bit differs another code may follow.
    assert others < 0.01 * sum(each.numel() for each in start)
