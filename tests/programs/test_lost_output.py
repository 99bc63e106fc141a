"""Output that cannot be written: a full disk, a closed stream, a reader that has left. No verb ends in a traceback.

Verbs run in copies of this process whose streams lead elsewhere.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import fullshard.programs.checkpoint_tool.output
import fullshard.programs.inspect_tool.cost
import fullshard.programs.report.page  # noqa: F401
from fullshard import checkpoint
from fullshard.programs import cli
from fullshard.programs.train import command
from fullshard.programs.train.progress import showing_progress
from tests.helpers.run_folders import Machine, write_run

cli.build_app()  # all verbs and what they need are imported here, not in each copy
FULL = "/dev/full"
CLOSED = None


def outcome(
    arguments: Sequence[str],
    stdout: str | None,
    stderr: str | None = "",
    *,
    unbuffered: bool = False,
) -> tuple[int, str]:
    """Run a verb with these files, or none, as its streams: its exit code, and what it wrote to a readable stderr."""
    with tempfile.NamedTemporaryFile() as file:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there may be threads, which are not there in the copy
            process = os.fork()
        if process == 0:
            code = 99
            try:
                _redirect(2, file.name if stderr == "" else stderr, unbuffered=unbuffered)
                _redirect(1, stdout, unbuffered=unbuffered)
                code = _exit_code(arguments)
            except BaseException:
                Path(file.name).write_text(f"in the test: {traceback.format_exc()}")
            finally:
                os._exit(code)
        _, status = os.waitpid(process, 0)
        return os.waitstatus_to_exitcode(status), Path(file.name).read_text()


def _redirect(number: int, path: str | None, *, unbuffered: bool) -> None:
    if path is None:
        os.close(number)
    else:
        descriptor = os.open(path, os.O_WRONLY)
        os.dup2(descriptor, number)
        if descriptor != number:
            os.close(descriptor)
    stream = None
    if path is not None:  # as Python begins, also with PYTHONUNBUFFERED
        raw = open(number, "wb", 0 if unbuffered else -1, closefd=False)
        stream = io.TextIOWrapper(raw, write_through=unbuffered)
    setattr(sys, "stdout" if number == 1 else "stderr", stream)


def _exit_code(arguments: Sequence[str]) -> int:
    sys.argv = ["fullshard", *arguments]
    try:
        cli.main()
    except SystemExit as leaving:
        sys.stdout.flush()  # as Python ends
        sys.stderr.flush()
        return int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
        return 98
    return 97


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path / "one", model)
    with torch.no_grad():
        model.weight.add_(1)
    checkpoint.save(tmp_path / "two", model)
    write_run(tmp_path / "run", Machine(layers=1, world=1), steps=6, num_traced=1)
    return {name: str(tmp_path / name) for name in ("one", "two", "run")}


def test_verbs_whose_output_is_lost_say_so(places: dict[str, str]) -> None:
    one, two, run = places["one"], places["two"], places["run"]
    for arguments in (
        ["checkpoint", "inspect", one],
        ["checkpoint", "inspect", "--json", one],
        ["checkpoint", "verify", one],
        ["checkpoint", "diff", one, two],
        ["report", run],
        ["inspect", "tiny", "--world", "2"],
        ["train", "--fields"],
    ):
        code, said = outcome(arguments, FULL)
        assert (code, said) == (
            2,
            "Error: The output cannot be written: No space left on device.\n",
        )
    for arguments in (["checkpoint", "verify", one], ["train", "--fields"]):
        assert outcome(arguments, FULL, FULL)[0] == 2
        assert outcome(arguments, FULL, unbuffered=True)[0] == 2
        for streams in ((CLOSED,), (CLOSED, CLOSED), (os.devnull, CLOSED), (os.devnull, FULL)):
            assert outcome(arguments, *streams)[0] == 0, (arguments, streams)


def test_errors_are_told_if_they_can_be(places: dict[str, str]) -> None:
    nothing = places["run"] + "/nothing"
    for arguments in (["report", nothing], ["train", nothing]):
        for streams in ((FULL,), (CLOSED,), (os.devnull, FULL), (os.devnull, CLOSED)):
            code, said = outcome(arguments, *streams)
            assert code == 2 and "Traceback" not in said, said


def test_a_reader_that_has_left_is_told_nothing(places: dict[str, str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert outcome(["checkpoint", "inspect", places["one"]], f"/dev/fd/{writer}") == (1, "")
    os.close(writer)


def test_a_run_goes_on_without_its_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def start(*_: object, **__: object) -> None:
        with showing_progress(Console(), tmp_path) as progress:
            progress.print_last("trained \N{SNOWMAN}")
        (tmp_path / "done").touch()

    monkeypatch.setattr(command, "start", start)
    for streams in ((FULL,), (FULL, FULL), (CLOSED,), (CLOSED, CLOSED)):
        arguments = ["train", "--folder", str(tmp_path / "run")]
        for unbuffered in (False, True):
            assert outcome(arguments, *streams, unbuffered=unbuffered) == (0, "")
            (tmp_path / "done").unlink()
