"""What any source has, as tensors in memory that were checked before they were read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fullshard.checkpoint.blocks import Block, whole
from fullshard.checkpoint.json_values import DeviceScalar
from fullshard.checkpoint.source import Source, TensorRef
from fullshard.errors import CheckpointError


def read_verified(source: Source, key: str, wanted: Block | None = None) -> Tensor:
    """A block of a tensor, or all of it."""
    info = source.tensors[key]
    block = whole(info.shape) if wanted is None else wanted
    faults = source.verify([(key, block)])
    if faults:
        raise CheckpointError("\n".join([f"{source.path} is damaged:", *faults]))
    out = torch.empty(block.shape, dtype=info.dtype)
    source.read(key, block, out)
    return out


def with_tensors(tree: Any, source: Source) -> Any:
    """A tree of ``source`` with tensors in the place of what stands for them."""
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
