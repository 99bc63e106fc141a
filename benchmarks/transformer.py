"""The model that the contestants train, and its sizes by name.

A plain decoder: RMSNorm, causal attention, SwiGLU, untied embedding and head, no biases, nine
parameters per block. It has no position encoding, because nothing is learned here; it only has to
cost what a real decoder costs.

The scaling study varies one thing at a time with other blocks: one weight, cut into any number of
parameters of the same size (`CutBlock`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "PRESETS",
    "Block",
    "CutBlock",
    "Shape",
    "Transformer",
    "count_parameters",
    "initialise",
    "local_tensor",
]

MLP_MULTIPLE = 256
"""The MLP is 8/3 as wide as the model, rounded up to a multiple of this (Llama's rule)."""

WEIGHT_STD = 0.02
"""Spread of the initial weights: small enough that the loss stays finite in bf16 at every size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes of one model and of the batch it is given."""

    layers: int
    width: int
    head_width: int
    batch: int
    context: int
    vocab: int = 32000
    cut: tuple[int, int] | None = None
    """Rows of a block's weight, and into how many parameters they are cut; None: blocks of a decoder."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "batch", "context", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}.")
        if self.cut is not None and self.cut[0] % self.cut[1]:
            raise ValueError(f"{self.cut[0]} rows cannot be cut into {self.cut[1]} equal parts.")
        if self.width % self.head_width:
            raise ValueError(
                f"width must be a multiple of head_width, got {self.width} and {self.head_width}. "
                f"Choose --width as a multiple of {self.head_width}, or another preset."
            )

    @property
    def mlp_width(self) -> int:
        """Inner width of the MLP."""
        return -(-self.width * 8 // (3 * MLP_MULTIPLE)) * MLP_MULTIPLE

    @property
    def num_groups(self) -> int:
        """How many groups communicate when every block and the root is sharded."""
        return self.layers + 1


PRESETS: Mapping[str, Shape] = MappingProxyType(
    {
        "tiny": Shape(layers=12, width=64, head_width=16, batch=1, context=64, vocab=256),
        "small": Shape(layers=6, width=192, head_width=32, batch=2, context=64, vocab=1024),
        "12x768": Shape(layers=12, width=768, head_width=64, batch=1, context=512),
        "1.2b": Shape(layers=21, width=2048, head_width=128, batch=4, context=2048),
        "3.8b": Shape(layers=32, width=3072, head_width=128, batch=2, context=2048),
        "7b": Shape(layers=32, width=4096, head_width=128, batch=1, context=4096),
        "65b": Shape(layers=80, width=8192, head_width=128, batch=1, context=4096),
    }
)


class Attention(nn.Module):
    """Causal self-attention with separate query, key and value projections."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of `x`, shape (batch, context, width)."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class SwiGLU(nn.Module):
    """The gated MLP of a block."""

    def __init__(self, width: int, mlp_width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, mlp_width, bias=False)
        self.up = nn.Linear(width, mlp_width, bias=False)
        self.down = nn.Linear(mlp_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform every position of `x` by itself."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One layer: the module that becomes a group of its own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = Attention(shape.width, shape.head_width)
        self.mlp_norm = nn.RMSNorm(shape.width)
        self.mlp = SwiGLU(shape.width, shape.mlp_width)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention and MLP to the residual stream."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class CutBlock(nn.Module):
    """A layer with one weight, cut by rows into parameters: their number changes, the computation does not."""

    def __init__(self, rows: int, parts: int, width: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.empty(rows // parts, width) for _ in range(parts))

    def forward(self, x: Tensor) -> Tensor:
        """Go through the weight and back."""
        weight = torch.cat(list(self.parts))
        out: Tensor = x + F.linear(F.linear(x, weight), weight.t())
        return out


class Transformer(nn.Module):
    """The whole decoder, from token numbers to logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(
            Block(shape) if shape.cut is None else CutBlock(*shape.cut, shape.width)
            for _ in range(shape.layers)
        )
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token, shape (batch, context, vocab)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def count_parameters(shape: Shape) -> int:
    """Count the elements of the model's parameters."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(shape).parameters())


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's piece of a DTensor, and a plain tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    piece: Tensor = to_local()
    return piece


@torch.no_grad()
def initialise(module: nn.Module, *, recurse: bool = True) -> None:
    """Give every parameter's local piece values a training run could start from.

    Works on pieces so that no rank-wide random state and no communication is involved.
    """
    for child in module.modules() if recurse else (module,):
        for parameter in child.parameters(recurse=False):
            piece = local_tensor(parameter)
            if isinstance(child, nn.RMSNorm):
                piece.fill_(1.0)
            else:
                piece.normal_(std=WEIGHT_STD)
