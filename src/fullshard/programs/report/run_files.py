"""A run folder as plain values: configuration, metrics and traces. Each of them may be missing.

    RUN/config.toml             sections of fields
    RUN/metrics.jsonl           one record a line; the last record of a kind and step counts
    RUN/trace/rank_00000.json   traces; or RUN/rank_00000.json, the folder `fullshard.trace` was given

A killed run leaves a line that is cut off; a full disk leaves an empty trace. What cannot be read is left out and named in
`Run.notes`. Only a folder without metrics and traces is an error. All texts come out safe to show. Nothing here imports
torch.
"""

from __future__ import annotations

import bisect
import json
import tomllib
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from fullshard.errors import ConfigurationError, ranks_text
from fullshard.files import content_of
from fullshard.programs.console.safe_text import safe_line, safe_text
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
    UnknownFormatError,
    parse_line,
)
from fullshard.programs.train.renamed_fields import with_names_of_today
from fullshard.tracing.schema import Trace, parse_trace

Config = Mapping[str, Mapping[str, Any]]
T = TypeVar("T")

MOST_BYTES = 16 << 30
"""Largest file that is read."""
MOST_DEPTH = 8
"""Deepest nesting of a configuration's value that is shown."""
NO_JSON = (OSError, ValueError, RecursionError)
"""Errors of reading and parsing JSON or TOML. Deeply nested brackets raise a RecursionError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """An event that is marked on the loss curve."""

    kind: str
    """resumed, checkpoint, trouble, stall or stopped."""
    step: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """The content of `metrics.jsonl`."""

    starts: tuple[Start, ...] = ()
    """Starts whose steps count, in order; each may have other ranks."""
    steps: tuple[Step, ...] = ()
    """Steps in order. Numbers that were not finite, or not written, are NaN."""
    evaluations: tuple[Evaluation, ...] = ()
    marks: tuple[Mark, ...] = ()
    bad_steps: tuple[BadStep, ...] = ()
    stalls: tuple[Stall, ...] = ()
    samples: tuple[str, ...] = ()
    is_finished: bool = False
    num_broken: int = 0
    """Lines that could not be read."""

    @property
    def start(self) -> Start | None:
        """The newest start: what is trained, on what, with which versions."""
        return self.starts[-1] if self.starts else None

    @property
    def newest(self) -> tuple[Start | None, tuple[Step, ...]]:
        """The newest start that has steps, and these; all steps if no start was read."""
        return next(iter(reversed(self.by_start)), (self.start, ()))

    @property
    def by_start(self) -> list[tuple[Start | None, tuple[Step, ...]]]:
        """The steps of each start that has any, in order."""
        firsts = [start.resumed_from or 0 for start in self.starts] or [0]
        ends = [*firsts[1:], float("inf")]
        found = [
            (start, tuple(step for step in self.steps if first < step.step <= end))
            for start, first, end in zip(self.starts or (None,), firsts, ends, strict=True)
        ]
        return [(start, steps) for start, steps in found if steps]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Everything that was read of a run."""

    name: str
    config: Config = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    traces: tuple[Trace, ...] = ()
    """Traces, in the order of ranks."""
    notes: tuple[str, ...] = ()
    """Sentences about what could not be read."""

    @property
    def is_of_trainer(self) -> bool:
        """Whether the trainer made the run, so that its fields can be changed; otherwise a program of the user's did."""
        return bool(self.config or self.metrics.starts)

    @property
    def world(self) -> int:
        """Number of ranks; 0 if it is not known."""
        described = (self.metrics.start, *self.traces[:1])
        return next((each.world for each in described if each is not None and each.world), 0)

    def setting(self, section: str, name: str) -> Any:
        """Return a field of the configuration; None if it is missing."""
        fields = self.config.get(section)
        return fields.get(name) if isinstance(fields, Mapping) else None


def read_run(folder: Path) -> Run:
    """Read the run in ``folder``.

    Raises:
        ConfigurationError: it is not a folder, or has neither metrics nor traces.
    """
    if not folder.is_dir():
        raise ConfigurationError(
            f"A report needs the folder of a run; {folder} "
            f"{'is a file' if folder.exists() else 'does not exist'}. Name the folder that has `metrics.jsonl` or `trace`."
        )
    notes: list[str] = []
    traces = _read_traces(folder, notes)
    metrics = _read_metrics(folder / "metrics.jsonl", notes)
    if not traces and not metrics.steps and not metrics.start:
        raise ConfigurationError(
            f"A report needs `metrics.jsonl` with records, or traces `trace/rank_*.json`; {folder} has neither. "
            + "".join(f"{note} " for note in notes)
            + "Name a run's folder, or the one that was given to `fullshard.trace`."
        )
    return Run(
        name=safe_line(folder.resolve().name),
        config=_read_config(folder / "config.toml", notes),
        metrics=metrics,
        traces=traces,
        notes=tuple(notes),
    )


def _read_config(path: Path, notes: list[str]) -> Config:
    try:
        config = tomllib.loads(content_of(path, max_bytes=MOST_BYTES).decode())
    except FileNotFoundError:
        return {}
    except NO_JSON as error:
        notes.append(safe_text(f"{path.name} cannot be read: {error}."))
        return {}
    shown = _shown(config)
    return with_names_of_today(
        {name: fields for name, fields in shown.items() if isinstance(fields, dict)}
    )


def _shown(value: Any, depth: int = 0) -> Any:
    """Return a value of a configuration in a form that can be shown and written as JSON."""
    if isinstance(value, str):
        return safe_text(value)
    if isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else "a number of many digits"
    if isinstance(value, dict | list) and depth == MOST_DEPTH:
        return "..."
    if isinstance(value, dict):
        return {safe_line(key): _shown(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list):
        return [_shown(each, depth + 1) for each in value]
    return str(value)


def _read_traces(folder: Path, notes: list[str]) -> tuple[Trace, ...]:
    traces: dict[int, Trace] = {}
    for path in sorted([*folder.glob("trace/rank_*.json"), *folder.glob("rank_*.json")]):
        try:
            trace = _safe_trace(parse_trace(json.loads(content_of(path, max_bytes=MOST_BYTES))))
        except NO_JSON as error:
            notes.append(safe_text(f"{path.name} is left out: {error}."))
            continue
        if trace.num_broken:
            notes.append(f"{path.name}: {trace.num_broken} events are broken and left out.")
        if trace.dropped:
            notes.append(
                f"{path.name}: {trace.dropped} events were not recorded, because the limit was reached; "
                "times of the last step may be too small."
            )
        traces[trace.rank] = trace
    return tuple(traces[rank] for rank in sorted(traces))


def _read_metrics(path: Path, notes: list[str]) -> Metrics:
    try:
        text = content_of(path, max_bytes=MOST_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return Metrics()
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error}.")
        return Metrics()
    lines = [line for line in text.splitlines() if line.strip()]
    events: list[Event] = []
    broken: list[int] = []
    for number, line in enumerate(lines, start=1):
        try:
            event = parse_line(line)
        except UnknownFormatError as error:
            notes.append(f"{path.name} is left out: {error}.")
            return Metrics()
        except ValueError:
            broken.append(number)
        else:
            if event is not None:
                events.append(event if isinstance(event, Step) else safe(event))
    if broken:
        notes.append(
            f"{path.name}: the last line is cut off and left out."
            if broken == [len(lines)]  # the usual end of a killed run
            else f"{path.name}: {len(broken)} of {len(lines)} lines are broken and left out."
        )
    return _metrics(events, len(broken))


def _metrics(events: list[Event], num_broken: int) -> Metrics:
    by_step: dict[int, dict[Hashable, Event]] = {}
    steps: list[int] = []
    """The keys of `by_step`, sorted: steps after a checkpoint are at the end."""
    starts: list[Start] = []
    is_finished = False
    for event in events:
        if isinstance(event, Start):
            # A resumed run discards what was done after its checkpoint, also the end of the run.
            first = event.resumed_from or 0
            while steps and steps[-1] > first:
                del by_step[steps.pop()]
            while starts and (starts[-1].resumed_from or 0) > first:
                starts.pop()
            starts.append(event)
            is_finished = False
        elif isinstance(event, End):
            is_finished = True
        else:
            if event.step not in by_step:
                by_step[event.step] = {}
                bisect.insort(steps, event.step)
            several = event.report if isinstance(event, Stall) else ""  # in one step
            by_step[event.step][type(event), several] = event
    kept = [event for step in steps for event in by_step[step].values()]
    return Metrics(
        starts=tuple(starts),
        steps=tuple(event for event in kept if isinstance(event, Step)),
        evaluations=tuple(event for event in kept if isinstance(event, Evaluation)),
        marks=tuple(_marks(starts, kept)),
        bad_steps=tuple(event for event in kept if isinstance(event, BadStep)),
        stalls=tuple(event for event in kept if isinstance(event, Stall) and event.ranks),
        samples=tuple(text for event in kept if isinstance(event, Samples) for text in event.texts),
        is_finished=is_finished,
        num_broken=num_broken,
    )


def _marks(starts: list[Start], events: list[Event]) -> Iterator[Mark]:
    for start in starts:
        if step := start.resumed_from:
            yield Mark(kind="resumed", step=step, text=f"resumed from step {step}")
    for event in events:
        if isinstance(event, Checkpoint):
            text = "lowest held-out loss so far" if event.best else "checkpoint"
            yield Mark(kind=event.kind, step=event.step, text=text)
        elif isinstance(event, BadStep):
            text = f"{event.what or 'trouble'}; action: {str(event.action) or 'none'}"
            yield Mark(kind=event.kind, step=event.step, text=text)
        elif isinstance(event, Stall) and event.ranks:
            text = f"others waited {event.seconds:.0f} s for {ranks_text(event.ranks)}"
            yield Mark(kind=event.kind, step=event.step, text=text)
        elif isinstance(event, Stopped):
            yield Mark(kind=event.kind, step=event.step, text=f"stopped: {event.why or '?'}")


# --- texts that are safe to show --------------------------------------------------------------------


def safe(value: T) -> T:
    """Return a value that was read, with all texts in it safe to show. Only samples keep their lines."""
    return cast(T, _safe(value))


def _safe(value: object) -> object:
    if isinstance(value, str):
        return safe_line(value)
    if isinstance(value, Samples):
        return replace(value, texts=tuple(map(safe_text, value.texts)))
    if isinstance(value, tuple):
        return tuple(map(_safe, value))
    if isinstance(value, dict):
        return {safe_line(name): _safe(each) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        texts = {
            each.name: _safe(getattr(value, each.name))
            for each in fields(value)
            if isinstance(getattr(value, each.name), str | tuple | dict)
        }
        return replace(value, **texts)
    return value


def _safe_trace(trace: Trace) -> Trace:
    """Return the trace with safe texts. Spans are many and almost always safe, so they are copied only if needed."""
    texts = {text for span in trace.spans for text in (span.group, span.phase, span.awaited)}
    spans = trace.spans if all(map(str.isprintable, texts)) else safe(trace.spans)
    return replace(trace, device=safe_line(trace.device), groups=safe(trace.groups), spans=spans)
