"""Progress in one line, which is redrawn on a terminal.

In a pipe or a log file a plain line appears about ten times in all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_LINES = 10


class ProgressLine(Protocol):
    """What shows how much is done."""

    def begin(self, total: int, description: str, status: str) -> None:
        """Say how much there is to do."""

    def show(self, done: int, description: str, status: str) -> None:
        """Say how much is done; ``description`` comes before ``status``."""

    def close(self) -> None:
        """Remove the line and restore the cursor. May be called again."""


class LiveLine:
    """One line on a terminal, redrawn in place."""

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
        """Redraw the line."""
        self._bar.update(self._task, description=description, completed=done, status=status)

    def close(self) -> None:
        """Remove the line and restore the cursor. May be called again."""
        self._bar.stop()


class PlainLine:
    """A line now and then, for a pipe or a log file."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._total = 0
        self._parts_shown = -1

    def begin(self, total: int, description: str, status: str) -> None:
        """Remember the total; show nothing yet."""
        self._total = total
        self._parts_shown = -1

    def show(self, done: int, description: str, status: str) -> None:
        """Write a line at the first call, and whenever another tenth is done."""
        parts = done * PLAIN_LINES // self._total if self._total else PLAIN_LINES
        if parts > self._parts_shown:
            self._parts_shown = parts
            self._console.print(f"{description}  {status}", soft_wrap=True)

    def close(self) -> None:
        """Do nothing: there is no line to remove."""


@contextmanager
def showing_line(console: Console) -> Iterator[ProgressLine]:
    """Yield a progress line for a terminal or for plain output, and restore the terminal afterwards."""
    line = LiveLine(console) if console.is_terminal else PlainLine(console)
    try:
        yield line
    finally:
        line.close()
