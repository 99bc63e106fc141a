"""Train a pipeline of two stages, each sharded over half of the ranks; checkpoints with DCP.

torchrun --nproc-per-node 4 -m examples.clients.pipelining                    # torch's FSDP
torchrun --nproc-per-node 4 -m fullshard.run -m examples.clients.pipelining   # fullshard
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from examples.clients import small_task
from examples.clients.small_task import BATCH, VOCABULARY, Trained

WIDTH, STAGES, MICROBATCHES = 32, 2, 4


def command_line() -> argparse.ArgumentParser:
    """Return the options of this program."""
    return small_task.parser(__doc__)


def make_stage(place: int, mesh: DeviceMesh, seed: int) -> nn.Module:
    """Build the layers of one stage and shard them over the ranks that share it."""
    torch.manual_seed(seed)
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2 * STAGES)]
    head = nn.Linear(WIDTH, VOCABULARY)
    layers = ([embedding, *blocks[:2]], [*blocks[2:], head])[place]
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    stage = nn.Sequential(*layers)
    fully_shard(stage, mesh=mesh, reshard_after_forward=False)
    return stage


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of a microbatch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(options: argparse.Namespace) -> Trained:
    """Train, save after one of the steps, and return the losses; only the last stage has any."""
    device = torch.device("cuda" if small_task.on_gpu() else "cpu")
    if not dist.is_initialized():
        dist.init_process_group("nccl" if small_task.on_gpu() else "gloo")
    replicas = dist.get_world_size() // STAGES
    mesh = init_device_mesh(device.type, (STAGES, replicas), mesh_dim_names=("pp", "dp"))
    place, share = mesh.get_local_rank("pp"), BATCH // replicas
    model = make_stage(place, mesh["dp"], seed=1 if options.resume else 0).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stage = PipelineStage(model, place, STAGES, device, group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=loss_of)
    first, key = 0, f"stage_{place}"
    if options.resume:
        weights, optimizer_state = get_state_dict(model, optimizer)
        dcp.load(
            {key: {"model": weights, "optimizer": optimizer_state}}, checkpoint_id=options.resume
        )
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optimizer_state)
        first = options.save_after

    rows = small_task.sequences()
    losses = []
    for step in range(first, options.steps):
        start = step * BATCH + mesh.get_local_rank("dp") * share
        batch = small_task.collate(rows[start : start + share])["input_ids"].to(device)
        microbatch_losses: list[Tensor] = []
        if place == 0:
            schedule.step(batch[:, :-1])
        else:
            schedule.step(target=batch[:, 1:], losses=microbatch_losses)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum(loss.item() for loss in microbatch_losses)) / MICROBATCHES)
        if options.folder and step + 1 == options.save_after:
            weights, optimizer_state = get_state_dict(model, optimizer)
            state = {key: {"model": weights, "optimizer": optimizer_state}}
            dcp.save(state, checkpoint_id=options.folder)
    return Trained(losses=losses, model=model)


if __name__ == "__main__":
    small_task.run(train, command_line())
