"""One file of tensors: safetensors, with a checksum of every chunk.

    | 8 bytes: length | header: JSON, padded with spaces | data: one tensor after another |
                      ^                                  ^ at a multiple of 64 bytes
                      "__metadata__": {"chunk_bytes": "1048576", "crc32": 8 hex digits for each chunk of the data}

Any reader of safetensors can read such a file. A reader that needs a part of it checks only the chunks with that part.
The header is written last, so a file that was cut short has none.

The header has a parser of its own, because the safetensors library maps whole files into memory, where a file that
becomes shorter is a crash and not an error; it does not say where a tensor is; and of two tensors with one name it takes
the last. Nothing in a file is ever executed.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import math
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullshard.checkpoint.dtypes import DTYPE_CODES, DTYPES_BY_CODE
from fullshard.checkpoint.json_values import without_repetition
from fullshard.checkpoint.manifest import FileRecord
from fullshard.errors import CheckpointError
from fullshard.layout.blocks import MAX_DIMS, Block, are_sizes, row_major_strides

CHUNK_BYTES = 1 << 20
"""Data under one checksum."""
ALIGNMENT = 64
MAX_HEADER = 100_000_000
"""The limit of the safetensors library, which refuses longer headers."""
MAX_WRITE = 16 << 20
"""Bytes of one write call; progress is reported after each."""
SCRATCH_BYTES = 8 << 20
"""Memory for data that are not read directly into the target."""
SMALLEST_DIRECT_READ = 1 << 20
"""A range of so many bytes is read directly into the target if possible: the time of a call does not matter then."""
MAX_GAP = 32 << 10
"""Two ranges with a smaller gap between them are read in one call: reading the gap is faster than a second call."""


# --- writing ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewEntry:
    """A tensor to write."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], Tensor]
    """Return the tensor when it is written: a contiguous CPU tensor, whose memory the next call of any `fetch` may reuse."""


def write_file(
    path: Path, entries: Sequence[NewEntry], *, on_bytes: Callable[[int], object] | None = None
) -> FileRecord:
    """Write a new file, and wait until the disk has it.

    Tensors are fetched and written one at a time: those with the largest elements first, which keeps all of them
    aligned, and otherwise in the given order. If it fails, the file is removed.

    Args:
        path: A path without a file.
        entries: The tensors, with different keys.
        on_bytes: Called with the number of bytes after each write.
    """
    unknown = [
        f"{entry.key} ({entry.dtype})" for entry in entries if entry.dtype not in DTYPE_CODES
    ]
    if unknown:
        raise CheckpointError(
            f"A checkpoint can have the dtypes of safetensors only; these have others: {', '.join(unknown)}. Convert them."
        )
    entries = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    ends = list(
        itertools.accumulate(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries)
    )
    total = ends[-1] if ends else 0
    head = _head(entries, ends, [0] * _chunks_in(total))
    if len(head) - 8 > MAX_HEADER:
        raise CheckpointError(
            f"The header of a tensor file can have at most {MAX_HEADER} bytes; that of {path}, with {len(entries)} tensors "
            f"and {total} bytes of data, would have {len(head) - 8}. Use more ranks."
        )
    with _os_errors_as(f"Cannot create {path}"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            checksums = _write_data(descriptor, path, entries, len(head), total, on_bytes)
            head = _head(entries, ends, checksums)
            with _os_errors_as(f"Cannot write the header of {path}"):
                _write(descriptor, memoryview(head), 0)
                os.fsync(descriptor)
        finally:
            with _os_errors_as(f"Cannot close {path}"):
                os.close(descriptor)
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
        raise
    return FileRecord(nbytes=len(head) + total, header_crc32=zlib.crc32(head))


def record_in(path: Path) -> FileRecord:
    """Return the record of a file that is complete, as `write_file` has returned it."""
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(struct.unpack("<Q", length)[0])
        return FileRecord(os.fstat(file.fileno()).st_size, zlib.crc32(length + header))


def _head(entries: Sequence[NewEntry], ends: Sequence[int], checksums: Sequence[int]) -> bytes:
    """Return everything before the data. Its length does not depend on the values of the checksums."""
    header: dict[str, object] = {
        "__metadata__": {
            "format": "pt",
            "chunk_bytes": str(CHUNK_BYTES),
            "crc32": "".join(f"{checksum:08x}" for checksum in checksums),
        }
    }
    for entry, begin, end in zip(entries, [0, *ends], ends, strict=False):
        assert entry.key not in header, f"{entry.key} is written twice"
        header[entry.key] = {
            "dtype": DTYPE_CODES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _write_data(
    descriptor: int,
    path: Path,
    entries: Sequence[NewEntry],
    position: int,
    total: int,
    on_bytes: Callable[[int], object] | None,
) -> list[int]:
    """Write the tensors from ``position`` on, and return the checksums of the chunks."""
    checksums = _ChunkChecksums()
    written = 0
    # zlib and write both release the GIL and take about the same time, so they run in two threads.
    with ThreadPoolExecutor(max_workers=1) as beside:
        for entry in entries:
            tensor = entry.fetch()
            assert (tensor.dtype, tensor.shape) == (entry.dtype, entry.shape), (
                f"{entry.key} was announced as {entry.dtype} {entry.shape} "
                f"and is {tensor.dtype} {tuple(tensor.shape)}"
            )
            data = memory_of(tensor)
            if len(data) < CHUNK_BYTES:  # faster without the other thread
                checksums.add(data)
                done = None
            else:
                done = beside.submit(checksums.add, data)
            for first in range(0, len(data), MAX_WRITE):
                written_now = data[first : first + MAX_WRITE]
                with _os_errors_as(
                    f"Cannot write {path}, at tensor {entry.key!r}, after {written} of {total} bytes"
                ):
                    _write(descriptor, written_now, position + written)
                written += len(written_now)
                if on_bytes is not None:
                    on_bytes(len(written_now))
            if done is not None:
                done.result()  # the next fetch may reuse the memory
    return checksums.of_chunks


class _ChunkChecksums:
    """The CRC-32 of every chunk of data that are added in portions of any size."""

    def __init__(self) -> None:
        self.of_chunks: list[int] = []
        self._room = 0

    def add(self, data: memoryview) -> None:
        while data:
            if not self._room:
                self.of_chunks.append(0)
                self._room = CHUNK_BYTES
            portion, data = data[: self._room], data[self._room :]
            self.of_chunks[-1] = zlib.crc32(portion, self.of_chunks[-1])
            self._room -= len(portion)


def _write(descriptor: int, data: memoryview, position: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, position)
        data = data[count:]
        position += count


# --- reading ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A tensor of a file: bytes ``begin`` to ``end`` of the data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """A complete file of tensors whose header was checked.

    It keeps the header, and the file open. Reading after `close` opens the file again, if it is still the same file. Several
    threads may read at once.

    Args:
        path: A regular file. With a ``record`` it may not be a link; without one it may be, as in Hugging Face's caches.
        record: Its record in the manifest; None for a file that others wrote, which has no checksums.
    """

    path: Path
    entries: Mapping[str, FileEntry]
    """Entries by key, in the order of the data."""
    metadata: Mapping[str, str]

    def __init__(self, path: Path, record: FileRecord | None) -> None:
        self.path = path
        self._follows_links = record is None
        self._descriptor: _Descriptor | None = self._open()
        self._identity = self._descriptor.identity
        nbytes = self._descriptor.status.st_size
        if record is not None and nbytes != record.nbytes:
            raise self._unusable(f"it has {nbytes} bytes, but {record.nbytes} were written")
        if nbytes < 8:
            raise self._unusable(f"it has {nbytes} bytes, too few for a header")
        length = self._read_bytes(8, at=0)
        (header_bytes,) = struct.unpack("<Q", length)
        if header_bytes > min(nbytes - 8, MAX_HEADER):
            raise self._unusable(
                f"its header would have {header_bytes} bytes; the file has {nbytes}, and a header "
                f"{MAX_HEADER} at most"
            )
        header = self._read_bytes(header_bytes, at=8)
        if record is not None and zlib.crc32(length + header) != record.header_crc32:
            raise self._unusable("the header is not the one that was written (CRC-32 differs)")
        self._data_at = 8 + header_bytes
        self._data_bytes = nbytes - self._data_at
        try:
            self.entries, self.metadata = _parse_header(header, self._data_bytes)
            self._checksums = None if record is None else self._checksums_of_chunks()
        except (ValueError, RecursionError) as error:
            raise self._unusable(f"its header is not valid: {error}") from error

    def close(self) -> None:
        """Close the file as soon as no thread reads it."""
        self._descriptor = None

    def read_into(self, key: str, first_element: int, out: Tensor) -> None:
        """Read elements of a tensor, in row-major order from ``first_element`` on, to fill ``out``.

        ``out`` is a contiguous CPU tensor of the stored dtype and of any shape.
        """
        entry = self.entries[key]
        begin = entry.begin + first_element * entry.dtype.itemsize
        assert out.dtype == entry.dtype, f"{key} is {entry.dtype}, not {out.dtype}"
        assert entry.begin <= begin <= begin + out.nbytes <= entry.end, (
            f"{key} has no such elements"
        )
        self._read(memory_of(out), self._data_at + begin, f"tensor {key!r}")

    def read_block(
        self, key: str, wanted: Block, out: Tensor, *, of: Block, first_element: int = 0
    ) -> None:
        """Read the part ``wanted`` of the block ``of``, whose elements are stored from ``first_element`` on.

        ``out`` is a CPU tensor of the wanted shape and the stored dtype, strided or not.
        """
        if not wanted.numel:
            return
        strides = row_major_strides(of.shape)
        start = (s - o for s, o in zip(wanted.start, of.start, strict=True))
        first_element += sum(i * stride for i, stride in zip(start, strides, strict=True))
        self._read_strided(key, first_element, strides, out.detach())

    def verify(self, ranges: Iterable[tuple[int, int]]) -> list[str]:
        """Check the chunks with these ranges of bytes of the data, and return a line for each fault."""
        if self._checksums is None:
            return []
        chunks = {
            chunk
            for begin, end in ranges
            for chunk in range(begin // CHUNK_BYTES, _chunks_in(end))
            if begin < end
        }
        faults = []
        bad: list[tuple[int, int]] = []
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for chunk in sorted(chunks):
            begin = chunk * CHUNK_BYTES
            end = min(begin + CHUNK_BYTES, self._data_bytes)
            data = buffer[: end - begin]
            try:
                self._read(data, self._data_at + begin, "its data")
            except CheckpointError as error:
                faults.append(f"{error} These bytes are in {self._tensors_in(begin, end)}.")
                break
            if zlib.crc32(data) != self._checksums[chunk]:
                if bad and bad[-1][1] == begin:
                    begin = bad.pop()[0]
                bad.append((begin, end))
        return [
            f"{self.path} is damaged: bytes {begin} to {end} of its data are not those that were written "
            f"(CRC-32 differs), in {self._tensors_in(begin, end)}."
            for begin, end in bad
        ] + faults

    def _read_strided(self, key: str, first: int, strides: tuple[int, ...], out: Tensor) -> None:
        """Fill ``out`` with elements that are stored ``strides`` apart, from element ``first`` on."""
        if _extent(out.shape, strides) == out.numel() and out.is_contiguous():
            self.read_into(key, first, out)
            return
        stride, *rest = strides
        row = _extent(out.shape[1:], rest)
        # Gaps within a row are no larger than gaps between rows.
        gap = stride - row
        size = out.element_size()
        if len(out) == 1 or gap * size > MAX_GAP or row * size >= SMALLEST_DIRECT_READ:
            for index in range(len(out)):
                self._read_strided(key, first + index * stride, tuple(rest), out[index])
            return
        rows_at_once = SCRATCH_BYTES // (stride * size)
        for index in range(0, len(out), rows_at_once):
            rows = out[index : index + rows_at_once]
            covering = torch.empty(_extent(rows.shape, strides), dtype=out.dtype)
            self.read_into(key, first + index * stride, covering)
            rows.copy_(covering.as_strided(rows.shape, strides))

    def _checksums_of_chunks(self) -> tuple[int, ...]:
        if self.metadata.get("chunk_bytes") != str(CHUNK_BYTES):
            raise ValueError(f"checksums must be of chunks of {CHUNK_BYTES} bytes")
        digits = bytes.fromhex(self.metadata.get("crc32", ""))
        chunks = _chunks_in(self._data_bytes)
        if len(digits) != 4 * chunks:
            raise ValueError(f"there must be {chunks} checksums, one for each chunk of the data")
        return struct.unpack(f">{chunks}I", digits)

    def _open(self) -> _Descriptor:
        # O_NONBLOCK: opening a pipe would wait for its other end.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            opened = _Descriptor(
                os.open(self.path, flags if self._follows_links else flags | os.O_NOFOLLOW)
            )
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self._unusable("it is a link") from error
            raise self._unusable(f"it cannot be opened: {error.strerror}") from error
        except ValueError as error:  # the path has a zero byte, or half a character
            raise self._unusable(f"it cannot be opened: {error}") from error
        if not stat.S_ISREG(opened.status.st_mode):
            raise self._unusable("it is not a regular file")
        return opened

    def _reopened(self) -> _Descriptor:
        opened = self._open()
        if opened.identity != self._identity:
            raise self._unusable("it has been changed or replaced since its header was read")
        self._descriptor = opened
        return opened

    def _read_bytes(self, count: int, *, at: int) -> bytes:
        data = bytearray(count)
        self._read(memoryview(data), at, "its header")
        return bytes(data)

    def _read(self, into: memoryview, position: int, what: str) -> None:
        # This reference keeps it open if another thread calls `close`.
        descriptor = self._descriptor or self._reopened()
        while into:
            try:
                count = os.preadv(descriptor.number, [into], position)
            except OSError as error:
                raise self._unusable(f"cannot read {what}: {error.strerror}") from error
            if not count:
                raise self._unusable(
                    f"it ends after {position} bytes, {len(into)} before the end of {what}"
                )
            into = into[count:]
            position += count

    def _tensors_in(self, begin: int, end: int) -> str:
        keys = (
            repr(key)
            for key, entry in self.entries.items()
            if max(entry.begin, begin) < min(entry.end, end)
        )
        return f"tensors {', '.join(keys)}"

    def _unusable(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} cannot be used: {why}.")


class _Descriptor:
    """An open file that is closed with the last reference to it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.status = os.fstat(number)

    @property
    def identity(self) -> tuple[int, int, int]:
        return self.status.st_ino, self.status.st_size, self.status.st_mtime_ns

    def __del__(self) -> None:
        os.close(self.number)


def _parse_header(header: bytes, data_bytes: int) -> tuple[dict[str, FileEntry], dict[str, str]]:
    """Return the tensors in the order of their data, and the metadata.

    Raises:
        ValueError: the header breaks a rule.
    """
    fields = json.loads(header.decode(), object_pairs_hook=without_repetition)
    if not isinstance(fields, dict):
        raise ValueError("it must be a JSON object")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(text, str) for text in metadata.values()
    ):
        raise ValueError("__metadata__ must be an object of strings")
    entries = {key: _parse_entry(key, field) for key, field in fields.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    end = 0
    for key, entry in entries.items():
        if entry.begin != end:
            raise ValueError(
                f"tensor {key!r} must begin where the one before it ends, at {end}, not at {entry.begin}"
            )
        end = entry.end
    if end != data_bytes:
        raise ValueError(f"its tensors have {end} bytes, but {data_bytes} follow it")
    return entries, metadata


def _parse_entry(key: str, field: Any) -> FileEntry:
    if not isinstance(field, dict):
        raise ValueError(f"tensor {key!r} must be an object")
    code, shape, offsets = (field.get(name) for name in ("dtype", "shape", "data_offsets"))
    dtype = DTYPES_BY_CODE.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise ValueError(
            f"tensor {key!r} has the dtype {code!r:.100}; readable are {', '.join(DTYPES_BY_CODE)}"
        )
    if not are_sizes(shape):
        raise ValueError(
            f"tensor {key!r} must have {MAX_DIMS} sizes at most, none of them negative"
        )
    if not are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {key!r} must have two data_offsets, none of them negative")
    begin, end = offsets
    nbytes = math.prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        raise ValueError(
            f"tensor {key!r}, {code} {shape}, needs {nbytes} bytes, not those from {begin} to {end}"
        )
    return FileEntry(dtype, tuple(shape), begin, end)


# --- both ------------------------------------------------------------------------------------------------


def _chunks_in(nbytes: int) -> int:
    return -(-nbytes // CHUNK_BYTES)


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last of a strided tensor that is not empty."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, for reading and writing. Keep the tensor alive meanwhile."""
    is_view = tensor.is_conj() or tensor.is_neg()
    assert tensor.is_cpu and tensor.is_contiguous() and not is_view, (
        "the bytes of other tensors are not contiguous"
    )
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(memory).cast("B")


@contextmanager
def _os_errors_as(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{what}: {error.strerror}. Make room, or save to another folder."
        ) from error
