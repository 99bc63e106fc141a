"""Torch distributed checkpoints (DCP): reading, and writing in one process.

    path/.metadata        the entries, and where they are: see `dcp_metadata`
    path/__0_0.distcp     items, each written by one `torch.save`: a chunk of a tensor, or another value

The path of an entry in the saved state dict says what it is:

    {"model": state dict, "optimizer": state dict, ...}    as torch's `get_state_dict` has them; also "optim"
    {name: tensor, ...}                                    a bare state dict of the model

Optimizer states may be nested or flattened (``flatten_optimizer_state_dict``). All other entries are `extra`.
Values are read by ``torch.load(weights_only=True)``, which runs no code.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fullshard.checkpoint import json_values
from fullshard.checkpoint.source import (
    MODEL,
    OPTIMIZER,
    Source,
    TensorInfo,
    TensorRef,
    without_class,
)
from fullshard.checkpoint.sources.dcp_metadata import (
    METADATA,
    Chunk,
    DcpTensor,
    Item,
    read_metadata,
)
from fullshard.checkpoint.sources.torch_items import fault_of, refuse_compressed, refuse_expanded
from fullshard.checkpoint.sources.verified_reads import (
    raise_if_damaged,
    read_verified,
    with_tensors,
)
from fullshard.errors import CheckpointError
from fullshard.files import atomic_write, local_path
from fullshard.layout.blocks import Block, slabs, whole
from fullshard.torch_border import EXTRA_STATE, dcp_item_place

EXTRA = "extra/"
"""Prefix of the keys of large tensors in `extra`, which are not read when the checkpoint is opened."""

DATA = "__0_0.distcp"
CHUNK_BYTES = 256 << 20
"""Bytes of the chunks that are written; a reader loads one chunk at a time."""

MODEL_ROOT = "model"
OPTIMIZER_ROOTS = ("optimizer", "optim")
EXTRA_ROOT = "extra"

StatePath = tuple[str | int, ...]
"""The path of a value in a state dict: keys of dicts, indices of lists."""


# --- reading -----------------------------------------------------------------------------------------------


class DcpCheckpoint:
    """A `Source`. It keeps the chunk that was read last, so it is fastest to read blocks in the order of their chunks."""

    format = "DCP"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = local_path(path)
        self._metadata = read_metadata(self.path)
        self._files: dict[str, int] = {}
        self._last: tuple[Item, Tensor] | None = None
        self._stored: dict[str, DcpTensor] = {}
        self._made: dict[str, Tensor] = {}
        """Tensors that were made of other values in the files, by key."""
        self.tied: Mapping[str, str] = {}
        try:
            self._arrange()
        except BaseException:
            self.close()
            raise
        everything: dict[str, DcpTensor | Tensor] = {**self._stored, **self._made}
        self.tensors: Mapping[str, TensorInfo] = {
            key: TensorInfo(each.dtype, tuple(each.shape)) for key, each in everything.items()
        }

    def read(self, key: str, wanted: Block, out: Tensor) -> None:
        """Read a block into ``out``, a CPU tensor of the block's shape and the stored dtype."""
        if key in self._made:
            out.copy_(self._made[key][wanted.slices_in(whole(self._made[key].shape))])
            return
        for chunk, common in _overlapping(self._stored[key], wanted):
            found = self._chunk(key, chunk)
            out[common.slices_in(wanted)].copy_(found[common.slices_in(chunk.block)])

    def verify(self, wanted: Iterable[tuple[str, Block]]) -> list[str]:
        """Check the CRC-32 of every chunk that has a part of these blocks. Items are zip files, which have checksums."""
        items = {
            chunk.item: key
            for key, block in wanted
            if key in self._stored
            for chunk, _ in _overlapping(self._stored[key], block)
        }
        return [fault for item, key in items.items() for fault in self._faults(item, key)]

    def pieces(self, key: str) -> Iterator[tuple[str, int, int, Block]]:
        """Yield where a tensor is: file, first byte, number of bytes, and block."""
        for chunk in self._stored[key].chunks if key in self._stored else ():
            yield chunk.item.file, chunk.item.offset, chunk.item.nbytes, chunk.block

    def close(self) -> None:
        """Close all files."""
        while self._files:
            os.close(self._files.popitem()[1])
        self._last = None

    def _arrange(self) -> None:
        """Sort the entries into model, optimizer and extra, and read all values but large tensors."""
        root = _nested(self._metadata.paths)
        inner = root.pop(MODEL_ROOT) if isinstance(root.get(MODEL_ROOT), dict) else root
        self._add_module_states(inner)
        if inner is root:
            tensors = [
                key
                for key, entry in root.items()
                if isinstance(entry, str) and entry in self._metadata.tensors
            ]
            model = {key: root.pop(key) for key in tensors}
        else:
            model = {".".join(map(str, path)): name for path, name in _entries(inner)}
        values = sorted(name for name in model if model[name] not in self._metadata.tensors)
        if values:
            raise CheckpointError(
                f"A model's entries must be tensors; in {self.path} these are not: {values}. Save the model without them, or "
                "save them outside of it."
            )
        self._stored |= {MODEL + name: self._metadata.tensors[model[name]] for name in model}
        found = [name for name in OPTIMIZER_ROOTS if isinstance(root.get(name), dict)]
        self.optimizer = self._optimizer_of(root.pop(found[0]), model) if found else None
        extra = root.get(EXTRA_ROOT) if set(root) == {EXTRA_ROOT} else root or None
        self.extra = self._values(extra, EXTRA[:-1], max_bytes=json_values.MAX_ARRAY_BYTES)

    def _add_module_states(self, model: dict[str, Any]) -> None:
        """Take extra states of modules that are not tensors out of ``model``, and keep them as tensors of JSON text."""
        for name in list(filter(_is_module_state, model)):
            if isinstance(model[name], str) and model[name] in self._metadata.tensors:
                continue
            state = self._values(model.pop(name), name, max_bytes=json_values.MAX_ARRAY_BYTES)
            faults: list[str] = []
            text = json.dumps(json_values.encode(state, name, faults))
            if faults:
                raise CheckpointError(
                    f"The extra state of a module must be what JSON can hold; in {self.path} these are not: {faults}. Save "
                    "the checkpoint without them."
                )
            self._made[MODEL + name] = torch.tensor(list(text.encode()), dtype=torch.uint8)

    def _optimizer_of(self, tree: dict[str, Any], names: Mapping[str, str]) -> Mapping[str, Any]:
        if "param_groups" not in tree:
            return self._flattened_optimizer_of(tree, names)
        groups = self._values(tree["param_groups"], "param_groups")
        state = self._values(tree.get("state", {}), OPTIMIZER[:-1])
        if not (
            isinstance(groups, list)
            and all(isinstance(group, dict) for group in groups)
            and all(isinstance(group.get("params"), list | tuple) for group in groups)
            and all(isinstance(each, str | int) for group in groups for each in group["params"])
            and isinstance(state, dict)
            and all(isinstance(each, dict) for each in state.values())
        ):
            raise self._strange_optimizer("others")
        named = [{**group, "params": list(map(str, group["params"]))} for group in groups]
        return {"state": state, "param_groups": named}

    def _strange_optimizer(self, found: str) -> CheckpointError:
        return CheckpointError(
            "The optimizer of a torch distributed checkpoint must have a state for each parameter and a list of "
            f"param_groups; {self.path} has {found}. Save what torch's get_state_dict returns."
        )

    def _flattened_optimizer_of(
        self, tree: Mapping[str, Any], names: Mapping[str, str]
    ) -> Mapping[str, Any]:
        """Return a flattened optimizer's tree. It has options for each parameter; equal options make one group."""
        parts: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
        for flat, entry in tree.items():
            part, _, rest = flat.partition(".")
            if part not in parts:
                raise self._strange_optimizer(repr(flat))
            ends = [end for end, letter in enumerate(rest) if letter == "."]
            end = next((end for end in reversed(ends) if rest[:end] in names), rest.rfind("."))
            parts[part].setdefault(rest[:end], {})[rest[end + 1 :]] = entry
        groups: dict[str, dict[str, Any]] = {}
        for name, options in self._values(parts["param_groups"], "param_groups").items():
            same = json.dumps(json_values.encode(options, name, []), sort_keys=True)
            groups.setdefault(same, {"params": [], **options})["params"].append(name)
        state = self._values(parts["state"], OPTIMIZER[:-1])
        return {"state": state, "param_groups": list(groups.values())}

    def _values(self, tree: Any, key: str, *, max_bytes: int = 0) -> Any:
        """Return a tree of entries as a tree of values; tensors with dimensions and more than ``max_bytes`` become references."""
        if tree is None:
            return None
        if isinstance(tree, dict):
            return {
                each: self._values(tree[each], f"{key}/{each}", max_bytes=max_bytes)
                for each in tree
            }
        if isinstance(tree, list):
            return [
                self._values(each, f"{key}/{i}", max_bytes=max_bytes) for i, each in enumerate(tree)
            ]
        if tree in self._metadata.values:
            item = self._metadata.values[tree]
            raise_if_damaged(self.path, self._faults(item, tree))
            return self._load(item, tree)
        self._stored[key] = tensor = self._metadata.tensors[tree]
        block = whole(tensor.shape)
        if tensor.shape and block.numel * tensor.dtype.itemsize > max_bytes:
            return TensorRef(key)
        raise_if_damaged(self.path, self.verify([(key, block)]))
        value = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.read(key, block, value)
        del self._stored[key]
        return value

    def _chunk(self, key: str, chunk: Chunk) -> Tensor:
        if self._last is not None and self._last[0] == chunk.item:
            return self._last[1]
        self._last = None  # free its memory before the next one is loaded
        found = self._load(chunk.item, key)
        dtype, shape = self._stored[key].dtype, chunk.block.shape
        kind = fault_of(found)
        if kind is None and (found.dtype, tuple(found.shape)) != (dtype, shape):
            kind = f"is {found.dtype} {tuple(found.shape)}"
        if kind is not None:
            raise CheckpointError(
                f"{self._location(chunk.item, key)} must be {dtype} {shape}, and {kind}. The checkpoint is damaged. Load another."
            )
        tensor: Tensor = found.detach()
        self._last = chunk.item, tensor
        return tensor

    def _load(self, item: Item, key: str) -> Any:
        try:
            stream = cast(IO[bytes], self._open(item))
            refuse_compressed(stream, item.nbytes)
            value = torch.load(stream, map_location="cpu", weights_only=True)
            json_values.check_size(value)
            refuse_expanded(value, item.nbytes)
            return value
        except Exception as error:  # a damaged item can raise anything
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise CheckpointError(
                f"{self._location(item, key)} cannot be read by torch.load(weights_only=True): {reason}"
            ) from error

    def _faults(self, item: Item, key: str) -> list[str]:
        try:
            stream = cast(IO[bytes], self._open(item))
            refuse_compressed(stream, item.nbytes)
            with zipfile.ZipFile(stream) as archive:
                # With torch.serialization.set_crc32_options(False), torch writes none.
                has_checksums = any(record.CRC for record in archive.infolist())
                damaged = archive.testzip() if has_checksums else None
        except Exception as error:  # a damaged item can raise anything
            return [f"{self._location(item, key)}: {error}"]
        if damaged is None:
            return []
        return [f"{self._location(item, key)}: the checksum of {damaged} is wrong"]

    def _location(self, item: Item, key: str) -> str:
        span = f"bytes {item.offset} to {item.offset + item.nbytes}"
        return f"{self.path / item.file}, {key} ({span})"

    def _open(self, item: Item) -> io.RawIOBase:
        if item.file not in self._files:
            self._files[item.file] = os.open(self.path / item.file, os.O_RDONLY | os.O_CLOEXEC)
        return _ItemFile(self._files[item.file], item)


class _ItemFile(io.RawIOBase):
    """An item as a file of its own."""

    def __init__(self, descriptor: int, item: Item) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._item = item
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._item.nbytes}
        self._position = max(base[whence] + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, up to the end of the item. One call is not enough: a single read stops at 2 GiB."""
        view = memoryview(buffer).cast("B")[: max(self._item.nbytes - self._position, 0)]
        done = 0
        while done < len(view):
            start = self._item.offset + self._position
            count = os.preadv(self._descriptor, [view[done:]], start)
            if not count:
                break
            done += count
            self._position += count
        return done


def _overlapping(tensor: DcpTensor, wanted: Block) -> Iterator[tuple[Chunk, Block]]:
    for chunk in tensor.chunks:
        common = chunk.block.intersection(wanted)
        if common is not None:
            yield chunk, common


def _nested(paths: Mapping[str, StatePath]) -> dict[str, Any]:
    """Return the saved state dict with the names of entries in place of values."""
    root: dict[Any, Any] = {}
    for name, path in paths.items():
        inner = root
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise CheckpointError(
                    f"An entry of a torch distributed checkpoint must not be within another; {name} is, at {path}. The "
                    "checkpoint is damaged. Load another."
                )
        inner[path[-1]] = name
    return {str(key): _with_lists(value) for key, value in root.items()}


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    inner = {key: _with_lists(value) for key, value in tree.items()}
    if all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner)]
    return {str(key): value for key, value in inner.items()}


def _entries(tree: Any, path: StatePath = ()) -> Iterator[tuple[StatePath, str]]:
    """Yield the entries in a tree of `_nested`: path and name."""
    if isinstance(tree, str):
        yield path, tree
        return
    for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from _entries(inner, (*path, key))


def _leaves(tree: Any, path: StatePath = ()) -> Iterator[tuple[StatePath, Any]]:
    """Yield the leaves of a tree: path and value. Lists and tuples are leaves, unless a list has dicts or tensors in it."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(tree, list) and not all(map(_is_leaf, tree)):
        for i, value in enumerate(tree):
            yield from _leaves(value, (*path, i))
    else:
        yield path, tree


def _is_leaf(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_leaf, value))
    return not isinstance(value, Mapping | Tensor | TensorRef | json_values.DeviceScalar)


# --- writing -----------------------------------------------------------------------------------------------


def write_dcp(source: Source, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint as a torch distributed checkpoint: ``{"model": ..., "optimizer": ..., **extra}``.

    ``torch.distributed.checkpoint.load`` and ``set_state_dict`` load it into any model. An ``extra`` that is not a dict, or
    has one of these keys, becomes the entry "extra". Tensors are copied in chunks. The folder must be new or empty. Its
    metadata are written last; with them it is a checkpoint.

    Raises:
        CheckpointError: the source is damaged, or the folder cannot be written to.
    """
    folder = local_path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise CheckpointError(
                f"A torch distributed checkpoint must be written to a new or empty folder; {folder} is not. Choose another."
            )
        try:
            metadata = _write_data(source, folder / DATA)
            with atomic_write(folder / METADATA, durable=True) as file:
                pickle.dump(metadata, file)
        except BaseException:
            (folder / DATA).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CheckpointError(f"No checkpoint can be written to {folder}: {error}") from error


def _write_data(source: Source, path: Path) -> Metadata:
    """Write all items to a new file; return where they are."""
    metadata = Metadata({}, planner_data={}, storage_data={})
    with path.open("xb") as file:
        for where, value in _leaves(_state_dict(source)):
            _write_entry(file, metadata, where, value, source)
        file.flush()
        os.fsync(file.fileno())
    return metadata


def _state_dict(source: Source) -> dict[str, Any]:
    names = [key.removeprefix(MODEL) for key in source.tensors if key.startswith(MODEL)]
    model: dict[str, Any] = {name: TensorRef(MODEL + name) for name in names}
    model |= {name: TensorRef(MODEL + stored) for name, stored in source.tied.items()}
    model |= {name: _module_state(source, name) for name in names if _is_module_state(name)}
    found: dict[str, Any] = {MODEL_ROOT: model}
    if source.optimizer is not None:
        found[OPTIMIZER_ROOTS[0]] = without_class(source.optimizer)
    if source.extra is None:
        return found
    ours = {MODEL_ROOT, EXTRA_ROOT, *OPTIMIZER_ROOTS}
    if isinstance(source.extra, Mapping) and not ours.intersection(map(str, source.extra)):
        return {**found, **source.extra}
    return {**found, EXTRA_ROOT: source.extra}


def _is_module_state(name: str) -> bool:
    return name.rpartition(".")[2] == EXTRA_STATE


def _module_state(source: Source, name: str) -> Any:
    """Return the extra state of a module as torch has it: the value, if the tensor is its JSON text."""
    info = source.tensors[MODEL + name]
    if info.dtype == torch.uint8 and len(info.shape) == 1:
        text = bytes(read_verified(source, MODEL + name).tolist())
        with contextlib.suppress(ValueError, RecursionError, CheckpointError):
            return json_values.decode(json.loads(text))
    return TensorRef(MODEL + name)


def _write_entry(
    file: IO[bytes], metadata: Metadata, where: StatePath, value: Any, source: Source
) -> None:
    name = ".".join(map(str, where))
    if name in metadata.planner_data:
        raise CheckpointError(
            f"Names in a torch distributed checkpoint are joined by dots, and must differ; {where} and "
            f"{metadata.planner_data[name]} both become {name!r}. Rename one of them."
        )
    metadata.planner_data[name] = where

    def write(item: Any, index: MetadataIndex) -> None:
        offset = file.tell()
        torch.save(item, file)
        metadata.storage_data[index] = dcp_item_place(DATA, offset, file.tell() - offset)

    if isinstance(value, json_values.DeviceScalar):
        value = value.value
    if not isinstance(value, Tensor | TensorRef):
        write(with_tensors(value, source), MetadataIndex(name))
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        return
    info = source.tensors[value.key] if isinstance(value, TensorRef) else value
    chunks: list[ChunkStorageMetadata] = []
    for block in list(slabs(info.shape, CHUNK_BYTES // info.dtype.itemsize)) or [whole(info.shape)]:
        if isinstance(value, TensorRef):
            part = read_verified(source, value.key, block)
        else:
            part = value[block.slices_in(whole(info.shape))].clone()
        write(part, MetadataIndex(name, block.start, len(chunks)))
        chunks.append(ChunkStorageMetadata(torch.Size(block.start), torch.Size(block.shape)))
    properties = TensorProperties(dtype=info.dtype)
    metadata.state_dict_metadata[name] = TensorStorageMetadata(
        properties, torch.Size(info.shape), chunks
    )
