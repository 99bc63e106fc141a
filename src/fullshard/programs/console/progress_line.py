"""Progress in one line, which is redrawn on a terminal and fits its width.

    step 120/2000  [bar]  loss 3.989  2,811 tokens/s  386 MiB  lr 3.0e-03  norm 0.75  12:34 left
    step 120/2000  loss 3.989  2,811 tokens/s  386 MiB  lr 3.0e-03  12:34 left
    step 120/2000  loss 3.989  2,811 tokens/s  12:34 left

Where there is no room the bar goes first, then the parts of the status, the last one first. What is done and the time that
is left always stay. In a pipe or a log file a plain line appears for each tenth, and at least once a minute, or as often as
the caller says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PLAIN_LINES = 10
"""Lines in a pipe or a log file, if nothing else is said and all takes less than ten minutes."""

LONGEST_SILENCE_S = 60.0
"""Seconds after which there is another line, whatever is done by then."""

BAR_WIDTH = 20
SHORTEST_BAR = 8

GAP = "  "
"""Space between the parts of a line."""

FADE = 0.9
"""Weight of earlier times in the estimate of the time that is left."""


class ProgressLine(Protocol):
    """A display of the work that is done."""

    def begin(self, total: int, done: int, description: str, status: Sequence[str]) -> None:
        """Say how much there is to do, and how much of it was done before."""

    def show(self, done: int, description: str, status: Sequence[str]) -> None:
        """Say how much is done; ``description`` comes before ``status``, whose most important part is the first."""

    def close(self) -> None:
        """Remove the line and restore the cursor. May be called again."""


class TimeLeft:
    """The time until all is done, from the times of what was done last.

    The time until the first report is left out: it has what happens once, such as the first evaluation of a run.
    """

    def __init__(self, total: int, clock: Callable[[], float]) -> None:
        self._total = total
        self._clock = clock
        self._last: tuple[float, int] | None = None
        self._seconds = 0.0
        self._amount = 0.0

    def add(self, done: int) -> None:
        """Note how much is done now."""
        now = self._clock()
        if self._last is not None and done > self._last[1]:
            self._seconds = FADE * self._seconds + now - self._last[0]
            self._amount = FADE * self._amount + done - self._last[1]
        self._last = now, done

    def text(self) -> str:
        """Return it in words; empty as long as it is not known."""
        if self._last is None or not self._amount:
            return ""
        then, done = self._last
        since = self._clock() - then
        left_s = (self._total - done) * self._seconds / self._amount
        return f"{clock_text(max(left_s - since, 0.0))} left"


def clock_text(seconds: float) -> str:
    """Return seconds as a clock shows them: 0:07, 12:34, 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class LiveLine:
    """One line on a terminal, redrawn in place."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._live = Live(self, console=console, transient=True, refresh_per_second=10)
        self._total = self._done = 0
        self._description = ""
        self._status: Sequence[str] = ()
        self._time_left = TimeLeft(0, clock)
        self._widest_without_bar = 0
        """A terminal of this width has had no room for the bar. It stays away, also when the texts become shorter."""

    def begin(self, total: int, done: int, description: str, status: Sequence[str]) -> None:
        """Open the line."""
        self._total, self._done = total, done
        self._description, self._status = description, status
        self._time_left = TimeLeft(total, self._clock)
        self._live.start()

    def show(self, done: int, description: str, status: Sequence[str]) -> None:
        """Redraw the line."""
        self._done, self._description, self._status = done, description, status
        self._time_left.add(done)

    def close(self) -> None:
        """Remove the line and restore the cursor. May be called again."""
        self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the line for the terminal's width of this moment."""
        if not self._description:
            return
        time_left = self._time_left.text()
        room = options.max_width - cell_len(self._description)
        room -= cell_len(GAP + time_left) if time_left else 0
        parts = []
        for part in self._status:
            room -= cell_len(GAP + part)
            if room < 0:
                break
            parts.append(part)
        is_whole = len(parts) == len(self._status)
        bar_width = min(BAR_WIDTH, room - len(GAP)) if is_whole else 0
        line = Table.grid(padding=(0, len(GAP)))
        cells: list[Text | ProgressBar] = [Text(self._description)]
        if bar_width < SHORTEST_BAR:
            self._widest_without_bar = max(self._widest_without_bar, options.max_width)
        if options.max_width > self._widest_without_bar:
            cells.append(ProgressBar(self._total, self._done, width=bar_width))
        cells += [Text(part) for part in parts]
        if time_left:
            cells.append(Text(time_left, style="progress.remaining"))
        for _ in cells:
            line.add_column(no_wrap=True)
        line.add_row(*cells)
        yield line


class PlainLine:
    """A line now and then, for a pipe or a log file."""

    def __init__(
        self,
        console: Console,
        every: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Write to a console.

        Args:
            console: A pipe or a file.
            every: Amount between two lines; None for a tenth of all.
            clock: Tells the seconds.
        """
        self._console = console
        self._every = every
        self._clock = clock
        self._total = 0
        self._parts_shown = -1
        self._shown_at = clock()
        self._time_left = TimeLeft(0, clock)

    def begin(self, total: int, done: int, description: str, status: Sequence[str]) -> None:
        """Remember the total; show nothing yet."""
        self._total = total
        self._parts_shown = -1
        self._time_left = TimeLeft(total, self._clock)

    def show(self, done: int, description: str, status: Sequence[str]) -> None:
        """Write a line at the first and the last call, after every part, and after a minute without a line."""
        self._time_left.add(done)
        parts = self._parts(done)
        silent_s = self._clock() - self._shown_at
        if parts > self._parts_shown or done == self._total or silent_s >= LONGEST_SILENCE_S:
            self._parts_shown, self._shown_at = parts, self._clock()
            time_left = [text for text in [self._time_left.text()] if text and done < self._total]
            self._console.print(GAP.join([description, *status, *time_left]), soft_wrap=True)

    def _parts(self, done: int) -> int:
        if self._every is not None:
            return done // self._every
        return done * PLAIN_LINES // self._total if self._total else PLAIN_LINES

    def close(self) -> None:
        """Do nothing: there is no line to remove."""


@contextmanager
def showing_line(console: Console, every: int | None = None) -> Iterator[ProgressLine]:
    """Yield a progress line for a terminal or for plain output (``every`` as there), and restore the terminal afterwards."""
    line = LiveLine(console) if console.is_terminal else PlainLine(console, every)
    try:
        yield line
    finally:
        line.close()
