"""A run folder as plain values: configuration, metrics and traces, each of which may be missing.

    RUN/config.toml             sections of fields
    RUN/metrics.jsonl           a record a line; the last one of a (kind, step) counts, unless a resume went back before it
    RUN/trace/rank_00000.json   traces; or RUN/rank_00000.json, the folder `fullshard.trace` was given

A run that was killed leaves a cut line, a disk that was full an empty trace. What cannot be read is left out and
told in `Run.notes`; only a folder with nothing in it is an error. Nothing here imports torch.
"""

from __future__ import annotations

import bisect
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigurationError
from fullshard.files import content_of
from fullshard.programs.console.safe_text import harmless, harmless_line
from fullshard.programs.report.trace_file import Trace, as_number, parse_trace

Record = Mapping[str, Any]
Config = Mapping[str, Mapping[str, Any]]

LARGEST = 1e40
"""Number of a metrics file; more than any float32 is."""
MOST_BYTES = 16 << 30
"""Of a file that is read."""
MOST_DEPTH = 8
"""Of a value in a configuration that is shown."""
NO_JSON = (OSError, ValueError, RecursionError)
"""What reading and parsing may raise; a text of brackets alone is too deep for Python."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step; what was not finite or not written is None."""

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float | None
    tokens: float | None
    step_s: float | None
    memory_bytes: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Something that happened beside the steps."""

    kind: str
    """resumed, checkpoint, trouble or stopped."""
    step: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """What `metrics.jsonl` says."""

    start: Record = field(default_factory=dict)
    """The newest record of this kind: what is trained, on what, with which versions."""
    steps: tuple[StepRecord, ...] = ()
    evaluations: tuple[tuple[int, float | None], ...] = ()
    """Steps and losses; None for one that was not finite."""
    marks: tuple[Mark, ...] = ()
    samples: tuple[str, ...] = ()
    is_finished: bool = False
    num_broken: int = 0
    """Lines that are no record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """All that is known of a run."""

    name: str
    config: Config = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    traces: tuple[Trace, ...] = ()
    """By rank."""
    notes: tuple[str, ...] = ()
    """What could not be read, in sentences."""

    def setting(self, section: str, name: str) -> Any:
        """A field of the configuration; None where there is none."""
        fields = self.config.get(section)
        return fields.get(name) if isinstance(fields, Mapping) else None


def read_run(folder: Path) -> Run:
    """Read what ``folder`` has."""
    if not folder.is_dir():
        raise ConfigurationError(
            f"A report is made of a run's folder; {folder} is "
            f"{'a file' if folder.exists() else 'not there'}. Name the folder that has `metrics.jsonl` or `trace`."
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
        name=harmless_line(folder.resolve().name),
        config=_read_config(folder / "config.toml", notes),
        metrics=metrics,
        traces=traces,
        notes=tuple(notes),
    )


def _read_config(path: Path, notes: list[str]) -> Config:
    try:
        config = tomllib.loads(content_of(path, most_bytes=MOST_BYTES).decode())
    except FileNotFoundError:
        return {}
    except NO_JSON as error:
        notes.append(harmless(f"{path.name} cannot be read: {error}."))
        return {}
    shown = _shown(config)
    return {name: fields for name, fields in shown.items() if isinstance(fields, dict)}


def _shown(value: Any, depth: int = 0) -> Any:
    """A value of a configuration as far as it can be shown and written as JSON."""
    if isinstance(value, str):
        return harmless(value)
    if isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else "a number of many digits"
    if isinstance(value, dict | list) and depth == MOST_DEPTH:
        return "..."
    if isinstance(value, dict):
        return {harmless_line(key): _shown(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list):
        return [_shown(each, depth + 1) for each in value]
    return str(value)


def _read_traces(folder: Path, notes: list[str]) -> tuple[Trace, ...]:
    traces: dict[int, Trace] = {}
    for path in sorted([*folder.glob("trace/rank_*.json"), *folder.glob("rank_*.json")]):
        try:
            trace = parse_trace(json.loads(content_of(path, most_bytes=MOST_BYTES)))
        except NO_JSON as error:
            notes.append(harmless(f"{path.name} is left out: {error}."))
            continue
        if trace.num_broken:
            notes.append(f"{path.name}: {trace.num_broken} events are broken and left out.")
        if trace.num_dropped:
            notes.append(
                f"{path.name}: {trace.num_dropped} events were not recorded, since the limit was reached; "
                "times of the last step may be too small."
            )
        traces[trace.rank] = trace
    return tuple(traces[rank] for rank in sorted(traces))


def _read_metrics(path: Path, notes: list[str]) -> Metrics:
    try:
        text = content_of(path, most_bytes=MOST_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return Metrics()
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error}.")
        return Metrics()
    lines = [line for line in text.splitlines() if line.strip()]
    records = list(_records(lines))
    num_broken = len(lines) - len(records)
    if num_broken:
        notes.append(
            f"{path.name}: {num_broken} of {len(lines)} lines are broken and left out."
            if num_broken > 1 or not _is_last(lines)
            else f"{path.name}: the last line is cut off and left out."
        )
    return _metrics(records, num_broken)


def _is_last(lines: list[str]) -> bool:
    """Whether the one broken line is the last: the usual end of a killed run."""
    return next(_records(lines[-1:]), None) is None


def _records(lines: Iterable[str]) -> Iterator[Record]:
    for line in lines:
        try:
            record = json.loads(line)
        except NO_JSON:
            continue
        if isinstance(record, dict) and isinstance(record.get("kind"), str):
            if record["kind"] != "step" or _step(record) > 0:
                yield record


def _metrics(records: list[Record], num_broken: int) -> Metrics:
    by_step: dict[int, dict[str, Record]] = {}
    steps: list[int] = []
    """Its keys, in order: what is beyond a step is at the end."""
    starts: list[Record] = []
    is_finished = False
    for record in records:
        if record["kind"] == "start":
            # What was done beyond the checkpoint is not part of the run that goes on from it; nor is its end.
            first = _resumed_from(record)
            while steps and steps[-1] > first:
                del by_step[steps.pop()]
            while starts and _resumed_from(starts[-1]) > first:
                starts.pop()
            starts.append(record)
            is_finished = False
        elif record["kind"] == "end":
            is_finished = True
        else:
            step = _step(record)
            if step not in by_step:
                by_step[step] = {}
                bisect.insort(steps, step)
            by_step[step][record["kind"]] = record
    of_kind: dict[str, list[Record]] = {}
    for step in steps:
        for kind, record in by_step[step].items():
            of_kind.setdefault(kind, []).append(record)
    texts = [text for record in of_kind.get("samples", []) for text in _texts(record)]
    return Metrics(
        start=starts[-1] if starts else {},
        steps=tuple(map(_step_record, of_kind.get("step", []))),
        evaluations=tuple(
            (_step(record), number(record, "loss")) for record in of_kind.get("evaluation", [])
        ),
        marks=tuple(_marks(starts, of_kind)),
        samples=tuple(texts),
        is_finished=is_finished,
        num_broken=num_broken,
    )


def _step_record(record: Record) -> StepRecord:
    return StepRecord(
        step=_step(record),
        loss=number(record, "loss"),
        grad_norm=number(record, "grad_norm"),
        lr=number(record, "lr"),
        tokens=number(record, "tokens"),
        step_s=number(record, "step_s"),
        memory_bytes=number(record, "memory_bytes"),
    )


def _marks(starts: list[Record], of_kind: Mapping[str, list[Record]]) -> Iterator[Mark]:
    for start in starts:
        if step := _resumed_from(start):
            yield Mark(kind="resumed", step=step, text=f"resumed from step {step}")
    for record in of_kind.get("checkpoint", []):
        yield Mark(kind="checkpoint", step=_step(record), text="checkpoint")
    for record in of_kind.get("trouble", []):
        what, action = text_of(record, "what", "trouble"), text_of(record, "action", "none")
        yield Mark(kind="trouble", step=_step(record), text=f"{what}; action: {action}")
    for record in of_kind.get("stopped", []):
        yield Mark(
            kind="stopped", step=_step(record), text=f"stopped: {text_of(record, 'why', '?')}"
        )


def _texts(record: Record) -> list[str]:
    texts = record.get("texts")
    if not isinstance(texts, list):
        return []
    return [harmless(text) for text in texts if isinstance(text, str)]


def _resumed_from(start: Record) -> int:
    """The step whose checkpoint a run goes on from; 0 for one that begins."""
    return int(as_number(start.get("resumed_from"), largest=1e15) or 0)


def _step(record: Record) -> int:
    return int(as_number(record.get("step"), largest=1e15) or 0)


def text_of(record: Record, name: str, otherwise: str = "") -> str:
    """A text of a record, or ``otherwise``."""
    value = record.get(name)
    return harmless_line(value) if isinstance(value, str) else otherwise


def number(record: Record, name: str) -> float | None:
    """A finite number of a record, or None."""
    return as_number(record.get(name), largest=LARGEST)
