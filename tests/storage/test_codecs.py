"""A codec that the library does not have: int8 with a scale for each row. It is what makes the seam a seam.

Everything that knows of it is `Int8Rows`. The same computation in one process rounds the weights itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.stream_settings import BF16, decoder, sharded, train
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.checks.stream_check import StreamCheck
from fullshard.engine.known_groups import groups_of
from fullshard.layout.segments import Layout
from fullshard.storage.codecs import Recoded
from fullshard.transport.comm_objects import DefaultAllGather
from tests.helpers.threads import run_threads

WORLD = 4


class Int8Rows(Recoded):
    """Each row of a shard as whole numbers up to 127, and the float that they are multiplied by; biases are one row each."""

    def _shapes(self, layout: Layout) -> Iterator[tuple[int, int]]:
        """Yield rows and columns of each parameter's largest piece, padding included."""
        for slot, segment in zip(layout.slots, layout.segments, strict=True):
            columns = slot.shape[1] if len(slot.shape) > 1 else 1
            yield segment.piece_numel // columns, columns

    def row_nbytes(self, layout: Layout) -> int:
        return sum(rows * (4 + columns) for rows, columns in self._shapes(layout))

    def _parts(self, row: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the scales and the numbers of each parameter; all scales come first, where floats are aligned."""
        shapes, start = [*self._shapes(self.layout)], 0
        numbers = 4 * sum(rows for rows, _ in shapes)
        for rows, columns in shapes:
            scales = row[start : start + 4 * rows].view(torch.float32)
            yield scales, row[numbers : numbers + rows * columns].view(torch.int8).view(rows, -1)
            start, numbers = start + 4 * rows, numbers + rows * columns

    def encode_row(self, shard: Sequence[Tensor], row: Tensor) -> None:
        for piece, (scales, numbers) in zip(shard, self._parts(row), strict=True):
            values = piece.view(numbers.shape)
            scales.copy_(scales_of(values))
            numbers.copy_((values / scales[:, None]).round_())

    def decode_rows(self, rows: Tensor) -> None:
        parts = [[*self._parts(row)] for row in rows.unbind()]
        for index, param in enumerate(self.params):
            whole = torch.cat(
                [numbers * scales[:, None] for scales, numbers in zip_of(parts, index)]
            )
            param.copy_(whole.flatten()[: param.numel()].view(param.shape))


def zip_of(parts: list[list[tuple[Tensor, Tensor]]], index: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one parameter's parts of all ranks."""
    return (of_rank[index] for of_rank in parts)


def scales_of(values: Tensor) -> Tensor:
    return values.abs().amax(1).div_(127).clamp_min_(1e-12)


# --- the same in one process -----------------------------------------------------------------------------


def rounded(param: Tensor) -> Tensor:
    """What every rank computes with."""
    values = param.detach().view(param.shape[0], -1)
    scales = scales_of(values)[:, None]
    return ((values / scales).round() * scales).view(param.shape)


def model_of(frozen: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 5))
    if frozen:
        model[0].requires_grad_(False)
    return model


def batch(step: int) -> Tensor:
    return torch.randn(2 * WORLD, 6, generator=torch.Generator().manual_seed(step))


def reference(dtype: torch.dtype, frozen: bool) -> list[Tensor]:
    model = model_of(frozen)
    for step in range(3):
        computing = copy.deepcopy(model)
        for param, original in zip(computing.parameters(), model.parameters(), strict=True):
            param.data = rounded(original).to(dtype)
        losses = [computing(part.to(dtype)).float().square().sum() for part in batch(step).split(2)]
        (sum(losses[1:], losses[0]) / WORLD).backward()
        with torch.no_grad():
            for param, other in zip(model.parameters(), computing.parameters(), strict=True):
                if other.grad is not None:
                    param.sub_(other.grad, alpha=0.05)
    return [param.detach() for param in model.parameters()]


def on_ranks(dtype: torch.dtype, setting: str) -> list[Tensor]:
    model: Any = model_of(setting == "frozen")
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=True)
    for module in (model[0], model[2], model):
        fully_shard(
            module, mp_policy=policy, reshard_after_forward=2 if setting == "kept" else True
        )
    for group in groups_of(model.parameters()):
        group.set_codec(Int8Rows)
        if setting == "comm object":
            group.set_custom_all_gather(DefaultAllGather())
    for step in range(3):
        mine = batch(step).split(2)[dist.get_rank()]
        model(mine).float().square().sum().backward()
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param -= 0.05 * param.grad
                    param.grad = None
    assert all(group.held_bytes == 0 for group in groups_of(model.parameters()))
    return [param.full_tensor().detach() for param in model.parameters()]


@pytest.mark.parametrize("setting", ["plain", "frozen", "kept", "comm object"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_gathered_as_int8_train_as_in_one_process(
    world, dtype: torch.dtype, setting: str
) -> None:
    expected = reference(dtype, setting == "frozen")
    for found in world(WORLD).run(on_ranks, dtype, setting):
        tolerance = (
            {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 0.02, "atol": 2e-3}
        )
        for each, other in zip(found, expected, strict=True):
            torch.testing.assert_close(each, other, **tolerance)


def bytes_received(models: list[Any]) -> tuple[int, int]:
    (group,) = groups_of(fully_shard(models[dist.get_rank()]).parameters())
    before = group.routes.traffic().received
    group.set_codec(Int8Rows)
    coded = group.routes.traffic().received
    group.set_codec(None)
    assert group.routes.traffic().received == before
    return before, coded


def test_int8_sends_a_quarter_and_can_be_taken_off_again() -> None:
    models = [nn.Linear(64, 96) for _ in range(WORLD)]
    for plain, coded in run_threads(WORLD, bytes_received, models):
        assert coded < 0.3 * plain


def test_encoding_and_decoding_are_ordered_on_streams() -> None:
    with StreamCheck(8, raises=False) as check:
        model = sharded(decoder(), mp_policy=BF16)
        for group in groups_of(model.parameters()):
            group.set_codec(Int8Rows)
        train(model, microbatches=2)
    assert check.accesses > 300
    assert not check.races, check.text
