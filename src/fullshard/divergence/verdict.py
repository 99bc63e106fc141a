"""The watchdog's verdict, for the thread that trains.

A wait of ours is a loop: wait for a slice of time, look here, wait again. So a thread that waits for other ranks leaves
with `DivergenceError` as soon as a divergence is proven, whatever it waits for.
"""

from __future__ import annotations

import threading
import time

from fullshard.errors import DivergenceError

SLICE_S = 0.2
"""Longest time of a wait before it looks at the verdict."""
EXPLANATION_S = 40.0
"""Time for which a rank that has lost another one waits for the watchdog's reason. The watchdog gives up by itself, and
does so after some seconds. On a crowded machine these seconds are longer, and the reason is worth waiting for."""


class Verdict:
    """The verdict of this process, and the wish for one."""

    def __init__(self) -> None:
        self.message: str | None = None
        """The reason why ranks have diverged; None as long as nothing is proven."""
        self.wanted = threading.Event()
        """Set by a thread that has lost another rank, and wants to know why at once."""
        self.is_sought = False
        """Whether that thread waits for the reason. The lost rank will not come, so the wait counts as in vain at once, whatever
        its length."""
        self.is_unknown = False
        """Whether the watchdog has looked for the reason, and found none."""
        self.taken = False
        """Whether the thread that trains has raised the verdict."""
        self.watched = False
        """Whether a watchdog is running that gives verdicts."""
        self.wake: threading.Event | None = None
        """Lets the watchdog look at once."""

    def raise_if_diverged(self) -> None:
        """Raise the divergence that the watchdog has proven, if any.

        Raises:
            DivergenceError: ranks have diverged.
        """
        if self.message is not None:
            self.taken = True
            raise DivergenceError(self.message)

    def explain(self, otherwise: str) -> DivergenceError:
        """Return the error for a rank that has lost another one: the watchdog's verdict, or ``otherwise`` if none comes."""
        self.is_sought, self.is_unknown = True, False
        self.wanted.set()
        if self.wake is not None:
            self.wake.set()
        end = time.monotonic() + EXPLANATION_S
        while self.watched and self.message is None and time.monotonic() < end:
            if self.is_unknown:
                break
            time.sleep(SLICE_S / 10)
        self.is_sought = False
        self.taken = True
        return DivergenceError(self.message or otherwise)


VERDICT = Verdict()
