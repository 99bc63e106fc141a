"""Values of JSON files that anyone may have written, as the fields of a dataclass.

The dataclass names the fields and their types once; writers store its fields, and `read_fields` reads them back.
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

    A field that is missing or null has its default, or else reads as 0, NaN, "" or empty, by its type.

    Args:
        kind: The dataclass. Its fields have the types of `_READERS`, or texts.
        values: What was read.
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
    """Return a number that was read; None for anything else: no number, not finite, or larger than any that is meant.

    What is very small is zero: nothing is measured that finely, and to divide by it would be infinite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # In this order: an integer may be too long to be a float, and a NaN is not below anything.
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
    int: (0, _int),
    int | None: (None, _int),
    float: (math.nan, _float),
    tuple[int, ...]: ((), _list_of(_int)),
    tuple[str, ...]: ((), _list_of(_text)),
    dict[str, str]: ({}, _texts_by_name),
}
"""By a field's type: what a missing value reads as, and how a value is read. Other types are kinds of text."""


@cache
def _readers(kind: type) -> dict[str, tuple[Any, Callable[[object], Any]]]:
    hints = get_type_hints(kind)
    readers = {}
    for field in fields(kind):
        missing, read = _READERS.get(hints[field.name], ("", _text))
        readers[field.name] = missing if field.default is MISSING else field.default, read
    return readers
