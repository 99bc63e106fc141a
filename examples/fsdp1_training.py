"""A typical FSDP1 script: auto wrap, mixed precision, accumulation, clipping, checkpoint, resume.

    torchrun --nproc-per-node 2 examples/fsdp1_training.py --steps 40
    torchrun --nproc-per-node 2 examples/fsdp1_training.py --steps 60      # goes on from step 40

It learns to write its own source. Nothing in it knows of fullshard but the two imports: with

    from torch.distributed.fsdp import ...
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

it is a script of torch's FSDP1 and prints the same losses. With fullshard it runs without a GPU, too,
on one process or many; checkpoints of one can be loaded by the other.
"""

import argparse
import os
from pathlib import Path

# Some machines advertise AMX without allowing it; before torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard import (
    BackwardPrefetch,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from fullshard.wrap import ModuleWrapPolicy

VOCABULARY, WIDTH, DEPTH, CONTEXT = 128, 64, 3, 64
MICROBATCHES, BATCH = 2, 8
"""Per rank: microbatches of a step, sequences of a microbatch."""


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Mix positions, then channels."""
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, 4, WIDTH // 4)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class Model(nn.Module):
    """A small language model over ASCII."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the character after each position."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def wrap(model: nn.Module, device: torch.device) -> FSDP:
    """Shard every block, and the rest with the whole model."""
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=device,
        sync_module_states=True,
        use_orig_params=True,
    )


def batches(step: int, rank: int, device: torch.device) -> list[Tensor]:
    """The microbatches of a step: windows of this file, different ones on every rank."""
    text = torch.tensor([min(byte, 127) for byte in Path(__file__).read_bytes()])
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(len(text) - CONTEXT - 1, (MICROBATCHES, BATCH), generator=generator)
    return [
        torch.stack([text[start : start + CONTEXT + 1] for start in row]).to(device)
        for row in starts.tolist()
    ]


def train_step(model: FSDP, optimizer: torch.optim.Optimizer, microbatches: list[Tensor]) -> Tensor:
    """Gradients are added up locally over all microbatches but the last, which reduces them."""
    losses = []

    def backward(batch: Tensor) -> None:
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        (loss / len(microbatches)).backward()
        losses.append(loss.detach())

    with model.no_sync():
        for batch in microbatches[:-1]:
            backward(batch)
    backward(microbatches[-1])
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def save(path: Path, model: FSDP, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write whole tensors from rank 0, in host memory; all ranks take part in gathering them."""
    with FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
    ):
        state = {
            "model": model.state_dict(),
            "optimizer": FSDP.optim_state_dict(model, optimizer),
            "step": step,
        }
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        torch.save(state, unfinished)
        unfinished.replace(path)
    dist.barrier()


def load(path: Path, model: FSDP, optimizer: torch.optim.Optimizer) -> int:
    """Read a checkpoint, on every rank, and return the step it was written after."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(
            FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"])
        )
    step: int = state["step"]
    return step


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, print, save; returns the losses."""
    parser = argparse.ArgumentParser(description="Train with FullyShardedDataParallel.")
    parser.add_argument("--steps", type=int, default=40, help="go on until this step")
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/fsdp1_training.pt"))
    options = parser.parse_args(arguments)

    on_gpu = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=world)

    torch.manual_seed(0)
    model = wrap(Model(), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = load(options.checkpoint, model, optimizer) if options.checkpoint.exists() else 0
    losses = []
    for step in range(first, options.steps):
        loss = train_step(model, optimizer, batches(step, dist.get_rank(), device))
        losses.append(loss.item())
        if dist.get_rank() == 0 and (step % 10 == 9 or step == first):
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    save(options.checkpoint, model, optimizer, max(options.steps, first))
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
