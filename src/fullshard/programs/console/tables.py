"""Lines and tables: drawn on a terminal, plain with the same columns in a pipe or a file.

Names and values may come from any file, so everything that is printed here is made safe first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fullshard.programs.console.broken_pipe_safe import broken_pipe_safe
from fullshard.programs.console.safe_text import safe_line, safe_text

Row = Sequence[str]

GAP = "  "
"""Space between columns."""


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


def print_prose(console: Console, text: str) -> None:
    """Print sentences. A terminal gets lines that end between words; other readers get one line."""
    is_one_line = not console.is_terminal
    console.print(safe_text(text), soft_wrap=is_one_line, highlight=False, markup=False)


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
    """Print a table whose first ``num_texts`` columns are texts and the others numbers.

    A name that has no room beside the other columns gets a line of its own: a name that is cut cannot be looked up.
    """
    print_line(console, "")
    lines = [[safe_line(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    if console.is_terminal:
        room = console.width - sum(widths[1:]) - len(GAP) * len(widths[1:])
        widths[0] = max(min(widths[0], room), 0)
    for number, (name, *others) in enumerate(lines):
        style = "bold" if number == 0 else ""
        if cell_len(name) > widths[0]:
            console.print(Text(name, style=style), soft_wrap=True)
            name = ""
        cells = [
            _padded(cell, width, is_number=i >= num_texts)
            for i, (cell, width) in enumerate(zip((name, *others), widths, strict=True))
        ]
        console.print(Text(GAP.join(cells).rstrip(), style=style), soft_wrap=True)


def print_first_rows(
    console: Console, columns: Row, rows: Sequence[Row], *, num_texts: int, most: int | None
) -> None:
    """Print a table with at most so many rows, and below it how many more there are; None for all of them."""
    print_table(console, columns, rows[:most], num_texts=num_texts)
    print_more(console, rows, most)


def print_more(console: Console, items: Sequence[object], most: int | None) -> None:
    """Print how many items are not shown if only the first ``most`` are; None for all of them."""
    if most is not None and len(items) > most:
        print_line(console, f"and {len(items) - most:,} more (--all lists them)")


def _padded(cell: str, width: int, *, is_number: bool) -> str:
    padding = " " * (width - cell_len(cell))
    return padding + cell if is_number else cell + padding
