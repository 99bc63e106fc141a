"""A configuration as a TOML file: read with all its problems at once, and written.

    run.toml                     --set train.steps=10        -> RunConfig, or one ConfigurationError
    values of some fields        of some more; these win

`read_config` of what `to_toml` wrote is the same configuration. This module imports no torch.
"""

from __future__ import annotations

import difflib
import reprlib
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard import __version__
from fullshard.errors import ConfigurationError
from fullshard.programs.train.config import Problem, RunConfig
from fullshard.programs.train.config_fields import ConfigField, config_sections
from fullshard.programs.train.renamed_fields import renamed

Check = Callable[[RunConfig], Iterable[Problem]]

LINE_LENGTH = 100
LONGEST_SHOWN = 300
"""Most characters of a value in a message."""
MOST_BYTES = 1 << 20
"""Largest file that is read."""


def read_config(
    file: Path | None, settings: Sequence[str] = (), *, checks: Sequence[Check] = ()
) -> RunConfig:
    """Return the configuration of a file (the defaults, if none) with `section.field=value` settings.

    Args:
        file: changes to the defaults.
        settings: changes to the file.
        checks: find further problems, such as those of this machine; they are in the same message.

    Raises:
        ConfigurationError: with everything that is wrong.
    """
    reading = _Reading()
    if file is not None:
        reading.add_file(file)
    for setting in settings:
        reading.add_setting(setting)
    config = reading.config()
    for check in (RunConfig.problems, *checks):
        reading.add_problems(check(config))
    if reading.problems:
        raise ConfigurationError(_message(reading.problems))
    return config


def _message(problems: Sequence[str]) -> str:
    noun = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"The configuration has {noun}; nothing was started."]
    lines += ["  - " + problem.replace("\n", "\n    ") for problem in problems]
    return "\n".join([*lines, "All fields and their values: fullshard train --fields"])


class _Reading:
    """The values that were read so far, and their problems."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._values: dict[str, dict[str, Any]] = {name: {} for name in config_sections()}
        self._refused: set[str] = set()
        """Full names of fields whose values were refused. They have their defaults."""

    def config(self) -> RunConfig:
        sections = config_sections()
        return RunConfig(
            **{name: sections[name].build(**values) for name, values in self._values.items()}
        )

    def add_problems(self, problems: Iterable[Problem]) -> None:
        """Add problems, except for those that may only follow from values that were refused."""
        for problem in problems:
            if not any(_concerns(about, name) for about in problem.about for name in self._refused):
                self.problems.append(problem.text)

    # --- a file

    def add_file(self, file: Path) -> None:
        try:
            document = _document(_text_of(file))
        except FileNotFoundError:
            self.problems.append(f"There is no file {file}.")
        except IsADirectoryError:
            inside = file / "config.toml"
            hint = f" Its run is described by {inside}." if inside.is_file() else ""
            self.problems.append(f"{file} is a folder, not a TOML file.{hint}")
        except OSError as error:
            self.problems.append(f"{file} cannot be read: {error.strerror}.")
        except ValueError as error:
            self.problems.append(f"{file} is not TOML: {error}.")
        else:
            self._add_document(document, source=str(file))

    def _add_document(self, document: dict[str, Any], *, source: str) -> None:
        for section, values in document.items():
            if section not in config_sections():
                kind = "section" if isinstance(values, dict) else "field outside of a section"
                self.problems.append(
                    f"{section}: {source} has a {kind} of that name, and there is none.{_nearest(section)}"
                )
            elif not isinstance(values, dict):
                self.problems.append(f"{section} is a section; {source} says {_shown(values)}.")
                self._refused.add(section)
            else:
                for name, value in values.items():
                    self._add_value(f"{section}.{name}", [value], source=source)

    # --- a setting

    def add_setting(self, setting: str) -> None:
        name, equals, text = setting.partition("=")
        name = name.strip()
        if not equals or not name:
            self.problems.append(f"--set takes section.field=value, got {setting!r}.")
        elif name in config_sections():
            self.problems.append(
                f"{name} is a section; --set takes section.field=value, got {setting!r}."
            )
        elif not text:
            self._add_value(name, [None, ""], source="--set")
        else:
            values = [*_toml_values(text)]
            # A quoted text is a text. The quotes are never a part of it, also if the field cannot take it.
            is_quoted = any(isinstance(each, str) for each in values)
            self._add_value(name, values if is_quoted else [*values, text], source="--set")

    # --- one value

    def _add_value(self, full_name: str, candidates: Sequence[Any], *, source: str) -> None:
        """Give a field the first of the candidates that it can take."""
        new = [renamed(full_name, candidate) for candidate in candidates]
        full_name, candidates = new[0][0], [candidate for _, candidate in new]
        field = _find(full_name)
        if field is None:
            self.problems.append(
                f"{full_name}: there is no such field ({source}).{_nearest(full_name)}"
            )
            return
        reason = f"{full_name} must be {_expected(field)}; {source} says {_shown(candidates[0])}."
        for candidate in candidates:
            try:
                value = _taken(field, candidate)
            except ConfigurationError as error:  # it says more than what kind of value is expected
                reason = f"{full_name}: {error}"
                continue
            except ValueError:
                continue
            self._values[field.section][field.name] = value
            self._refused.discard(full_name)
            return
        self._refused.add(full_name)
        self._values[field.section].pop(field.name, None)
        self.problems.append(reason)


def _taken(field: ConfigField, value: object) -> object:
    if value is None and field.can_be_none:
        return None
    return field.kind.take(value)


def _toml_values(text: str) -> Iterator[Any]:
    """Yield the value of a text in TOML, if it is one."""
    try:
        document = _document(f"value = {text}")
    except ValueError:
        return
    if document.keys() == {"value"}:  # a text of several lines could say more
        yield document["value"]


def _text_of(file: Path) -> str:
    """Return the text of a file or a pipe; a pipe may be endless, so the size is limited."""
    with file.open("rb") as stream:
        content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    # Some editors write a byte order mark.
    return content.decode("utf-8-sig")


def _document(text: str) -> dict[str, Any]:
    """Parse TOML; ValueError if it is invalid, nested too deep or has too many digits."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deep") from None


def _find(full_name: str) -> ConfigField | None:
    section, _, name = full_name.partition(".")
    known = config_sections().get(section)
    return known.fields.get(name) if known else None


def _concerns(about: str, name: str) -> bool:
    """Say whether the two are the same, or one is the section of the other."""
    return about == name or about.startswith(f"{name}.") or name.startswith(f"{about}.")


def _nearest(wrong: str) -> str:
    """Return a hint with similar names, if there are any."""
    sections = config_sections()
    section, _, name = wrong.rpartition(".")
    elsewhere = [f"{other}.{name}" for other in sections if name in sections[other].fields]
    names = [f"{other}.{field}" for other in sections for field in sections[other].fields]
    if section in sections:
        own = difflib.get_close_matches(name, sections[section].fields, n=1)
        found = [f"{section}.{field}" for field in own] or elsewhere
    elif elsewhere:
        found = difflib.get_close_matches(wrong, elsewhere, n=1) if section else elsewhere
    else:
        found = difflib.get_close_matches(wrong, [*sections, *names], n=1)
    return f" Did you mean {' or '.join(found)}?" if found else ""


def _expected(field: ConfigField) -> str:
    return f"{field.kind.words}{', or left out' if field.can_be_none else ''}"


def _shown(value: object) -> str:
    """Return a value as in a TOML file, cut off if it is long."""
    if value is None:
        return "nothing"
    try:
        text = toml_value(value)
    except TypeError:  # a date, a table
        text = reprlib.repr(value)
    except ValueError:  # too many digits for Python to write
        return "a number of thousands of digits"
    if isinstance(value, int) and abs(value) >= 1 << 63:
        text += ", more than 64 bits hold"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


# --- writing ---------------------------------------------------------------------------------------------


def to_toml(config: RunConfig) -> str:
    """Return a TOML file with all fields of a configuration and their meanings."""
    lines = [f"# A run of fullshard {__version__}, with all its settings."]
    for section in config_sections().values():
        lines += ["", "", *_comment(section.text), f"[{section.name}]"]
        values = getattr(config, section.name)
        for field in section.fields.values():
            value = getattr(values, field.name)
            # TOML has no null. A field that is left out has its default, which is None.
            assignment = (
                f"# {field.name} is not set"
                if value is None
                else f"{field.name} = {toml_value(value)}"
            )
            lines += ["", *_comment(field.text), assignment]
    return "\n".join([*lines, ""])


def to_short_toml(config: RunConfig, about: str) -> str:
    """Return a TOML file with the fields that differ from the defaults, below a comment."""
    lines = _comment(about)
    for section in config_sections().values():
        values = getattr(config, section.name)
        changed = [
            f"{field.name} = {toml_value(value)}"
            for field in section.fields.values()
            if (value := getattr(values, field.name)) != field.default and value is not None
        ]
        lines += ["", f"[{section.name}]", *changed] if changed else []
    return "\n".join([*lines, ""])


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, LINE_LENGTH, initial_indent="# ", subsequent_indent="# ")


def toml_value(value: object) -> str:
    """Write a value in TOML; TypeError for what no field has."""
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str() | Path():
            return f'"{"".join(map(_escaped, str(value)))}"'
        case tuple() | list():
            return f"[{', '.join(map(toml_value, value))}]"
    raise TypeError(f"no field has a {type(value).__name__}")


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    # TOML strings must not have control characters, and other invisible characters would confuse.
    return character if character.isprintable() else f"\\U{ord(character):08x}"


# --- comparing -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """A field that decides the trajectory of a run and has two values."""

    field: str
    old: str
    new: str
    """Values as in a TOML file; `not set` for none."""


def differences(old: RunConfig, new: RunConfig) -> list[Difference]:
    """Return the differences because of which one configuration cannot resume the other's run."""
    found = []
    for section in config_sections().values():
        for field in section.fields.values():
            values = [getattr(getattr(each, section.name), field.name) for each in (old, new)]
            if field.is_fixed and values[0] != values[1]:
                shown = ["not set" if value is None else toml_value(value) for value in values]
                found.append(Difference(field.full_name, *shown))
    return found
