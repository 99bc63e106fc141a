"""In which files and bytes the tensors of a checkpoint are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fullshard.checkpoint.blocks import whole
from fullshard.checkpoint.dcp import DcpCheckpoint
from fullshard.checkpoint.huggingface import HuggingFaceFolder
from fullshard.checkpoint.manifest import file_name
from fullshard.checkpoint.source import MODEL, Source
from fullshard.checkpoint.stored_checkpoint import StoredCheckpoint
from fullshard.checkpoint.tensor_files import TensorFile
from fullshard.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor, and where it is."""

    file: str
    """Relative to the checkpoint."""
    offset: int | None
    """First byte in the file; None where that is not known."""
    nbytes: int | None
    start: tuple[int, ...]
    """Of the block of the tensor, or the one element, if the tensor is cut as one range of elements."""
    shape: tuple[int, ...]


class TensorLocations(Protocol):
    """Where the tensors of one checkpoint are."""

    def files(self) -> list[Path]:
        """All files that have tensors."""

    def num_pieces(self, key: str) -> int:
        """Parts that a tensor is stored in."""

    def pieces(self, key: str) -> Iterator[Piece]:
        """These parts."""


def locate_tensors(source: Source) -> TensorLocations:
    """Where the tensors of ``source`` are."""
    if isinstance(source, StoredCheckpoint):
        return _StoredLocations(source)
    if isinstance(source, DcpCheckpoint):
        return _DcpLocations(source)
    if isinstance(source, HuggingFaceFolder):
        return _HuggingFaceLocations(source.path)
    return _OneFile(source)


class _StoredLocations:
    def __init__(self, source: StoredCheckpoint) -> None:
        self._path = source.path
        self._manifest = source.manifest
        self._opened: dict[int, TensorFile] = {}

    def files(self) -> list[Path]:
        return [self._file(rank) for rank in sorted(self._manifest.files)]

    def num_pieces(self, key: str) -> int:
        sharding = self._manifest.tensors[key].sharding
        return sum(sharding.extent(cell).numel > 0 for cell in range(sharding.cells))

    def pieces(self, key: str) -> Iterator[Piece]:
        sharding = self._manifest.tensors[key].sharding
        for cell in range(sharding.cells):
            extent = sharding.extent(cell)
            if extent.numel:
                rank = sharding.holders[0][cell]
                file = self._open(rank)
                entry = file.entries.get(key)
                if entry is None:
                    raise CheckpointError(f"{file.path} has no part of {key!r}.")
                # Data are at the end of a file, without holes.
                data = self._manifest.files[rank].nbytes - max(e.end for e in file.entries.values())
                name = f"{self._manifest.data}/{file_name(rank)}"
                nbytes = entry.end - entry.begin
                yield Piece(name, data + entry.begin, nbytes, extent.start, extent.shape)

    def _file(self, rank: int) -> Path:
        return self._path / self._manifest.data / file_name(rank)

    def _open(self, rank: int) -> TensorFile:
        if rank not in self._opened:
            if rank not in self._manifest.files:
                raise CheckpointError(
                    f"The manifest of {self._path} has tensors that rank {rank} wrote, but no file of it."
                )
            self._opened[rank] = TensorFile(self._file(rank), self._manifest.files[rank])
            self._opened[rank].close()  # what its header says is kept
        return self._opened[rank]


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
    """Torch maps its files itself and does not say where a tensor is."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def files(self) -> list[Path]:
        return [self._source.path]

    def num_pieces(self, key: str) -> int:
        return 1

    def pieces(self, key: str) -> Iterator[Piece]:
        block = whole(self._source.tensors[key].shape)
        yield Piece(self._source.path.name, None, None, block.start, block.shape)
