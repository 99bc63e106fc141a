"""The differences between two checkpoints of any formats, found in bounded memory.

Tensors of one dtype are compared by their bits: a NaN equals itself, and zeros of both signs differ. Tensors of different
dtypes are compared by value. A tensor that is tied in one checkpoint and stored twice in the other is not a difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fullshard.checkpoint.json_values import DeviceScalar, references
from fullshard.checkpoint.source import CLASS, MODEL, Source, TensorInfo, TensorRef, without_class
from fullshard.checkpoint.sources.verified_reads import read_verified
from fullshard.layout.blocks import slabs

COMPARED_AT_ONCE = 1 << 20
"""Elements of each checkpoint that are in memory at once."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The differences of a tensor that both checkpoints have."""

    first: TensorInfo
    second: TensorInfo
    differing: int = 0
    """Number of elements that differ; all of them if the shapes differ."""
    largest_absolute: float = 0.0
    """Infinite if one value is NaN, or if the shapes differ."""
    largest_relative: float = 0.0
    """Share of the larger of both values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """All differences of two checkpoints."""

    only_first: list[str] = field(default_factory=list)
    """Keys of tensors that only the first one has."""
    only_second: list[str] = field(default_factory=list)
    tensors: dict[str, TensorDifference] = field(default_factory=dict)
    """Tensors that differ, by key."""
    values: list[str] = field(default_factory=list)
    """A line for each difference in values that are not tensors: the optimizer's and extra."""
    compared: int = 0
    """Number of tensors that both have."""

    def __bool__(self) -> bool:
        """Whether there are any differences."""
        return bool(self.only_first or self.only_second or self.tensors or self.values)


def differences(
    first: Source, second: Source, *, compared: Callable[[int], None] = lambda nbytes: None
) -> Differences:
    """Compare two checkpoints.

    Args:
        first: One.
        second: The other.
        compared: Called with the number of bytes of the first checkpoint after each comparison.
    """
    ours, theirs = _stored_keys(first), _stored_keys(second)
    found = Differences(
        only_first=sorted(ours.keys() - theirs.keys()),
        only_second=sorted(theirs.keys() - ours.keys()),
        compared=len(ours.keys() & theirs.keys()),
    )
    for key in ours:
        if key in theirs:
            difference = _compare(first, ours[key], second, theirs[key], compared)
            if difference is not None:
                found.tensors[key] = difference
    optimizers = [first.optimizer, second.optimizer]
    if not all(each is not None and CLASS in each for each in optimizers):
        # Not every format has the optimizer's class.
        optimizers = [each and without_class(each) for each in optimizers]
    for name, pair in (("optimizer", optimizers), ("extra", [first.extra, second.extra])):
        one, other = map(_with_scalars, pair, (first, second))
        _compare_trees(one, other, name, found.values)
    return found


def _stored_keys(source: Source) -> dict[str, str]:
    """Return the key under which each tensor is stored, by all its names."""
    tied = {MODEL + name: MODEL + stored for name, stored in source.tied.items()}
    scalars = {ref.key for ref in references(source.optimizer) if _is_scalar(ref, source)}
    return {key: key for key in source.tensors if key not in scalars} | tied


def _with_scalars(tree: Any, source: Source) -> Any:
    """Return a tree with 0-d tensors in place of references to them: some formats have the one, some the other."""
    if isinstance(tree, TensorRef) and _is_scalar(tree, source):
        return read_verified(source, tree.key)
    if isinstance(tree, Mapping):
        return {key: _with_scalars(each, source) for key, each in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_with_scalars(each, source) for each in tree)
    return tree


def _is_scalar(ref: TensorRef, source: Source) -> bool:
    return not source.tensors[ref.key].shape


def _compare(
    first: Source,
    first_key: str,
    second: Source,
    second_key: str,
    compared: Callable[[int], None],
) -> TensorDifference | None:
    ours, theirs = first.tensors[first_key], second.tensors[second_key]
    if ours.shape != theirs.shape:
        return TensorDifference(ours, theirs, math.prod(ours.shape), math.inf, math.inf)
    differing, absolute, relative = 0, 0.0, 0.0
    for block in slabs(ours.shape, COMPARED_AT_ONCE):
        a = torch.empty(block.shape, dtype=ours.dtype)
        b = torch.empty(block.shape, dtype=theirs.dtype)
        first.read(first_key, block, a)
        second.read(second_key, block, b)
        where = _differing(a, b)
        if where.any():
            differing += int(where.sum())
            farthest = _distances(a.flatten(), b.flatten(), where)
            absolute, relative = max(absolute, farthest[0]), max(relative, farthest[1])
        compared(a.nbytes)
    if not differing and ours.dtype == theirs.dtype:
        return None
    return TensorDifference(ours, theirs, differing, absolute, relative)


def _differing(a: Tensor, b: Tensor) -> Tensor:
    """Return which elements differ, flattened."""
    if a.dtype == b.dtype:
        return (_bits(a) != _bits(b)).any(dim=1)
    a, b = _comparable(a).flatten(), _comparable(b).flatten()
    return (a != b) & ~(a.isnan() & b.isnan())


def _bits(value: Tensor) -> Tensor:
    """Return the bits of each element as a row of integers."""
    size = value.dtype.itemsize
    return value.flatten().view(_BITS[min(size, 8)]).view(-1, max(size // 8, 1))


def _distances(a: Tensor, b: Tensor, where: Tensor) -> tuple[float, float]:
    """Return the largest absolute and relative difference among the elements ``where``."""
    a, b = _comparable(a), _comparable(b)
    distance = (a - b).abs().masked_fill_(~where, 0.0)
    larger = torch.maximum(a.abs(), b.abs())
    # Zeros of both signs have no distance, and must not be divided by.
    relative = distance / larger.masked_fill_(distance == 0, 1.0)
    return _largest(distance), _largest(relative)


def _largest(values: Tensor) -> float:
    """Return the largest value; infinity if there is a NaN."""
    largest = float(values.max())  # NaN, if there is one
    return math.inf if math.isnan(largest) else largest


def _comparable(value: Tensor) -> Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _compare_trees(first: Any, second: Any, path: str, lines: list[str]) -> None:
    first, second = _plain(first), _plain(second)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in [*first, *(key for key in second if key not in first)]:
            where = f"{path}.{key}"
            if key not in second:
                lines.append(f"{where}: only in the first")
            elif key not in first:
                lines.append(f"{where}: only in the second")
            else:
                _compare_trees(first[key], second[key], where, lines)
    elif type(first) is type(second) and isinstance(first, list | tuple):
        if len(first) != len(second):
            lines.append(f"{path}: {len(first)} and {len(second)} items")
        for i, (one, other) in enumerate(zip(first, second, strict=False)):
            _compare_trees(one, other, f"{path}[{i}]", lines)
    elif not _is_same(first, second):
        lines.append(f"{path}: {_shown(first)} and {_shown(second)}")


def _plain(value: Any) -> Any:
    """Return a scalar without its device, which does not matter here."""
    return value.value if isinstance(value, DeviceScalar) else value


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return (
            first.dtype == second.dtype
            and first.shape == second.shape
            and not _differing(first, second).any()
        )
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first):
        return math.isnan(second)
    if isinstance(first, TensorRef) and isinstance(second, TensorRef):
        return True  # what it refers to is compared as a tensor
    return type(first) is type(second) and bool(first == second)


def _shown(value: Any) -> str:
    if isinstance(value, TensorRef):
        return "a tensor"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
