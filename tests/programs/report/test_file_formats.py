"""Traces and metrics: what is written is what is read, and an unknown format is refused."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import pytest

from fullshard.errors import ConfigurationError
from fullshard.programs.report.run_files import read_run
from fullshard.programs.run_events import (
    BadStep,
    Checkpoint,
    End,
    Evaluation,
    Event,
    Samples,
    Stall,
    Step,
    Stopped,
    UnknownFormatError,
    line_of,
    parse_line,
    read_events,
)
from fullshard.programs.train.metrics_file import MetricsFile
from fullshard.programs.train.run_folder import RunFolder
from fullshard.tracing.schema import (
    KINDS,
    GroupFacts,
    MemorySample,
    Release,
    Span,
    Trace,
    parse_trace,
    to_document,
)
from tests.programs.test_progress import START as FIRST_START

START = replace(FIRST_START, rank_bytes=(2000, 2001), versions={"torch": "2.13"}, resumed_from=4)
EVENTS: tuple[Event, ...] = (
    START,
    FIRST_START,
    Step(step=5, loss=2.25, grad_norm=0.5, lr=1e-3, tokens=320, step_s=0.25, memory_bytes=1 << 40),
    Evaluation(step=5, loss=2.5),
    Checkpoint(step=5, path="checkpoints/step_00000005", blocked_s=0.125),
    BadStep(step=6, what="loss is nan", action="skip", traceback="in train.py"),
    Stall(step=6, seconds=7.5, ranks=(1, 3), where="step 5, outside, at data.py:3", report="all"),
    Samples(step=9, texts=("one\n", "two\x1b")),
    Stopped(step=7, why="SIGTERM"),
    End(step=9, seconds=12.5),
)
GROUP = GroupFacts(
    name="layers.0",
    modules=("layers.0", "norm"),
    **{
        field.name: 1000 + number
        for number, field in enumerate(fields(GroupFacts))
        if field.type == "int"
    },
    param_dtype="float32",
    compute_dtype="bfloat16",
    reduce_dtype="float16",
    wire_dtype="float8_e5m2",
    trained_share=0.25,
)
WHERE = {"step": 20, "group": "layers.0", "phase": "backward"}
WIRE = {"nbytes": 4096, "issued_us": 10.5}
TRACE = Trace(
    rank=1,
    world=2,
    device="cuda",
    first_step=20,
    num_steps=1,
    zero_unix_ns=1763200000123456789,
    groups=(GROUP,),
    dropped=3,
    spans=(
        Span(kind="step", name="step 20", step=20, start_us=0.0, duration_us=99.125),
        Span(kind="compute", name="recompute layers.0", start_us=1.5, duration_us=5.001, **WHERE),
        Span(kind="wait", name="wait", start_us=2, duration_us=1, awaited="reduction", **WHERE),
        Span(kind="gather", name="gather", start_us=3, duration_us=1, **WHERE, **WIRE),
        Span(kind="reduce", name="reduce", start_us=4, duration_us=1, **WHERE, **WIRE),
        Span(kind="all-reduce", name="all-reduce", start_us=5, duration_us=1, **WHERE, **WIRE),
    ),
    releases=(Release(group="layers.0", phase="forward", step=20, time_us=7.25),),
    memory=(
        MemorySample(time_us=8.5, gathered=10, reducing=20, allocated=None),
        MemorySample(time_us=9.5, gathered=11, reducing=21, allocated=30),
    ),
)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_an_event_is_read_as_it_was_written(event: Event) -> None:
    assert parse_line(line_of(event)) == event


def test_all_kinds_of_events_are_among_them() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(Event))


def test_a_number_that_is_not_finite_is_read_as_nan() -> None:
    for loss in (math.nan, math.inf):
        event = parse_line(line_of(Evaluation(step=1, loss=loss)))
        assert isinstance(event, Evaluation) and math.isnan(event.loss)


def test_a_trace_is_read_as_it_was_written() -> None:
    assert {span.kind for span in TRACE.spans} == set(KINDS)
    read = parse_trace(json.loads(json.dumps(to_document(TRACE))))
    for field in fields(Trace):
        assert getattr(read, field.name) == getattr(TRACE, field.name), field.name
    assert to_document(read) == to_document(TRACE)


def test_a_trace_of_another_format_is_refused() -> None:
    document = to_document(TRACE)
    document["fullshard"]["format"] = 2
    with pytest.raises(ValueError, match="its format is 2, this version of fullshard reads 1"):
        parse_trace(document)


def test_metrics_of_another_format_are_refused_by_report_and_trainer(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics(replace(START, format=2))
    metrics(Step(step=5, loss=2, grad_norm=1, lr=1, tokens=1, step_s=1, memory_bytes=1))
    metrics.close()
    with pytest.raises(UnknownFormatError):
        list(read_events(tmp_path / "metrics.jsonl"))
    words = "its format is 2, this version of fullshard reads 1"
    with pytest.raises(ConfigurationError, match=f"metrics.jsonl is left out: {words}"):
        read_run(tmp_path)
    with pytest.raises(ConfigurationError, match=f"{words}. Go on with that version"):
        RunFolder(tmp_path).is_finished(9)


def test_a_start_without_a_format_is_of_the_first() -> None:
    record = json.loads(line_of(START))
    del record["format"]
    assert parse_line(json.dumps(record)) == START
