"""What a torch distributed checkpoint (DCP) says of itself, read without trusting it.

Its ``.metadata`` is a pickle, and unpickling runs what it is told to. So nothing of torch's is called here: each
class that such a file is made of is replaced by a record that only keeps what it is given, and any other name
is refused before it is looked up. All that can be wrong with what is found then is checked.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from .blocks import Block, whole

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes of a file that were written by one ``torch.save``."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of a tensor and where it is."""

    block: Block
    item: Item


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor, whose chunks together are all of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """All entries of a checkpoint, by flattened name."""

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, Item]
    paths: Mapping[str, tuple[str | int, ...]]
    """Where each entry was in the state dict that was saved: keys of dicts, positions in lists."""


def read_metadata(folder: Path) -> DcpMetadata:
    """Read and check what the checkpoint in ``folder`` has, and that its files have room for it."""
    file = folder / METADATA
    try:
        content = file.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"A torch distributed checkpoint is a folder with a file {METADATA}; {file} cannot be read: {error}"
        ) from error
    try:
        metadata = _understood(_RecordUnpickler(io.BytesIO(content)).load())
    except Exception as error:  # a broken pickle can raise anything
        raise CheckpointError(
            f"{file} is not the metadata of a torch distributed checkpoint that can be used: "
            f"{type(error).__name__}: {error}."
        ) from error
    faults = _faults(folder, metadata)
    if faults:
        raise CheckpointError("\n".join([f"The checkpoint {folder} is damaged:", *faults]))
    return metadata


# --- the pickle --------------------------------------------------------------------------------------------


class _Record:
    """Stands for an object of another class: keeps what it would be built from, and runs nothing."""

    def __new__(cls, *args: Any) -> _Record:
        record = object.__new__(cls)
        record.state = args
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    state: Any


_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    # Written by torch before 2.3.
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    # Of the path that was saved to; Python 3.13 has it in a module of its own.
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
}
_BUILTINS: dict[tuple[str, str], type] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): dict,
}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _RecordUnpickler(pickle.Unpickler):
    """Makes records, built-in values and dtypes; refuses all else."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._classes: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            # A pickle can also set attributes of the classes it names: these live as long as the unpickler.
            return self._classes.setdefault(name, type(name, (_Record,), {}))
        if (module, name) in _BUILTINS:
            return _BUILTINS[module, name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise pickle.UnpicklingError(
            f"{module}.{name} is not part of any metadata; the file would run it"
        )


# --- what it means -----------------------------------------------------------------------------------------


def _understood(metadata: Any) -> DcpMetadata:
    fields = _fields(metadata, "Metadata")
    items: dict[tuple[str, tuple[int, ...] | None], Item] = {}
    for index, info in (fields.get("storage_data") or {}).items():
        place, where = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        if where.get("transform_descriptors"):
            raise ValueError(f"{place['fqn']} was written through an extension of torch's")
        file = where["relative_path"]
        if os.path.basename(file) != file or file in ("", ".", ".."):
            raise ValueError(f"{place['fqn']} is in {file!r}, which is not in the folder")
        item = Item(file, _count(where["offset"]), _count(where["length"]))
        items[place["fqn"], place.get("offset")] = item
    tensors, values = {}, {}
    for name, entry in fields["state_dict_metadata"].items():
        if type(entry).__name__ == "BytesStorageMetadata":
            values[name] = _item(items, name, None)
        else:
            tensors[name] = _tensor(name, _fields(entry, "TensorStorageMetadata"), items)
    paths = fields.get("planner_data") or {}
    found = {name: tuple(paths.get(name, (name,))) for name in (*tensors, *values)}
    for name, path in found.items():
        if not path or not all(isinstance(key, str | int) for key in (name, *path)):
            raise ValueError(f"{name!r} cannot be at {path!r}")
    return DcpMetadata(tensors, values, found)


def _tensor(
    name: str,
    fields: Mapping[str, Any],
    items: Mapping[tuple[str, tuple[int, ...] | None], Item],
) -> DcpTensor:
    dtype, layout, *_ = fields["properties"].state
    if not isinstance(dtype, torch.dtype) or layout != "torch.strided":
        raise ValueError(f"{name} has dtype {dtype} and layout {layout}")
    chunks = []
    for chunk in fields["chunks"]:
        part = _fields(chunk, "ChunkStorageMetadata")
        start, shape = _sizes(part["offsets"]), _sizes(part["sizes"])
        chunks.append(Chunk(Block(start, shape), _item(items, name, start)))
    return DcpTensor(dtype, _sizes(fields["size"]), tuple(chunks))


def _item(
    items: Mapping[tuple[str, tuple[int, ...] | None], Item],
    name: str,
    offset: tuple[int, ...] | None,
) -> Item:
    if (name, offset) not in items:
        raise ValueError(f"{name} is in no file, at {offset}")
    return items[name, offset]


def _fields(record: Any, kind: str) -> Mapping[str, Any]:
    if type(record).__name__ != kind or not isinstance(record.state, dict):
        raise ValueError(f"{type(record).__name__} where a {kind} should be")
    return record.state


def _sizes(values: Any) -> tuple[int, ...]:
    return tuple(map(_count, values))


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} where a size should be")
    return value


def _faults(folder: Path, metadata: DcpMetadata) -> list[str]:
    faults = []
    ends: dict[str, int] = {}
    items = [chunk.item for tensor in metadata.tensors.values() for chunk in tensor.chunks]
    for item in (*items, *metadata.values.values()):
        ends[item.file] = max(ends.get(item.file, 0), item.offset + item.nbytes)
    for file, end in sorted(ends.items()):
        try:
            size = (folder / file).stat().st_size
        except OSError as error:
            faults.append(f"{file}: {error.strerror}")
        else:
            if size < end:
                faults.append(f"{file}: has {size} bytes, and entries up to byte {end}")
    for name, tensor in metadata.tensors.items():
        if not _is_tiled(whole(tensor.shape), [chunk.block for chunk in tensor.chunks]):
            faults.append(f"{name}: its chunks are not, each once, all of its shape {tensor.shape}")
    return faults


def _is_tiled(outer: Block, blocks: list[Block]) -> bool:
    """Whether the blocks are ``outer`` without gaps and overlaps.

    Where blocks meet, their corners meet. If all corners but those of ``outer`` come in pairs, every element is in an
    odd number of blocks, so in one at least; and if the sizes add up, in no more than one.
    """
    corners: set[tuple[int, ...]] = set()
    for block in (outer, *blocks):
        if len(block.shape) != len(outer.shape):
            return False
        if block.numel:
            corners.symmetric_difference_update(
                itertools.product(*zip(block.start, block.stop, strict=True))
            )
    return not corners and sum(block.numel for block in blocks) == outer.numel
