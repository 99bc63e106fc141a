"""Ways in which a run ends before its last step: a signal, a bad step, or a checkpoint that cannot be written.

A signal only sets a flag. All ranks exchange their flags at each step, so they stop after the same step, with a checkpoint
of it. A rank that exited on its own would leave the others in a collective.

This file imports no torch: the launcher uses these errors, too.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fullshard.errors import CheckpointError, FullshardError

STOP_SIGNALS = tuple(
    signal.Signals[name] for name in ("SIGTERM", "SIGHUP") if name in signal.Signals.__members__
)
"""Signals that ask a process to stop. SIGHUP comes when its terminal is closed; not every platform has it."""


def is_nohup(number: signal.Signals) -> bool:
    """Say whether it is SIGHUP and this process ignores it, as under nohup or as a rank."""
    return number.name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN


class StoppedBySignalError(FullshardError, RuntimeError):
    """A run was asked to stop, and did so after a checkpoint."""


class BadStepError(FullshardError, RuntimeError):
    """A bad step has stopped the run."""


COLLECTIVE_ERRORS = (StoppedBySignalError, BadStepError, CheckpointError)
"""All ranks raise these together, with the same message. So no rank waits for another, and no traceback is needed."""


class StopRequest:
    """A request to stop this process, once a signal has made it."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def is_made(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None


@contextmanager
def noticing_stop_requests() -> Iterator[StopRequest]:
    """Note SIGTERM and SIGHUP within the block, instead of ending the process.

    Python handles signals in the main thread only. Ranks in other threads, as in tests, get no requests.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)

    before = {
        number: signal.signal(number, note) for number in STOP_SIGNALS if not is_nohup(number)
    }
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
