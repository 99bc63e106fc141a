"""Dataclasses read from JSON files that anyone may have written.

The dataclass states names and types of the fields once. Writers store its fields, and `read_fields` reads them back.
Nothing here imports torch: the report works without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, get_type_hints

LARGEST_INT = (1 << 63) - 1
LARGEST_FLOAT = 1e40
"""More than any float32 is."""


def read_fields(kind: type, values: Mapping[str, Any], *, is_strict: bool) -> dict[str, Any]:
    """Return the fields of the dataclass ``kind`` as ``values`` has them, to make one of it.

    A field that is missing or null has its default, or else reads as false, 0, NaN, "" or empty, by its type.

    Args:
        kind: The dataclass. Its fields have the types of `_READERS`, or texts.
        values: The values that were read.
        is_strict: Raise if a value has another type than its field; otherwise it reads as if it were missing.

    Raises:
        ValueError: A value has another type than its field, and ``is_strict``.
    """
    found: dict[str, Any] = {}
    for name, (missing, read) in _readers(kind).items():
        value = values.get(name)
        try:
            found[name] = missing if value is None else read(value)
        except ValueError:
            if is_strict:
                raise
            found[name] = missing
    return found


def as_number(value: object, *, largest: float = LARGEST_FLOAT) -> float | None:
    """Return a finite number of a plausible size, or None for any other value.

    A very small number becomes zero: nothing is measured that finely, and dividing by it would overflow.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # Compared before it is converted: an integer may be too long for a float. A NaN fails both comparisons.
    if not -largest <= value <= largest:
        return None
    return float(value) if abs(value) >= 1 / largest else 0.0


def _float(value: object) -> float:
    number = as_number(value)
    if number is None:
        raise ValueError("it has something else where a number should be")
    return number


def _int(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_INT:
        return value
    number = as_number(value, largest=LARGEST_INT)
    if number is None:
        raise ValueError("it has something else where a number should be")
    return int(number)


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("it has something else where true or false should be")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("it has something else where a text should be")
    return value


def _list_of(read: Callable[[object], Any]) -> Callable[[object], tuple[Any, ...]]:
    def read_list(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ValueError("it has something else where a list should be")
        return tuple(read(each) for each in value)

    return read_list


def _texts_by_name(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError("it has something else where an object should be")
    return {name: _text(each) for name, each in value.items()}


_READERS: dict[Any, tuple[Any, Callable[[object], Any]]] = {
    bool: (False, _bool),
    int: (0, _int),
    int | None: (None, _int),
    float: (math.nan, _float),
    tuple[int, ...]: ((), _list_of(_int)),
    tuple[str, ...]: ((), _list_of(_text)),
    dict[str, str]: ({}, _texts_by_name),
}
"""Value of a missing field, and reader of a present one, for each type of a field. All other types are texts."""


@cache
def _readers(kind: type) -> dict[str, tuple[Any, Callable[[object], Any]]]:
    hints = get_type_hints(kind)
    readers = {}
    for field in fields(kind):
        missing, read = _READERS.get(hints[field.name], ("", _text))
        readers[field.name] = missing if field.default is MISSING else field.default, read
    return readers
