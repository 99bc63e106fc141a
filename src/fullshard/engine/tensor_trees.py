"""Finding and replacing tensors in inputs and outputs of modules.

Tuples, lists, dicts, dataclasses and their subclasses are looked into; anything else is left as it
is. Only `tensors_within`, which replaces nothing, looks into the attributes of other objects, too.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Set
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in a nested value."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, MutableMapping):
        for item in value.values():
            _collect(item, found)
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name, None), found)


_LEVELS = 8
"""Depth to which `tensors_within` looks: tensors that a module computes lie no deeper, but whole programs do."""
_DATA = (str, bytes, int, float, complex, type, type(None))
"""Types without tensors inside, for a quick answer."""
_CODE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, nn.Module)
"""Types that refer to much that is not part of a value."""


def tensors_within(value: Any) -> list[Tensor]:
    """Return all tensors in a nested value, once each, with those in attributes of objects: distributions, caches.

    Modules are left out, since their parameters are theirs, and so is what would have to be run: functions, iterators.
    """
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    _search(value, found, set(), _LEVELS)
    return found


def _search(value: Any, found: list[Tensor], seen: set[int], levels: int) -> None:
    if isinstance(value, _DATA) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        found.append(value)
        return
    if not levels or isinstance(value, _CODE):
        return
    if isinstance(value, (tuple, list, Set)):
        items = list(value)
    else:
        items = list(value.values()) if isinstance(value, Mapping) else []
        items.extend(_attributes(value))
    for item in items:
        _search(item, found, seen, levels - 1)


def _attributes(value: Any) -> Iterator[Any]:
    """Yield an object's attributes; properties and the like are not run."""
    yield from getattr(value, "__dict__", {}).values()
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name != "__dict__":
                yield getattr(value, name, None)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return the same nested value with ``function`` applied to its tensors; what does not change is not copied."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(function, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        # A named tuple takes its fields one by one.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        return _replaced(function, value, list(value.items()), _set_item)
    if _is_dataclass(value):
        items_ = [
            (field.name, getattr(value, field.name))
            for field in dataclasses.fields(value)
            if hasattr(value, field.name)
        ]
        # object.__setattr__: frozen dataclasses too.
        return _replaced(function, value, items_, object.__setattr__)
    return value


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return the same nested value with its floating-point tensors in ``dtype``."""

    def cast(tensor: Tensor) -> Tensor:
        # `to` returns the tensor itself where there is nothing to do.
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(cast, value)


def to_device(value: Any, device: torch.device) -> Any:
    """Return the same nested value with its tensors on ``device``."""
    return map_tensors(lambda tensor: tensor.to(device), value)


def _replaced(
    function: Callable[[Tensor], Tensor],
    value: Any,
    items: list[tuple[Any, Any]],
    assign: Callable[[Any, Any, Any], None],
) -> Any:
    result = value
    for key, old in items:
        new = map_tensors(function, old)
        if new is not old:
            result = copy.copy(value) if result is value else result
            assign(result, key, new)
    return result


def _set_item(mapping: Any, key: Any, item: Any) -> None:
    mapping[key] = item


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
