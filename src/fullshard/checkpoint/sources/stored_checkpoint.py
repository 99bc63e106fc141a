"""A checkpoint of our own format, read in parts.

The shardings in the manifest say which files have parts of a block. Only these files are opened, and only these parts are
read.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from fullshard.checkpoint.manifest import Manifest, StoredTensor, file_name
from fullshard.checkpoint.source import TensorInfo
from fullshard.checkpoint.tensor_files import CHUNK_BYTES, FileEntry, TensorFile
from fullshard.errors import CheckpointError
from fullshard.layout.blocks import Block
from fullshard.layout.sharding import CellPart

MAX_OPEN_FILES = 64
"""Files that are open at once. Their headers stay in memory, so opening a file again costs little."""


class StoredCheckpoint:
    """A `Source` of our own format. Several threads may read at once.

    Args:
        path: The checkpoint's folder.
        manifest: The content of its manifest.
    """

    format = "fullshard"

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.tensors: Mapping[str, TensorInfo] = {
            key: TensorInfo(stored.dtype, stored.shape) for key, stored in manifest.tensors.items()
        }
        self.tied = manifest.tied
        self.optimizer = manifest.optimizer
        self.extra = manifest.extra
        self.base = manifest.base
        self.manifest = manifest
        self._files: dict[int, TensorFile] = {}
        """Files whose headers have been read, by the rank that wrote them."""
        self._open: OrderedDict[int, TensorFile] = OrderedDict()
        """The open ones, the most recently used last."""
        self._lock = threading.Lock()
        """Guards both."""

    def read(self, key: str, wanted: Block, out: Tensor) -> None:
        """Read a block into ``out``, a CPU tensor of the block's shape and the stored dtype, strided or not."""
        stored = self.manifest.tensors[key]
        if stored.sharding.order is not None:
            out = out.permute(stored.sharding.order)
        wanted = _as_stored(stored, wanted)
        for part in stored.sharding.overlapping(wanted):
            file = self.file_of(stored.sharding.holders[0][part.cell])
            _checked_entry(file, key, stored, part.cell)
            file.read_block(
                key,
                part.wanted,
                out[part.wanted.slices_in(wanted)],
                of=part.block,
                first_element=part.offset,
            )

    def verify(self, wanted: Iterable[tuple[str, Block]]) -> list[str]:
        """Check headers and data of all files with parts of these blocks; return a line for each fault."""
        parts: dict[int, list[tuple[str, CellPart]]] = defaultdict(list)
        for key, block in wanted:
            stored = self.manifest.tensors[key]
            for part in stored.sharding.overlapping(_as_stored(stored, block)):
                parts[stored.sharding.holders[0][part.cell]].append((key, part))
        return [fault for rank in sorted(parts) for fault in self._faults(rank, parts[rank])]

    def verify_file(self, rank: int, *, thorough: bool) -> list[str]:
        """Check that the file of a rank has what the manifest says and, if ``thorough``, all its data.

        Returns:
            A line for each fault.
        """
        parts = []
        for key, stored in self.manifest.tensors.items():
            cell = stored.sharding.cell_of(rank)
            if cell is not None and (extent := stored.sharding.extent(cell)).numel:
                parts.append((key, CellPart(cell, extent, 0, extent)))
        if not parts and rank not in self.manifest.files:
            return []
        return self._faults(rank, parts, data=thorough)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            self._files.clear()
            self._open.clear()

    def _faults(
        self, rank: int, parts: list[tuple[str, CellPart]], *, data: bool = True
    ) -> list[str]:
        try:
            file = self.file_of(rank)
        except CheckpointError as error:
            return [str(error)]
        faults = []
        ranges = []
        for key, part in parts:
            try:
                entry = _checked_entry(file, key, self.manifest.tensors[key], part.cell)
            except CheckpointError as error:
                faults.append(str(error))
                continue
            size = entry.dtype.itemsize
            # A gap that is smaller than a chunk contains no whole chunk that could be skipped.
            gap = CHUNK_BYTES // size - 1
            for first, count in part.wanted.ranges_in(part.block, largest_gap=gap):
                begin = entry.begin + (part.offset + first) * size
                ranges.append((begin, begin + count * size))
        return list(dict.fromkeys(faults)) + (file.verify(ranges) if data else [])

    def file_of(self, rank: int) -> TensorFile:
        """Return the file that a rank wrote."""
        with self._lock:
            file = self._files.get(rank)
            if file is None:
                record = self.manifest.files.get(rank)
                if record is None:
                    raise CheckpointError(
                        f"The manifest of {self.path} has tensors of rank {rank}, but no file of that rank. Load another "
                        "checkpoint."
                    )
                file = TensorFile(self.path / self.manifest.data / file_name(rank), record)
                self._files[rank] = file
            self._open[rank] = file
            self._open.move_to_end(rank)
            if len(self._open) > MAX_OPEN_FILES:
                _, longest_unused = self._open.popitem(last=False)
                longest_unused.close()
            return file


def _as_stored(stored: StoredTensor, block: Block) -> Block:
    """Return a block of the model's tensor with its dimensions in the order of the file."""
    order = stored.sharding.order
    if order is None:
        return block
    return Block(tuple(block.start[dim] for dim in order), tuple(block.shape[dim] for dim in order))


def _checked_entry(file: TensorFile, key: str, stored: StoredTensor, cell: int) -> FileEntry:
    """Return the file's entry of a cell, after comparing it with the manifest."""
    entry = file.entries.get(key)
    shape = stored.sharding.extent(cell).shape
    if entry is None:
        raise CheckpointError(
            f"{file.path} does not have tensor {key!r}, although the manifest says so."
        )
    if (entry.dtype, entry.shape) != (stored.dtype, shape):
        raise CheckpointError(
            f"{file.path} has tensor {key!r} as {entry.dtype} {entry.shape}; the manifest says {stored.dtype} {shape}."
        )
    return entry
