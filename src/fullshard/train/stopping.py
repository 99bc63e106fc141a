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
    """Within it, SIGTERM is noted instead of ending the process.

    Python lets only the main thread decide about signals; ranks that are other threads notice none.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)
