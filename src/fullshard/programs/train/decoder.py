"""The decoder: tokens in, a score for every next token out.

    token -> embed -> | RMSNorm -> attention (rotary, causal) -> + | x layers -> RMSNorm -> head -> scores
                      | RMSNorm -> SwiGLU                     -> + |

It computes what Llama computes, matrix by matrix, so that its weights are those of a Llama under
other names (`built_in`). No module here holds a buffer, so a model built on the meta device is
complete once its parameters are filled (`weights`). Nothing here knows about sharding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.programs.train.decoder_shape import DecoderShape

NORM_EPS = 1e-6
ROTARY_BASE = 10_000.0


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.width, bias=False)
        self.value = nn.Linear(shape.width, shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        """Mix each position with those before it, or with those that are visible to it: (batch, 1, length, length)."""
        batch, length, width = x.shape
        # (batch, length, width) -> (batch, heads, length, width / heads)
        query, key, value = (
            matrix(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for matrix in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            rotate(query), rotate(key), value, attn_mask=visible, is_causal=visible is None
        )
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class SwiGLU(nn.Module):
    """The feed-forward half of a block."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position by itself."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One decoder layer; the unit that is gathered and released as a whole."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=NORM_EPS)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.width, eps=NORM_EPS)
        self.feed_forward = SwiGLU(shape)

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        """Add the outputs of attention and SwiGLU to the residual stream."""
        x = x + self.attention(self.attention_norm(x), visible)
        x = x + self.feed_forward(self.feed_forward_norm(x))
        return x


class Decoder(nn.Module):
    """A language model."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=NORM_EPS)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, visible: Tensor | None = None) -> Tensor:
        """Return scores (batch, length, vocabulary) for the token after each of `tokens` (batch, length).

        Args:
            tokens: Tokens that are read.
            visible: Tokens that each token sees (batch, 1, length, length); by default itself and all before it.
        """
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, visible)
        scores: Tensor = self.head(self.norm(x))
        return scores

    def starting_deviations(self) -> Iterator[tuple[str, nn.Parameter, float | None]]:
        """Yield each parameter with the standard deviation it starts with; None starts at one.

        Matrices keep the variance of their inputs. Those that write to the residual stream share its variance. The head
        starts small, so that the loss starts at that of guessing.
        """
        writers = 2 * self.shape.layers
        for name, parameter in self.named_parameters():
            fan_in = parameter.shape[-1]
            if "norm" in name:
                yield name, parameter, None
            elif name.endswith(("attention.out.weight", "feed_forward.down.weight")):
                yield name, parameter, (fan_in * writers) ** -0.5
            elif name == "head.weight":
                yield name, parameter, 0.1 * fan_in**-0.5
            else:
                yield name, parameter, fan_in**-0.5


def rotate(x: Tensor) -> Tensor:
    """Turn the feature pairs of (..., length, features) by angles that grow with the position.

    Feature i is paired with i + features / 2. The angles are made here at each call rather than
    kept in a buffer, which `to_empty` would leave unfilled and mixed precision would round.
    """
    length, features = x.shape[-2:]
    pairs = torch.arange(features // 2, device=x.device, dtype=torch.float32)
    positions = torch.arange(length, device=x.device, dtype=torch.float32)
    angles = torch.outer(positions, ROTARY_BASE ** (-2.0 * pairs / features))
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.type_as(x)
