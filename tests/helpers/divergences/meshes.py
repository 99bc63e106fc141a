"""Divergences of ranks in meshes: hybrid sharding, tensor parallel, pipelines."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fullshard import ShardingStrategy
from tests.helpers.divergences import (
    WIDTH,
    WRAPPER,
    Block,
    Net,
    Training,
    device_type,
    kind,
    shard,
    wrap,
)
from tests.helpers.divergences.exits import raise_mishap
from tests.helpers.divergences.legal import SLOW_S
from tests.helpers.rank_programs import Rank

TORCH = "DivergenceError or RuntimeError"
"""The ends of ranks that may wait in collectives of torch's own."""


def square(*names: str) -> DeviceMesh:
    return init_device_mesh(device_type(), (2, 2), mesh_dim_names=names)


# --- hybrid sharding ----------------------------------------------------------------------------------------------


@kind(ranks=4, names=["layers.1"])
def a_hybrid_rank_skips_a_layer(me: Rank) -> None:
    run = Training(me, shard(Net(), mesh=square("replicate", "shard")))
    run.steps(2)
    if me.diverges():
        run.net.order.remove(1)
    run.go_on()


@kind(is_variant=True, ranks=4, odd=3, odd_ends="Mishap", names=["layers.1"])
def a_hybrid_rank_raises_in_forward(me: Rank) -> None:
    run = Training(me, shard(Net(), mesh=square("replicate", "shard")))
    run.steps(2)
    if me.diverges():
        run.net.layers[1].second.register_forward_pre_hook(raise_mishap)
    run.go_on()


@kind(ranks=4, odd=2, names=["layers", "all_reduce"])
def a_hybrid_rank_does_not_sum_over_replicas(me: Rank) -> None:
    run = Training(me, shard(Net(), mesh=square("replicate", "shard")))
    run.steps(2)
    if me.diverges():
        run.model.set_requires_all_reduce(False)
    run.go_on()


@kind(is_variant=True, ranks=4, odd=1, names=["layers", "mesh"])
def a_hybrid_rank_only_shards(me: Rank) -> None:
    mesh = square("replicate", "shard")
    Training(me, shard(Net(), mesh=mesh["shard"] if me.diverges() else mesh)).go_on()


@kind(ranks=4, odd=2, names=["layers", "shape"])
def a_replica_has_another_shape(me: Rank) -> None:
    # The replicas {0, 1} and {2, 3} shard alone, so only sums over replicas would meet.
    mesh = square("replicate", "shard")
    odd_replica = me.diverges() or me.number == 3 == me.odd + 1
    Training(me, shard(Net(width=5 if odd_replica else 4), mesh=mesh)).go_on()


@kind(
    api=WRAPPER,
    ranks=4,
    odd=3,
    odd_ends="DivergenceError or LifecycleError",
    names=["layers", "root"],
)
def a_wrapped_hybrid_rank_does_not_sync(me: Rank) -> None:
    mesh = square("replicate", "shard")
    strategy = ShardingStrategy.HYBRID_SHARD
    run = Training(me, wrap(Net(), device_mesh=mesh, sharding_strategy=strategy))
    run.steps(2)
    if me.diverges():
        with run.model.no_sync():
            run.loss().backward()
    else:
        run.loss().backward()
    run.update()
    run.go_on()


# --- tensor parallel ----------------------------------------------------------------------------------------------


def tensor_parallel(mesh: DeviceMesh) -> Net:
    net = Net()
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    for layer in net.layers:
        parallelize_module(layer, mesh["tp"], plan)
    return net


@kind(is_variant=True, others_end=TORCH, ranks=4, odd=3, odd_ends="Mishap", names=["layers.1"])
def a_tensor_parallel_rank_raises_in_forward(me: Rank) -> None:
    mesh = square("dp", "tp")
    run = Training(me, shard(tensor_parallel(mesh), mesh=mesh["dp"]))
    run.steps(2)
    if me.diverges():
        run.net.layers[1].second.register_forward_pre_hook(raise_mishap)
    run.go_on()


@kind(is_variant=True, others_end=TORCH, ranks=4, odd=2, names=["layers.1"])
def a_tensor_parallel_rank_skips_a_layer(me: Rank) -> None:
    mesh = square("dp", "tp")
    run = Training(me, shard(tensor_parallel(mesh), mesh=mesh["dp"]))
    run.steps(2)
    if me.diverges():
        run.net.order.remove(1)
    run.go_on()


@kind(
    is_variant=True, others_end=TORCH, ranks=2, names=["layers.1", "all_reduce"], odd_ends="Mishap"
)
def a_rank_with_only_tensor_parallel_neighbours_raises(me: Rank) -> None:
    mesh = init_device_mesh(device_type(), (1, me.world_size), mesh_dim_names=("dp", "tp"))
    run = Training(me, shard(tensor_parallel(mesh), mesh=mesh["dp"]))
    run.steps(2)
    if me.diverges():
        run.net.layers[1].second.register_forward_pre_hook(raise_mishap)
    run.go_on()


@kind(others_end=TORCH, ranks=4, odd=1, names=["layers.1"])
def a_rank_has_another_tensor_parallel_plan(me: Rank) -> None:
    mesh = square("dp", "tp")
    net = tensor_parallel(mesh)
    if me.diverges():
        net.layers[1] = Block()
    Training(me, shard(net, mesh=mesh["dp"])).go_on()


# --- pipelines ----------------------------------------------------------------------------------------------------


class Pipeline:
    """Two stages, each sharded over two ranks; or four, two on each rank, with a schedule that splits backward."""

    def __init__(self, microbatches: int, *, split_backward: bool = False) -> None:
        mesh = square("pp", "dp")
        place = mesh["pp"].get_local_rank()
        self.stage_numbers = (place, place + 2) if split_backward else (place,)
        self.num_stages = 2 * len(self.stage_numbers)
        self.models = [shard(Net(), mesh=mesh["dp"]) for _ in self.stage_numbers]
        stages = [
            PipelineStage(
                _Chunk(model),
                number,
                self.num_stages,
                torch.device(device_type()),
                group=mesh["pp"].get_group(),
            )
            for number, model in zip(self.stage_numbers, self.models, strict=True)
        ]
        self.schedule: Any
        if split_backward:
            self.schedule = ScheduleInterleavedZeroBubble(stages, microbatches, loss_fn=_loss)
        else:
            self.schedule = ScheduleGPipe(stages[0], microbatches, loss_fn=_loss)

    def step(self) -> None:
        batch = torch.randn(12, WIDTH)
        inputs = [batch] if 0 in self.stage_numbers else []
        last = self.num_stages - 1 in self.stage_numbers
        self.schedule.step(*inputs, target=batch if last else None)


class _Chunk(nn.Module):
    """A net whose output has the size of its input."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x).sum()


def _loss(output: Tensor, target: Tensor) -> Any:
    return (output - target).square().mean()


@kind(others_end=TORCH, odd_ends=TORCH, ranks=4, odd=1, names=["layers", "recv", "send", "wait"])
def a_pipeline_rank_has_more_microbatches(me: Rank) -> None:
    microbatches = 3 if me.diverges() else 2
    pipeline = Pipeline(microbatches)
    for _ in range(4):
        pipeline.step()
    dist.destroy_process_group()


@kind(others_end=TORCH, ranks=4, odd=2, odd_ends="RuntimeError", names=["layers.1"])
def a_pipeline_rank_raises_in_forward(me: Rank) -> None:
    pipeline = Pipeline(2)
    pipeline.step()
    if me.diverges():
        pipeline.models[0].layers[1].second.register_forward_pre_hook(raise_mishap)
    for _ in range(4):
        pipeline.step()
    dist.destroy_process_group()


@kind(legal=True, ranks=4, odd=2)
def a_stage_of_a_pipeline_is_slow(me: Rank) -> None:
    """Ranks of other stages run other modules, and wait for it in torch's messages."""
    pipeline = Pipeline(2, split_backward=True)
    pipeline.step()
    if me.diverges():
        time.sleep(SLOW_S)
    pipeline.step()
    dist.destroy_process_group()
