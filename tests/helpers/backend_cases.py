"""Training in many configurations, as ranks of any backend: on NCCL with a GPU, on the stand-in for it without.

A case is a function of a device that ranks call. It returns the losses of some steps, averaged over all ranks, which must
be those of one process (`alone`). With `EXACT` cases there is something else to compare, and the case itself does so.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fullshard
from benchmarks.number_models import TwoPartWeight
from fullshard import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    checkpoint,
    fully_shard,
)
from fullshard.optim import ShardedOptimizer
from fullshard.wrap import ModuleWrapPolicy

WIDTH, ROWS, STEPS = 16, 8, 4
LR = 0.05

Case = Callable[[str], list[float]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


def make_model(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(3)], nn.Linear(WIDTH, 1)).to(device)


def batch_of(step: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator).to(device)


def mine(batch: Tensor, parts: int, part: int) -> Tensor:
    return batch.chunk(parts)[part]


def mean(loss: Tensor) -> float:
    """Return a loss, averaged over all ranks."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def train(
    model: Any,
    device: str,
    *,
    parts: int | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    steps: range = range(STEPS),
) -> list[float]:
    """Train for some steps; each of ``parts`` data-parallel ranks has a part of each batch."""
    parts = dist.get_world_size() if parts is None else parts
    part = dist.get_rank() * parts // dist.get_world_size()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    losses = []
    for step in steps:
        loss = model(mine(batch_of(step, device), parts, part)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
    return losses


@functools.cache
def alone(adamw: bool = False) -> list[float]:
    """Return the losses of one process without sharding."""
    model = make_model("cpu")
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=LR)
        if adamw
        else torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    )
    losses = []
    for step in range(STEPS):
        loss = model(batch_of(step, "cpu")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def shard(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for each in (*model, model):
        fully_shard(each, **options)
    return model


def fully_sharded(device: str) -> list[float]:
    return train(shard(make_model(device)), device)


def wrapped(device: str, **options: Any) -> list[float]:
    model = FullyShardedDataParallel(
        make_model(device),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device(device),
        **options,
    )
    return train(model, device)


def wrapped_original(device: str) -> list[float]:
    return wrapped(device, use_orig_params=True)


def hybrid(device: str) -> list[float]:
    mesh = init_device_mesh(
        device, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
    )
    return train(shard(make_model(device), mesh=mesh), device)


def on_the_wire(device: str) -> list[float]:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, wire_dtype=torch.bfloat16
    )
    model = shard(make_model(device), mp_policy=policy)
    return train(model, device)


def fused_gradients(device: str) -> list[float]:
    return train(shard(make_model(device), fuse_gradients=True), device)


def offloaded(device: str) -> list[float]:
    policy = CPUOffloadPolicy(pin_memory=device != "cpu")
    return train(shard(make_model(device), offload_policy=policy), device)


def tensor_parallel(device: str) -> list[float]:
    world = dist.get_world_size()
    mesh = init_device_mesh(device, (world // 2, 2), mesh_dim_names=("dp", "tp"))
    model = make_model(device)
    for block in model[:-1]:
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    shard(model, mesh=mesh["dp"])
    return train(model, device, parts=world // 2)


def over_replicas(device: str) -> list[float]:
    mesh = init_device_mesh(
        device, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
    )
    model = shard(make_model(device), mesh=mesh)
    optimizer = ShardedOptimizer(
        torch.optim.AdamW, model.parameters(), shard_over_replicas=True, lr=LR
    )
    return train(model, device, optimizer=optimizer)


def skipped(device: str) -> list[float]:
    """The last rank skips a block that adds nothing: its gradients are zero where the others' count."""
    model = shard(make_model(device))
    alone_there = dist.get_rank() == dist.get_world_size() - 1
    for step in range(2):
        x = batch_of(step, device)
        h = model[0].skip_forward() + x if alone_there else model[0](x)
        h.square().mean().backward()
        grad = model[0].first.weight.grad.full_tensor()
        expected = make_model(device)[0]
        expected(x).square().mean().backward()
        share = 1 - 1 / dist.get_world_size()
        torch.testing.assert_close(grad, expected.first.weight.grad * share)
        model.zero_grad()
    return []


def joined(device: str) -> list[float]:
    model = shard(make_model(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    batches = [batch_of(step, device) for step in range(2 + dist.get_rank())]
    seen = 0
    with fullshard.join(model, batches) as own:
        for batch in own:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += own.active
    assert seen == len(batches)
    return []


def guarded(device: str) -> list[float]:
    """A step in which a rank raises is skipped on all; the steps after it are those of a run without it."""
    model = shard(make_model(device))
    with fullshard.guarded_step(model, on_error="skip") as step:
        loss = model(batch_of(99, device)).square().mean()
        if dist.get_rank() == 1:
            raise ValueError("a bad sample")
        loss.backward()
    assert step.failure is not None and step.failure.rank == 1
    return train(model, device)


def checkpointed(device: str) -> list[float]:
    """Two steps, a checkpoint, a new model, and two steps more."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, device=torch.device(device))
    model = shard(make_model(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    losses = train(model, device, optimizer=optimizer, steps=range(2))
    checkpoint.save(Path(str(folder[0])) / "saved", model, optimizer)
    model = shard(make_model(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    checkpoint.load(Path(str(folder[0])) / "saved", model, optimizer)
    return losses + train(model, device, optimizer=optimizer, steps=range(2, STEPS))


def save_half(folder: Path, device: str) -> list[float]:
    """Two steps and a checkpoint, for `resume_half` on other ranks."""
    model = shard(make_model(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    losses = train(model, device, optimizer=optimizer, steps=range(2))
    checkpoint.save(folder, model, optimizer)
    return losses


def resume_half(folder: Path, device: str) -> list[float]:
    model = shard(make_model(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    checkpoint.load(folder, model, optimizer)
    return train(model, device, optimizer=optimizer, steps=range(2, STEPS))


def graphed(device: str) -> list[float]:
    """On a GPU, two steps are captured and replayed; on a CPU, all run eagerly."""
    model = shard(make_model(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, fused=True)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    world, rank = dist.get_world_size(), dist.get_rank()
    inputs = [mine(batch_of(number, device), world, rank) for number in range(STEPS)]
    call = fullshard.graphed(step, (inputs[0],), model=model, optimizer=optimizer, warmup=2)
    losses = [mean(call(x)) for x in inputs]
    assert call.num_graphs == (device != "cpu")
    return losses  # with a living graph: the process group is destroyed next


def by_extension(device: str) -> list[float]:
    """Weights gather themselves, as two halves in bf16."""
    model = make_model(device)
    for block in model[:-1]:
        for linear in block.children():
            linear.weight = nn.Parameter(TwoPartWeight(linear.weight.detach().clone()))
    return train(shard(model), device)


def pipelined(device: str) -> list[float]:
    """Two stages, each sharded over half of the ranks, by torch's schedule."""
    mesh = init_device_mesh(device, (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    index, parts = mesh["pp"].get_local_rank(), mesh["dp"].size()
    part = nn.Sequential(*[*make_model(device)][2 * index : 2 * index + 2])
    shard(part, mesh=mesh["dp"])
    rows = ROWS // parts // 2
    hidden, out = (
        torch.empty(rows, width, device=device, requires_grad=True) for width in (WIDTH, 1)
    )
    stage = PipelineStage(
        part,
        index,
        2,
        torch.device(device),
        input_args=hidden if index else hidden.detach(),
        output_args=out if index else hidden,
        group=mesh["pp"].get_group(),
    )
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=lambda y, _: y.square().mean())
    optimizer = torch.optim.SGD(part.parameters(), lr=LR, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x = mine(batch_of(step, device), parts, mesh["dp"].get_local_rank())
        found: list[Tensor] = []
        if index == 0:
            schedule.step(x)
        else:
            schedule.step(target=x, losses=found)
        optimizer.step()
        optimizer.zero_grad()
        own = torch.stack(found).mean() if found else torch.zeros((), device=device)
        losses.append(2 * mean(own))  # half of the ranks have none
    return losses


def is_close(found: list[float], case: Case) -> bool:
    """Return whether losses are those of one process; where weights are rounded, roughly."""
    expected = alone(adamw=case is over_replicas)[: len(found)]
    tolerance = {on_the_wire: 0.02, by_extension: 1e-3}.get(case, 1e-4)
    return all(
        math.isclose(one, other, rel_tol=tolerance)
        for one, other in zip(found, expected, strict=True)
    )


CASES: tuple[Case, ...] = (
    fully_sharded,
    wrapped,
    wrapped_original,
    hybrid,
    on_the_wire,
    fused_gradients,
    offloaded,
    tensor_parallel,
    over_replicas,
    skipped,
    joined,
    guarded,
    checkpointed,
    graphed,
    by_extension,
    pipelined,
)
