"""Run a function in several processes of this machine, and see to it that they all end.

A process that fails sends its traceback through a pipe before its sockets close. So when its
failure makes others fail, the message of the first is already there, and that is the one to show:

    rank 1   raises -> traceback into the pipe -> ends, connections close
    rank 0                                                     -> "connection closed by peer" -> ...

Whoever wants the run to stop says so to this process, which passes it on:

    Ctrl-C, SIGTERM or SIGHUP here   -> SIGTERM to every rank, which may finish what it has to, for SAVE_GRACE_S
    Ctrl-C again                     -> they end at once

The processes themselves ignore Ctrl-C and SIGHUP, which a terminal sends to all of them. They also end when
the parent is gone, whatever ended it.
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
"""How long ranks may take to save what they have after they were told to stop."""

HEEDED = (signal.SIGINT, *STOP_SIGNALS)
"""What tells this process to stop."""

FROM_TERMINALS = tuple(number for number in HEEDED if number != signal.SIGTERM)
"""Of these, what a terminal sends to this process and the ranks alike."""


class RankFailedError(FullshardError, RuntimeError):
    """A rank that this process had started did not come to a good end."""


class StoppedError(FullshardError, RuntimeError):
    """This process was told to stop, and its ranks have ended."""

    def __init__(self, message: str, by: signal.Signals) -> None:
        super().__init__(message)
        self.by = by


@dataclass(frozen=True, slots=True)
class ProcessResults(Generic[Result]):
    """How processes came to a good end."""

    results: tuple[Result, ...]
    """What the work returned, by rank."""

    stopped_by: signal.Signals | None
    """What they were told to stop by; whether they still finished their work is theirs to say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How one rank failed."""

    rank: int

    message: str
    """Its traceback, or what is known when it had no time to send one."""

    is_for_the_user: bool = False
    """The message is that of a `ConfigurationError`."""

    was_sent: bool
    """False when something ended the rank from outside, which is never the echo of another failure."""

    time_s: float
    """On the machine's monotonic clock, which its processes share."""


def run_in_processes(
    work: Callable[[Argument], Result],
    arguments: Sequence[Argument],
    *,
    on_stop: Callable[[signal.Signals], None] = lambda _: None,
) -> ProcessResults[Result]:
    """Call `work` with each argument, the n-th as rank n, in a process of its own.

    Must be called in the main thread, since it takes over the signals in `HEEDED` until it returns.
    After: all processes have ended, also when this raises.

    Args:
        work: what a rank does.
        arguments: one per rank.
        on_stop: told once, with the signal, when the ranks have been told to stop.

    Raises:
        RankFailedError: with the traceback of the rank that failed first.
        ConfigurationError: that of the rank that failed first; it is for the user, and needs no traceback.
        StoppedError: ranks that had been told to stop were ended, by a second Ctrl-C or because they
            took too long.
    """
    spawn = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    with _heeding_signals() as signals:
        try:
            for rank, argument in enumerate(arguments):
                receiver, sender = spawn.Pipe(duplex=False)
                process = spawn.Process(
                    target=_process_main, args=(work, argument, rank, sender), daemon=True
                )
                with _ignoring_terminals():
                    process.start()
                sender.close()  # the rank's copy is now the only one: its end is the pipe's end
                processes.append(process)
                pipes.append(receiver)
            return _Watch(processes, pipes, signals, on_stop).until_all_ended()
        finally:
            # By force: those that still run wait for one that has failed, or were told long ago.
            for started in processes:
                started.kill()
                started.join()


class _Watch(Generic[Result]):
    """What has been heard from the processes, and what they have been told."""

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
        """Return when all have ended well; raise when the first has not."""
        while self._running:
            ready = wait([*self._running, self._signals], self._seconds_left())
            # Ranks first: what failed before the signal came is not due to it.
            self._hear(pipe for pipe in ready if isinstance(pipe, Connection))
            if self._signals in ready:
                for number in self._signals.recv(64):
                    self._heed(number)
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

    def _hear(self, pipes: Iterator[Connection]) -> None:
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
            f"Rank {first.rank} of {len(self._processes)} failed; the other ranks were stopped."
        )

    def _silent_failure(self, rank: int) -> Iterator[Failure]:
        """Yield what is known of a process that ended without a message, if it did not end well."""
        process = self._processes[rank]
        process.join()
        code = process.exitcode
        if code == 0 and rank in self._results:
            return
        reason = f"with exit code {code}"
        if code is not None and code < 0:
            reason = f"by signal {signal.Signals(-code).name}"
        message = f"Rank {rank} (process {process.pid}) was ended {reason} and left no message."
        yield Failure(rank=rank, message=message, was_sent=False, time_s=time.monotonic())

    def _heed(self, number: int) -> None:
        if number not in HEEDED:
            return  # a handler of someone else's
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
def _heeding_signals() -> Iterator[socket.socket]:
    """Give a socket that receives the number of each signal in `HEEDED`, which do nothing else."""
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)
    fd_before = signal.set_wakeup_fd(writing.fileno())
    # A handler of Python's own must be there, or nothing is written; there is nothing left for it to do.
    before = {
        number: signal.signal(number, lambda *_: None) for number in HEEDED if not is_nohup(number)
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
def _ignoring_terminals() -> Iterator[None]:
    """Start processes that ignore a terminal's signals from their first instruction on: they inherit it."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in FROM_TERMINALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _process_main(
    work: Callable[[Argument], Result], argument: Argument, rank: int, parent: Connection
) -> None:
    """Do the work of one rank and tell the parent what came of it; on failure leave at once."""
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
        # No orderly exit: taking down a process group whose other ranks are in a collective can
        # hang.
        os._exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only runs in processes that were started from another"
    parent.join()
    os._exit(1)
