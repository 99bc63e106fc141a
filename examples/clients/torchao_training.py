"""Train with torchao's tensors: float8 and int8 weights that gather themselves; checkpoints with DCP.

torchrun --nproc-per-node 2 -m examples.clients.torchao_training                    # torch's FSDP
torchrun --nproc-per-node 2 -m fullshard.run -m examples.clients.torchao_training   # fullshard

    --tensors float8          weights are cast before they travel, each with a scale that its gather computes
              float8-scales   one all-reduce after the optimizer computes all scales
              int8            weights are int8 at rest, and are rounded stochastically when they are updated
              int8-products   weights travel in bf16; products are computed in int8
    --rows                    of the first matrix of each block; an odd number is not divided evenly by two ranks
    --only-matrices           blocks have no other parameters, so groups are of one dtype

DCP cannot save int8 weights: torchao has not implemented `is_pinned` for them. So `--tensors int8` saves nothing.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchao import quantize_
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.prototype.quantized_training import (
    Int8MixedPrecisionTrainingConfig,
    Int8MixedPrecisionTrainingLinearWeight,
    int8_mixed_precision_training,
    int8_weight_only_quantized_training,
)

from examples.clients import small_task
from examples.clients.small_task import BATCH, VOCABULARY, Trained

WIDTH, BLOCKS = 32, 2

# DCP reads no other classes; torchao has done this for float8.
torch.serialization.add_safe_globals(
    [Int8MixedPrecisionTrainingConfig, Int8MixedPrecisionTrainingLinearWeight]
)


class Block(nn.Module):
    """Two matrices and a residual connection."""

    def __init__(self, rows: int, *, only_matrices: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=not only_matrices)
        self.up = nn.Linear(WIDTH, rows, bias=False)
        self.down = nn.Linear(rows, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


def command_line() -> argparse.ArgumentParser:
    """Return the options of this program."""
    made = small_task.parser(__doc__)
    made.add_argument(
        "--tensors", choices=("float8", "float8-scales", "int8", "int8-products"), default="float8"
    )
    made.add_argument("--rows", type=int, default=64)
    made.add_argument("--only-matrices", action="store_true")
    return made


def convert(blocks: nn.Module, tensors: str) -> None:
    """Let torchao replace the matrices of the blocks."""
    if tensors.startswith("float8"):
        config = Float8LinearConfig(
            enable_fsdp_float8_all_gather=True, emulate=not small_task.on_gpu()
        )
        convert_to_float8_training(blocks, config=config)
    elif tensors == "int8":
        quantize_(blocks, int8_weight_only_quantized_training())
    else:
        quantize_(blocks, int8_mixed_precision_training())


def make_model(options: argparse.Namespace, device: torch.device) -> nn.Sequential:
    """Build a model of tokens without attention, and shard it."""
    torch.manual_seed(1 if options.resume else 0)
    blocks = nn.Sequential(
        *(Block(options.rows, only_matrices=options.only_matrices) for _ in range(BLOCKS))
    )
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), blocks, nn.Linear(WIDTH, VOCABULARY)).to(
        device
    )
    convert(blocks, options.tensors)
    if options.unsharded:
        return model
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    for module in (*blocks, model):
        fully_shard(module, mp_policy=policy)
    return model


def train(options: argparse.Namespace) -> Trained:
    """Train, save after one of the steps, and return the losses."""
    device = torch.device("cuda" if small_task.on_gpu() else "cpu")
    if not dist.is_initialized():
        dist.init_process_group("nccl" if small_task.on_gpu() else "gloo")
    model = make_model(options, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    first = 0
    if options.resume:
        if options.tensors == "int8":
            raise SystemExit("DCP cannot save int8 weights")
        weights, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": optimizer_state}, checkpoint_id=options.resume)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optimizer_state)
        first = options.save_after

    losses = []
    for step, batch in enumerate(small_task.rank_batches(first, options.steps, device), first + 1):
        tokens: Any = batch["input_ids"]
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.manual_seed(step * BATCH + dist.get_rank())  # int8 weights are rounded at random
        optimizer.step()
        optimizer.zero_grad()
        if options.tensors == "float8-scales" and not options.unsharded:
            precompute_float8_dynamic_scale_for_fsdp(model)
        losses.append(loss.item())
        if options.folder and step == options.save_after and options.tensors != "int8":
            weights, optimizer_state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": optimizer_state}, checkpoint_id=options.folder)
    return Trained(losses=losses, model=model)


if __name__ == "__main__":
    small_task.run(train, command_line())
