"""Trackers of numbers: TensorBoard, Weights & Biases, MLflow.

A tracker must not cost a run. Whatever one of them raises is one warning, and it gets nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from fullshard.programs.run_events import End, Evaluation, Event, Start, Step, Stopped

STEP_NUMBERS = ("loss", "grad_norm", "lr", "step_s", "memory_bytes")


class Tracker(Protocol):
    """A receiver of the numbers of a run."""

    def begin(self, start: Start) -> None:
        """Begin, or go on with a run that is resumed."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of a step, by name."""

    def finish(self, *, succeeded: bool) -> None:
        """End; a run that has neither ended nor been stopped has failed."""


class Tracking:
    """A watcher that passes the numbers of a run on to a tracker."""

    def __init__(self, name: str, tracker: Tracker, warn: Callable[[str], None]) -> None:
        """Take a tracker.

        Args:
            name: Its name for users.
            tracker: It gets the numbers.
            warn: Tells the user, at most once, that it gets nothing more.
        """
        self._name = name
        self._tracker = tracker
        self._warn = warn
        self._has_begun = False
        self._has_failed = False
        self._succeeded = False

    def __call__(self, event: Event) -> None:
        """Pass the numbers of an event on."""
        if isinstance(event, End | Stopped):
            self._succeeded = True
        if isinstance(event, Start):
            self._attempt(lambda: self._tracker.begin(event))
            self._has_begun = not self._has_failed
        elif numbers := numbers_of(event):
            self._attempt(lambda: self._tracker.log(event.step, numbers))

    def close(self) -> None:
        """End the tracker."""
        if self._has_begun:
            self._attempt(lambda: self._tracker.finish(succeeded=self._succeeded))

    def _attempt(self, call: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            call()
        except Exception as error:  # whatever a tracker raises: a login, a network, a disk
            self._has_failed = True
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self._warn(f"Logging to {self._name} has stopped, and the run goes on: {reason}")


def numbers_of(event: Event) -> dict[str, float]:
    """Return the numbers of an event that are drawn as curves, by name; none for most kinds of events."""
    if isinstance(event, Step):
        return {f"train/{name}": getattr(event, name) for name in STEP_NUMBERS}
    return {"held_out/loss": event.loss} if isinstance(event, Evaluation) else {}
