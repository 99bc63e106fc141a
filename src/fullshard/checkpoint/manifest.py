"""What a checkpoint says of itself: one JSON file, small however many ranks have written.

It names every tensor with its whole shape, how it was cut, and which rank's file has which cell. Byte ranges
and checksums of data are in the header of each file, which is for those who read that file; the manifest has a
checksum of each header, and of itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .spread import Spread


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint."""

    dtype: torch.dtype
    spread: Spread
    """With one list of holders: the ranks that wrote the cells."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As the model has it."""
        order = self.spread.order
        if order is None:
            return self.spread.shape
        sizes = dict(zip(order, self.spread.shape, strict=True))
        return tuple(sizes[dim] for dim in range(len(order)))


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint, as it was when it was complete."""

    nbytes: int
    header_crc32: int
    """Of the first bytes: the length and the header itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All that is known of a checkpoint without reading tensors."""

    data: str
    """The folder of the tensor files, beside the manifest."""
    world: int
    tensors: Mapping[str, StoredTensor]
    """By key, tied ones once."""
    files: Mapping[int, FileRecord]
    """By the rank that wrote it; ranks that had nothing to write have none."""
    tied: Mapping[str, str] = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    """See `source.Source.optimizer`."""
    extra: Any = None
    serial: int = 0
    """One more than the highest among the checkpoints that were beside this one when it was written."""
    created: str = ""
    fullshard: str = ""
    torch: str = ""


def file_name(rank: int) -> str:
    """Of the tensors that a rank wrote."""
    return f"rank-{rank:05d}.safetensors"
