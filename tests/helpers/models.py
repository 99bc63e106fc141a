"""Small models with awkward shapes: rows that no world size divides, tied, frozen and 0-d parameters."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 11


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    width: int = 6
    hidden: int = 13
    depth: int = 3
    tied: bool = False
    """Head and embedding are one parameter."""
    frozen: tuple[str, ...] = ()
    """Endings of the names of parameters that are not trained."""
    scalar: bool = False
    """Each block has a 0-d parameter."""
    checkpointing: str = "none"
    """none, reentrant or non_reentrant, around each block."""
    repeat: int = 1
    """How often the blocks are run, one after the other."""


class Block(nn.Module):
    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(options.width)
        self.up = nn.Linear(options.width, options.hidden)
        self.down = nn.Linear(options.hidden, options.width)
        self.scale = nn.Parameter(torch.tensor(0.7)) if options.scalar else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        if self.scale is not None:
            y = y * self.scale
        return x + y


class Decoder(nn.Module):
    """Embedding, blocks, head; the loss of predicting each token from itself, shifted by one."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.options = options
        self.embed = nn.Embedding(VOCABULARY, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.depth))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, VOCABULARY, bias=False)
        if options.tied:
            self.head.weight = self.embed.weight
        for name, param in self.named_parameters():
            if name.endswith(options.frozen) and options.frozen:
                param.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(self.options.repeat):
            for block in self.blocks:
                x = self._run(block, x)
        logits: Tensor = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.options.checkpointing == "none":
            result: Tensor = block(x)
        else:
            reentrant = self.options.checkpointing == "reentrant"
            result = checkpoint(block, x, use_reentrant=reentrant)
        return result


_SEEDING = threading.Lock()
"""Ranks may be threads, which share torch's generator."""


def make_decoder(options: ModelOptions | None = None, seed: int = 0) -> Decoder:
    with _SEEDING:
        torch.manual_seed(seed)
        return Decoder(options or ModelOptions())


def tokens_for(step: int, batch: int, length: int = 7) -> Tensor:
    """The global batch of a step; every rank takes its rows."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, VOCABULARY, (batch, length), generator=generator)
