"""Verification of a checkpoint: reading all of it and checking its checksums."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fullshard.checkpoint.source import Source, TensorInfo
from fullshard.checkpoint.sources.dcp import DcpCheckpoint
from fullshard.checkpoint.sources.stored_checkpoint import StoredCheckpoint
from fullshard.errors import CheckpointError
from fullshard.layout.blocks import slabs, whole

BATCH_BYTES = 64 << 20
"""Tensors are checked in batches of about so many bytes, because small ones share checksums."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a verification."""

    tensors: int
    nbytes: int
    seconds: float
    has_checksums: bool
    """Whether the format has checksums; if not, it is only known that everything can be read."""
    faults: list[str]


def bytes_in(source: Source, prefix: str = "") -> int:
    """Return the bytes of all tensors, or of those whose keys begin with ``prefix``."""
    return sum(_nbytes(info) for key, info in source.tensors.items() if key.startswith(prefix))


def check(source: Source, advance: Callable[[int], None]) -> Report:
    """Check every byte of every tensor.

    Opening the source has checked that all files are there, and that they have whole tensors.

    Args:
        source: A checkpoint.
        advance: Called with the bytes of each batch.
    """
    began = time.perf_counter()
    has_checksums = isinstance(source, StoredCheckpoint | DcpCheckpoint)
    faults: dict[str, None] = {}  # in order, each once
    for keys in _batches(source):
        if has_checksums:
            wanted = [(key, whole(source.tensors[key].shape)) for key in keys]
            faults |= dict.fromkeys(source.verify(wanted))
        else:
            faults |= dict.fromkeys(fault for key in keys for fault in _unreadable(source, key))
        advance(sum(_nbytes(source.tensors[key]) for key in keys))
    seconds = time.perf_counter() - began
    return Report(len(source.tensors), bytes_in(source), seconds, has_checksums, list(faults))


def _batches(source: Source) -> Iterator[list[str]]:
    batch: list[str] = []
    room = BATCH_BYTES
    for key, info in source.tensors.items():
        batch.append(key)
        room -= _nbytes(info)
        if room <= 0:
            yield batch
            batch, room = [], BATCH_BYTES
    if batch:
        yield batch


def _unreadable(source: Source, key: str) -> list[str]:
    info = source.tensors[key]
    try:
        for block in slabs(info.shape, BATCH_BYTES // info.dtype.itemsize):
            source.read(key, block, torch.empty(block.shape, dtype=info.dtype))
    except CheckpointError as error:
        return [str(error)]
    return []


def _nbytes(info: TensorInfo) -> int:
    return math.prod(info.shape) * info.dtype.itemsize
