"""What `torch.save` wrote, a zip file of a pickle and of data: what is looked at before and after torch loads it.

``torch.load(weights_only=True)`` runs nothing, but believes what it reads: sizes of compressed data, and tensors that
are much larger than what is stored of them.
"""

from __future__ import annotations

import zipfile
from typing import IO, Any

import torch
from torch import Tensor, nn

MAX_EXPANDED_BYTES = 1 << 30
"""Of a tensor whose elements share memory: such a tensor can have any size, whatever is stored of it."""


def refuse_compressed(stream: IO[bytes], nbytes: int) -> None:
    """Raise unless the records of a zip file are stored as they are, and no more than the file has room for.

    torch compresses nothing, and unpacks what others have compressed, to any size.

    Raises:
        Exception: of any kind, if it is no such file.
    """
    with zipfile.ZipFile(stream) as archive:
        records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError("it is compressed, and torch.save compresses nothing")
    if sum(record.file_size for record in records) > nbytes:
        raise ValueError("its records say that they are larger than all of it")
    stream.seek(0)


def fault_of(value: Any) -> str | None:
    """Why a value cannot be taken for a whole tensor, or None."""
    if not isinstance(value, Tensor):
        return f"is no tensor but {type(value).__name__}"
    if type(value) not in (Tensor, nn.Parameter):
        return f"is a {type(value).__name__}"
    if value.is_meta:
        return "is a tensor on the meta device, without data"
    if value.layout != torch.strided or value.is_quantized:
        return f"is a tensor of layout {value.layout} and dtype {value.dtype}"
    if value.nbytes > max(value.untyped_storage().nbytes(), MAX_EXPANDED_BYTES):
        return f"is a tensor of {value.nbytes} bytes, of which few are stored"
    return None
