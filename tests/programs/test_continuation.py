"""A run goes on only from what it has saved, with the data that it began with. Otherwise it says so, and changes nothing."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from typer.testing import CliRunner

from fullshard import checkpoint
from fullshard.errors import CheckpointError, ConfigurationError
from fullshard.programs import cli
from fullshard.programs.evaluate_tool.rank import evaluate
from fullshard.programs.train import data_record, rank
from fullshard.programs.train.config import DataSection, ModelSection, RunConfig
from fullshard.programs.train.data import open_data
from fullshard.programs.train.data_record import DataRecord, read_record, record_of
from fullshard.programs.train.loop import Job
from fullshard.programs.train.model_source import open_model
from fullshard.programs.train.windows import tokens_in
from tests.helpers.ranks import World
from tests.helpers.runs import Incident, last_losses, run, tiny

MakeWorld = Callable[[int], World]


def shown_by(config: RunConfig) -> str:
    shown = io.StringIO()
    run(config, shown=shown)
    return " ".join(shown.getvalue().split())


def refused(config: RunConfig) -> str:
    """What all ranks say; the folder is as it was."""
    if dist.get_rank() == 0:
        before = files_of(config)
    with pytest.raises(ConfigurationError) as error:
        run(config)
    if dist.get_rank() == 0:
        assert files_of(config) == before
    return str(error.value)


def files_of(config: RunConfig) -> dict[str, bytes]:
    paths = sorted(config.run.folder.rglob("*"))
    return {str(path): path.read_bytes() for path in paths if path.is_file()}


# --- checkpoints -------------------------------------------------------------------------------------


def lose_all_checkpoints(two: RunConfig, four: RunConfig) -> list[str]:
    run(two)
    folder = two.run.folder / "checkpoints"
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    said = [refused(four)]
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    said.append(refused(four))
    assert run(two).was_finished, "nothing is left to be done"
    assert list(run(four, fresh=True).losses) == [1, 2, 3, 4]
    return said


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(
    world: MakeWorld, tmp_path: Path
) -> None:
    configs = [tiny(tmp_path, f"train.steps={steps}") for steps in (2, 4)]
    one, other = world(2).run(lose_all_checkpoints, *configs)
    assert one == other
    for text in one:
        assert "has saved a checkpoint of step 2" in text and "begin again at step 0" in text
        assert str(tmp_path / "run" / "checkpoints") in text and "--fresh" in text


def test_a_run_that_had_saved_nothing_begins_anew(world: MakeWorld, tmp_path: Path) -> None:
    config = tiny(tmp_path, "train.steps=3", "checkpoint.every=0")
    [error] = world(1).outcomes(run, config, Incident("error", call=3, rank=None))
    assert str(error) == "died" and list(last_losses(config)) == [1, 2]
    [result] = world(1).run(run, config)
    assert list(result.losses) == [1, 2, 3]


def lose_the_newest(two: RunConfig, four: RunConfig) -> str:
    run(two)
    shutil.rmtree(two.run.folder / "checkpoints" / "step_00000002")
    return shown_by(four)


def test_a_run_that_goes_on_from_an_older_checkpoint_says_so(
    world: MakeWorld, tmp_path: Path
) -> None:
    configs = [tiny(tmp_path, f"train.steps={n}", "checkpoint.every=1") for n in (2, 4)]
    [shown] = world(1).run(lose_the_newest, *configs)
    assert (
        "Going on after step 1: the checkpoint of step 2, which the run had saved, is not" in shown
    )
    [shown] = world(1).run(shown_by, tiny(tmp_path, "train.steps=5", "checkpoint.every=1"))
    assert "Going on" not in shown


def extend(two: RunConfig, four: RunConfig) -> str:
    run(two)
    return shown_by(four)


def test_a_run_that_is_extended_says_what_its_learning_rate_does(
    world: MakeWorld, tmp_path: Path
) -> None:
    configs = [tiny(tmp_path, f"train.steps={n}", "schedule.warmup=0") for n in (2, 4)]
    [shown] = world(1).run(extend, *configs)
    assert (
        "train.steps was 2 and is 4, which stretches the schedule: the learning rate was 5.5e-03 at step 2, and is 5.5e-03 at "
        "step 3." in shown
    )
    [shown] = world(1).run(shown_by, tiny(tmp_path, "train.steps=5", "schedule.warmup=0"))
    assert "train.steps was 4 and is 5" in shown


def test_a_run_that_is_resumed_as_it_was_says_nothing_of_its_schedule(
    world: MakeWorld, tmp_path: Path
) -> None:
    constant = ("schedule.kind=constant", "schedule.warmup=0")
    configs = [tiny(tmp_path, f"train.steps={n}", *constant) for n in (2, 4)]
    [shown] = world(1).run(extend, *configs)
    assert "resumes after step 2" in shown and "the schedule" not in shown


class Reached(Exception):
    """The run is about to take steps."""


@contextmanager
def failing(call: int, folder: Path, *, once: bool) -> Iterator[list[str]]:
    """Let one of the calls that ask the file system for something below the folder fail, or all from then on."""
    asked: list[str] = []

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any, **options: Any) -> Any:
            path = args[0] if args else "."
            if not isinstance(path, int) and str(path).startswith(str(folder)):
                asked.append(f"{name} {path}")
                if len(asked) == call or (len(asked) > call and not once):
                    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return function(*args, **options)

        return ask

    places = [(os, each) for each in ("listdir", "scandir", "stat", "lstat", "open")] + [
        (io, "open")
    ]
    with pytest.MonkeyPatch.context() as patches:
        for place, name in places:
            patches.setattr(place, name, wrapped(name, getattr(place, name)))
        yield asked


def start_where_calls_fail(
    two: RunConfig, four: RunConfig, below: str, once: bool
) -> dict[str, str]:
    """For each call of a start, what became of it: the step that the run would go on from, or the error."""
    run(two)

    class Training:
        def __init__(self, job: Job, watch: object) -> None:
            newest = checkpoint.latest(job.folder.checkpoints)
            raise Reached("nothing" if newest is None else newest.name)

    outcomes: dict[str, str] = {}
    with patch.object(rank, "Training", Training), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(1, 10_000):
            with failing(call, two.run.folder / below, once=once) as asked:
                try:
                    run(four)
                except (Reached, CheckpointError, ConfigurationError) as error:
                    outcome = f"{type(error).__name__}: {error}"
            if len(asked) < call:
                assert outcome == "Reached: step_00000002"
                return outcomes
            outcomes[f"{call}: {asked[call - 1]}"] = outcome
    raise AssertionError("there is an end")


@pytest.mark.parametrize(
    ("below", "once"), [("", True), ("", False), ("checkpoints", False)], ids=str
)
def test_a_file_system_that_fails_never_lets_a_run_begin_anew(
    world: MakeWorld, tmp_path: Path, below: str, once: bool
) -> None:
    configs = [tiny(tmp_path, f"train.steps={n}") for n in (2, 4)]
    [outcomes] = world(1).run(start_where_calls_fail, *configs, below, once)
    asked = "\n".join(outcomes)
    for place in ("listdir", "manifest.json", "metrics.jsonl", "data.json", "config.toml"):
        assert place in asked or below
    for call, outcome in outcomes.items():
        went_on = outcome == "Reached: step_00000002"
        assert went_on or "Input/output error" in outcome, (call, outcome)


def test_programs_say_that_there_is_no_checkpoint_only_where_it_is_known(
    world: MakeWorld, tmp_path: Path
) -> None:
    config = tiny(tmp_path, "train.steps=1")
    world(1).run(run, config)
    folder = config.run.folder
    for arguments in (
        ["export", folder],
        ["export", folder, "--step", "1"],
        ["evaluate", folder, "--step", "1"],
        ["checkpoint", "verify", folder],
        ["checkpoint", "inspect", folder],
    ):
        with failing(1, folder / "checkpoints", once=False) as asked:
            done = CliRunner().invoke(cli.build_app(), list(map(str, arguments)))
        assert asked and done.exit_code in (1, 2), done.output
        assert "Input/output error" in done.output and "Train first" not in done.output


def test_that_nothing_is_there_is_said_only_where_it_is_known(tmp_path: Path) -> None:
    """Of a library's user: `if latest(folder) is None` begins anew."""
    model = torch.nn.Linear(2, 2)
    assert checkpoint.latest(tmp_path / "none") is None
    (tmp_path / "other").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.warns(UserWarning, match="loop is skipped"):
        assert checkpoint.latest(tmp_path) is None
    (tmp_path / "loop").unlink()
    checkpoint.save(tmp_path / "a", model)
    real = os.open

    def open_(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith("manifest.json"):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path, *args, **options)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(os, "open", open_)
        with pytest.raises(CheckpointError, match=r"(?s)these cannot be read now.*Stale"):
            checkpoint.latest(tmp_path)
    (tmp_path / "a" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"(?s)or are damaged:.*usable manifest"):
        checkpoint.latest(tmp_path)
    checkpoint.save(tmp_path / "b", model)
    with pytest.warns(UserWarning, match="a is skipped"):
        assert checkpoint.latest(tmp_path) == tmp_path / "b"


# --- data --------------------------------------------------------------------------------------------


def change_data(two: RunConfig, four: RunConfig) -> dict[str, str]:
    assert two.data.path is not None
    path, folder = two.data.path, two.run.folder
    run(two)
    text = path.read_text()
    changes = {
        "appended": text + "more of it\n" * 9,
        "cut": text[:-100],
        "replaced": text[:3000] + "#" + text[3001:],
        "swapped": text[100:] + text[:100],
    }
    said = {}
    for name, changed in changes.items():
        path.write_text(changed)
        said[name] = refused(four)
    assert "The data have changed" in evaluate(four, None, torch.device("cpu")).note
    path.write_text(text)
    os.utime(path, (1, 1))
    assert evaluate(four, None, torch.device("cpu")).note == ""
    path.write_text(changes["appended"])
    (folder / "data.json").unlink()  # the user knows
    assert list(run(four).losses) == [3, 4]
    assert json.loads((folder / "data.json").read_text())["tokens"] == len(changes["appended"])
    return said


def test_data_that_have_changed_are_refused(world: MakeWorld, tmp_path: Path) -> None:
    configs = [tiny(tmp_path, f"train.steps={steps}") for steps in (2, 4)]
    [said] = world(1).run(change_data, *configs)
    length = len((tmp_path / "text.txt").read_text()) - 99
    for name, now in (("appended", length + 99), ("cut", length - 100)):
        change = f"{length:,} tokens in 1 sequence then, {now:,} tokens in 1 sequence now"
        assert f"have changed since its first start: {change}" in said[name]
    assert all(": other tokens." in said[name] for name in ("replaced", "swapped"))
    for text in said.values():
        assert "data.json" in text and "--fresh" in text and "model.weights" in text


def test_data_may_change_before_anything_is_saved(world: MakeWorld, tmp_path: Path) -> None:
    config = tiny(tmp_path, "train.steps=3", "checkpoint.every=0")
    [error] = world(1).outcomes(run, config, Incident("error", call=2, rank=None))
    assert str(error) == "died"
    text = tmp_path / "text.txt"
    text.write_text(text.read_text() + "more\n" * 20)
    [result] = world(1).run(_run_with_these_data, config)
    assert list(result) == [1, 2, 3]


def _run_with_these_data(config: RunConfig) -> list[int]:
    return list(run(config).losses)


def open_other_data(config: RunConfig, other: Path) -> None:
    source: Any = open_model(config)
    read = config
    if dist.get_rank() == 1:
        read = replace(config, data=replace(config.data, path=other))
    stop: Any = None
    job = Job(
        config=config,
        source=source,
        data=open_data(read, source),
        device=torch.device("cpu"),
        stop=stop,
    )
    rank.run_in_folder(job, Console(file=io.StringIO()))


def test_ranks_with_other_data_are_named(world: MakeWorld, tmp_path: Path) -> None:
    config, other = tiny(tmp_path), tmp_path / "other.txt"
    other.write_text((tmp_path / "text.txt").read_text().replace("for", "not"))
    for error in world(2).outcomes(open_other_data, config, other):
        assert isinstance(error, ConfigurationError)
        assert "All ranks must read the same data" in str(error)
        assert "rank 0: " in str(error) and "rank 1: " in str(error)
    assert not (tmp_path / "run").exists()


def recorded(path: Path, dtype: str = "uint16") -> DataRecord:
    section = DataSection(path=path, context=9, dtype=dtype)  # type: ignore[arg-type]
    config = RunConfig(data=section, model=ModelSection(vocabulary=1000))
    return record_of(open_data(config, open_model(config)))


def test_a_record_is_of_tokens_and_not_of_their_files(tmp_path: Path) -> None:
    tokens = np.arange(300, dtype=np.uint16)
    np.save(tmp_path / "a.npy", tokens)
    np.save(tmp_path / "b.npy", tokens.astype(np.int64))
    tokens.tofile(tmp_path / "c.bin")
    assert len({recorded(tmp_path / name) for name in ("a.npy", "b.npy", "c.bin")}) == 1
    for name, cut in (("one", 100), ("two", 200)):
        (tmp_path / name).mkdir()
        tokens[:cut].tofile(tmp_path / name / "a.bin")
        tokens[cut:].tofile(tmp_path / name / "b.bin")
    records = {recorded(tmp_path / name) for name in ("a.npy", "one", "two")}
    assert len(records) == 3, "windows do not cross from one file into the next"
    assert str(recorded(tmp_path / "one")) == "300 tokens in 2 sequences"
    record = recorded(tmp_path / "one")
    record.write(tmp_path / "data.json")
    assert read_record(tmp_path / "data.json") == record
    assert read_record(tmp_path / "none.json") is None
    for text in ("", "[]", '{"tokens": 3}', "[" * 10_000):
        (tmp_path / "data.json").write_text(text)
        with pytest.raises(ConfigurationError, match=r"data\.json says which data.*remove it"):
            read_record(tmp_path / "data.json")


def test_every_token_of_small_data_and_samples_of_large_data_are_in_the_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_record, "SAMPLES", 4)
    monkeypatch.setattr(data_record, "SAMPLE_TOKENS", 20)

    def noticed(size: int) -> list[int]:
        tokens = torch.arange(size) % 50

        def record() -> DataRecord:
            parts = [tokens_in("a", tokens[:30]), tokens_in("b", tokens[30:])]
            return record_of(Mock(split=[(each, len(each)) for each in parts]))

        before, places = record(), []
        for place in range(size):
            tokens[place] += 1
            if record() != before:
                places.append(place)
            tokens[place] -= 1
        assert record() == before
        return places

    assert noticed(80) == list(range(80))
    assert noticed(200) == [place for place in range(200) if place % 60 < 20]
