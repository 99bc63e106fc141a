"""The training loop of one rank, and an example of `fully_shard` in use.

The model is built without memory (meta), cut (`fully_shard`: one group per block and one for the
rest), given memory for this rank's pieces only (`to_empty`), and filled. From there on it is an
ordinary loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.train.batches import Batches, BatchPlan
from fullshard.train.built_in import starting_weights
from fullshard.train.memory import memory_bytes
from fullshard.train.model import Decoder, DecoderShape, next_byte_losses
from fullshard.train.options import TrainOptions
from fullshard.train.result import RunFacts, StepReport, TrainResult, Watcher
from fullshard.train.text import Text
from fullshard.train.weights import fill

MAX_GRADIENT_NORM = 1.0

WARM_UP_FRACTION = 0.1
"""Part of the steps that the warm-up takes."""

LAST_RATE_FRACTION = 0.1
"""Part of the highest learning rate that the cosine ends at."""


def train(
    options: TrainOptions, text: Text, *, device: torch.device, watcher: Watcher
) -> TrainResult:
    """Train over all ranks of the default process group.

    Every rank calls this with the same options and text, and all get the same losses.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = build_model(options, mesh)
    # Made while the parameters show their sharded face: those are the ones to update.
    optimizer = build_optimizer(options, model)
    batches = Batches(_batch_plan(options), text, device)
    facts = _facts(options, text, model, device)
    watcher.begin(facts)

    held_out_before = held_out_loss(model, batches)
    reports = []
    for report in train_steps(options, model, optimizer, batches):
        reports.append(report)
        watcher.step(report)
    rank_bytes = _bytes_at_rest(model, device)

    result = TrainResult(
        facts=facts,
        losses=tuple(report.loss for report in reports),
        held_out_before=held_out_before,
        held_out_after=held_out_loss(model, batches),
        tokens=reports[-1].tokens,
        seconds=reports[-1].seconds,
        unsharded_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        rank_bytes=rank_bytes,
    )
    watcher.end(result)
    return result


def build_model(options: TrainOptions, mesh: DeviceMesh) -> Decoder:
    """Return a sharded decoder with its starting weights; no rank ever holds all of it."""
    shape = DecoderShape(layers=options.layers, width=options.width, heads=options.heads)
    with torch.device("meta"):
        model = Decoder(shape)
    policy = MixedPrecisionPolicy()
    if options.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=mesh.device_type)
    fill(model, starting_weights(shape, seed=options.seed))
    return model


def build_optimizer(options: TrainOptions, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer over this rank's pieces of the parameters."""
    return torch.optim.AdamW(
        model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )


def train_steps(
    options: TrainOptions,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
) -> Iterator[StepReport]:
    """Take the steps of a run, and report each when it is done."""
    tokens = 0
    started = time.perf_counter()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        windows = batches.training(step)
        loss = next_byte_losses(model, windows).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
        tokens += options.batch * options.context * dist.get_world_size()
        yield StepReport(
            step=step + 1,
            loss=_mean_over_ranks(loss.detach()),
            tokens=tokens,
            seconds=time.perf_counter() - started,
            memory_bytes=memory_bytes(windows.device),
        )


def learning_rate(step: int, options: TrainOptions) -> float:
    """Return the rate of a step (from 0): a linear warm-up, then half a cosine down to a tenth."""
    warm_up = max(1, round(options.steps * WARM_UP_FRACTION))
    if step < warm_up:
        return options.lr * (step + 1) / warm_up
    done = (step - warm_up) / (options.steps - warm_up)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return options.lr * (LAST_RATE_FRACTION + (1 - LAST_RATE_FRACTION) * cosine)


@torch.no_grad()
def held_out_loss(model: nn.Module, batches: Batches) -> float:
    """Return the mean loss over the held-out windows, those of all ranks together."""
    totals = torch.zeros(2)
    for windows, weights in batches.held_out():
        losses = next_byte_losses(model, windows)
        totals = totals.to(weights.device) + torch.stack(((losses * weights).sum(), weights.sum()))
    dist.all_reduce(totals)
    loss, weight = totals.tolist()
    return float(loss / weight)


def _batch_plan(options: TrainOptions) -> BatchPlan:
    return BatchPlan(
        context=options.context,
        batch=options.batch,
        seed=options.seed,
        rank=dist.get_rank(),
        world=dist.get_world_size(),
    )


def _facts(options: TrainOptions, text: Text, model: nn.Module, device: torch.device) -> RunFacts:
    world = dist.get_world_size()
    return RunFacts(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        ranks=world,
        device=device.type,
        source=text.source,
        training_bytes=len(text.training),
        held_out_bytes=len(text.held_out),
        steps=options.steps,
        tokens_per_step=options.batch * options.context * world,
    )


def _mean_over_ranks(value: Tensor) -> float:
    dist.all_reduce(value)  # a sum, because gloo has no mean
    return float(value.item() / dist.get_world_size())


def _bytes_at_rest(model: nn.Module, device: torch.device) -> tuple[int, ...]:
    """Return for each rank how many bytes of the model's parameters it holds between steps."""
    held = 0
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        held += local.numel() * local.element_size()
    of_ranks = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    of_ranks[dist.get_rank()] = held
    dist.all_reduce(of_ranks)
    return tuple(of_ranks.tolist())
