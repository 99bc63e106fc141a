"""The metadata of a torch distributed checkpoint (DCP), read without trusting the file.

``.metadata`` is a pickle. `metadata_pickle` reads it as plain values, which are checked here. A small file can refer to one
object many times. So numbers and lengths are limited before any work is done for each: time and memory are a small
multiple of the file's size.
"""

from __future__ import annotations

import itertools
import math
import os
import reprlib
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.sources.metadata_pickle import Record, unpickle
from fullshard.checkpoint.sources.verified_reads import raise_if_damaged
from fullshard.errors import CheckpointError
from fullshard.files import content_of
from fullshard.layout.blocks import MAX_DIMS, Block, are_sizes, whole

METADATA = ".metadata"
MAX_BYTES = 4 << 30
"""Bytes of metadata that are read."""
MAX_KEYS = 100
"""Keys of a path in a state dict."""
MAX_CUT_DIMS = 6
"""Dimensions that the chunks of a tensor may cut. All corners of a chunk are compared: 2 to this power."""
CHUNK_BYTES = 8
"""Fewer bytes than any chunk takes in the file, which limits the number of chunks."""


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes of a file that were written by one ``torch.save``."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of a tensor, and the item that has it."""

    block: Block
    item: Item


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor, with chunks that together are all of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """All entries of a checkpoint, by flattened name."""

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, Item]
    paths: Mapping[str, tuple[str | int, ...]]
    """The path of each entry in the saved state dict: keys of dicts, indices of lists."""


def read_metadata(folder: Path) -> DcpMetadata:
    """Read the metadata of the checkpoint in ``folder``, and check that its files are long enough."""
    file = folder / METADATA
    try:
        content = content_of(file, max_bytes=MAX_BYTES)
    except OSError as error:
        raise CheckpointError(
            f"A torch distributed checkpoint must be a folder with a file {METADATA}; {file} cannot be read: {error}"
        ) from error
    try:
        metadata = _understood(unpickle(content), most_chunks=len(content) // CHUNK_BYTES)
    except Exception as error:  # a broken pickle can raise anything
        raise CheckpointError(
            f"{file} is not the metadata of a torch distributed checkpoint that can be used: "
            f"{type(error).__name__}: {error}."
        ) from error
    raise_if_damaged(folder, _faults(folder, metadata))
    return metadata


# --- from records to metadata ------------------------------------------------------------------------------


def _understood(metadata: Any, *, most_chunks: int) -> DcpMetadata:
    fields = _fields(metadata, "Metadata")
    items = dict(_items(fields.get("storage_data") or {}))
    tensors, values = {}, {}
    for name, entry in _dict(fields["state_dict_metadata"]).items():
        if type(name) is not str:
            raise ValueError(f"the name of an entry is {reprlib.repr(name)}")
        if type(entry) is Record and entry.kind == "BytesStorageMetadata":
            values[name] = _item(items, name, None)
            continue
        tensors[name] = _tensor(name, _fields(entry, "TensorStorageMetadata"), items, most_chunks)
        most_chunks -= len(tensors[name].chunks)
    paths = _dict(fields.get("planner_data") or {})
    found = {name: _path(name, paths.get(name, (name,))) for name in (*tensors, *values)}
    return DcpMetadata(tensors, values, found)


_ItemKey = tuple[str, tuple[int, ...] | None]
"""The name of an entry, and the start of a chunk in it."""


def _items(storage_data: Any) -> Iterator[tuple[_ItemKey, Item]]:
    for index, info in _dict(storage_data).items():
        key, where = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        name, offset, file = key["fqn"], key.get("offset"), where["relative_path"]
        if type(name) is not str or type(file) is not str:
            raise ValueError("the names of an entry and of its file must be strings")
        if where.get("transform_descriptors"):
            raise ValueError(f"{name} was written through a DCP extension, which cannot be read")
        if os.path.basename(file) != file or file in ("", ".", "..") or "\0" in file:
            raise ValueError(f"{name} is in {file!r}, which is not in the folder")
        item = Item(file, _count(where["offset"]), _count(where["length"]))
        yield (name, None if offset is None else _sizes(offset)), item


def _path(name: str, path: Any) -> tuple[str | int, ...]:
    if type(path) not in (tuple, list):
        raise TypeError(f"the path of {name!r} is {reprlib.repr(path)}")
    if not 0 < len(path) <= MAX_KEYS or not all(type(key) in (str, int) for key in path):
        raise ValueError(f"{name!r} cannot be at {reprlib.repr(path)}")
    return tuple(path)


def _tensor(
    name: str, fields: Mapping[str, Any], items: Mapping[_ItemKey, Item], most_chunks: int
) -> DcpTensor:
    dtype, layout, *_ = fields["properties"].state
    if not isinstance(dtype, torch.dtype) or layout != "torch.strided":
        raise ValueError(f"{name} has dtype {reprlib.repr(dtype)}, layout {reprlib.repr(layout)}")
    shape = _sizes(fields["size"])
    if math.prod(shape) * dtype.itemsize >= 1 << 63:
        raise ValueError(f"{name} has the shape {shape}, which is too large")
    listed = fields["chunks"]
    if type(listed) is not list or len(listed) > most_chunks:
        raise ValueError(f"{name} has more chunks than the file has room for, or no list of them")
    chunks = []
    for chunk in listed:
        part = _fields(chunk, "ChunkStorageMetadata")
        block = Block(_sizes(part["offsets"]), _sizes(part["sizes"]))
        chunks.append(Chunk(block, _item(items, name, block.start)))
    return DcpTensor(dtype, shape, tuple(chunks))


def _item(items: Mapping[_ItemKey, Item], name: str, offset: tuple[int, ...] | None) -> Item:
    if (name, offset) not in items:
        raise ValueError(f"{name} is in no file, at {offset}")
    return items[name, offset]


def _fields(record: Any, kind: str) -> Mapping[str, Any]:
    found = record.kind if type(record) is Record else type(record).__name__
    if found != kind:
        raise ValueError(f"{found} where a {kind} should be")
    return _dict(record.state)


def _dict(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ValueError(f"{type(value).__name__} where a dict should be")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    if not are_sizes(values):
        raise ValueError(f"{reprlib.repr(values)} where at most {MAX_DIMS} sizes should be")
    return tuple(values)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{reprlib.repr(value)} where a size should be")
    return value


def _faults(folder: Path, metadata: DcpMetadata) -> list[str]:
    faults = []
    ends: dict[str, int] = {}
    items = [chunk.item for tensor in metadata.tensors.values() for chunk in tensor.chunks]
    for item in (*items, *metadata.values.values()):
        ends[item.file] = max(ends.get(item.file, 0), item.offset + item.nbytes)
    for file, end in sorted(ends.items()):
        try:
            found = (folder / file).stat()
        except OSError as error:
            faults.append(f"{file}: {error.strerror}")
            continue
        if not stat.S_ISREG(found.st_mode):
            faults.append(f"{file}: is not a regular file")
        elif found.st_size < end:
            faults.append(f"{file}: has {found.st_size} bytes, and entries up to byte {end}")
    for name, tensor in metadata.tensors.items():
        if not _is_tiled(whole(tensor.shape), [chunk.block for chunk in tensor.chunks]):
            faults.append(
                f"{name}: its chunks do not cover its shape {tensor.shape} exactly once, or cut more than "
                f"{MAX_CUT_DIMS} of its dimensions"
            )
    return faults


def _is_tiled(outer: Block, blocks: list[Block]) -> bool:
    """Return whether the blocks cover ``outer`` without gaps and overlaps.

    Where blocks meet, their corners meet. If all corners but those of ``outer`` come in pairs, every element is in an
    odd number of blocks, so in at least one. If the sizes add up, too, it is in exactly one. Dimensions that no block cuts
    do not matter.
    """
    dims = range(len(outer.shape))
    if any(len(block.start) != len(dims) or len(block.shape) != len(dims) for block in blocks):
        return False
    blocks = [block for block in blocks if block.numel]
    if sum(block.numel for block in blocks) != outer.numel:
        return False
    cut = [
        dim
        for dim in dims
        if any((each.start[dim], each.shape[dim]) != (0, outer.shape[dim]) for each in blocks)
    ]
    if len(cut) > MAX_CUT_DIMS:
        return False
    corners: set[tuple[int, ...]] = set()
    for block in (outer, *blocks) if outer.numel else ():
        spans = [(block.start[dim], block.start[dim] + block.shape[dim]) for dim in cut]
        corners.symmetric_difference_update(itertools.product(*spans))
    return not corners
