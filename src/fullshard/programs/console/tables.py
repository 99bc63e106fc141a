"""Lines and tables: drawn on a terminal, plain with the same columns in a pipe or a file.

Names and values may come from any file, so everything that is printed here is made safe first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fullshard.programs.console.broken_pipe_safe import broken_pipe_safe
from fullshard.programs.console.safe_text import safe_line, safe_text

Row = Sequence[str]


def print_error(text: str) -> None:
    """Print an error or a warning to stderr."""
    print_line(Console(file=broken_pipe_safe(sys.stderr)), text)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 rank`, `2 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def time_text(seconds: float) -> str:
    """Return a time in the unit that fits."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def print_line(console: Console, text: str) -> None:
    """Print a text without markup, and with control characters escaped."""
    console.print(safe_text(text), soft_wrap=True, highlight=False, markup=False)


def print_facts(console: Console, facts: Sequence[tuple[str, str]]) -> None:
    """Print labelled texts, one below the other. On a terminal long texts wrap beside their labels."""
    facts = [(label, safe_line(text)) for label, text in facts]
    width = max(len(label) for label, _ in facts) + 2
    if not console.is_terminal:
        for label, text in facts:
            print_line(console, f"{label:<{width}}{text}")
        return
    grid = Table.grid(padding=(0, 2))
    for label, text in facts:
        grid.add_row(Text(label), Text(text, overflow="fold"))
    console.print(grid)


def print_table(console: Console, columns: Row, rows: Sequence[Row], *, num_texts: int) -> None:
    """Print a table whose first ``num_texts`` columns are texts and the others numbers."""
    print_line(console, "")
    rows = [[safe_line(cell) for cell in row] for row in rows]
    if not console.is_terminal:
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        for row in (columns, *rows):
            cells = [
                f"{cell:<{width}}" if i < num_texts else f"{cell:>{width}}"
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            print_line(console, "  ".join(cells).rstrip())
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for i, column in enumerate(columns):
        # Names wrap where there is no room: a name that is cut off cannot be looked up.
        justify: Literal["left", "right"] = "left" if i < num_texts else "right"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=i > 0)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
