"""Gradients lie as the table in `reduce_buffer` says: each of its rows occurs in the test that it names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.stream_settings import decoder, sharded, step
from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.checks.stream_check import StreamCheck
from fullshard.comm import DefaultReduceScatter
from fullshard.engine import reduction_state
from fullshard.engine.state import state_of
from fullshard.storage import reduce_buffer
from fullshard.storage.reduce_buffer import Arrangement, Order
from tests.helpers.compare import assert_close

DESIGN = Path(__file__).parents[2] / "docs" / "design.md"


def occurring(run: Callable[[], None]) -> set[Arrangement]:
    """Return how gradients lay while a program ran."""
    found: set[Arrangement] = set()
    decide = reduce_buffer.arrangement

    def noting(*args: Any, **options: Any) -> Arrangement:
        found.add(decide(*args, **options))
        return decide(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction_state, "arrangement", noting)
        run()
    return found


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 2))


def inputs_of(rank: int) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))


def mean_gradients(model: nn.Module) -> list[Tensor]:
    """What a model that is not sharded has, of the inputs of all ranks."""
    for rank in range(dist.get_world_size()):
        (model(inputs_of(rank)).sum() / dist.get_world_size()).backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def train_rows(change: Callable[[Any], None] = lambda model: None, **options: Any) -> None:
    """Train a model of `fully_shard`, and compare."""
    model: Any = layers()
    reference = copy.deepcopy(model)
    for module in (model[0], model[2], model):
        fully_shard(module, **options)
    change(model)
    model(inputs_of(dist.get_rank())).sum().backward()
    found = [param.grad.full_tensor() for param in model.parameters()]
    assert_close(found, mean_gradients(reference), rtol=1e-6, atol=1e-6)


def gradients_lie_segment_after_segment() -> set[Arrangement]:
    def run() -> None:
        with StreamCheck(8):
            model = sharded(decoder())
            step(model)
            for module in (*model.blocks, model):
                (group,) = state_of(module).groups  # type: ignore[union-attr]
                (buffer,) = group.reduction.buffers()
                (bucket,) = buffer.planned.popitem()[1]
                assert len(bucket.inputs) == len(group.layout.segments)

    return occurring(run)


def gradients_lie_row_after_row() -> set[Arrangement]:
    return occurring(train_rows)


def gradients_lie_flat() -> set[Arrangement]:
    def run() -> None:
        model = layers()
        reference = copy.deepcopy(model)
        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        wrapped(inputs_of(dist.get_rank())).sum().backward()
        (param,) = wrapped.parameters()
        flat = torch.cat([gradient.flatten() for gradient in mean_gradients(reference)])
        assert param.grad is not None
        assert_close(param.grad, flat.chunk(2)[dist.get_rank()], rtol=1e-6, atol=1e-6)

    return occurring(run)


def gradients_are_staged() -> set[Arrangement]:
    def change(model: Any) -> None:
        for module in (model[0], model[2], model):
            if state_of(module).groups:  # type: ignore[union-attr]
                module.set_custom_reduce_scatter(DefaultReduceScatter())

    return occurring(lambda: train_rows(change))


def gradients_are_written_by_backward() -> set[Arrangement]:
    return occurring(lambda: train_rows(fuse_gradients=True))


Row = tuple[Callable[[], set[Arrangement]], set[Arrangement]]
ROWS: dict[str, Row] = {
    "SEGMENTS": (
        gradients_lie_segment_after_segment,
        {Arrangement(Order.SEGMENTS, is_staged=False, is_written=False)},
    ),
    "ROWS": (
        gradients_lie_row_after_row,
        {Arrangement(Order.ROWS, is_staged=False, is_written=False)},
    ),
    "FLAT": (gradients_lie_flat, {Arrangement(Order.FLAT, is_staged=False, is_written=False)}),
    "staged": (
        gradients_are_staged,
        {Arrangement(Order.ROWS, is_staged=True, is_written=False)},
    ),
    "written": (
        gradients_are_written_by_backward,
        {Arrangement(Order.SEGMENTS, is_staged=False, is_written=True)},
    ),
}
"""By row of the table: its test, and what occurs there."""


def occurs(name: str) -> None:
    run, expected = ROWS[name]
    assert run() >= expected


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_table_occurs_in_its_test(world, name: str) -> None:
    if name == "SEGMENTS":
        occurs(name)  # on a virtual device, which has a world of its own
    else:
        world(2).run(occurs, name)


def test_the_table_has_a_row_for_each_arrangement_and_is_that_of_the_page() -> None:
    assert reduce_buffer.__doc__ is not None
    lines = [line for line in reduce_buffer.__doc__.splitlines() if line.startswith("| ")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    assert {name: test for name, *_, test in table} == {
        name: f"`{run.__name__}`" for name, (run, _) in ROWS.items()
    }
    modifiers = [field.removeprefix("is_") for field in Arrangement._fields[1:]]
    assert [*ROWS] == [*(order.name for order in Order), *modifiers]
    page = DESIGN.read_text()
    for line in lines:
        assert line in page, line
