"""A run folder as plain values: configuration, metrics and traces, each of which may be missing.

    RUN/config.toml             sections of fields
    RUN/metrics.jsonl           a record a line; the last one of a (kind, step) counts, unless a resume went back before it
    RUN/trace/rank_00000.json   traces; or RUN/rank_00000.json, the folder `fullshard.trace` was given

A run that was killed leaves a cut line, a disk that was full an empty trace. What cannot be read is left out and
told in `Run.notes`; only a folder with nothing in it is an error. Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigurationError
from fullshard.report.trace_file import Trace, parse_trace

Record = Mapping[str, Any]
Config = Mapping[str, Mapping[str, Any]]


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
        name=folder.resolve().name,
        config=_read_config(folder / "config.toml", notes),
        metrics=metrics,
        traces=traces,
        notes=tuple(notes),
    )


def _read_config(path: Path, notes: list[str]) -> Config:
    try:
        config = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read: {error}.")
        return {}
    return {name: fields for name, fields in config.items() if isinstance(fields, dict)}


def _read_traces(folder: Path, notes: list[str]) -> tuple[Trace, ...]:
    traces: dict[int, Trace] = {}
    for path in sorted([*folder.glob("trace/rank_*.json"), *folder.glob("rank_*.json")]):
        try:
            trace = parse_trace(json.loads(path.read_bytes()))
        except (OSError, ValueError) as error:
            notes.append(f"{path.name} is left out: {error}.")
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
        text = path.read_text(errors="replace")
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
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("kind"), str):
            if record["kind"] != "step" or _step(record) > 0:
                yield record


def _metrics(records: list[Record], num_broken: int) -> Metrics:
    last: dict[tuple[str, int], Record] = {}
    starts: list[Record] = []
    for record in records:
        if record["kind"] == "start":
            # What was done beyond the checkpoint is not part of the run that goes on from it; nor is its end.
            first = _resumed_from(record)
            last = {key: old for key, old in last.items() if key[1] <= first and key[0] != "end"}
            starts = [*(start for start in starts if _resumed_from(start) <= first), record]
        else:
            last[record["kind"], _step(record)] = record
    by_step = sorted(last.items(), key=lambda item: item[0][1])
    of_kind: dict[str, list[Record]] = {}
    for (kind, _), record in by_step:
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
        is_finished="end" in of_kind,
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
        what, action = record.get("what", "trouble"), record.get("action", "none")
        yield Mark(kind="trouble", step=_step(record), text=f"{what}; action: {action}")
    for record in of_kind.get("stopped", []):
        yield Mark(kind="stopped", step=_step(record), text=f"stopped: {record.get('why', '?')}")


def _texts(record: Record) -> list[str]:
    texts = record.get("texts")
    return [str(text) for text in texts] if isinstance(texts, list) else []


def _resumed_from(start: Record) -> int:
    """The step whose checkpoint a run goes on from; 0 for one that begins."""
    return int(number(start, "resumed_from") or 0)


def _step(record: Record) -> int:
    return int(number(record, "step") or 0)


def number(record: Record, name: str) -> float | None:
    """A finite number of a record, or None."""
    value = record.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    return None
