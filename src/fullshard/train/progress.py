"""What the user sees of a run: one line while it trains (`progress_line`), and a summary at its end.

Rank 0 watches with `showing_progress`, the others with `Silence`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from fullshard.progress_line import ProgressLine, showing_line
from fullshard.train.result import RunFacts, StepReport, TrainResult, Watcher, bits_per_byte

SMOOTHING = 0.9
"""How much of the shown loss is carried over from step to step."""


class Silence:
    """The watcher of a rank that shows nothing."""

    def begin(self, facts: RunFacts) -> None:
        """Say nothing."""

    def step(self, report: StepReport) -> None:
        """Say nothing."""

    def end(self, result: TrainResult) -> None:
        """Say nothing."""


class SmoothLoss:
    """A running mean of losses in which old ones fade."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0

    def add(self, loss: float) -> float:
        """Take in a loss and return the mean."""
        self._sum = SMOOTHING * self._sum + loss
        self._weight = SMOOTHING * self._weight + 1.0
        return self._sum / self._weight


class RunProgress:
    """Shows a run: a line while it trains, a summary at its end."""

    def __init__(self, console: Console, line: ProgressLine) -> None:
        self._console = console
        self._line = line
        self._loss = SmoothLoss()
        self._steps = 0

    def begin(self, facts: RunFacts) -> None:
        """Say what is trained, and open the line."""
        print_facts(self._console, facts)
        self._steps = facts.steps
        self._line.begin(facts.steps, step_of(0, facts.steps), "evaluating")

    def step(self, report: StepReport) -> None:
        """Renew the line."""
        status = status_of(report, self._loss.add(report.loss))
        self._line.show(report.step, step_of(report.step, self._steps), status)

    def end(self, result: TrainResult) -> None:
        """Put the summary in the place of the line."""
        self._line.close()
        print_summary(self._console, result)


@contextmanager
def showing_progress(console: Console) -> Iterator[Watcher]:
    """Give the watcher that suits where the console writes to, and leave the terminal as it was."""
    with showing_line(console) as line:
        yield RunProgress(console, line)


def step_of(step: int, steps: int) -> str:
    """Return where the run stands, in a width that stays the same."""
    return f"step {step:>{len(str(steps))}}/{steps}"


def status_of(report: StepReport, loss: float) -> str:
    """Return loss, speed and memory in a few words."""
    speed = report.tokens / report.seconds
    return f"loss {loss:.3f}  {speed:,.0f} tokens/s  {megabytes(report.memory_bytes)}"


def print_facts(console: Console, facts: RunFacts) -> None:
    """Say what is about to be trained, on what, by whom."""
    console.print(
        f"Text    {facts.source}\n"
        f"        {megabytes(facts.training_bytes)} to learn from, "
        f"{megabytes(facts.held_out_bytes)} held out\n"
        f"Model   {facts.parameters:,} parameters, sharded over {ranks_on(facts)}\n"
        f"Steps   {facts.steps} of {facts.tokens_per_step:,} tokens",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


def print_summary(console: Console, result: TrainResult) -> None:
    """Say what was trained, how the loss fell, and what each rank held."""
    facts = result.facts
    console.print(
        f"\nTrained {facts.parameters:,} parameters on {result.tokens:,} tokens "
        f"in {result.seconds:.1f} s, sharded over {ranks_on(facts)}.\n",
        soft_wrap=True,
        highlight=False,
    )
    console.print(loss_table(result), memory_table(result), sep="\n")


def loss_table(result: TrainResult) -> Table:
    """Return the losses before and after, on both parts of the text."""
    table = Table(title="Loss", title_justify="left")
    table.add_column("")
    for unit in ("nats per byte", "bits per byte"):
        table.add_column(unit, justify="right")
    for label, loss in (
        ("first step", result.losses[0]),
        ("last step", result.losses[-1]),
        ("held out, before", result.held_out_before),
        ("held out, after", result.held_out_after),
    ):
        table.add_row(label, f"{loss:.4f}", f"{bits_per_byte(loss):.4f}")
    return table


def memory_table(result: TrainResult) -> Table:
    """Return the bytes of parameters at rest, rank by rank, against the unsharded model."""
    table = Table(title="Parameters held at rest", title_justify="left")
    table.add_column("")
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    for rank, held in enumerate(result.rank_bytes):
        table.add_row(f"rank {rank}", f"{held:,}", f"{held / result.unsharded_bytes:.1%}")
    table.add_section()
    table.add_row("unsharded model", f"{result.unsharded_bytes:,}", "100.0%")
    return table


def ranks_on(facts: RunFacts) -> str:
    """Return number and device of the ranks in words."""
    return f"{facts.ranks} {facts.device} rank{'s' if facts.ranks > 1 else ''}"


def megabytes(num_bytes: int) -> str:
    """Return a size in words."""
    return f"{num_bytes / 1e6:,.1f} MB"
