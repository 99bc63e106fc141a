"""The codes of dtypes in safetensors files and in our manifests, and which dtypes may be cast to which."""

from __future__ import annotations

import torch

DTYPE_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Other dtypes cannot be stored."""

DTYPES_BY_CODE = {code: dtype for dtype, code in DTYPE_CODES.items()}


def keeps_meaning(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a cast changes values by rounding at most.

    Integers are not cast to floating-point numbers: they may be quantised weights.
    """
    if stored == wanted:
        return True
    if stored.is_floating_point or stored.is_complex:
        return wanted.is_complex or (wanted.is_floating_point and stored.is_floating_point)
    if wanted.is_floating_point or wanted.is_complex or wanted == torch.bool:
        return False
    if stored == torch.bool:
        return True
    old, new = torch.iinfo(stored), torch.iinfo(wanted)
    return bool(new.min <= old.min and old.max <= new.max)
