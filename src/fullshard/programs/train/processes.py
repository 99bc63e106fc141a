"""Processes of this machine that run one function each, and all end.

A process that fails sends its traceback through a pipe before its sockets close. When its failure makes others fail,
the traceback of the first is already there, and it is the one to show:

    rank 1   raises -> traceback into the pipe -> ends, connections close
    rank 0                                                     -> "connection closed by peer" -> ...

Signals to this process are passed on:

    Ctrl-C, SIGTERM or SIGHUP   -> SIGTERM to every rank, which has SAVE_GRACE_S to save and end
    Ctrl-C again                -> all ranks are killed

A terminal sends Ctrl-C and SIGHUP to all processes, so the ranks ignore them. They end when their parent ends, however it
ends.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Generic, NoReturn, TypeVar

from fullshard.errors import ConfigurationError, FullshardError
from fullshard.programs.train.stop import STOP_SIGNALS, is_nohup

Argument = TypeVar("Argument")
Result = TypeVar("Result")

SAVE_GRACE_S = 120.0
"""Seconds that ranks may take to save after they were asked to stop."""

STOPPING = (signal.SIGINT, *STOP_SIGNALS)
"""Signals that ask this process to stop."""

FROM_TERMINALS = tuple(number for number in STOPPING if number != signal.SIGTERM)
"""Signals that a terminal sends to this process and to the ranks."""


class RankFailedError(FullshardError, RuntimeError):
    """A rank that this process had started failed."""

    def __init__(self, message: str, killed_by: signal.Signals | None = None) -> None:
        super().__init__(message)
        self.killed_by = killed_by
        """The signal that ended the rank, if one did."""


class StoppedError(FullshardError, RuntimeError):
    """This process was asked to stop, and its ranks have ended."""

    def __init__(self, message: str, by: signal.Signals) -> None:
        super().__init__(message)
        self.by = by


@dataclass(frozen=True, slots=True)
class ProcessResults(Generic[Result]):
    """The results of processes that all succeeded."""

    results: tuple[Result, ...]
    """Results of the work, by rank."""

    stopped_by: signal.Signals | None
    """The signal that asked them to stop, if any. Their results say whether they finished their work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Failure of one rank."""

    rank: int

    message: str
    """Its traceback, or what is known if it could not send one."""

    is_for_the_user: bool = False
    """The message is that of a `ConfigurationError`, which needs no traceback."""

    killed_by: signal.Signals | None = None
    """The signal that ended it, if one did."""

    was_sent: bool
    """False if the rank was killed from outside, which never follows from another rank's failure."""

    time_s: float
    """Time on the machine's monotonic clock, which its processes share."""


def run_in_processes(
    work: Callable[[Argument], Result],
    arguments: Sequence[Argument],
    *,
    on_stop: Callable[[signal.Signals], None] = lambda _: None,
) -> ProcessResults[Result]:
    """Call `work` with each argument, the n-th as rank n, in a process of its own.

    It must be called in the main thread, because it handles the signals in `STOPPING` until it returns. Afterwards all
    processes have ended, also if it raises.

    Args:
        work: what a rank does.
        arguments: one per rank.
        on_stop: called once, with the signal, after the ranks have been asked to stop.

    Raises:
        RankFailedError: with the traceback of the rank that failed first.
        ConfigurationError: that of the rank that failed first; it needs no traceback.
        StoppedError: ranks that had been asked to stop were killed, because of a second Ctrl-C or because they
            took too long.
    """
    spawn = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    with _stopping_signals() as signals:
        try:
            for rank, argument in enumerate(arguments):
                receiver, sender = spawn.Pipe(duplex=False)
                process = spawn.Process(
                    target=_process_main, args=(work, argument, rank, sender), daemon=True
                )
                with _terminal_signals_ignored():
                    process.start()
                sender.close()  # now the rank has the only copy, so the pipe ends when the rank does
                processes.append(process)
                pipes.append(receiver)
            return _Watch(processes, pipes, signals, on_stop).until_all_ended()
        finally:
            # Killed: ranks that still run wait in a collective for one that has failed, or have ignored SIGTERM.
            for started in processes:
                started.kill()
                started.join()


class _Watch(Generic[Result]):
    """The state of the processes: which of them run, their results, and whether they were asked to stop."""

    def __init__(
        self,
        processes: Sequence[BaseProcess],
        pipes: Sequence[Connection],
        signals: socket.socket,
        on_stop: Callable[[signal.Signals], None],
    ) -> None:
        self._processes = processes
        self._running = {pipe: rank for rank, pipe in enumerate(pipes)}
        self._results: dict[int, Result] = {}
        self._signals = signals
        self._on_stop = on_stop
        self._stopped_by: signal.Signals | None = None
        self._deadline = math.inf

    def until_all_ended(self) -> ProcessResults[Result]:
        """Return when all have succeeded; raise when the first has failed."""
        while self._running:
            ready = wait([*self._running, self._signals], self._seconds_left())
            # Messages of ranks first: a failure before the signal is not due to it.
            self._receive(pipe for pipe in ready if isinstance(pipe, Connection))
            if self._signals in ready:
                for number in self._signals.recv(64):
                    self._handle(number)
        results = tuple(self._results[rank] for rank in range(len(self._processes)))
        return ProcessResults(results, self._stopped_by)

    def _seconds_left(self) -> float | None:
        if self._stopped_by is None:
            return None
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise StoppedError(
                f"The ranks were ended: they had not saved within {SAVE_GRACE_S:.0f} s.",
                self._stopped_by,
            )
        return seconds

    def _receive(self, pipes: Iterator[Connection]) -> None:
        failures: list[Failure] = []
        for pipe in pipes:
            rank = self._running[pipe]
            try:
                message = pipe.recv()
            except EOFError:
                del self._running[pipe]
                failures.extend(self._silent_failure(rank))
                continue
            if isinstance(message, Failure):
                failures.append(message)
            else:
                [self._results[rank]] = message
        if failures:
            self._fail(min(failures, key=lambda failure: (failure.was_sent, failure.time_s)))

    def _fail(self, first: Failure) -> NoReturn:
        if first.is_for_the_user:
            raise ConfigurationError(first.message)
        if self._stopped_by is not None and not first.was_sent:
            raise StoppedError(
                f"The ranks were ended before they had saved: {first.message}", self._stopped_by
            )
        raise RankFailedError(
            f"{first.message.rstrip()}\n\n"
            f"Rank {first.rank} of {len(self._processes)} failed; the other ranks were stopped.",
            first.killed_by,
        )

    def _silent_failure(self, rank: int) -> Iterator[Failure]:
        """Yield a failure for a process that ended without a message, unless it had succeeded."""
        process = self._processes[rank]
        process.join()
        code = process.exitcode
        if code == 0 and rank in self._results:
            return
        killed_by = signal.Signals(-code) if code is not None and code < 0 else None
        reason = f"with exit code {code}" if killed_by is None else f"by signal {killed_by.name}"
        message = f"Rank {rank} (process {process.pid}) was ended {reason} and left no message."
        yield Failure(
            rank=rank,
            message=message,
            killed_by=killed_by,
            was_sent=False,
            time_s=time.monotonic(),
        )

    def _handle(self, number: int) -> None:
        if number not in STOPPING:
            return  # another signal that has a handler in Python
        if self._stopped_by is None:
            self._stopped_by = signal.Signals(number)
            self._deadline = time.monotonic() + SAVE_GRACE_S
            for process in self._processes:
                process.terminate()
            self._on_stop(self._stopped_by)
        elif number == signal.SIGINT:
            raise StoppedError(
                "The ranks were ended at once, as a second Ctrl-C asked for.", self._stopped_by
            )


@contextmanager
def _stopping_signals() -> Iterator[socket.socket]:
    """Yield a socket that receives the number of each signal in `STOPPING`. The signals have no other effect."""
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)
    fd_before = signal.set_wakeup_fd(writing.fileno())
    # Python only writes to the socket for signals that have a handler, so they get one that does nothing.
    before = {
        number: signal.signal(number, lambda *_: None)
        for number in STOPPING
        if not is_nohup(number)
    }
    try:
        yield reading
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(fd_before)
        reading.close()
        writing.close()


@contextmanager
def _terminal_signals_ignored() -> Iterator[None]:
    """Ignore a terminal's signals within the block. Processes that are started there inherit it from their first instruction."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in FROM_TERMINALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _process_main(
    work: Callable[[Argument], Result], argument: Argument, rank: int, parent: Connection
) -> None:
    """Do the work of one rank and send the parent its result; after a failure exit at once."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        parent.send([work(argument)])
    except Exception as error:
        is_for_the_user = isinstance(error, ConfigurationError)
        parent.send(
            Failure(
                rank=rank,
                message=str(error) if is_for_the_user else traceback.format_exc(),
                is_for_the_user=is_for_the_user,
                was_sent=True,
                time_s=time.monotonic(),
            )
        )
        # Not an orderly exit: destroying a process group while other ranks are in a collective can hang.
        os._exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only runs in processes that were started from another"
    parent.join()
    os._exit(1)
