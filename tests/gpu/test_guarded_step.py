"""Steps that really run out of the device's memory, anywhere: training goes on as if the batch had not been there.

NCCL with one rank, which communicates with itself. How ranks leave a step together is tested with gloo, in
tests/divergence/test_guarded_step.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard.layout.segments
from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, guarded_step
from tests.gpu.lone_rank import lone_rank

pytestmark = pytest.mark.gpu

WIDTH, DEPTH, ROWS = 1024, 4, 256
PLACES = 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


class Net(nn.Module):
    def __init__(self, *, checkpointing: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        result: Tensor = self.head(x)
        return result


class Shortage:
    """Leaves no memory from a place of the step on: the next allocation that needs new memory fails, whoever makes it."""

    def __init__(self, model: nn.Module) -> None:
        self.passed = 0
        self.place: int | None = None
        for module in model.modules():
            module.register_forward_pre_hook(self._pass)
            module.register_forward_hook(self._watch)

    @contextmanager
    def at(self, place: int | None) -> Iterator[None]:
        """Let memory be short from this place on, until the end of the block."""
        self.passed, self.place = 0, place
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def _pass(self, *_: Any) -> None:
        self.passed += 1
        if self.passed - 1 == self.place:
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)

    def _watch(self, module: nn.Module, args: Any, output: Any) -> None:
        self._pass()
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: self._pass())


def batch(step: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(step)
    return torch.randn(ROWS, WIDTH, device="cuda", generator=generator)


def compute_gradients(model: nn.Module, step: int) -> Tensor:
    total = torch.zeros((), device="cuda")
    for part in batch(step).chunk(2):
        loss = model(part).float().pow(2).mean()
        loss.backward()
        total += loss.detach()
    return total


def train(
    options: dict[str, Any], failing: dict[int, int], *, checkpointing: bool, skip: bool
) -> tuple[list[float], list[Tensor], int]:
    """Train on the steps that do not fail; return losses, weights, and the number of places in a step."""
    torch.manual_seed(0)
    model = Net(checkpointing=checkpointing).cuda()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    shortage = Shortage(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    losses = []
    for step in range(3 + 2 * PLACES):
        fails = step in failing
        if fails and skip:
            continue
        with shortage.at(failing.get(step)), guarded_step(model, on_error="skip") as guarded:
            loss = compute_gradients(model, step)
            if fails:  # what was left in the allocator's pools may have been enough
                torch.empty(torch.cuda.get_device_properties(0).total_memory, device="cuda")
        assert guarded.failed is fails
        if guarded.failure is not None:
            assert guarded.failure.type == "OutOfMemoryError"
            assert all(param.grad is None for param in model.parameters())
            continue
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    params = [param.to_local().detach().clone() for param in model.parameters()]  # type: ignore[attr-defined]
    return losses, params, shortage.passed


OPTIONS: dict[str, dict[str, Any]] = {
    "in place": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
}


@pytest.mark.parametrize(
    ("kind", "in_place", "checkpointing"),
    [
        ("in place", True, False),
        ("in place", False, True),
        ("bf16", False, False),
        ("bf16", True, True),
        ("offloaded", True, False),
    ],
)
@pytest.mark.usefixtures("communicates_with_itself")
def test_a_run_goes_on_after_it_ran_out_of_memory_anywhere(
    monkeypatch: pytest.MonkeyPatch, kind: str, in_place: bool, checkpointing: bool
) -> None:
    monkeypatch.setattr(fullshard.layout.segments, "IN_PLACE_FROM", 0 if in_place else 1 << 40)
    with lone_rank():
        *_, places = train(OPTIONS[kind], {}, checkpointing=checkpointing, skip=False)
        rng = random.Random(places)
        failing = {3 + 2 * number: rng.randrange(places) for number in range(PLACES)}
        losses, params, _ = train(OPTIONS[kind], failing, checkpointing=checkpointing, skip=False)
        expected_losses, expected, _ = train(
            OPTIONS[kind], failing, checkpointing=checkpointing, skip=True
        )
        assert losses == expected_losses
        for param, other in zip(params, expected, strict=True):
            assert torch.equal(param, other)
