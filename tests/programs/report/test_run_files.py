"""Run folders as they are left behind: whole, in part, cut off, or not at all."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fullshard.errors import ConfigurationError
from fullshard.programs.report.run_files import read_run
from tests.helpers.run_folders import (
    Machine,
    metrics_records,
    simulated_trace,
    write_metrics,
    write_run,
    write_traces,
)


def test_a_whole_folder_is_read(tmp_path: Path):
    run = read_run(write_run(tmp_path / "demo", Machine(), steps=30))
    assert run.name == "demo"
    assert run.setting("sharding", "prefetch") == 1
    assert run.setting("sharding", "no_such") is None and run.setting("no_such", "field") is None
    assert [step.step for step in run.metrics.steps] == list(range(1, 31))
    assert [each.step for each in run.metrics.evaluations] == [0, 10, 20, 30]
    assert run.metrics.is_finished
    assert [trace.rank for trace in run.traces] == [0, 1]
    assert [group.name for group in run.traces[0].groups][:2] == ["root", "layers.0"]
    assert run.notes == ()


def test_old_names_of_fields_are_read(tmp_path: Path):
    folder = write_run(tmp_path / "demo", Machine())
    config = (folder / "config.toml").read_text().replace('api = "fsdp2"', 'door = "wrapper"')
    (folder / "config.toml").write_text(config)
    assert read_run(folder).config["sharding"]["api"] == "fsdp1"
    assert "door" not in read_run(folder).config["sharding"]


@pytest.mark.parametrize("place", [".", "trace"])
def test_traces_alone_are_enough(tmp_path: Path, place: str):
    write_traces(tmp_path / place, Machine())
    run = read_run(tmp_path)
    assert len(run.traces) == 2 and run.metrics.steps == () and run.config == {}


def test_metrics_alone_are_enough(tmp_path: Path):
    write_metrics(tmp_path, metrics_records(10))
    assert len(read_run(tmp_path).metrics.steps) == 10


def test_after_a_resume_the_last_record_of_a_step_counts(tmp_path: Path):
    start, *_ = metrics_records(3)
    write_metrics(
        tmp_path,
        [
            start,
            {"kind": "step", "step": 1, "loss": 3.0},
            {"kind": "step", "step": 2, "loss": 2.0},
            {**start, "resumed_from": 1},
            {"kind": "step", "step": 2, "loss": 2.5},
        ],
    )
    metrics = read_run(tmp_path).metrics
    assert [(step.step, step.loss) for step in metrics.steps] == [(1, 3.0), (2, 2.5)]
    assert [(mark.kind, mark.step) for mark in metrics.marks] == [("resumed", 1)]


def test_what_a_resume_went_back_before_is_not_part_of_the_run(tmp_path: Path):
    start, *life = metrics_records(9)
    write_metrics(
        tmp_path,
        [
            start,
            *life,
            {"kind": "trouble", "step": 8, "what": "loss is nan", "action": "skip"},
            {**start, "resumed_from": 6},
            {"kind": "step", "step": 7, "loss": 2.0},
            {**start, "resumed_from": 3},
            {"kind": "step", "step": 4, "loss": 2.5},
        ],
    )
    metrics = read_run(tmp_path).metrics
    assert [step.step for step in metrics.steps] == [1, 2, 3, 4]
    assert [each.step for each in metrics.evaluations] == [0, 3]
    assert [(mark.kind, mark.step) for mark in metrics.marks] == [("resumed", 3), ("checkpoint", 3)]
    assert metrics.samples == () and not metrics.is_finished


def test_a_run_that_begins_again_has_nothing_of_before(tmp_path: Path):
    start, *_ = metrics_records(3)
    step = {"kind": "step", "loss": 2.0}
    write_metrics(tmp_path, [start, {**step, "step": 1}, {**step, "step": 2}, start, {**step, "step": 1}])  # fmt: skip
    assert [step.step for step in read_run(tmp_path).metrics.steps] == [1]


def test_a_finished_run_that_is_prolonged_is_not_finished(tmp_path: Path):
    start, *life = metrics_records(3)
    write_metrics(tmp_path, [start, *life, {**start, "resumed_from": 3, "steps": 6}])
    metrics = read_run(tmp_path).metrics
    assert len(metrics.steps) == 3 and not metrics.is_finished


def test_a_cut_last_line_is_ignored_and_told(tmp_path: Path):
    write_metrics(tmp_path, metrics_records(10))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"kind":"step","st')
    run = read_run(tmp_path)
    assert len(run.metrics.steps) == 10
    assert run.notes == ("metrics.jsonl: the last line is cut off and left out.",)


def test_broken_lines_are_counted(tmp_path: Path):
    lines = [
        '{"kind":"step","step":1,"loss":null,"lr":"high"}',
        '{"kind":"step","step":"two"}',
        "not JSON",
        '["a list"]',
        '{"kind":"step","step":3,"loss":1e999}',
        "",
        '{"kind":"news","step":3}',
    ]
    (tmp_path / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    run = read_run(tmp_path)
    assert [step.step for step in run.metrics.steps] == [1, 3]
    assert all(math.isnan(step.loss) and math.isnan(step.lr) for step in run.metrics.steps)
    assert run.notes == ("metrics.jsonl: 4 of 7 lines are broken and left out.",)


def test_a_broken_trace_is_left_out_and_the_others_are_read(tmp_path: Path):
    write_traces(tmp_path, Machine(world=4))
    (tmp_path / "rank_00000.json").write_text('{"traceEvents": [')
    (tmp_path / "rank_00001.json").write_text('{"traceEvents": []}')
    foreign = simulated_trace(Machine())
    foreign["fullshard"]["format"] = 99
    (tmp_path / "rank_00002.json").write_text(json.dumps(foreign))
    run = read_run(tmp_path)
    assert [trace.rank for trace in run.traces] == [3]
    assert len(run.notes) == 3
    assert "rank_00001.json is left out: it was not written by fullshard.trace." in run.notes
    assert "its format is 99, this version of fullshard reads 1" in run.notes[2]


def test_broken_and_missing_events_are_counted(tmp_path: Path):
    trace = simulated_trace(Machine())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    spans[0]["dur"] = -1
    spans[1]["ts"] = "soon"
    del spans[2]["args"]
    trace["traceEvents"].append("news")
    trace["fullshard"]["dropped"] = 7
    (tmp_path / "rank_00000.json").write_text(json.dumps(trace))
    first, second = read_run(tmp_path).notes
    assert "4 events are broken" in first
    assert "7 events were not recorded" in second


def test_a_broken_configuration_is_told(tmp_path: Path):
    write_metrics(tmp_path, metrics_records(3))
    (tmp_path / "config.toml").write_text("[sharding\nprefetch")
    run = read_run(tmp_path)
    assert run.config == {}
    assert run.notes[0].startswith("config.toml cannot be read: ")


def test_nothing_to_read_is_an_error_that_says_what_was_looked_for(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"metrics\.jsonl.*trace/rank_.*has neither"):
        read_run(tmp_path)
    with pytest.raises(ConfigurationError, match="does not exist"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="is a file"):
        read_run(tmp_path / "file")
