"""How far something is, in one line: it renews itself on a terminal.

Elsewhere (a pipe, a log file) a plain line appears about ten times in all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_LINES = 10


class ProgressLine(Protocol):
    """Shows how much is done."""

    def begin(self, total: int, description: str, status: str) -> None:
        """Say how much there is to do."""

    def show(self, done: int, description: str, status: str) -> None:
        """Say how much is done; ``description`` comes before ``status``."""

    def close(self) -> None:
        """Take the line away and give the cursor back; harmless when done already."""


class LiveLine:
    """One line on a terminal that renews itself."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, visible=False, status="")

    def begin(self, total: int, description: str, status: str) -> None:
        """Open the line."""
        self._bar.update(
            self._task, description=description, total=total, visible=True, status=status
        )
        self._bar.start()

    def show(self, done: int, description: str, status: str) -> None:
        """Renew the line."""
        self._bar.update(self._task, description=description, completed=done, status=status)

    def close(self) -> None:
        """Take the line away and give the cursor back; harmless when done already."""
        self._bar.stop()


class PlainLine:
    """A line now and then, for a pipe or a log file."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._total = 0
        self._parts_shown = -1

    def begin(self, total: int, description: str, status: str) -> None:
        """Nothing is done yet, so nothing is shown."""
        self._total = total
        self._parts_shown = -1

    def show(self, done: int, description: str, status: str) -> None:
        """Write a line, at first and when another tenth is done."""
        parts = done * PLAIN_LINES // self._total if self._total else PLAIN_LINES
        if parts > self._parts_shown:
            self._parts_shown = parts
            self._console.print(f"{description}  {status}", soft_wrap=True)

    def close(self) -> None:
        """There is nothing to take away."""


@contextmanager
def showing_line(console: Console) -> Iterator[ProgressLine]:
    """Give the line that suits where the console writes to, and leave the terminal as it was."""
    line = LiveLine(console) if console.is_terminal else PlainLine(console)
    try:
        yield line
    finally:
        line.close()
