"""Work of a run's earlier starts, from its metrics: a summary counts the whole run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fullshard.programs.run_events import (
    BadStep,
    Checkpoint,
    Evaluation,
    Start,
    Step,
    read_timed_events,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierStarts:
    """The starts of a run before this one."""

    count: int = 0

    seconds: float = 0.0
    """Seconds from the first to the last record of each start, so a start that was killed counts, too."""

    first_step: Step | None = None

    first_evaluation: Evaluation | None = None

    skipped: tuple[int, ...] = ()
    """Numbers of steps whose updates were skipped. Some may be after the checkpoint that the next start goes on from."""

    steps: int = 0
    """Steps of the whole run, as its last start planned it; 0 if their number is not known."""

    saved_step: int = 0
    """The step of the last checkpoint that became complete; 0 if there was none."""


def read_earlier_starts(metrics: Path) -> EarlierStarts:
    """Return the facts about the starts so far from a metrics file.

    Raises:
        UnknownFormatError: It was written in another format.
    """
    count, seconds, began_s, last_s = 0, 0.0, 0.0, 0.0
    first_step, first_evaluation = None, None
    skipped: list[int] = []
    saved_step, steps = 0, 0
    for time_s, event in read_timed_events(metrics):
        if isinstance(event, Start):
            count += 1
            steps = event.steps
            seconds += max(last_s - began_s, 0.0)
            began_s = time_s
        last_s = time_s
        if isinstance(event, Step):
            first_step = first_step or event
        elif isinstance(event, Evaluation):
            first_evaluation = first_evaluation or event
        elif isinstance(event, BadStep) and event.action == "skip":
            skipped.append(event.step)
        elif isinstance(event, Checkpoint) and not event.best:
            saved_step = event.step
    return EarlierStarts(
        count=count,
        seconds=seconds + max(last_s - began_s, 0.0),
        first_step=first_step,
        first_evaluation=first_evaluation,
        skipped=tuple(skipped),
        steps=steps,
        saved_step=saved_step,
    )
