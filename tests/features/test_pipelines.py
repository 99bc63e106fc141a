"""Chunks of a pipeline scheduled by hand: forwards and backwards of microbatches in the orders that pipelines use.

Torch's own schedules are in `test_pipelining`.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard import share_comm_ctx
from fullshard.engine.state import state_of
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.training import FULLSHARD, TORCH, gradients, mine

WIDTH = 6
MICROBATCHES = 4


def make_chunks(number: int) -> list[nn.Sequential]:
    """The parts of a model: a layer that is to be a group, and one that is left to the chunk."""
    torch.manual_seed(0)

    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    return [nn.Sequential(layer(), nn.Linear(WIDTH, WIDTH)) for _ in range(number)]


def shard_chunk(chunk: nn.Sequential, api: str) -> Any:
    library = importlib.import_module("torch.distributed.fsdp" if api == TORCH else "fullshard")
    for layer in chunk[:-1]:
        library.fully_shard(layer)
    return library.fully_shard(chunk)


def data(num_ranks: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the whole batch."""
    generator = torch.Generator().manual_seed(1)
    rows = 2 * MICROBATCHES * num_ranks
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(
        rows, WIDTH, generator=generator
    )


def gradients_of_one_process(number: int, num_ranks: int) -> list[dict[str, Tensor]]:
    """Of the mean loss over all rows, by chunk."""
    chunks = make_chunks(number)
    inputs, targets = data(num_ranks)
    F.mse_loss(nn.Sequential(*chunks)(inputs), targets).backward()
    return [gradients(chunk) for chunk in chunks]


# --- two chunks on one rank, scheduled by hand -------------------------------------------------------

Action = tuple[str, int, int]
"""Forward or backward, chunk, microbatch."""

ORDERS: dict[str, list[Action]] = {
    "all forwards, then all backwards": [
        *(("forward", chunk, m) for chunk in (0, 1) for m in range(MICROBATCHES)),
        *(("backward", chunk, m) for chunk in (1, 0) for m in range(MICROBATCHES)),
    ],
    "all backwards in the other order": [
        *(("forward", chunk, m) for m in range(MICROBATCHES) for chunk in (0, 1)),
        *(("backward", chunk, m) for m in reversed(range(MICROBATCHES)) for chunk in (1, 0)),
    ],
    "one forward, one backward": [
        ("forward", 0, 0),
        ("forward", 0, 1),
        ("forward", 1, 0),
        ("backward", 1, 0),
        ("forward", 1, 1),
        ("backward", 0, 0),
        ("forward", 0, 2),
        ("backward", 1, 1),
        ("forward", 0, 3),
        ("backward", 0, 1),
        ("forward", 1, 2),
        ("forward", 1, 3),
        ("backward", 1, 2),
        ("backward", 0, 2),
        ("backward", 1, 3),
        ("backward", 0, 3),
    ],
}

SWITCHES: dict[str, tuple[str, ...]] = {
    "reduced every time": (),
    "reduced once": ("set_requires_gradient_sync",),
    "reduced once, waited for once": ("set_requires_gradient_sync", "set_is_last_backward"),
    "reduced and waited for once, kept": (
        "set_requires_gradient_sync",
        "set_is_last_backward",
        "set_reshard_after_backward",
    ),
    "waited for once": ("set_is_last_backward",),
    "kept": ("set_reshard_after_backward",),
}
"""What is switched on for the last microbatch only."""


class Pipeline:
    """The chunks of one rank, and what flows between them."""

    def __init__(self, chunks: list[Any], switches: tuple[str, ...]) -> None:
        self.chunks, self.switches = chunks, switches
        inputs, targets = (mine(rows).chunk(MICROBATCHES) for rows in data(dist.get_world_size()))
        self.inputs: dict[tuple[int, int], Tensor] = {(0, m): x for m, x in enumerate(inputs)}
        self.targets = targets
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.backwards_left = [MICROBATCHES] * len(chunks)

    def run(self, order: list[Action]) -> None:
        for kind, chunk, microbatch in order:
            (self.forward if kind == "forward" else self.backward)(chunk, microbatch)

    def forward(self, chunk: int, m: int) -> None:
        output = self.chunks[chunk](self.inputs[chunk, m])
        if chunk + 1 < len(self.chunks):
            self.inputs[chunk + 1, m] = output.detach().requires_grad_()
        else:
            output = F.mse_loss(output, self.targets[m]) / MICROBATCHES
        self.outputs[chunk, m] = output

    def backward(self, chunk: int, m: int) -> None:
        self.backwards_left[chunk] -= 1
        for switch in self.switches:
            getattr(self.chunks[chunk], switch)(self.backwards_left[chunk] == 0)
        last = chunk + 1 == len(self.chunks)
        gradient = None if last else self.inputs[chunk + 1, m].grad
        torch.autograd.backward(self.outputs.pop((chunk, m)), gradient)


def scheduled_by_hand(api: str, order: str, switches: str) -> list[dict[str, Tensor]]:
    chunks = [shard_chunk(chunk, api) for chunk in make_chunks(2)]
    if api == FULLSHARD:  # with torch 2.13 one chunk's last backward ends the other's
        share_comm_ctx(chunks)
    for _ in range(2):  # the second step has a forecast, and must not see the first one's state
        for chunk in chunks:
            chunk.zero_grad()
        Pipeline(chunks, SWITCHES[switches]).run(ORDERS[order])
    if api == FULLSHARD:
        states = {state_of(module) for chunk in chunks for module in chunk.modules()} - {None}
        assert len(states) == 4 and not any(state.gathered for state in states)
    return [gradients(chunk) for chunk in chunks]


def both_scheduled_by_hand(order: str, switches: str) -> None:
    ours = scheduled_by_hand(FULLSHARD, order, switches)
    expected = gradients_of_one_process(2, dist.get_world_size())
    assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    assert_equal(ours, scheduled_by_hand(TORCH, order, switches))


@pytest.mark.parametrize(
    ("order", "switches"),
    [
        ("one forward, one backward", "reduced every time"),
        ("one forward, one backward", "reduced and waited for once, kept"),
        ("one forward, one backward", "waited for once"),
        ("one forward, one backward", "kept"),
        ("all forwards, then all backwards", "reduced once, waited for once"),
        ("all backwards in the other order", "reduced once"),
    ],
)
def test_two_chunks_on_a_rank_give_the_gradients_of_one_process(
    world, order: str, switches: str
) -> None:
    world(2).run(both_scheduled_by_hand, order, switches)
