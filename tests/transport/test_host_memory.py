"""A transport that the library does not have: messages go through host memory and gloo. It is what makes the seam a seam.

Everything that knows of it is `HostMemory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp, Work

from fullshard import fully_shard
from fullshard.engine.known_groups import groups_of
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

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        ranks = dist.get_process_group_ranks(group)
        is_gloo = dist.get_backend(group) == "gloo"
        self._gloo = group if is_gloo else dist.new_group(ranks, backend="gloo")

    def gather(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], tag: Tag, *, async_op: bool
    ) -> Work | None:
        for output, own in zip(outputs, inputs, strict=True):
            gathered = torch.empty_like(output, device="cpu")
            dist.all_gather_into_tensor(gathered, own.to("cpu", copy=True), group=self._gloo)
            output.copy_(gathered)
        HostMemory.calls += len(outputs)
        return None

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
            dist.reduce_scatter_tensor(reduced, own, op=op, group=self._gloo)
            output.copy_(reduced.view_as(output))
        HostMemory.calls += len(outputs)
        return None


def trained(through_host: bool, reshard_after_forward: bool | int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 5))
    for module in (model[0], model[2], model):
        fully_shard(module, reshard_after_forward=reshard_after_forward)
    for group in groups_of(model.parameters()) if through_host else ():
        peers = group.mesh_info.shard_peers
        assert peers is not None
        group.gather_with(HostMemory(peers, group.device))
    before = HostMemory.calls
    for step in range(3):
        generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
        model(torch.randn(2, 6, generator=generator)).square().sum().backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.05 * param.grad
                param.grad = None
    # Two groups in forward; one of them again in backward, or both where nothing is kept at the end of forward.
    assert HostMemory.calls - before >= (3 * 3 if through_host else 0)
    assert through_host or HostMemory.calls == before
    return {name: param.full_tensor().detach() for name, param in model.named_parameters()}


def gathers_through_the_host(reshard_after_forward: bool | int) -> None:
    expected, found = (trained(flag, reshard_after_forward) for flag in (False, True))
    assert_equal(found, expected)


def test_gathers_go_through_the_host_bit_for_bit(world) -> None:
    world(2).run(gathers_through_the_host, True)


def test_backward_gathers_through_the_host_what_forward_has_kept(world) -> None:
    world(4).run(gathers_through_the_host, 2)


def reduced_through_the_host(run: Run, in_place: bool) -> None:
    expected, model = shard(make_decoder(), FULLSHARD, run), shard(make_decoder(), FULLSHARD, run)
    before = HostMemory.calls
    for module in (*model.blocks, model):
        for group in state_of(module).groups:
            transport: Any = HostMemory(group.mesh_info.shard_peers, group.device)
            transport.in_place = in_place
            group.reduce_with(transport)
    for step in range(2):  # the second is added to the first
        for each in (expected, model):
            each(mine(batch_of(step))).backward()
    assert_equal(gradients(model), gradients(expected))
    assert HostMemory.calls - before >= 2 * len(model.blocks)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    "dtypes", [{}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}]
)
def test_gradients_go_through_the_host_bit_for_bit(world, dtypes: Any, in_place: bool) -> None:
    world(2).run(reduced_through_the_host, Run(**dtypes), in_place)
