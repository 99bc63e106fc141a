"""The sizes of the built-in decoder. This file imports no torch, because the launcher checks them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fullshard.programs.train.config import ModelSection, Size

BYTES = 256

HIDDEN_MULTIPLE = 64
"""Widths inside SwiGLU are multiples of this: matrices of odd sizes are slow on GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderShape:
    """The sizes that make one decoder differ from another."""

    layers: int
    width: int
    heads: int
    vocabulary: int = BYTES
    """Without a tokenizer every byte is a token."""

    @property
    def hidden(self) -> int:
        """Width inside SwiGLU: 8/3 of the model's, so that its three matrices cost what two of 4x do."""
        return math.ceil(8 * self.width / (3 * HIDDEN_MULTIPLE)) * HIDDEN_MULTIPLE


VOCABULARY_UNKNOWN = (
    "The built-in decoder must know how many tokens there are, and arrays do not say: "
    "set model.vocabulary, or data.tokenizer."
)

SIZES: dict[Size, DecoderShape] = {
    "tiny": DecoderShape(layers=4, width=128, heads=4),
    "small": DecoderShape(layers=6, width=384, heads=6),
    "medium": DecoderShape(layers=12, width=768, heads=12),
    "large": DecoderShape(layers=24, width=2048, heads=16),
}
"""With bytes as tokens about 1, 11, 85 and 1200 million parameters. Each further token adds two rows of the width."""


def decoder_shape(section: ModelSection, vocabulary: int = BYTES) -> DecoderShape:
    """Return the sizes of a decoder: those of its named size, unless a field says otherwise."""
    size = SIZES[section.size]
    return DecoderShape(
        layers=section.layers or size.layers,
        width=section.width or size.width,
        heads=section.heads or size.heads,
        vocabulary=vocabulary,
    )
