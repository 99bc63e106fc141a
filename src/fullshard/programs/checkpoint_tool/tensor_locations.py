"""The files and bytes of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fullshard.checkpoint.manifest import file_name
from fullshard.checkpoint.source import MODEL, Source
from fullshard.checkpoint.sources.dcp import DcpCheckpoint
from fullshard.checkpoint.sources.huggingface import HuggingFaceFolder
from fullshard.checkpoint.sources.stored_checkpoint import StoredCheckpoint
from fullshard.checkpoint.tensor_files import TensorFile
from fullshard.errors import CheckpointError
from fullshard.layout.blocks import whole


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor that is in one file."""

    file: str
    """Path, relative to the checkpoint."""
    offset: int | None
    """First byte in the file; None if it is not known."""
    nbytes: int | None
    start: tuple[int, ...]
    """Start of the block of the tensor; the first element, if the tensor is cut as one range of elements."""
    shape: tuple[int, ...]


class TensorLocations(Protocol):
    """The locations of one checkpoint's tensors."""

    def files(self) -> list[Path]:
        """Return all files that have tensors."""

    def num_pieces(self, key: str) -> int:
        """Return the number of pieces of a tensor."""

    def pieces(self, key: str) -> Iterator[Piece]:
        """Yield the pieces of a tensor."""


def locate_tensors(source: Source) -> TensorLocations:
    """Return the locations of the tensors of ``source``."""
    if isinstance(source, StoredCheckpoint):
        return _StoredLocations(source)
    if isinstance(source, DcpCheckpoint):
        return _DcpLocations(source)
    if isinstance(source, HuggingFaceFolder):
        return _HuggingFaceLocations(source.path)
    return _OneFile(source)


class _StoredLocations:
    def __init__(self, source: StoredCheckpoint) -> None:
        self._source = source
        self._manifest = source.manifest

    def files(self) -> list[Path]:
        folder = self._source.path / self._manifest.data
        return [folder / file_name(rank) for rank in sorted(self._manifest.files)]

    def num_pieces(self, key: str) -> int:
        sharding = self._manifest.tensors[key].sharding
        return sum(sharding.extent(cell).numel > 0 for cell in range(sharding.cells))

    def pieces(self, key: str) -> Iterator[Piece]:
        sharding = self._manifest.tensors[key].sharding
        for cell in range(sharding.cells):
            extent = sharding.extent(cell)
            if extent.numel:
                rank = sharding.holders[0][cell]
                file = self._source.file_of(rank)
                entry = file.entries.get(key)
                if entry is None:
                    raise CheckpointError(
                        f"{file.path} does not have tensor {key!r}, although the manifest says so."
                    )
                # Data are at the end of a file, without gaps.
                data = self._manifest.files[rank].nbytes - max(e.end for e in file.entries.values())
                name = f"{self._manifest.data}/{file_name(rank)}"
                nbytes = entry.end - entry.begin
                yield Piece(name, data + entry.begin, nbytes, extent.start, extent.shape)


class _DcpLocations:
    def __init__(self, source: DcpCheckpoint) -> None:
        self._source = source

    def files(self) -> list[Path]:
        return sorted(self._source.path.glob("*.distcp"))

    def num_pieces(self, key: str) -> int:
        return sum(1 for _ in self._source.pieces(key))

    def pieces(self, key: str) -> Iterator[Piece]:
        for file, offset, nbytes, block in self._source.pieces(key):
            yield Piece(file, offset, nbytes, block.start, block.shape)


class _HuggingFaceLocations:
    def __init__(self, path: Path) -> None:
        self._files: dict[str, TensorFile] = {}
        for file in sorted(path.glob("*.safetensors")):
            opened = TensorFile(file, None)
            opened.close()
            self._files |= {f"{MODEL}{name}": opened for name in opened.entries}

    def files(self) -> list[Path]:
        return sorted({file.path for file in self._files.values()})

    def num_pieces(self, key: str) -> int:
        return 1

    def pieces(self, key: str) -> Iterator[Piece]:
        file = self._files[key]
        entry = file.entries[key.removeprefix(MODEL)]
        data = file.path.stat().st_size - max(each.end for each in file.entries.values())
        block = whole(entry.shape)
        nbytes = entry.end - entry.begin
        yield Piece(file.path.name, data + entry.begin, nbytes, block.start, block.shape)


class _OneFile:
    """A file of torch.save: torch maps it into memory and does not say where a tensor is."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def files(self) -> list[Path]:
        return [self._source.path]

    def num_pieces(self, key: str) -> int:
        return 1

    def pieces(self, key: str) -> Iterator[Piece]:
        block = whole(self._source.tensors[key].shape)
        yield Piece(self._source.path.name, None, None, block.start, block.shape)
