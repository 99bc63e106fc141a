"""What the client programs share: a small language model, sequences to learn, and the command line.

Nothing is downloaded. A step trains on the same `BATCH` sequences however many ranks share them, so losses can be
compared between one process and many.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Some machines advertise AMX without allowing it; before torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, CONTEXT = 96, 16
BATCH = 8
"""Sequences of a step, over all ranks."""
MAX_STEPS = 8
"""Steps until the sequences are used up."""

Batch = dict[str, Tensor]


@dataclass(kw_only=True)
class Trained:
    """What a program returns to those that compare runs."""

    losses: list[float]
    """This rank's losses by step, from the step after which the run was resumed."""
    model: nn.Module
    checks: list[float] = field(default_factory=list)
    """Further numbers that must be the same: an evaluation, generated tokens."""
    saved: list[float] = field(default_factory=list)
    """How many tensors the saved model has, and their sum."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all programs have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--steps", type=int, default=5, help=f"train until this step, at most {MAX_STEPS}"
    )
    made.add_argument("--folder", type=Path, help="save a checkpoint here")
    made.add_argument("--save-after", type=int, default=3, help="save after this step")
    made.add_argument("--resume", type=Path, help="load the checkpoint of this folder first")
    made.add_argument("--unsharded", action="store_true", help="one process, without FSDP")
    return made


def on_gpu() -> bool:
    """Say whether to train on a GPU: where there is one, unless CUDA_VISIBLE_DEVICES hides it."""
    return torch.cuda.is_available()


def world_size() -> int:
    """Return the number of ranks that the launcher started."""
    return int(os.environ.get("WORLD_SIZE", 1))


def small_llama(*, seed: int = 0, tied: bool = False) -> LlamaForCausalLM:
    """Build two layers of 32 channels; 28,000 parameters."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=tied,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def sequences() -> list[Batch]:
    """Return counted sequences: each starts anywhere and goes on in steps of one to five."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(VOCABULARY, (MAX_STEPS * BATCH, 1), generator=generator)
    strides = torch.randint(1, 6, (MAX_STEPS * BATCH, 1), generator=generator)
    tokens = (starts + strides * torch.arange(CONTEXT)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens]


def collate(rows: Sequence[Batch]) -> Batch:
    """Stack sequences into a batch."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def loader(
    batch_size: int, *, first_step: int = 0, rank: int = 0, ranks: int = 1
) -> "DataLoader[Batch]":
    """Return a loader of the sequences from a step on, of one rank or of all together."""
    rows: Any = sequences()[first_step * BATCH + rank :: ranks]  # a list will do for a dataset
    return DataLoader(rows, batch_size=batch_size, collate_fn=collate)


def rank_batches(first_step: int, steps: int, device: torch.device) -> list[Batch]:
    """Return this rank's share of each step's batch, for programs that load data themselves."""
    rows, share = sequences(), BATCH // dist.get_world_size()
    starts = [step * BATCH + dist.get_rank() * share for step in range(first_step, steps)]
    return [
        {name: value.to(device) for name, value in collate(rows[start : start + share]).items()}
        for start in starts
    ]


def run(train: Any, made: argparse.ArgumentParser) -> None:
    """Run a program from its command line."""
    losses = train(made.parse_args()).losses
    if int(os.environ.get("RANK", 0)) == 0:
        print("losses", *(f"{loss:.5f}" for loss in losses), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
