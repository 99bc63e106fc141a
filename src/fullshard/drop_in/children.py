"""Processes that `multiprocessing` starts as new interpreters: they call a function before the program's own module.

`torch.multiprocessing.spawn` and data loaders start such processes. Each is sent a dict of facts about its parent, which it
unpickles before it imports the program's main module. The dict gets an entry that calls the function when it is unpickled.
The process must be able to import the function without the parent's `sys.path`.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

_ENTRY = "fullshard"


class _Call:
    """An object that is unpickled as the result of a function."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return self._function, ()


class _Children:
    """Facts about processes that this one has started."""

    have_started = False
    """Whether there was one that calls a function first."""


def have_started() -> bool:
    """Return whether a process was started that has called a function first."""
    return _Children.have_started


def call_in_children(function: Callable[[], object]) -> Callable[[], None]:
    """Let all processes that are started from now on call a function first; what is returned undoes that."""
    original = spawn.get_preparation_data
    is_active = True

    def get_preparation_data(name: str) -> dict[str, Any]:
        facts = original(name)
        if not is_active:
            return facts
        _Children.have_started = True
        return {_ENTRY: _Call(function), **facts}

    def undo() -> None:
        nonlocal is_active
        is_active = False
        if spawn.get_preparation_data is get_preparation_data:
            spawn.get_preparation_data = original

    spawn.get_preparation_data = get_preparation_data
    return undo
