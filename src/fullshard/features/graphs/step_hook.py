"""Hooks of optimizers that replays of a captured step call, too."""

from __future__ import annotations

from collections.abc import Callable


class StepHook:
    """A hook before the steps of an optimizer that also runs before a graph with such a step: replays call no hooks."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, *_: object) -> None:
        """Run it."""
        self._call()
