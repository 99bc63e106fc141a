"""A transport that the library does not have: gradients go through host memory and gloo. It is what makes the seam a seam.

Everything that knows of it is `HostMemory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, Work

from fullshard.engine.state import state_of
from fullshard.transport.tags import Tag
from fullshard.transport.transports import Transport
from tests.helpers.compare import assert_equal
from tests.helpers.models import make_decoder
from tests.helpers.training import FULLSHARD, Run, batch_of, gradients, mine, shard


class HostMemory(Transport):
    """Copies to the host, gloo's collective, and copies back: the host waits, so nothing is in flight afterwards."""

    capturable = False
    calls = 0

    def gather(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], tag: Tag, *, async_op: bool
    ) -> Work | None:
        raise NotImplementedError

    def reduce(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        op: ReduceOp.RedOpType,
        tag: Tag,
        *,
        async_op: bool,
    ) -> Work | None:
        for output, tensor in zip(outputs, inputs, strict=True):
            own = tensor.to("cpu", copy=True).view(-1)
            reduced = own.new_empty(output.numel())
            dist.reduce_scatter_tensor(reduced, own, op=op, group=self.group)
            output.copy_(reduced.view_as(output))
        self.calls += len(outputs)
        return None


def reduced_through_the_host(run: Run, in_place: bool) -> None:
    expected, model = shard(make_decoder(), FULLSHARD, run), shard(make_decoder(), FULLSHARD, run)
    transports = []
    for module in (*model.blocks, model):
        for group in state_of(module).groups:
            transport: Any = HostMemory(group.mesh_info.shard_peers, group.device)
            transport.in_place = in_place
            group.reduce_with(transport)
            transports.append(transport)
    for step in range(2):  # the second is added to the first
        for each in (expected, model):
            each(mine(batch_of(step))).backward()
    assert_equal(gradients(model), gradients(expected))
    assert all(transport.calls >= 2 for transport in transports)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    "dtypes", [{}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}]
)
def test_gradients_go_through_the_host_bit_for_bit(world, dtypes: Any, in_place: bool) -> None:
    world(2).run(reduced_through_the_host, Run(**dtypes), in_place)
