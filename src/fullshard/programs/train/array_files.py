"""Files of tokens: their headers, and their content.

    .npy    a header that numpy writes, then numbers
    .bin    numbers only; the configuration has their dtype

Tokens are read when they are used, so files may be larger than memory. They are read and not mapped: if a mapped file is cut
short, or its disk fails, the process dies of a SIGBUS, which says nothing. Headers are read without torch.
"""

from __future__ import annotations

import ast
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.errors import ConfigurationError
from fullshard.programs.train.config import TokenDtype

if TYPE_CHECKING:
    from torch import Tensor

MAGIC = b"\x93NUMPY"

DTYPES = {
    "|u1": "uint8",
    "|i1": "int8",
    "<u2": "uint16",
    "<i2": "int16",
    "<u4": "uint32",
    "<i4": "int32",
    "<u8": "uint64",
    "<i8": "int64",
}
"""Dtypes that can be read, by numpy's code."""

ITEM_BYTES = {name: int(code[-1]) for code, name in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """A file of tokens."""

    path: Path
    dtype: str
    first_byte: int
    """Offset of the first token."""
    length: int
    """Length in tokens."""

    def opened(self) -> OpenArray:
        """Open it to read its tokens."""
        return OpenArray(self)


class OpenArray:
    """A file of tokens that is open for as long as this lives. Another file that gets its name meanwhile is not seen."""

    def __init__(self, file: ArrayFile) -> None:
        self._file = file
        try:
            self._descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigurationError(f"Arrays of tokens must be readable: {error}.") from error
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, start: int, stop: int) -> Tensor:
        """Return the tokens from index ``start`` to ``stop``.

        Raises:
            ConfigurationError: the file has been cut short, or cannot be read any more.
        """
        import torch

        file, size = self._file, ITEM_BYTES[self._file.dtype]
        memory = bytearray((stop - start) * size)
        done = 0
        while done < len(memory):
            place = file.first_byte + start * size + done
            try:
                count = os.preadv(self._descriptor, [memoryview(memory)[done:]], place)
            except OSError as error:
                raise ConfigurationError(
                    f"Arrays of tokens must stay readable: {file.path}: {error}."
                ) from error
            if not count:
                raise ConfigurationError(
                    f"Arrays of tokens must stay as they are while they are used; {file.path} had {file.length} tokens, and now "
                    f"ends before number {stop}: it was cut short. Write new data to another file."
                )
            done += count
        dtype = getattr(torch, file.dtype)
        return torch.frombuffer(memory, dtype=dtype) if memory else torch.empty(0, dtype=dtype)


def read_header(path: Path, bin_dtype: TokenDtype) -> ArrayFile:
    """Return dtype and length of a file of tokens; a `.bin` file has tokens of `bin_dtype`.

    Raises:
        ConfigurationError: it cannot be read, or is not a one-dimensional array of integers.
    """
    try:
        size = path.stat().st_size
        if path.suffix == ".npy":
            return _read_npy_header(path, size)
    except OSError as error:
        raise ConfigurationError(f"Arrays of tokens must be readable: {error}.") from error
    except ConfigurationError:  # it is a ValueError, too
        raise
    except ValueError as error:
        raise ConfigurationError(
            f"{path} is not an array as numpy.save writes it: {error}. Write it again."
        ) from error
    length, rest = divmod(size, ITEM_BYTES[bin_dtype])
    if rest:
        raise ConfigurationError(
            f"{path} must be tokens of {ITEM_BYTES[bin_dtype]} bytes each (data.dtype {bin_dtype}), but it has "
            f"{size} bytes. Set data.dtype to what it was written as."
        )
    return ArrayFile(path, bin_dtype, 0, length)


def _read_npy_header(path: Path, size: int) -> ArrayFile:
    """Read the header of a `.npy` file; ValueError if there is none."""
    with path.open("rb") as stream:
        opening = stream.read(len(MAGIC) + 2)
        if not opening.startswith(MAGIC) or len(opening) < len(MAGIC) + 2:
            raise ValueError("it does not begin like one")
        length_bytes = 2 if opening[-2] == 1 else 4
        header_length = int.from_bytes(stream.read(length_bytes), "little")
        first_byte = len(opening) + length_bytes + header_length
        if first_byte > size:
            raise ValueError("it ends within its header")
        header = _literal(stream.read(header_length))
    shape, dtype = header["shape"], DTYPES.get(header["descr"])
    if len(shape) != 1 or dtype is None:
        raise ConfigurationError(
            f"An array of tokens must have one dimension, and be of {', '.join(DTYPES.values())}; {path} is of "
            f"{header['descr']} (in numpy's words) and has shape {shape}. Write it with numpy.save as one of those."
        )
    missing = first_byte + shape[0] * ITEM_BYTES[dtype] - size
    if missing > 0:
        raise ValueError(f"its last {missing} bytes are missing")
    return ArrayFile(path, dtype, first_byte, shape[0])


def _literal(header: bytes) -> dict[str, Any]:
    """Return the dictionary in a header; ValueError if it lacks shape or dtype."""
    try:
        found = ast.literal_eval(header.decode())
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"its header cannot be read: {error}") from error
    if (
        not isinstance(found, dict)
        or not isinstance(found.get("descr"), str | list)
        or not isinstance(found.get("shape"), tuple)
        or not all(isinstance(size, int) and size >= 0 for size in found["shape"])
    ):
        raise ValueError("its header does not say shape and dtype")
    return {**found, "descr": str(found["descr"])}
