"""The models of published runs, written as their authors wrote them: Llama with all its elementwise operations, and GPT.

What an eager model does between its matrix products costs time and memory, so it matters how norms and rotations are
written. Until torch 2.8 RMSNorm was a chain of operations in float32; torchtitan rotates complex numbers in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.programs.train.sharded_model import recompute


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """The sizes of a decoder."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    hidden: int
    kv_heads: int | None = None
    is_gpt: bool = False
    """Layer norms, biases, GELU and learned positions, instead of Llama's."""
    is_mpt: bool = False
    """A GPT without biases, whose head is the embedding."""

    @property
    def parameters(self) -> int:
        """How many there are, without those of norms and biases."""
        head = self.width // self.heads
        attention = 2 * self.width**2 + 2 * self.width * (self.kv_heads or self.heads) * head
        hidden = (2 if self.is_gpt else 3) * self.width * self.hidden
        embeddings = (1 if self.is_mpt else 2) * self.vocabulary * self.width
        return self.layers * (attention + hidden) + embeddings


def mpt(layers: int, width: int, heads: int) -> Architecture:
    """Return the sizes of a model of llm-foundry."""
    return Architecture(
        layers=layers,
        width=width,
        heads=heads,
        vocabulary=50368,
        hidden=4 * width,
        is_gpt=True,
        is_mpt=True,
    )


ARCHITECTURES = {
    "Llama 2 7B": Architecture(layers=32, width=4096, heads=32, vocabulary=32000, hidden=11008),
    "Llama 2 13B": Architecture(layers=40, width=5120, heads=40, vocabulary=32000, hidden=13824),
    "Llama 2 34B": Architecture(
        layers=48, width=8192, heads=64, kv_heads=8, vocabulary=32000, hidden=22016
    ),
    "Llama 2 70B": Architecture(
        layers=80, width=8192, heads=64, kv_heads=8, vocabulary=32000, hidden=28672
    ),
    "Llama 3 8B": Architecture(
        layers=32, width=4096, heads=32, kv_heads=8, vocabulary=128256, hidden=14336
    ),
    "Llama 3 70B": Architecture(
        layers=80, width=8192, heads=64, kv_heads=8, vocabulary=128256, hidden=28672
    ),
    "MPT 760M": mpt(24, 1536, 12),
    "MPT 1B": mpt(24, 2048, 16),
    "MPT 7B": mpt(32, 4096, 32),
    "MPT 13B": mpt(40, 5120, 40),
    "MPT 30B": mpt(48, 7168, 64),
    "MPT 70B": mpt(80, 8192, 64),
    "GPT 175B": Architecture(
        layers=96, width=12288, heads=96, vocabulary=50000, hidden=4 * 12288, is_gpt=True
    ),
}


class ComposedNorm(nn.Module):
    """RMSNorm as a chain of operations in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, and scale."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn pairs of features of (batch, length, heads, width), as complex numbers in float32."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


class Attention(nn.Module):
    """Causal self-attention; Llama's has rotary positions and may share keys and values among heads."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.shape = shape
        self.head = shape.width // shape.heads
        kv_width = (shape.kv_heads or shape.heads) * self.head
        bias = shape.is_gpt and not shape.is_mpt
        self.query = nn.Linear(shape.width, shape.width, bias=bias)
        self.key = nn.Linear(shape.width, kv_width, bias=bias)
        self.value = nn.Linear(shape.width, kv_width, bias=bias)
        self.out = nn.Linear(shape.width, shape.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with those before it."""
        batch, length, width = x.shape
        query, key, value = (
            each(x).view(batch, length, -1, self.head)
            for each in (self.query, self.key, self.value)
        )
        if not self.shape.is_gpt:
            turns = torch.empty(
                1, length, 1, self.head // 2, dtype=torch.complex64, device=x.device
            )
            query, key = rotate(query, turns), rotate(key, turns)
        repeats = self.shape.heads // (self.shape.kv_heads or self.shape.heads)
        if repeats > 1:
            key, value = (each.repeat_interleave(repeats, dim=2) for each in (key, value))
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class FeedForward(nn.Module):
    """SwiGLU, or two matrices with GELU between them."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.is_gpt = shape.is_gpt
        bias = shape.is_gpt and not shape.is_mpt
        if not shape.is_gpt:
            self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=bias)
        self.down = nn.Linear(shape.hidden, shape.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position by itself."""
        hidden = F.gelu(self.up(x)) if self.is_gpt else F.silu(self.gate(x)) * self.up(x)
        out: Tensor = self.down(hidden)
        return out


class Block(nn.Module):
    """A layer."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        norm: Callable[[int], nn.Module] = nn.LayerNorm if shape.is_gpt else ComposedNorm
        self.first_norm = norm(shape.width)
        self.attention = Attention(shape)
        self.second_norm = norm(shape.width)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Add the outputs of attention and feed-forward to the residual stream."""
        x = x + self.attention(self.first_norm(x))
        out: Tensor = x + self.feed_forward(self.second_norm(x))
        return out


class PublishedDecoder(nn.Module):
    """A decoder. Its head has weights of its own, but for MPT."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width) if shape.is_gpt else ComposedNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.is_mpt:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores (batch, length, vocabulary)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


class PublishedModel:
    """A published model as a source of models for the planner."""

    def __init__(self, name: str, *, recomputed_blocks: int = 0) -> None:
        self.shape = ARCHITECTURES[name]
        self.vocabulary = self.shape.vocabulary
        self.description = name
        self._recomputed_blocks = recomputed_blocks

    def build(self) -> nn.Module:
        """Return the model on the meta device."""
        with torch.device("meta"):
            model = PublishedDecoder(self.shape)
        for block in model.blocks[: self._recomputed_blocks]:
            recompute(block, "blocks")
        return model

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return its layers."""
        assert isinstance(model, PublishedDecoder)
        return list(model.blocks)

    def scores(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Return the model's scores."""
        scores: Tensor = model(tokens)
        return scores
