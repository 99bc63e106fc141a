"""The folder of a run, and the files that tell what happened in it."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fullshard.errors import ConfigurationError
from fullshard.programs.run_events import BadStep, End, Evaluation, Step, read_events
from fullshard.programs.train import run_folder
from fullshard.programs.train.config import OptimizerSection, RunConfig, TrainSection
from fullshard.programs.train.config_file import read_config
from fullshard.programs.train.metrics_file import MetricsFile
from fullshard.programs.train.run_folder import RunFolder
from fullshard.programs.train.tensorboard_files import TensorBoardFiles
from fullshard.programs.train.trackers import Tracking
from tests.programs.test_progress import START, step

CONFIG = RunConfig(train=TrainSection(steps=40))


def begun(path: Path, config: RunConfig = CONFIG) -> RunFolder:
    folder = RunFolder(path)
    with folder.locked():
        if folder.has_steps_left(config):
            folder.begin(config)
    return folder


# --- whose it is -------------------------------------------------------------------------------------


def test_the_configuration_is_the_first_thing_in_it(tmp_path: Path) -> None:
    folder = begun(tmp_path / "deep" / "run")
    assert read_config(folder.config) == CONFIG
    assert {path.name for path in folder.path.iterdir()} == {"config.toml", "lock"}


def test_what_does_not_decide_the_course_may_change(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    longer = replace(CONFIG, train=TrainSection(steps=80))
    assert read_config(begun(tmp_path / "run", longer).config) == longer


def test_another_run_is_refused_with_all_that_differs(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run")
    other = replace(
        CONFIG, train=TrainSection(steps=40, batch=32), optimizer=OptimizerSection(lr=1.0)
    )
    with pytest.raises(ConfigurationError) as refusal:
        folder.has_steps_left(other)
    message = str(refusal.value)
    assert "train.batch was 16, and is 32 now" in message
    assert "optimizer.lr was 0.003, and is 1.0 now" in message
    assert "run.folder" in message and "--fresh" in message
    assert read_config(folder.config) == CONFIG, "nothing was changed"


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigurationError, match=r"has no config.toml, but other things: thesis"):
        RunFolder(tmp_path).check(CONFIG)
    with pytest.raises(ConfigurationError, match="is a file"):
        RunFolder(tmp_path / "thesis.tex").check(CONFIG)
    with pytest.raises(ConfigurationError, match="can be written to"):
        with RunFolder(tmp_path / "thesis.tex" / "run").locked():
            pass


def test_a_disk_of_its_own_is_empty_and_one_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lost+found").mkdir()
    begun(tmp_path)

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(ConfigurationError, match=r"can be read: .*Permission denied"):
        RunFolder(tmp_path).check(CONFIG)


def test_what_a_kill_left_of_the_first_write_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "config.toml.tmp").write_text("[run")
    begun(tmp_path)


def test_a_folder_is_used_by_one_process_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "LOCK_PATIENCE_S", 0.2)
    program = (
        "import sys, pathlib\n"
        "from fullshard.programs.train.run_folder import RunFolder\n"
        "with RunFolder(pathlib.Path(sys.argv[1])).locked():\n"
        "    assert 'torch' not in sys.modules\n"
        "    print('locked', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert other.stdin is not None and other.stdout is not None
    try:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(ConfigurationError, match=f"is in use by process {other.pid}"):
            with RunFolder(tmp_path).locked():
                pass
        with pytest.raises(ConfigurationError, match="is in use"):
            RunFolder(tmp_path).move_aside()
    finally:
        other.kill()
        other.communicate()
    with RunFolder(tmp_path).locked():
        pass  # a lock does not outlive its process


def test_moving_aside_keeps_everything(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert RunFolder(path).move_aside() is None
    for number in (1, 2):
        folder = begun(path)
        folder.metrics.write_text(f"run {number}")
        assert folder.move_aside() == tmp_path / f"run.old-{number}"
        assert not path.exists()
    assert (tmp_path / "run.old-1" / "metrics.jsonl").read_text() == "run 1"
    assert (tmp_path / "run.old-2" / "metrics.jsonl").read_text() == "run 2"


# --- what happened in it -----------------------------------------------------------------------------


def test_a_run_is_finished_when_its_last_steps_were_the_last_wanted(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    assert not folder.is_finished(40)
    metrics = MetricsFile(folder.metrics)
    metrics(START)
    assert not folder.is_finished(40)
    metrics(End(step=40, seconds=1.0))
    assert folder.is_finished(40) and not folder.is_finished(41)
    assert not folder.has_steps_left(replace(CONFIG, train=TrainSection(steps=20)))
    assert read_config(folder.config) == CONFIG, "it was trained for 40"
    metrics(START)  # it was begun again, for more steps
    assert not folder.is_finished(40)
    metrics.close()


def test_lines_survive_a_kill_in_the_middle_of_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics(step(1))
    assert path.read_text().endswith("}\n"), "written when it happens, not when the file is closed"
    metrics.close()
    with path.open("a") as file:
        file.write('{"kind": "step", "step": 2, "lo')
    metrics = MetricsFile(path)
    metrics(step(2))
    metrics.close()
    assert [event.step for event in read_events(path)] == [1, 2]
    assert len(path.read_text().splitlines()) == 3
    assert list(read_events(tmp_path / "none")) == []


def test_numbers_json_does_not_have_are_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics(replace(step(1, math.nan), grad_norm=math.inf))
    metrics(BadStep(step=1, what="loss is nan", action="skip"))
    metrics.close()
    first, second = (
        json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()
    )
    assert (first["loss"], first["grad_norm"], first["lr"]) == (None, None, 3e-3)
    assert (second["kind"], second["what"]) == ("trouble", "loss is nan")


def test_only_some_steps_are_written_and_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, every=15)
    metrics(START)
    for number in range(1, 41):
        metrics(step(number))
    metrics.close()
    steps = [event.step for event in read_events(path) if isinstance(event, Step)]
    assert steps == [15, 30, 40]


def test_tensorboard_can_read_the_curves(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = Tracking("TensorBoard", TensorBoardFiles(tmp_path), pytest.fail)
    curves(START)
    curves(step(1))
    curves(Evaluation(step=1, loss=2.5))
    curves.close()
    resumed = Tracking("TensorBoard", TensorBoardFiles(tmp_path), pytest.fail)
    resumed(replace(START, resumed_from=0))
    resumed(step(1, 4.0))
    resumed(step(2, 3.0))
    resumed.close()
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert [(e.step, e.value) for e in accumulator.Scalars("train/loss")] == [(1, 4.0), (2, 3.0)]
