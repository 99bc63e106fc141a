"""Tags: the purpose of a collective, in a form that is equal on all ranks."""

from __future__ import annotations

import functools
import hashlib
from typing import NamedTuple

TAG_BITS = 63
"""Bits of a tag's number."""


class Tag(NamedTuple):
    """The purpose of a collective; equal on all ranks that call it together."""

    text: str
    """For messages: "all-gather of layers.3"."""
    number: int
    """A hash of the text, the same in every process."""
    of_step: bool
    """Whether ranks that call it must be in the same step. Not if they compare more than that by themselves."""


@functools.lru_cache(
    maxsize=4096
)  # a program may build many models, or clip to another norm in every step
def tag(text: str, *, of_step: bool = True) -> Tag:
    """Return the tag with this text."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) & ((1 << TAG_BITS) - 1)
    return Tag(text, number, of_step)
