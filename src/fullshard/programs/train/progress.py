"""Progress of a run on the console: one line while it trains, messages about events, and a summary at the end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fullshard.errors import names_text, ranks_text, size_text
from fullshard.programs.console.broken_pipe_safe import broken_pipe_safe
from fullshard.programs.console.progress_line import ProgressLine, showing_line
from fullshard.programs.console.tables import counted, print_facts, print_line, time_text
from fullshard.programs.run_events import (
    BadStep,
    Checkpoint,
    End,
    Evaluation,
    Event,
    Samples,
    Stall,
    Start,
    Step,
    Stopped,
)
from fullshard.programs.train.earlier_starts import EarlierStarts

SMOOTHING = 0.9
"""Weight of the old value in a shown running mean."""

DONE = {"stop": "the run is stopped", "skip": "its update is skipped", "ignore": "it is ignored"}
"""Printed words about a bad step, by its action."""


SHOWN_STEPS = 10
"""Most skipped steps that the summary names."""


class SmoothValue:
    """A running mean in which old values fade; those that are not finite are left out."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float) -> float:
        """Add a value and return the mean."""
        if math.isfinite(value):
            self._sum = SMOOTHING * self._sum + value
            self._weight = SMOOTHING * self._weight + 1.0
        return self._sum / self._weight if self._weight else value


class RunProgress:
    """A `Watcher` that shows a run."""

    def __init__(self, console: Console, line: ProgressLine, folder: Path) -> None:
        self._console = console
        self._line = line
        self._folder = folder
        """Folder of the run."""
        self._loss = SmoothValue()
        self._step_s = SmoothValue()
        self._start: Start | None = None
        self._steps: list[Step] = []
        """The first and the latest."""
        self._evaluations: list[Evaluation] = []
        """The first and the latest."""
        self._skipped: dict[int, None] = {}
        """Numbers of steps, each once."""
        self._earlier = EarlierStarts()

    def count_earlier(self, earlier: EarlierStarts) -> None:
        """Let the summary count what earlier starts of the run have done. Call it before the first event."""
        self._earlier = earlier
        self._steps = [earlier.first_step] if earlier.first_step else []
        self._evaluations = [earlier.first_evaluation] if earlier.first_evaluation else []

    def __call__(self, event: Event) -> None:
        """Show an event."""
        match event:
            case Start():
                self._begin(event)
            case Step():
                self._show_step(event)
            case Evaluation():
                self._evaluations = [*self._evaluations[:1], event]
                self._print(f"step {event.step}: held-out loss {event.loss:.4f}")
            case Checkpoint():
                self._print(self._saved(event))
            case BadStep():
                if event.action == "skip":
                    self._skipped[event.step] = None
                self._print(f"step {event.step}: {event.what}; {DONE[event.action]}")
            case Stall():
                self._print(
                    f"step {event.step}: others waited {event.seconds:.0f} s for {ranks_text(event.ranks)} ({event.where})"
                )
            case Samples():
                self._line.close()
                for text in event.texts:
                    self._print(f"\nThe model writes:\n{text}")
            case Stopped():
                self._line.close()
                self._print(f"step {event.step}: stopped by {event.why}")
            case End():
                self._end(event)

    def print_message(self, text: str) -> None:
        """Print a message above the progress line."""
        self._print(text)

    def print_last(self, text: str) -> None:
        """Close the progress line, and print a message about the whole run."""
        self._line.close()
        self._print(text)

    def _print(self, text: str) -> None:
        print_line(self._console, text)

    def _saved(self, event: Checkpoint) -> str:
        if event.best:
            return f"step {event.step}: lowest held-out loss so far; saved in {self._folder / event.path}"
        removed = [str(self._folder / path) for path in event.removed]
        return f"step {event.step}: saved in {self._folder / event.path}" + (
            f"; removed {', '.join(removed)} (checkpoint.keep)" if removed else ""
        )

    def _begin(self, start: Start) -> None:
        self._start = start
        facts = [
            ("Folder", str(self._folder.absolute())),
            ("Data", start.data),
            (
                "",
                f"{start.training_tokens:,} tokens to learn from, {start.held_out_tokens:,} held out",
            ),
            ("", f"left out: {start.left_out}" if start.left_out else ""),
            ("Model", start.model),
            ("", f"{start.parameters:,} parameters, sharded over {ranks_on(start)}"),
            ("Steps", f"{start.steps} of {start.tokens_per_step:,} tokens"),
            ("", f"resumes after step {start.resumed_from}" if start.resumed_from else ""),
        ]
        print_facts(self._console, [(label, text) for label, text in facts if text])
        first = start.resumed_from or 0
        self._skipped = {number: None for number in self._earlier.skipped if number <= first}
        status = [] if first else ["evaluating"]
        self._line.begin(start.steps, first, step_of(first, start.steps), status)

    def _show_step(self, step: Step) -> None:
        assert self._start is not None, "runs begin with their start"
        self._steps = [*self._steps[:1], step]
        status = status_of(
            step,
            mean_loss=self._loss.add(step.loss),
            speed=self._start.tokens_per_step / self._step_s.add(step.step_s),
        )
        self._line.show(step.step, step_of(step.step, self._start.steps), status)

    def _end(self, end: End) -> None:
        assert self._start is not None, "runs begin with their start"
        self._line.close()
        self._print("\n" + "\n".join(self._summary(self._start, end)) + "\n")
        self._console.print(
            loss_table(self._steps, self._evaluations), memory_table(self._start), sep="\n"
        )

    def _summary(self, start: Start, end: End) -> Iterator[str]:
        """Yield lines about the whole run, and about this start of several."""

        def done(num_steps: int, seconds: float) -> str:
            tokens = num_steps * start.tokens_per_step
            return f"{counted(num_steps, 'step')} on {tokens:,} tokens in {time_text(seconds)}"

        earlier = self._earlier
        starts = f", in {earlier.count + 1} starts" if earlier.count else ""
        yield f"Trained {done(end.step, earlier.seconds + end.seconds)}{starts}."
        if earlier.count:
            yield f"This start: {done(end.step - (start.resumed_from or 0), end.seconds)}."
        yield f"{start.parameters:,} parameters, sharded over {ranks_on(start)}."
        if self._skipped:
            numbers = names_text([*map(str, self._skipped)], most=SHOWN_STEPS)
            yield f"Skipped {len(self._skipped)} of the steps: {numbers}."


@contextmanager
def showing_progress(
    console: Console, folder: Path, every: int | None = None
) -> Iterator[RunProgress]:
    """Yield a watcher for the console, and restore the terminal afterwards.

    It shows the run in ``folder``. Without a terminal, a line of progress appears after ``every`` steps, or after each tenth
    of the run. From then on the console ignores errors of writing: the run goes on, and its files have everything.
    """
    console.file = broken_pipe_safe(console.file)
    with showing_line(console, every) as line:
        yield RunProgress(console, line, folder)


def step_of(step: int, steps: int) -> str:
    """Return the step's number of all steps, with a constant width."""
    return f"step {step:>{len(str(steps))}}/{steps}"


def status_of(step: Step, *, mean_loss: float, speed: float) -> tuple[str, ...]:
    """Return the facts about a step, the most important first; speed is a mean of the last steps."""
    return (
        f"loss {step.loss:.4f}",
        f"{speed:,.0f} tokens/s",
        f"mean loss {mean_loss:.4f}",
        size_text(step.memory_bytes),
        f"lr {step.lr:.1e}",
        f"norm {step.grad_norm:.2f}",
    )


def loss_table(steps: Sequence[Step], evaluations: Sequence[Evaluation]) -> Table:
    """Return a table of the first and the last losses."""
    table = Table(title="Loss per token", title_justify="left")
    table.add_column("")
    for unit in ("nats", "bits"):
        table.add_column(unit, justify="right")
    rows = [(f"step {step.step}", step.loss) for step in steps]
    rows += [(f"held out, after step {each.step}", each.loss) for each in evaluations]
    for label, loss in rows:
        table.add_row(label, f"{loss:.4f}", f"{loss / math.log(2):.4f}")
    return table


def memory_table(start: Start) -> Table:
    """Return a table of the bytes of parameters that each rank holds between steps."""
    table = Table(title="Parameters held at rest", title_justify="left")
    table.add_column("")
    table.add_column("size", justify="right")
    table.add_column("share", justify="right")
    ranks: dict[int, list[int]] = {}
    for rank, held in enumerate(start.rank_bytes):
        ranks.setdefault(held, []).append(rank)
    for held, equal in ranks.items():
        each = " each" if len(equal) > 1 else ""
        share = f"{held / start.unsharded_bytes:.1%}"
        table.add_row(f"{ranks_text(equal)}{each}", size_text(held), share)
    table.add_section()
    table.add_row("unsharded model", size_text(start.unsharded_bytes), "100.0%")
    return table


def ranks_on(start: Start) -> str:
    """Return the number and the device of the ranks as a text."""
    return f"{start.world} {start.device} rank{'s' if start.world > 1 else ''}"
