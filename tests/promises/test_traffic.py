"""No more collectives than torch's FSDP2 issues, and no more bytes but for alignment."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import fullshard.layout
from tests.helpers.models import ModelOptions, make_decoder
from tests.helpers.traffic import ALL_REDUCE, GATHER, REDUCE_SCATTER, Traffic
from tests.helpers.training import FULLSHARD, TORCH, Run, forward_and_backward, shard

Sizes = dict[str, Counter[int]]
"""By kind of collective: how many there were of each number of bytes."""


def traffic_of_a_step(api: str, run: Run) -> Sizes:
    """Of the third step, when all orders are known; all microbatches of it."""
    model = shard(make_decoder(run.model), api, run)
    for step in range(3):
        with Traffic() as traffic:
            forward_and_backward(model, run, step)
    assert all(param.grad is not None for param in model.parameters())
    return {kind: traffic.sizes(kind) for kind in (GATHER, REDUCE_SCATTER, ALL_REDUCE)}


def traffic_in_place(run: Run) -> Sizes:
    """The same with every parameter gathered in place, as large ones are."""
    fullshard.layout.IN_PLACE_FROM, usual = 0, fullshard.layout.IN_PLACE_FROM
    try:
        return traffic_of_a_step(FULLSHARD, run)
    finally:
        fullshard.layout.IN_PLACE_FROM = usual


def shard_sizes(run: Run, dtype: torch.dtype | None) -> dict[int, int]:
    """Bytes of a rank's shard of each group as torch sends it: what it has with aligned parameters."""
    ranks = dist.get_world_size() // run.replicas
    unit = fullshard.layout.ROW_ALIGNMENT
    groups: dict[str, list[tuple[int, int]]] = {}
    for name, param in make_decoder(run.model).named_parameters():
        group = name.rsplit(".", 2)[0] if run.group_blocks and name.startswith("blocks") else ""
        rows = fullshard.layout.chunk_size(len(param), ranks)
        numel, itemsize = rows * param[0].numel(), (dtype or param.dtype).itemsize
        sizes = numel * itemsize, -(-numel // unit) * unit * itemsize
        groups.setdefault(group, []).append(sizes)
    return {
        sum(exact for exact, _ in sizes): sum(aligned for _, aligned in sizes)
        for sizes in groups.values()
    }


def no_more_than_torch(run: Run) -> None:
    ours, theirs = (traffic_of_a_step(api, run) for api in (FULLSHARD, TORCH))
    ranks = dist.get_world_size() // run.replicas
    gathered = {
        ranks * packed: ranks * aligned
        for packed, aligned in shard_sizes(run, run.param_dtype).items()
    }
    reduced = shard_sizes(run, run.reduce_dtype or run.param_dtype)
    scattered = {ranks * packed: ranks * aligned for packed, aligned in reduced.items()}
    aligned = {
        GATHER: Counter(gathered[size] for size in theirs[GATHER].elements()),
        REDUCE_SCATTER: Counter(scattered[size] for size in theirs[REDUCE_SCATTER].elements()),
        ALL_REDUCE: Counter(reduced[size] for size in theirs[ALL_REDUCE].elements()),
    }
    assert theirs[GATHER] and theirs[REDUCE_SCATTER]
    assert bool(theirs[ALL_REDUCE]) is (run.replicas > 1)
    for kind, allowed in aligned.items():
        assert ours[kind] <= allowed, (kind, ours[kind], allowed)
    in_place = traffic_in_place(run)
    assert in_place[GATHER] <= theirs[GATHER], (in_place[GATHER], theirs[GATHER])


BF16 = Run(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
RUNS = {
    "plain": Run(),
    "one group": Run(group_blocks=False),
    "kept after forward": Run(reshard_after_forward=False),
    "released after forward, root too": Run(reshard_after_forward=True),
    "bf16, reduced in fp32": BF16,
    "bf16, reduced in bf16": Run(param_dtype=torch.bfloat16),
    "accumulation": Run(microbatches=3),
    "accumulation, reduced every time": Run(microbatches=3, sync_every_microbatch=True),
    "accumulation, kept": Run(
        microbatches=3, keep_between_microbatches=True, reshard_after_forward=False
    ),
    "checkpointed": Run(model=ModelOptions(checkpointing="non_reentrant")),
    "checkpointed, reentrant": Run(model=ModelOptions(checkpointing="reentrant")),
    "blocks twice": Run(model=ModelOptions(repeat=2)),
}
HSDP = {
    "plain": Run(replicas=2),
    "bf16, reduced in fp32": replace(BF16, replicas=2),
    "accumulation": Run(replicas=2, microbatches=2),
}


@pytest.mark.parametrize("name", RUNS)
def test_collectives_are_no_more_and_no_larger_than_torch_s(world, name: str) -> None:
    world(2).run(no_more_than_torch, RUNS[name])


@pytest.mark.parametrize("name", HSDP)
def test_collectives_are_no_more_and_no_larger_than_torch_s_with_hsdp(world, name: str) -> None:
    world(4).run(no_more_than_torch, HSDP[name])


def calls_of_a_step(run: Run) -> list[int]:
    return [sizes.total() for sizes in traffic_of_a_step(FULLSHARD, run).values()]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", [7, 4, 0]),  # three blocks twice, the root once
        ("kept after forward", [4, 4, 0]),
        ("accumulation", [21, 4, 0]),
        ("accumulation, kept", [4, 4, 0]),  # for three microbatches
    ],
)
def test_collectives_are_as_many_as_groups(world, name: str, expected: list[int]) -> None:
    assert world(2).run(calls_of_a_step, RUNS[name]) == [expected] * 2
