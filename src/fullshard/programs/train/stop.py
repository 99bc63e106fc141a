"""How a run ends before its last step: a signal asks for it, a step is bad, or a checkpoint cannot be written.

A signal only sets a flag. All ranks exchange their flags at each step, so they stop after the same one, with a
checkpoint of it: a rank that left on its own would leave the others in a collective.

This file imports no torch: whoever starts ranks knows these errors, too.
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
"""What asks a process to stop; SIGHUP comes when its terminal is closed, and not every platform has it."""


def is_nohup(number: signal.Signals) -> bool:
    """Say whether it is a SIGHUP that this process was started to ignore, by nohup or as a rank."""
    return number.name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN


class StoppedBySignalError(FullshardError, RuntimeError):
    """A run was asked to stop, and did so after it had saved where it stood."""


class BadStepError(FullshardError, RuntimeError):
    """A step's loss or gradients were such that the run must not go on."""


ENDS_OF_ALL_RANKS = (StoppedBySignalError, BadStepError, CheckpointError)
"""All ranks raise these together, with the same message: no rank waits for another, and a traceback says no more."""


class StopRequest:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def is_made(self) -> bool:
        """Whether it was."""
        return self.signal is not None


@contextmanager
def noticing_stop_requests() -> Iterator[StopRequest]:
    """Within it, SIGTERM and SIGHUP are noted instead of ending the process.

    Python lets only the main thread decide about signals; ranks that are other threads notice none.
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
