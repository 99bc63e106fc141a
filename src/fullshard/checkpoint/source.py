"""What every format of checkpoints can be asked for: names, shapes, and blocks of tensors.

Keys of tensors are

    model/<name of a parameter or buffer>
    optimizer/<name of a parameter>/<path within its state>

and the optimizer's options, its numbers, and which tensor is which state are in a tree (`json_values`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fullshard.checkpoint.blocks import Block

MODEL = "model/"
OPTIMIZER = "optimizer/"
CLASS = "class"
"""Of an optimizer's tree: the names of its class and of those that it derives from."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a stored tensor without reading it."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands in a tree where a tensor is."""

    key: str


class Source(Protocol):
    """A checkpoint that can be read in parts. Opening one checks all that can be checked without reading data."""

    path: Path
    format: str
    """For people: "fullshard", "Hugging Face", "DCP", "torch"."""

    tensors: Mapping[str, TensorInfo]
    """All tensors by key, tied ones under one of their names."""

    tied: Mapping[str, str]
    """Further names of model tensors, with the name that is stored: neither has the prefix of keys."""

    optimizer: Mapping[str, Any] | None
    """None, or {"state": {name: {key: value}}, "param_groups": [{"params": [names], option: value}]}.

    Checkpoints of our own also have `CLASS` (see `optimizer_kinds`), but for those that were written before it was.
    Values are trees of dicts, lists, tuples, numbers, strings, None, 0-d tensors and `TensorRef`s."""

    extra: Any
    """What the user saved beside: anything that JSON can say."""

    def read(self, key: str, wanted: Block, out: Tensor) -> None:
        """Read a block into ``out``, a CPU tensor of the block's shape and the stored dtype, strided or not."""

    def verify(self, wanted: Iterable[tuple[str, Block]]) -> list[str]:
        """Read the bytes behind these blocks, without keeping them, and say what is wrong: a line for each fault.

        Lines name file and tensor. Empty if all is well, or where the format has no checksums.
        """

    def close(self) -> None:
        """Let go of files."""


def without_class(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's tree as torch's formats have it."""
    return {key: value for key, value in optimizer.items() if key != CLASS}
