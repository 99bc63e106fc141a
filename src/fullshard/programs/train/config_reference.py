"""The reference of all fields of a configuration, as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fullshard.programs.train.config_fields import ConfigField, ConfigSection, config_sections
from fullshard.programs.train.config_file import toml_value

COLUMNS = ("field", "values", "default", "fixed", "meaning")
"""A resumed run must have the same values of fixed fields."""


def row(field: ConfigField) -> tuple[str, ...]:
    """Return the texts of one field, in the order of `COLUMNS`."""
    default = "none" if field.default is None else toml_value(field.default)
    fixed = "fixed" if field.is_fixed else ""
    return field.name, field.kind.words, default, fixed, field.text


def print_reference(console: Console) -> None:
    """Print all sections: as tables on a terminal, otherwise as Markdown."""
    if not console.is_terminal:
        console.print(markdown(), soft_wrap=True, highlight=False, markup=False, end="")
        return
    for section in config_sections().values():
        console.print(Text.assemble((f"[{section.name}]", "bold"), f"  {section.text}"))
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
        for field in section.fields.values():
            table.add_row(*map(Text, row(field)))
        console.print(table, "")


def markdown() -> str:
    """Return all sections as Markdown."""
    return "\n".join(map(_markdown_of, config_sections().values()))


def _markdown_of(section: ConfigSection) -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for name, values, default, *others in map(row, section.fields.values()):
        rows.append((f"`{name}`", values, f"`{default}`", *others))
    table = "\n".join(f"| {' | '.join(each)} |" for each in rows)
    return f"### `[{section.name}]`\n\n{section.text}\n\n{table}\n"
