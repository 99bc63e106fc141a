"""Tensors of any source, read into memory after their checksums were checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullshard.checkpoint.json_values import DeviceScalar
from fullshard.checkpoint.source import Source, TensorRef
from fullshard.errors import CheckpointError
from fullshard.layout.blocks import Block, whole


def read_verified(source: Source, key: str, wanted: Block | None = None) -> Tensor:
    """Return a block of a tensor, or all of it.

    Raises:
        CheckpointError: it is damaged.
    """
    info = source.tensors[key]
    block = whole(info.shape) if wanted is None else wanted
    raise_if_damaged(source.path, source.verify([(key, block)]))
    out = torch.empty(block.shape, dtype=info.dtype)
    source.read(key, block, out)
    return out


def raise_if_damaged(path: Path, faults: Iterable[str]) -> None:
    """Raise an error that names all faults of a checkpoint, if there are any."""
    lines = list(faults)
    if lines:
        raise CheckpointError("\n  ".join([f"The checkpoint {path} is damaged:", *lines]))


def with_tensors(tree: Any, source: Source) -> Any:
    """Return a tree of values of ``source`` with the tensors themselves."""
    if isinstance(tree, TensorRef):
        return read_verified(source, tree.key)
    if isinstance(tree, DeviceScalar):
        return tree.value
    if isinstance(tree, Mapping):
        return {key: with_tensors(each, source) for key, each in tree.items()}
    if isinstance(tree, list | tuple):
        items = [with_tensors(each, source) for each in tree]
        return items if isinstance(tree, list) else tuple(items)
    return tree
