"""Run a function in several processes of this machine, and see to it that they all end.

A process that fails sends its traceback through a pipe before its sockets close. So when its
failure makes others fail, the message of the first is already there, and that is the one to show:

    rank 1   raises -> traceback into the pipe -> ends, connections close
    rank 0                                                     -> "connection closed by peer" -> ...

The processes ignore Ctrl-C, which a terminal sends to all of them: the parent stops them. They also
end when the parent is gone, whatever ended it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

from fullshard.errors import FullshardError

Argument = TypeVar("Argument")

STOP_GRACE_S = 5.0
"""How long a process may take to end after it was told to."""


class RankFailedError(FullshardError, RuntimeError):
    """A rank that this process had started did not come to a good end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How one rank failed."""

    rank: int

    message: str
    """Its traceback, or what is known when it had no time to send one."""

    was_sent: bool
    """False when something ended the rank from outside, which is never the echo of another failure."""

    time_s: float
    """On the machine's monotonic clock, which its processes share."""


def run_in_processes(work: Callable[[Argument], object], arguments: Sequence[Argument]) -> None:
    """Call `work` with each argument, the n-th as rank n, in a process of its own.

    After: all processes have ended, also when this raises.

    Raises:
        RankFailedError: with the traceback of the rank that failed first.
    """
    spawn = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank, argument in enumerate(arguments):
            receiver, sender = spawn.Pipe(duplex=False)
            process = spawn.Process(
                target=_process_main, args=(work, argument, rank, sender), daemon=True
            )
            with _ignoring_interrupts():
                process.start()
            sender.close()  # the rank's copy is now the only one: its end is the pipe's end
            processes.append(process)
            pipes.append(receiver)
        _wait_for_all(processes, pipes)
    finally:
        _stop(processes)


def _wait_for_all(processes: Sequence[BaseProcess], pipes: Sequence[Connection]) -> None:
    """Return when all have ended well; raise when the first has not."""
    ranks = {pipe: rank for rank, pipe in enumerate(pipes)}
    while ranks:
        failures = []
        for pipe in wait(list(ranks)):
            assert isinstance(pipe, Connection), "only pipes are waited for"
            try:
                failures.append(pipe.recv())
            except EOFError:
                rank = ranks.pop(pipe)
                failures.extend(_silent_failure(rank, processes[rank]))
        if failures:
            first = min(failures, key=lambda failure: (failure.was_sent, failure.time_s))
            raise RankFailedError(
                f"{first.message.rstrip()}\n\n"
                f"Rank {first.rank} of {len(processes)} failed; the other ranks were stopped."
            )


def _silent_failure(rank: int, process: BaseProcess) -> Iterator[Failure]:
    """Yield what is known of a process that ended without a message, if it did not end well."""
    process.join()
    code = process.exitcode
    if code == 0:
        return
    reason = f"with exit code {code}"
    if code is not None and code < 0:
        reason = f"by signal {signal.Signals(-code).name}"
    message = f"Rank {rank} (process {process.pid}) was ended {reason} and left no message."
    yield Failure(rank=rank, message=message, was_sent=False, time_s=time.monotonic())


def _stop(processes: Sequence[BaseProcess]) -> None:
    """End the processes that still run, by force those that do not listen."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + STOP_GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Start processes that ignore Ctrl-C from their first instruction on: they inherit it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _process_main(
    work: Callable[[Argument], object], argument: Argument, rank: int, failures: Connection
) -> None:
    """Do the work of one rank; on failure tell the parent, then leave at once."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work(argument)
    except Exception:
        failures.send(
            Failure(
                rank=rank,
                message=traceback.format_exc(),
                was_sent=True,
                time_s=time.monotonic(),
            )
        )
        # No orderly exit: taking down a process group whose other ranks are in a collective can
        # hang.
        os._exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only runs in processes that were started from another"
    parent.join()
    os._exit(1)
