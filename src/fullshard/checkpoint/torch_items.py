"""Checks before and after torch loads what `torch.save` wrote: a zip file with a pickle and data.

``torch.load(weights_only=True)`` runs no code, but it trusts the file: it unpacks compressed data of any size, and builds
tensors that are much larger than their data.
"""

from __future__ import annotations

import zipfile
from typing import IO, Any

import torch
from torch import Tensor, nn

MAX_EXPANDED_BYTES = 1 << 30
"""Bytes of a tensor whose elements share memory. A file of any size can describe a larger one."""


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
    if value.nbytes > max(value.untyped_storage().nbytes(), MAX_EXPANDED_BYTES):
        return f"is a tensor of {value.nbytes} bytes of which the file has only a few"
    return None
