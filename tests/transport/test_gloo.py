"""Gathers on gloo are never coalesced: [Note: names of gloo's work] in comm.py.

What happens otherwise, with torch 2.13 alone; on two idle cores malloc aborts in the first second:

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    group, own, total = dist.group.WORLD, torch.ones(4), torch.ones(4)
    outputs = [torch.empty(4) for _ in range(32)]
    while True:
        works = []
        for output in outputs:
            works.append(group.allgather_into_tensor_coalesced([output], [own]))
            works.append(group.allreduce([total]))
        for work in works:
            work.wait()

With `_allgather_base` in its place it runs on. As chance decides when, the tests below ask for the
calls instead, and so do the random configurations, of whole models.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fullshard.transport import collectives
from fullshard.transport.tags import tag
from tests.helpers.traffic import GATHER, Traffic

NOT_COALESCED = "allgather_base"


def gather_in_place(num_messages: int, async_op: bool) -> None:
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    sizes = [3 + index for index in range(num_messages)]
    outputs = [torch.zeros(size * world, dtype=torch.uint8) for size in sizes]
    inputs = [output.chunk(world)[rank] for output in outputs]
    for index, own in enumerate(inputs):
        own.fill_(10 * index + rank)
    with Traffic() as traffic:
        work = collectives.all_gather(outputs, inputs, group, tag("all-gather"), async_op=async_op)
    assert traffic.sizes(NOT_COALESCED) == traffic.sizes(GATHER) == {sum(sizes) * world: 1}
    assert (work is not None) is async_op
    if work is not None:
        work.wait()
    for index, (size, output) in enumerate(zip(sizes, outputs, strict=True)):
        expected = [10 * index + sender for sender in range(world) for _ in range(size)]
        assert output.tolist() == expected


@pytest.mark.parametrize("num_messages", [1, 3])
@pytest.mark.parametrize("async_op", [False, True])
def test_messages_of_one_gather_travel_as_one_and_arrive(
    world, num_messages: int, async_op: bool
) -> None:
    world(3).run(gather_in_place, num_messages, async_op)
