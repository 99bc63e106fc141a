"""The reference of all fields of a configuration, as tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fullshard.errors import ConfigurationError
from fullshard.programs.train.config_fields import ConfigField, ConfigSection, config_sections
from fullshard.programs.train.config_file import toml_value

COLUMNS = ("field", "values", "default", "fixed", "meaning")
"""A resumed run must have the same values of fixed fields."""

TABLE_WIDTH = 110
"""Narrower terminals get paragraphs."""


def row(field: ConfigField) -> tuple[str, ...]:
    """Return the texts of one field, in the order of `COLUMNS`."""
    default = "none" if field.default is None else toml_value(field.default)
    fixed = "fixed" if field.is_fixed else ""
    return field.name, field.kind.words, default, fixed, field.text


def print_reference(console: Console, name: str | None = None) -> None:
    """Print one section, or all: as tables or paragraphs on a terminal, otherwise as Markdown.

    Raises:
        ConfigurationError: there is no section of this name.
    """
    sections = config_sections()
    if name is not None and name.strip("[]") not in sections:
        raise ConfigurationError(
            f"--fields takes the name of a section; {name} is none. The sections: {', '.join(sections)}."
        )
    chosen = [*sections.values()] if name is None else [sections[name.strip("[]")]]
    if not console.is_terminal:
        text = markdown(chosen)
        console.print(text, soft_wrap=True, highlight=False, markup=False, end="")
        return
    for section in chosen:
        console.print(Text.assemble((f"[{section.name}]", "bold"), f"  {section.text}"))
        if console.width >= TABLE_WIDTH:
            _print_table(console, section)
        else:
            _print_paragraphs(console, section)


def _print_table(console: Console, section: ConfigSection) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    for field in section.fields.values():
        table.add_row(*map(Text, row(field)))
    console.print(table, "")


def _print_paragraphs(console: Console, section: ConfigSection) -> None:
    """Print each field with its default, and what it means below: a table would have columns of one word."""
    for field in section.fields.values():
        name, values, default, fixed, meaning = row(field)
        console.print(Text.assemble((name, "bold"), f" = {default}", (f"  {fixed}", "dim")))
        console.print(Padding(Text(f"{meaning}\n{values[:1].upper()}{values[1:]}."), (0, 0, 0, 4)))
    console.print()


def markdown(sections: Iterable[ConfigSection]) -> str:
    """Return sections as Markdown."""
    return "\n".join(map(_markdown_of, sections))


def _markdown_of(section: ConfigSection) -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for name, values, default, *others in map(row, section.fields.values()):
        rows.append((f"`{name}`", values, f"`{default}`", *others))
    table = "\n".join(f"| {' | '.join(each)} |" for each in rows)
    return f"### `[{section.name}]`\n\n{section.text}\n\n{table}\n"
