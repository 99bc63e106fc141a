"""`fullshard.debug("streams")` around steps on a GPU: real streams and the real allocator, and no race is found but a made one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.comm import DefaultAllGather
from tests.helpers.fake import fake_world

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("reduce_scatter_that_reduces")]


class OnAnotherStream(DefaultAllGather):
    """An all-gather on a stream of its own, for which no stream waits."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        with torch.cuda.stream(self.stream):
            return super().__call__(output_tensor, input_tensor, group, async_op)


def steps(comm: Any = None, **options: Any) -> None:
    mesh = init_device_mesh("cuda", (4,))
    model: Any = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).cuda()
    for layer in (*model, model):
        fullshard.fully_shard(layer, mesh=mesh, **options)
        if comm is not None:
            layer.set_custom_all_gather(comm)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(8, 256, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_the_steps_of_a_model_have_no_race(kept: bool, fused: bool) -> None:
    policy = fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with fake_world(4), fullshard.debug("streams") as check:
        steps(reshard_after_forward=not kept, mp_policy=policy, fuse_gradients=fused)
    assert check is not None
    assert check.accesses > 500 and check.races == []


def test_a_comm_object_on_another_stream_is_found() -> None:
    with fake_world(4), pytest.raises(fullshard.StreamOrderError, match="OnAnotherStream"):
        with fullshard.debug("streams"):
            steps(OnAnotherStream())
