"""Events as files: `metrics.jsonl`, whose lines `run_events` makes and reads, and TensorBoard's.

A process can be killed while it writes a line, so the next process begins on a line of its own. After a resume some steps
are written again: the last record of a kind and step counts.
"""

from __future__ import annotations

from pathlib import Path

from fullshard.programs.run_events import Evaluation, Event, Start, Step, line_of


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


def numbers_of(event: Event) -> dict[str, float]:
    """Return the numbers of an event that are drawn as curves, by name; none for most kinds of events."""
    if isinstance(event, Step):
        names = ("loss", "grad_norm", "lr", "step_s", "memory_bytes")
        return {f"train/{name}": getattr(event, name) for name in names}
    return {"held_out/loss": event.loss} if isinstance(event, Evaluation) else {}


class TensorBoardFiles:
    """A watcher that writes curves for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        self._writer_class = SummaryWriter
        self._writer: SummaryWriter | None = None

    def __call__(self, event: Event) -> None:
        """Write the numbers of steps and evaluations."""
        if isinstance(event, Start):
            # Steps that are taken again after a resume must not be drawn twice.
            first = None if event.resumed_from is None else event.resumed_from + 1
            self._writer = self._writer_class(str(self._folder), purge_step=first)
        assert self._writer is not None, "runs begin with their start"
        for name, value in numbers_of(event).items():
            self._writer.add_scalar(name, value, event.step)

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
