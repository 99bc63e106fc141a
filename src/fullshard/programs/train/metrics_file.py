"""Events as a file: `metrics.jsonl`, whose lines `run_events` makes and reads.

A process can be killed while it writes a line, so the next process begins on a line of its own. After a resume some steps
are written again: the last record of a kind and step counts.
"""

from __future__ import annotations

from pathlib import Path

from fullshard.programs.run_events import Event, Start, Step, line_of


class MetricsFile:
    """A watcher that appends events to a file of JSON lines."""

    def __init__(self, path: Path, *, every: int = 1) -> None:
        """Write all events, but of steps only every ``every``-th and the last."""
        self._every = every
        self._steps = 0
        self._file = path.open("a+b")
        if _is_cut(path):
            self._file.write(b"\n")

    def __call__(self, event: Event) -> None:
        """Write a line and flush it, so that it survives a kill of this process."""
        if isinstance(event, Start):
            self._steps = event.steps
        if isinstance(event, Step) and event.step % self._every and event.step != self._steps:
            return
        self._file.write(line_of(event))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _is_cut(path: Path) -> bool:
    """Say whether the last line of a file is incomplete."""
    content_end = path.stat().st_size
    if content_end == 0:
        return False
    with path.open("rb") as file:
        file.seek(content_end - 1)
        return file.read(1) != b"\n"
