"""Processes that fail, die or outlive their parent; no torch in them, so they start fast."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from fullshard.errors import ConfigurationError
from fullshard.programs.train import processes
from fullshard.programs.train.processes import (
    ProcessResults,
    RankFailedError,
    StoppedError,
    run_in_processes,
)
from fullshard.programs.train.stop import noticing_stop_requests

LONG_S = 50.0


def square(rank: int) -> int:
    return rank * rank


def leave_without_a_word(rank: int) -> None:
    sys.exit(0)


def complain(rank: int) -> None:
    if rank == 0:
        time.sleep(LONG_S)
    raise ConfigurationError("This cannot be.")


def save_when_told(folder: Path, rank: int) -> str:
    """Like a rank that trains: SIGTERM is noted, and heeded at the end of the step."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    touch(folder, rank)
    wait_until(lambda: bool(told))
    return f"rank {rank} saved"


def do_not_listen(folder: Path, rank: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    touch(folder, rank)
    time.sleep(LONG_S)


def touch(folder: Path, rank: int) -> None:
    (folder / str(rank)).write_text(str(os.getpid()))


def note_process_then_fail_on_rank_1(folder: Path, rank: int) -> None:
    touch(folder, rank)
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
    touch(folder, rank)
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


def test_every_rank_does_its_work() -> None:
    assert run_in_processes(square, [1, 2, 3]) == ProcessResults((1, 4, 9), stopped_by=None)


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
    ) as caught:
        run_in_processes(kill_rank_1, [0, 1])
    assert caught.value.killed_by == signal.SIGKILL


def test_of_cause_and_consequence_the_cause_is_shown(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="ValueError: the cause"):
        run_in_processes(partial(fail_on_rank_1_and_in_consequence_on_rank_0, tmp_path), [0, 1])


def test_a_rank_that_leaves_without_a_result_has_failed() -> None:
    with pytest.raises(RankFailedError, match="with exit code 0 and left no message"):
        run_in_processes(leave_without_a_word, [0])


def test_a_wrong_configuration_is_told_as_it_is() -> None:
    with pytest.raises(ConfigurationError, match=r"^This cannot be.$"):
        run_in_processes(complain, [0, 1])


# --- signals -----------------------------------------------------------------------------------------------


@contextmanager
def signalled(folder: Path, *numbers: signal.Signals, pause_s: float = 0.3) -> Iterator[None]:
    """Within it, this process gets signals, one after the other, when two ranks have started."""

    def send() -> None:
        wait_until(partial(have_started, folder, 2))
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(pause_s)

    before = {number: signal.getsignal(number) for number in processes.STOPPING}
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        sender.join()
    assert all(signal.getsignal(number) == handler for number, handler in before.items())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ranks_that_are_told_to_stop_may_save_first(tmp_path: Path, number: signal.Signals) -> None:
    told: list[signal.Signals] = []
    with signalled(tmp_path, number, pause_s=0):
        ended = run_in_processes(partial(save_when_told, tmp_path), [0, 1], on_stop=told.append)
    assert ended == ProcessResults(("rank 0 saved", "rank 1 saved"), stopped_by=number)
    assert told == [number]


def hears_terminal(rank: int) -> bool:
    handlers = map(signal.getsignal, (signal.SIGINT, signal.SIGHUP))
    return any(handler != signal.SIG_IGN for handler in handlers)


def test_a_closed_terminal_is_the_matter_of_the_parent_unless_it_is_to_be_ignored(
    tmp_path: Path,
) -> None:
    assert run_in_processes(hears_terminal, [0]).results == (False,)
    with noticing_stop_requests() as request:
        signal.raise_signal(signal.SIGHUP)
        assert request.signal == signal.SIGHUP
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with noticing_stop_requests() as request:
            signal.raise_signal(signal.SIGHUP)
            assert not request.is_made
        with signalled(tmp_path, signal.SIGHUP, signal.SIGTERM):
            ended = run_in_processes(partial(save_when_told, tmp_path), [0, 1])
        assert ended.stopped_by == signal.SIGTERM
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_interrupt_ends_ranks_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    numbers = (
        signal.SIGTERM,
        signal.SIGTERM,
        signal.SIGINT,
    )  # of which the second says nothing new
    with signalled(tmp_path, *numbers), pytest.raises(StoppedError, match="at once") as caught:
        run_in_processes(partial(do_not_listen, tmp_path), [0, 1])
    assert caught.value.by == signal.SIGTERM
    assert have_ended(tmp_path)
    assert 0.6 < time.monotonic() - began < 20


def test_ranks_that_take_too_long_to_save_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "SAVE_GRACE_S", 0.5)
    with signalled(tmp_path, signal.SIGINT), pytest.raises(StoppedError, match="not saved within"):
        run_in_processes(partial(do_not_listen, tmp_path), [0, 1])
    assert have_ended(tmp_path)


def test_ranks_that_cannot_save_yet_end_with_the_signal(tmp_path: Path) -> None:
    with signalled(tmp_path, signal.SIGINT), pytest.raises(StoppedError, match="before they had"):
        run_in_processes(partial(note_process_and_wait, tmp_path), [0, 1])
    assert have_ended(tmp_path)


def test_ranks_end_with_their_parent(tmp_path: Path) -> None:
    program = (
        "from functools import partial; from pathlib import Path\n"
        "from fullshard.programs.train.processes import run_in_processes\n"
        "from tests.programs.test_processes import note_process_and_wait\n"
        f"run_in_processes(partial(note_process_and_wait, Path({str(tmp_path)!r})), [0, 1])\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    wait_until(partial(have_started, tmp_path, 2))
    parent.kill()
    parent.wait(timeout=LONG_S)
    wait_until(partial(have_ended, tmp_path))
