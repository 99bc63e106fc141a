"""Checks before and after torch loads what `torch.save` wrote: a zip file with a pickle and data.

``torch.load(weights_only=True)`` runs no code, but it trusts the file: it unpacks compressed data of any size, and builds
tensors that are much larger than their data.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from typing import IO, Any

import torch
from torch import Tensor, nn

MAX_GROWTH = 16
"""Most bytes of a file's tensors, as a multiple of the file's. Elements of expanded tensors share memory, and
tensors may be views of the same data; so a file of any size can describe any number of bytes."""


def refuse_compressed(stream: IO[bytes], nbytes: int) -> None:
    """Raise unless the records of a zip file are not compressed and fit into ``nbytes``.

    torch compresses nothing, but it unpacks what others have compressed, to any size.

    Raises:
        Exception: of any kind, if it is not such a file.
    """
    with zipfile.ZipFile(stream) as archive:
        records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError("it is compressed; torch.save compresses nothing")
    if sum(record.file_size for record in records) > nbytes:
        raise ValueError("its records claim more bytes than the file has")
    stream.seek(0)


def fault_of(value: Any) -> str | None:
    """Return why a value is not a whole, dense tensor, or None if it is."""
    if not isinstance(value, Tensor):
        return f"is of type {type(value).__name__}, not a tensor"
    if type(value) not in (Tensor, nn.Parameter):
        return f"is a {type(value).__name__}"
    if value.is_meta:
        return "is a tensor on the meta device, without data"
    if value.layout != torch.strided or value.is_quantized:
        return f"is a tensor of layout {value.layout} and dtype {value.dtype}"
    return None


def refuse_expanded(content: Any, nbytes: int, *, at_least: int = 0) -> None:
    """Raise unless the tensors in what was loaded from ``nbytes`` are `MAX_GROWTH` times as large at most, or ``at_least``.

    Raises:
        ValueError: they are larger; the largest of those that share memory are named.
    """
    tensors = {
        (each.data_ptr(), each.dtype, each.shape, each.stride()): (each, path)
        for path, each in _tensors_in(content, "", set())
        if each.layout == torch.strided and not each.is_meta
    }
    total = sum(each.nbytes for each, _ in tensors.values())
    if total <= max(MAX_GROWTH * nbytes, at_least):
        return
    largest = sorted(tensors.values(), key=lambda found: -found[0].nbytes)[:5]
    raise ValueError(
        f"its tensors have {total} bytes, and it has {nbytes}, because elements or tensors share memory: "
        + ", ".join(f"{path} has {each.nbytes}" for each, path in largest)
        + "; save contiguous copies"
    )


def _tensors_in(value: Any, path: str, entered: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested containers with their paths; each container is entered once."""
    if isinstance(value, Tensor):
        yield path.removeprefix("."), value
    elif isinstance(value, Mapping | list | tuple) and id(value) not in entered:
        entered.add(id(value))
        inner = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, each in inner:
            yield from _tensors_in(each, f"{path}.{name}", entered)
