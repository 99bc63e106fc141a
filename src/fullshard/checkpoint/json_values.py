"""Nested values as JSON and back, exactly. Pickle would do that, but loading a pickle runs code.

JSON has None, bools, numbers, strings, lists and dicts with strings as keys. Everything else is an object with the
tag "!":

    tuple           {"!": "tuple", "items": [...]}
    other dicts     {"!": "dict", "items": [[key, value], ...]}
    nan, inf        {"!": "float", "value": "nan"}
    0-d tensor      {"!": "scalar", "dtype": "F32", "value": 3.0}, with "on": "device" unless it was on the CPU
    small tensor    {"!": "array", "dtype": "U8", "shape": [16], "base64": "..."}
    TensorRef       {"!": "tensor", "key": "optimizer/..."}

Subclasses of these types come back as the types themselves.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.dtypes import DTYPE_CODES, DTYPES_BY_CODE
from fullshard.checkpoint.source import TensorRef
from fullshard.checkpoint.tensor_memory import contiguous_values
from fullshard.errors import CheckpointError
from fullshard.layout.blocks import are_sizes

TAG = "!"
MAX_ARRAY_BYTES = 1 << 20
"""Largest tensor in a manifest."""
MAX_DEPTH = 100
MAX_VALUES = 1 << 22
"""Values in a tree; a text counts as one for every 16 characters."""
MAX_BITS = 14_000
"""Bits of an integer: Python does not write longer ones as text."""


@dataclass(frozen=True, slots=True)
class DeviceScalar:
    """A 0-d tensor that was on an accelerator when it was saved, as a CPU tensor."""

    value: Tensor


def encode(value: Any, path: str, faults: list[str]) -> Any:
    """Return a tree as JSON; what JSON cannot hold is added to ``faults``, with its path."""
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            faults.append(f"{path}: an integer of {value.bit_length()} bits; at most {MAX_BITS}")
            return None
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {TAG: "float", "value": repr(float(value))}
    if isinstance(value, Mapping):
        return _encode_dict(value, path, faults)
    if isinstance(value, list | tuple):
        items = [encode(each, f"{path}[{i}]", faults) for i, each in enumerate(value)]
        return items if isinstance(value, list) else {TAG: "tuple", "items": items}
    if isinstance(value, TensorRef):
        return {TAG: "tensor", "key": value.key}
    if isinstance(value, DeviceScalar):
        return {**_encode_tensor(value.value, path, faults), "on": "device"}
    if isinstance(value, Tensor):
        return _encode_tensor(value, path, faults)
    faults.append(f"{path}: {type(value).__module__}.{type(value).__qualname__}")
    return None


def _encode_dict(value: Mapping[Any, Any], path: str, faults: list[str]) -> Any:
    if TAG not in value and all(isinstance(key, str) for key in value):
        return {str(key): encode(each, f"{path}.{key}", faults) for key, each in value.items()}
    items = [
        [encode(key, f"key of {path}", faults), encode(each, f"{path}[{key!r}]", faults)]
        for key, each in value.items()
    ]
    return {TAG: "dict", "items": items}


def _encode_tensor(value: Tensor, path: str, faults: list[str]) -> Any:
    code = DTYPE_CODES.get(value.dtype)
    if code is None or isinstance(value, DTensor) or value.is_complex():
        faults.append(f"{path}: {type(value).__name__} of {value.dtype}")
        return None
    if not value.ndim:
        number = encode(value.item(), path, faults)
        found = {TAG: "scalar", "dtype": code, "value": number}
        return found if value.device.type == "cpu" else {**found, "on": "device"}
    if value.nbytes > MAX_ARRAY_BYTES:
        faults.append(f"{path}: a tensor of {value.nbytes} bytes; at most {MAX_ARRAY_BYTES}")
        return None
    dense = contiguous_values(value.detach().cpu())
    data = bytes(dense.reshape(-1).view(torch.uint8).tolist())
    text = base64.b64encode(data).decode()
    return {TAG: "array", "dtype": code, "shape": list(value.shape), "base64": text}


def decode(value: Any, depth: int = 0) -> Any:
    """Return the tree that `encode` was given, with base types for subclasses.

    Raises:
        CheckpointError: it is not what `encode` returns.
    """
    if depth > MAX_DEPTH:
        raise CheckpointError(f"Values in a manifest may be at most {MAX_DEPTH} levels deep.")
    if isinstance(value, list):
        return [decode(each, depth + 1) for each in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: decode(each, depth + 1) for key, each in value.items()}
    try:
        return _decode_tagged(value, depth)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"Not a value of a manifest: {str(value)[:200]}") from error


def _decode_tagged(value: dict[str, Any], depth: int) -> Any:
    kind = value[TAG]
    if kind == "tuple":
        return tuple(decode(each, depth + 1) for each in value["items"])
    if kind == "dict":
        return {decode(k, depth + 1): decode(v, depth + 1) for k, v in value["items"]}
    if kind == "float":
        return float(value["value"])
    if kind == "tensor":
        return TensorRef(str(value["key"]))
    if kind == "scalar":
        scalar = torch.tensor(decode(value["value"], depth + 1), dtype=_dtype(value))
        if scalar.ndim:
            raise ValueError("a scalar is one number")
        return DeviceScalar(scalar) if value.get("on") == "device" else scalar
    if kind == "array":
        data = base64.b64decode(value["base64"], validate=True)
        dtype, shape = _dtype(value), value["shape"]
        if (
            not are_sizes(shape)
            or len(data) != math.prod(shape) * dtype.itemsize
            or len(data) > MAX_ARRAY_BYTES
        ):
            raise ValueError("shape and data disagree")
        flat = torch.tensor(list(data), dtype=torch.uint8).view(dtype)
        return flat.reshape(shape)
    raise ValueError(f"unknown tag {kind!r}")


def check_size(tree: Any) -> None:
    """Raise unless a tree that others wrote can be walked. A small file can describe one that contains itself many times.

    Raises:
        CheckpointError: it is too deep, or too large if a value counts as often as it occurs.
    """
    if _extent(tree, 0, {})[0] > MAX_VALUES:
        raise CheckpointError(f"It has more than {MAX_VALUES} values.")


def _extent(value: Any, depth: int, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return how many values are in a value, and how deep they are; each container is entered once."""
    if isinstance(value, str | bytes):
        return 1 + len(value) // 16, 0
    if not isinstance(value, Mapping | list | tuple):
        return 1, 0
    count, height = known.get(id(value), (0, 0))
    if depth + height > MAX_DEPTH:
        raise CheckpointError(f"Its values are more than {MAX_DEPTH} levels deep.")
    if not count:
        inner = (*value, *value.values()) if isinstance(value, Mapping) else value
        extents = [_extent(each, depth + 1, known) for each in inner]
        count = 1 + sum(count for count, _ in extents)
        height = 1 + max((height for _, height in extents), default=0)
        known[id(value)] = count, height
    return count, height


def are_same(one: Any, other: Any) -> bool:
    """Return whether two trees are equal to the last bit of each value."""
    return one is other or bool(encode(one, "", []) == encode(other, "", []))


def references(tree: Any) -> Iterator[TensorRef]:
    """Yield all references to tensors in a tree."""
    if isinstance(tree, TensorRef):
        yield tree
    elif isinstance(tree, Mapping):
        for each in tree.values():
            yield from references(each)
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from references(each)


def _dtype(value: dict[str, Any]) -> torch.dtype:
    return DTYPES_BY_CODE[value["dtype"]]


def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; an `object_pairs_hook` of `json.loads` that refuses repeated names."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        twice = sorted(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"names must not be repeated: {', '.join(map(repr, twice))}")
    return fields
