"""Processes that fail, die or outlive their parent; no torch in them, so they start fast."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from fullshard.train.processes import RankFailedError, run_in_processes

LONG_S = 50.0


def touch(folder: Path, rank: int) -> None:
    (folder / str(rank)).touch()


def note_process_then_fail_on_rank_1(folder: Path, rank: int) -> None:
    (folder / str(rank)).write_text(str(os.getpid()))
    if rank == 1:
        while len(list(folder.iterdir())) < 3:
            time.sleep(0.01)
        raise ValueError("rank 1 has had enough")
    time.sleep(LONG_S)


def kill_rank_1(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LONG_S)


def fail_on_rank_1_and_in_consequence_on_rank_0(folder: Path, rank: int) -> None:
    """Like two ranks in a collective: when rank 1 ends, rank 0 sees its connection closed."""
    address = str(folder / "socket")
    if rank == 1:
        server = socket.create_server(address, family=socket.AF_UNIX)
        (folder / "ready").touch()
        _connection, _ = server.accept()  # open until this process ends
        raise ValueError("the cause")
    wait_until((folder / "ready").exists)
    client = socket.socket(socket.AF_UNIX)
    client.connect(address)
    client.recv(1)
    raise ConnectionError("the consequence")


def note_process_and_wait(folder: Path, rank: int) -> None:
    (folder / str(rank)).write_text(str(os.getpid()))
    time.sleep(LONG_S)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {condition}"
        time.sleep(0.02)


def have_started(folder: Path, count: int) -> bool:
    return len([file for file in folder.iterdir() if file.read_text()]) == count


def have_ended(folder: Path) -> bool:
    return not any(is_running(int(file.read_text())) for file in folder.iterdir())


def test_every_rank_does_its_work(tmp_path: Path) -> None:
    run_in_processes(partial(touch, tmp_path), [0, 1, 2])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1", "2"]


def test_a_failure_is_shown_once_and_ends_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        run_in_processes(partial(note_process_then_fail_on_rank_1, tmp_path), [0, 1, 2])
    message = str(caught.value)
    assert message.count("Traceback") == 1
    assert "ValueError: rank 1 has had enough" in message
    assert "Rank 1 of 3 failed; the other ranks were stopped." in message
    assert have_ended(tmp_path)


def test_a_killed_rank_is_named_with_its_signal() -> None:
    with pytest.raises(
        RankFailedError, match=r"Rank 1 \(process \d+\) was ended by signal SIGKILL"
    ):
        run_in_processes(kill_rank_1, [0, 1])


def test_of_cause_and_consequence_the_cause_is_shown(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="ValueError: the cause"):
        run_in_processes(partial(fail_on_rank_1_and_in_consequence_on_rank_0, tmp_path), [0, 1])


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT])
def test_ranks_end_with_their_parent(tmp_path: Path, signal_number: signal.Signals) -> None:
    program = (
        # A shell lets what it runs in the background ignore Ctrl-C, and children inherit that.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from functools import partial; from pathlib import Path\n"
        "from fullshard.train.processes import run_in_processes\n"
        "from tests.programs.test_processes import note_process_and_wait\n"
        f"run_in_processes(partial(note_process_and_wait, Path({str(tmp_path)!r})), [0, 1])\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(partial(have_started, tmp_path, 2))
    parent.send_signal(signal_number)
    _, errors = parent.communicate(timeout=20)
    wait_until(partial(have_ended, tmp_path))
    assert parent.returncode != 0
    # Of Ctrl-C only the parent's own trace remains, which the command turns into a word.
    assert errors.count("Traceback") == (signal_number == signal.SIGINT)
