"""The events of a run, and the schema of `metrics.jsonl`: the trainer writes them, the report reads them.

A line is a JSON object with the event's kind, the time it was written, and the event's fields under their own names. JSON
has no NaN and no infinity, so these are written as null, and null reads as NaN. A process can be killed while it writes a
line, so readers leave out lines that are not records. All ranks have the same events, except for times and memory; those of
the first rank are shown and written. Nothing here imports torch: the report works without it.
"""

from __future__ import annotations

import json
import math
import reprlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal, get_args

from fullshard.tracing.json_values import read_fields

FORMAT = 1
"""Version of the records. Each `Start` has it; files without it are of this version, too."""

BadStepAction = Literal["stop", "skip", "ignore"]
ErrorAction = Literal["stop", "skip"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The start of a run, new or resumed: what is trained."""

    kind: ClassVar[str] = "start"
    format: int = FORMAT
    step: int = 0
    world: int
    device: str
    device_name: str = ""
    """Name of a GPU, as its driver calls it; empty on the CPU."""
    parameters: int
    """Elements of all parameters."""
    unsharded_bytes: int
    """Bytes of all parameters."""
    rank_bytes: tuple[int, ...]
    """Bytes of the parameters that each rank holds between steps."""
    baseline_bytes: int = 0
    """Resident memory of the first rank before it made the model, of Python, torch and the data; 0 on CUDA, where memory is
    that of tensors."""
    tokens_per_step: int
    steps: int
    model: str
    """Text for people, like the data."""
    data: str
    left_out: str = ""
    """The part of the data that is not read, and why; empty if all is."""
    training_tokens: int
    held_out_tokens: int
    versions: dict[str, str]
    resumed_from: int | None
    """Steps done before; None for a new run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """An optimizer step, taken or skipped."""

    kind: ClassVar[str] = "step"
    step: int
    """Its number, counted from 1."""
    loss: float
    """Mean over the global batch, in nats per token, before the step's update."""
    grad_norm: float
    """Norm before clipping."""
    lr: float
    tokens: int
    """Tokens of the whole run until now, of all ranks together."""
    step_s: float
    memory_bytes: int
    """Peak so far: of resident memory on CPU, of allocated memory on CUDA."""
    optimizer_s: float = 0.0
    """The time of the optimizer's step; on CUDA of the step before this one. 0 if it is not known."""
    optimizer_bytes: int = 0
    """The optimizer's state on this rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The loss on held-out data."""

    kind: ClassVar[str] = "evaluation"
    step: int
    loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint that is now complete. Later steps may have been taken since it began."""

    kind: ClassVar[str] = "checkpoint"
    step: int
    path: str
    """Path relative to the run's folder."""
    blocked_s: float
    """Time for which training waited for it."""
    best: bool = False
    """Whether it has the weights with the lowest held-out loss so far, for another use than to resume the run."""
    removed: tuple[str, ...] = ()
    """Older checkpoints that were removed for it, relative to the run's folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadStep:
    """A bad step, and what was done about it."""

    kind: ClassVar[str] = "trouble"
    step: int
    what: str
    action: BadStepAction
    traceback: str = ""
    """Traceback of a rank's exception, if that was the trouble."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """A time in which ranks waited for others that were slow, written after the step in which it ended."""

    kind: ClassVar[str] = "stall"
    step: int
    seconds: float
    ranks: tuple[int, ...]
    """Ranks that were waited for."""
    where: str
    """Place of the first of them when the others noticed: its activity, and its line."""
    report: str
    """Places of the ranks at that time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Texts that the model has generated."""

    kind: ClassVar[str] = "samples"
    step: int
    texts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """The end of a run before its last step. It can be resumed from a checkpoint of this step."""

    kind: ClassVar[str] = "stopped"
    step: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """The end of a finished run, after its last step, or an early one, and everything that follows it."""

    kind: ClassVar[str] = "end"
    step: int
    seconds: float
    """Seconds of this process only."""
    patience: int = 0
    """Evaluations without a lower loss after which the run has ended before its last step; 0 if it has taken all."""


Event = Start | Step | Evaluation | Checkpoint | BadStep | Stall | Samples | Stopped | End
Watcher = Callable[[Event], None]
"""A function that is called with every event of a run."""

_EVENTS: dict[str, type[Event]] = {event.kind: event for event in get_args(Event)}


def all_of(watchers: Iterable[Watcher]) -> Watcher:
    """Return a watcher that passes events on to others, in their order."""
    listening = tuple(watchers)

    def pass_on(event: Event) -> None:
        for watcher in listening:
            watcher(event)

    return pass_on


# --- lines of a file --------------------------------------------------------------------------------


class UnknownFormatError(ValueError):
    """A metrics file was written in a format that this version does not read."""


def line_of(event: Event) -> bytes:
    """Return the line that is written for an event, with its end."""
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
    record = {"kind": event.kind, "time": time.time(), **finite}
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def parse_line(line: bytes | str) -> Event | None:
    """Return the event of a line; None if its kind is not known. Its texts may be anything.

    A field that is missing, or has another type, has its default or reads as 0, NaN, "" or empty.

    Raises:
        UnknownFormatError: It is a start in another format.
        ValueError: It is not a record: cut off, damaged, or a step without a number.
    """
    return _parse(line)[1]


def _parse(line: bytes | str) -> tuple[float, Event | None]:
    """Return the time at which a line was written, and its event, as `parse_line` does."""
    try:
        record = json.loads(line)
    except RecursionError:  # a text of brackets alone is too deep for Python
        raise ValueError("it is nested too deep for JSON") from None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise ValueError("a record is an object with a kind")
    kind = _EVENTS.get(record["kind"])
    written_s = record.get("time")
    written_s = float(written_s) if isinstance(written_s, int | float) else 0.0
    if kind is None:
        return written_s, None
    if kind is Start and record.get("format", FORMAT) != FORMAT:
        raise UnknownFormatError(
            f"its format is {reprlib.repr(record['format'])}, this version of fullshard reads {FORMAT}"
        )
    event = kind(**read_fields(kind, record, is_strict=False))
    if isinstance(event, Step) and event.step <= 0:
        raise ValueError("steps are counted from 1")
    return written_s, event


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a metrics file that were written in full; none if there is no file.

    Raises:
        UnknownFormatError: It was written in another format.
    """
    for _, event in read_timed_events(path):
        yield event


def read_timed_events(path: Path) -> Iterator[tuple[float, Event]]:
    """Yield the same events, each with the time at which it was written, in seconds since the epoch."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return  # after any other error it is not known what has happened
    with file:
        for line in file:
            try:
                written_s, event = _parse(line)
            except UnknownFormatError:
                raise
            except ValueError:
                continue
            if event is not None:
                yield written_s, event
