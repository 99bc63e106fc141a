"""One operation of torch, as `op_costs` asks about it: its arguments by name, and the bytes that go through memory.

The traffic follows from the operator's schema: each tensor that goes in is read once, each new result is written once, and
what is changed in place is read and written. A tensor that was expanded is read once, not once per repetition. Tensors of
the CPU do not count, since the device does not touch them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fullshard import torch_border
from fullshard.torch_border import Operator
from fullshard.virtual.operations import FILLS

OVERWRITES = {
    *("bernoulli_", "copy_", "exponential_", "fill_", "log_normal_", "normal_", "random_"),
    *("uniform_", "zero_", "_foreach_copy_", "_foreach_zero_"),
}
"""Operations that write their target without reading it."""


_HOLDERS = (Tensor, list, tuple)
"""The types of arguments that are or hold tensors."""


class Operation:
    """Facts about an operator that do not change from call to call."""

    __slots__ = ("_defaults", "_passes", "_passes_by_name", "_positions", "has_results", "name")

    def __init__(self, operator: Operator) -> None:
        signature = torch_border.signature_of(operator)
        self.name = f"{signature.namespace}.{signature.name}"
        self._positions = {each.name: i for i, each in enumerate(signature.arguments)}
        self._defaults = {each.name: each.default for each in signature.arguments}
        # How often memory is passed over: 1 for what is read or written, 2 for what is both.
        self._passes = tuple(_passes(signature.name, each) for each in signature.arguments)
        self._passes_by_name = dict(zip(self._positions, self._passes, strict=True))
        self.has_results = any(signature.new_results)

    def argument(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the argument of that name, or its default."""
        position = self._positions[name]
        return args[position] if position < len(args) else kwargs.get(name, self._defaults[name])

    def traffic(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> tuple[int, torch.dtype | None]:
        """Return the bytes that a call reads and writes, and the dtype of its arithmetic."""
        seen: list[Tensor] = []
        nbytes = 0
        for value, passes in zip(args, self._passes, strict=False):
            if isinstance(value, _HOLDERS):
                nbytes += _passed_bytes(value, passes, seen)
        for name, value in kwargs.items():
            if isinstance(value, _HOLDERS):
                nbytes += _passed_bytes(value, self._passes_by_name[name], seen)
        if self.has_results:
            for each in (result,) if isinstance(result, Tensor) else tensors_in(result):
                if not each.is_cpu:
                    nbytes += each.nbytes
                    seen.append(each)
        return nbytes, _arithmetic(seen)


def _passes(name: str, argument: torch_border.Argument) -> int:
    if argument.is_out or (argument.is_written and name in OVERWRITES):
        return 1
    if argument.is_written:
        return 2
    return 0 if name in FILLS else 1


def _passed_bytes(value: Any, passes: int, seen: list[Tensor]) -> int:
    """Return the bytes that an argument adds to the traffic, and note its tensors among those that were seen."""
    if isinstance(value, Tensor):
        if value.is_cpu:
            return 0
        if seen and any(_is_same_region(value, other) for other in seen):
            passes -= 1
        seen.append(value)
        return passes * region_bytes(value) if passes > 0 else 0
    nbytes = 0
    for each in value:
        if isinstance(each, Tensor) and not each.is_cpu:
            nbytes += region_bytes(each)
            # Lists of operations are long, and the first tensor says their dtype.
            if not seen:
                seen.append(each)
    return passes * nbytes


def region_bytes(tensor: Tensor) -> int:
    """Return the bytes of the distinct elements of a tensor: those of an expanded dimension are the same."""
    strides = tensor.stride()
    if 0 not in strides:
        return tensor.nbytes
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, strides, strict=True):
        count *= size if stride else min(size, 1)
    return count


def tensors_in(value: Any) -> Iterable[Tensor]:
    """Yield the tensors of a result or an argument, also those in lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def _is_same_region(one: Tensor, other: Tensor) -> bool:
    return one is other or (
        one.untyped_storage() is other.untyped_storage()
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def _arithmetic(tensors: Iterable[Tensor]) -> torch.dtype | None:
    """Return the dtype of the first floating tensor; that of the last where none floats."""
    dtype = None
    for each in tensors:
        dtype = each.dtype
        if dtype.is_floating_point:
            break
    return dtype


@functools.cache
def dtype_name(dtype: torch.dtype | None) -> str:
    """Return a name such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
