"""No more collectives than torch's FSDP2 issues, and no more bytes but for alignment."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fullshard.layout.segments
from fullshard import (
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    torch_border,
)
from fullshard.transport import comm_objects
from tests.helpers.models import ModelOptions, make_decoder, tokens_for
from tests.helpers.traffic import ALL_REDUCE, GATHER, REDUCE_SCATTER, Traffic
from tests.helpers.training import FULLSHARD, TORCH, Run, forward_and_backward, gradients, shard
from tests.helpers.wrapping import library, wrap_blocks

Sizes = dict[str, Counter[int]]
"""By kind of collective: how many there were of each number of bytes."""


def traffic_of_a_step(api: str, run: Run) -> Sizes:
    """Of the second step, when all orders are known; all microbatches of it."""
    model = shard(make_decoder(run.model), api, run)
    for step in range(2):
        with Traffic() as traffic:
            forward_and_backward(model, run, step)
    assert all(param.grad is not None for param in model.parameters())
    return {kind: traffic.sizes(kind) for kind in (GATHER, REDUCE_SCATTER, ALL_REDUCE)}


def traffic_in_place(run: Run) -> Sizes:
    """The same with every parameter gathered in place, as large ones are."""
    fullshard.layout.segments.IN_PLACE_FROM, usual = 0, fullshard.layout.segments.IN_PLACE_FROM
    try:
        return traffic_of_a_step(FULLSHARD, run)
    finally:
        fullshard.layout.segments.IN_PLACE_FROM = usual


def shard_sizes(run: Run, dtype: torch.dtype | None) -> dict[int, int]:
    """Bytes of a rank's shard of each group as torch sends it: what it has with aligned parameters."""
    ranks = dist.get_world_size() // run.replicas
    unit = fullshard.layout.segments.ROW_ALIGNMENT
    groups: dict[str, list[tuple[int, int]]] = {}
    for name, param in make_decoder(run.model).named_parameters():
        group = name.rsplit(".", 2)[0] if run.group_blocks and name.startswith("blocks") else ""
        rows = fullshard.layout.segments.chunk_size(len(param), ranks)
        numel, itemsize = rows * param[0].numel(), (dtype or param.dtype).itemsize
        sizes = numel * itemsize, -(-numel // unit) * unit * itemsize
        groups.setdefault(group, []).append(sizes)
    return {
        sum(exact for exact, _ in sizes): sum(aligned for _, aligned in sizes)
        for sizes in groups.values()
    }


def no_more_than_torch(run: Run, also_in_place: bool) -> list[int]:
    """Compare, and return how many collectives of each kind there are."""
    ours, theirs = (traffic_of_a_step(api, run) for api in (FULLSHARD, TORCH))
    ranks = dist.get_world_size() // run.replicas
    gathered = {
        ranks * packed: ranks * aligned
        for packed, aligned in shard_sizes(run, run.param_dtype).items()
    }
    follows = torch_border.REDUCES_IN_GRAD_DTYPE  # without a reduce dtype, that of the parameters
    reduced = shard_sizes(run, run.reduce_dtype or (None if follows else run.param_dtype))
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
    if also_in_place:
        in_place = traffic_in_place(run)
        assert in_place[GATHER] <= theirs[GATHER], (in_place[GATHER], theirs[GATHER])
    return [sizes.total() for sizes in ours.values()]


BF16 = Run(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
RUNS = {
    "plain": Run(),
    "one group": Run(group_blocks=False),
    "kept after forward": Run(reshard_after_forward=False),
    "released after forward, root too": Run(reshard_after_forward=True),
    "bf16, reduced in fp32": BF16,
    "bf16, reduced in bf16": Run(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    "bf16, reduced as by default": Run(param_dtype=torch.bfloat16),
    "accumulation": Run(microbatches=3),
    "accumulation, reduced every time": Run(microbatches=3, sync_every_microbatch=True),
    "accumulation, kept": Run(
        microbatches=3, keep_between_microbatches=True, reshard_after_forward=False
    ),
    "checkpointed": Run(model=ModelOptions(checkpointing="non_reentrant")),
    "checkpointed, reentrant": Run(model=ModelOptions(checkpointing="reentrant")),
    "blocks twice": Run(model=ModelOptions(repeat=2)),
}

IN_PLACE = ("plain", "one group", "bf16, reduced in fp32", "accumulation, kept")
"""Runs that are repeated with parameters that are gathered in place. What is gathered when does not depend on it."""
EXPECTED = {
    "plain": [7, 4, 0],  # three blocks twice, the root once
    "kept after forward": [4, 4, 0],
    "accumulation": [21, 4, 0],
    "accumulation, kept": [4, 4, 0],  # for three microbatches
}
"""Numbers of all-gathers, reduce-scatters and all-reduces: as many as groups."""


@pytest.mark.parametrize("name", RUNS)
def test_collectives_are_no_more_and_no_larger_than_torch_s(world, name: str) -> None:
    numbers = world(2).run(no_more_than_torch, RUNS[name], name in IN_PLACE)
    if name in EXPECTED:
        assert numbers == [EXPECTED[name]] * 2


def test_collectives_are_no_more_and_no_larger_than_torch_s_with_hsdp(world) -> None:
    world(4).run(no_more_than_torch, Run(replicas=2, microbatches=2), True)


class Uncalled(comm_objects.DefaultReduceScatter, comm_objects.DefaultAllGather):  # type: ignore[misc]
    """A comm object for axes with nobody to communicate with."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("there is nobody to communicate with")


def alone(low: bool) -> dict[str, tuple[Any, Any]]:
    """Models that shard over one rank, and how many all-reduces a step has; with ``low`` they compute in bf16."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if low else None, reduce_dtype=torch.float32
    )
    precision = MixedPrecision(param_dtype=torch.bfloat16 if low else None)
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)

    def apis(mesh: Any) -> Any:
        model: Any = make_decoder()
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        return model

    def wrapped(**options: Any) -> Any:
        return wrap_blocks(library(FULLSHARD), make_decoder(), mixed_precision=precision, **options)

    commed = apis(mesh["shard"])
    for module in commed.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(Uncalled())
            module.set_custom_reduce_scatter(Uncalled())
    commed.set_separate_reduce_scatter_group()
    hybrid, groups = ShardingStrategy.HYBRID_SHARD, len(commed.blocks) + 1
    return {
        "fully_shard": (apis(mesh["shard"]), 0),
        "with comm objects": (commed, 0),
        "HSDP": (apis(mesh), groups if ranks > 1 else 0),
        "flat": (wrapped(process_group=group), 0),
        "pieces": (wrapped(process_group=group, use_orig_params=True), 0),
        "hybrid": (
            wrapped(sharding_strategy=hybrid, device_mesh=mesh, use_orig_params=True),
            groups if ranks > 1 else 0,
        ),
    }


def nothing_is_sent_on_an_axis_of_one_rank() -> None:
    for low in (False, True):
        expected = make_decoder()
        expected(tokens_for(0, 2)).backward()
        for name, (model, all_reduces) in alone(low).items():
            with Traffic() as traffic:
                model(tokens_for(0, 2)).backward()
                model.zero_grad()
                loss = model(tokens_for(0, 2))
                loss.backward()
            kinds = {each for each in traffic.names if not each.startswith(ALL_REDUCE)}
            assert not kinds, (name, low, kinds)
            assert len(traffic.names) == 2 * all_reduces, (name, low, traffic.names)
            norm = torch.stack([each.norm() for each in gradients(model).values()]).norm()
            reference = torch.stack([p.grad.norm() for p in expected.parameters()]).norm()
            assert torch.isclose(norm, reference, rtol=0.05 if low else 1e-5), (name, low)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_axis_of_one_rank_communicates_nothing(world, ranks: int) -> None:
    world(ranks).run(nothing_is_sent_on_an_axis_of_one_rank)
