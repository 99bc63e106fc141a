"""Interface of every checkpoint format: names, shapes, and blocks of tensors.

Keys of tensors are

    model/<name of a parameter or buffer>
    optimizer/<name of a parameter>/<path within its state>

The optimizer's options and numbers are in a tree of values (`json_values`), with a `TensorRef` in place of each tensor.
Averages of parameters (`fullshard.optim.EMA`) are in the same tree, as one more state of each parameter:

    {"ema": {"updates": 300}, "state": {"head.weight": {"exp_avg": ..., "ema": TensorRef("optimizer/head.weight/ema")}}, ...}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fullshard.layout.blocks import Block

MODEL = "model/"
OPTIMIZER = "optimizer/"
CLASS = "class"
"""Key in an optimizer's tree: the names of its class and of the classes that it derives from."""
AVERAGES = "ema"
"""Key in an optimizer's tree, and in the state of each averaged parameter there. In a tree without it, a state of this name
is the optimizer's own."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Facts of a stored tensor that are known without reading it."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor in a tree of values, by its key."""

    key: str


class Source(Protocol):
    """An open checkpoint that can be read in parts. Opening it has checked all that can be checked without reading data."""

    path: Path
    format: str
    """The name in messages: "fullshard", "Hugging Face", "DCP", "torch"."""

    tensors: Mapping[str, TensorInfo]
    """All tensors by key; tied ones under one of their names."""

    tied: Mapping[str, str]
    """Further names of model tensors, with the name that is stored. Neither has the prefix of keys."""

    optimizer: Mapping[str, Any] | None
    """None, or {"state": {name: {key: value}}, "param_groups": [{"params": [names], option: value}]}.

    Our own checkpoints also have `CLASS` (see `optimizer_compatibility`), except old ones. Values are dicts, lists, tuples,
    numbers, strings, None, 0-d tensors and `TensorRef`s."""

    extra: Any
    """The user's value beside model and optimizer: any value that JSON can hold."""

    def read(self, key: str, wanted: Block, out: Tensor) -> None:
        """Read a block into ``out``, a CPU tensor of the block's shape and the stored dtype, strided or not."""

    def verify(self, wanted: Iterable[tuple[str, Block]]) -> list[str]:
        """Read the bytes of these blocks, without keeping them, and return a line for each fault.

        Lines name file and tensor. There are none if the format has no checksums.
        """

    def close(self) -> None:
        """Close all files."""


def without_class(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's tree as torch's formats have it; averages are states of their parameters."""
    return {key: value for key, value in optimizer.items() if key not in (CLASS, AVERAGES)}


def without_averages(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an optimizer's tree as it would be without averages."""
    if AVERAGES not in optimizer:
        return optimizer
    state = {
        name: {key: value for key, value in own.items() if key != AVERAGES}
        for name, own in optimizer["state"].items()
    }
    return {**{key: each for key, each in optimizer.items() if key != AVERAGES}, "state": state}


def averages_in(optimizer: Mapping[str, Any] | None) -> tuple[int, dict[str, TensorRef]] | None:
    """Return the number of updates and the averages by parameter; None if a checkpoint has none."""
    if optimizer is None or AVERAGES not in optimizer:
        return None
    averages = {name: own[AVERAGES] for name, own in optimizer["state"].items() if AVERAGES in own}
    return optimizer[AVERAGES]["updates"], averages
