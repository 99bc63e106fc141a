"""The fields of a configuration as data: names, kinds of values, defaults, and what they mean.

Everything comes from the dataclasses in `config`: the kind of a value from the field's type, the meaning from the text
below the field. Configuration files, error messages and the documentation all use this data.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from fullshard.files import local_path
from fullshard.programs.train import config
from fullshard.programs.train.config import FIXED, RunConfig
from fullshard.programs.train.limits import Limits


@dataclass(frozen=True, slots=True)
class Kind:
    """The values that a field may have."""

    words: str
    """Words for a message: `must be ...`."""

    take: Callable[[object], Any]
    """Converts a value of a TOML file; ValueError if it is not of this kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigField:
    """One field of a section."""

    section: str
    name: str
    kind: Kind
    can_be_none: bool
    default: object
    is_fixed: bool
    """A resumed run must have the same value."""
    text: str
    """Its meaning."""

    @property
    def full_name(self) -> str:
        """Section and name, as `--set` takes them."""
        return f"{self.section}.{self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigSection:
    """One section with its fields, in their order."""

    name: str
    text: str
    """Text about its subject."""
    build: Callable[..., Any]
    """Makes the section from values of its fields."""
    fields: dict[str, ConfigField]


@cache
def config_sections() -> dict[str, ConfigSection]:
    """Return all sections in their order."""
    texts = _texts_under_fields(inspect.getsource(config))
    hints = typing.get_type_hints(RunConfig)
    return {
        each.name: _section(each.name, hints[each.name], texts)
        for each in dataclasses.fields(RunConfig)
    }


def _section(name: str, section: type, texts: dict[tuple[str, str], str]) -> ConfigSection:
    hints = typing.get_type_hints(section, include_extras=True)
    fields = {}
    for each in dataclasses.fields(section):
        choices = [hint for hint in _members(hints[each.name]) if hint is not NoneType]
        assert len(choices) == 1, "a field has one kind of value, or none"
        fields[each.name] = ConfigField(
            section=name,
            name=each.name,
            kind=kind_of(choices[0]),
            can_be_none=NoneType in _members(hints[each.name]),
            default=each.default,
            is_fixed=each.metadata == FIXED,
            text=texts[section.__name__, each.name],
        )
    text = inspect.getdoc(section)
    assert text is not None, "every section says what it is about"
    return ConfigSection(name=name, text=text, build=section, fields=fields)


def _texts_under_fields(source: str) -> dict[tuple[str, str], str]:
    """Return the strings below annotated names in classes, by class and name."""
    texts = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        for field, below in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                assert isinstance(field.target, ast.Name), "a class body names its fields"
                text = ast.literal_eval(below.value)
                texts[node.name, field.target.id] = " ".join(text.split())
    return texts


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type itself."""
    return get_args(hint) if NoneType in get_args(hint) else (hint,)


# --- kinds of values -------------------------------------------------------------------------------------


def kind_of(hint: Any) -> Kind:
    """Return the kind of values of a type."""
    if get_origin(hint) is Literal:
        return _choice(get_args(hint))
    if get_origin(hint) is tuple:
        return _array(tuple(map(kind_of, get_args(hint))))
    if get_origin(hint) is typing.Annotated:
        base, limits = get_args(hint)
        return _limited(kind_of(base), limits)
    return PLAIN_KINDS[hint]


def _choice(choices: tuple[str, ...]) -> Kind:
    def take(value: object) -> str:
        if value not in choices:
            raise ValueError
        return value

    return Kind(f"one of {', '.join(choices)}", take)


def _array(items: tuple[Kind, ...]) -> Kind:
    def take(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or len(value) != len(items):
            raise ValueError
        return tuple(kind.take(item) for kind, item in zip(items, value, strict=True))

    return Kind(f"an array of {len(items)}, each {items[0].words}", take)


def _limited(kind: Kind, limits: Limits) -> Kind:
    def take(value: object) -> Any:
        number = kind.take(value)
        if number not in limits:
            raise ValueError
        return number

    return Kind(f"{kind.words}, {limits}", take)


def _take_bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _take_whole_number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 1 << 63:
        raise ValueError
    return value


def _take_number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError
    try:
        return float(value)
    except OverflowError as error:  # a whole number of hundreds of digits
        raise ValueError from error


def _take_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    value.encode()  # lone surrogates cannot be written to a file
    return value


def _take_path(value: object) -> Path:
    text = _take_text(value)
    if not text or "\0" in text:
        raise ValueError
    return local_path(text)


PLAIN_KINDS: dict[Any, Kind] = {
    bool: Kind("true or false", _take_bool),
    int: Kind("a whole number", _take_whole_number),
    float: Kind("a finite number", _take_number),
    str: Kind("a text", _take_text),
    Path: Kind("a path", _take_path),
}
