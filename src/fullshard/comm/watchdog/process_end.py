"""What a process says before it ends: that its program is done, or which exception has ended it.

    an exception reaches the top     `sys.excepthook`, and the end of a process of `multiprocessing`
    the interpreter ends             `atexit`, which runs before torch tears anything down
    fork                             the child has no watchdog: threads do not survive a fork

Whoever is killed says nothing. Other ranks find that out by themselves.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from multiprocessing.util import Finalize
from types import TracebackType

Ending = Callable[[BaseException | None], None]


class _Hooks:
    """What has been installed in this process."""

    pid = 0
    """The process that has installed the functions below; a forked one must do so again."""
    ending: Ending | None = None


def at_end(ending: Ending, *, forked: Callable[[], None]) -> None:
    """Call ``ending`` with the exception that ends this process, or with None if its program is done.

    ``forked`` is called in a child after a fork.
    """
    _Hooks.ending = ending
    if _Hooks.pid == os.getpid():
        return
    if _Hooks.pid == 0:
        os.register_at_fork(after_in_child=forked)
        sys.excepthook = _chained(sys.excepthook)
        atexit.register(_end, None)
    _Hooks.pid = os.getpid()
    # A process of `multiprocessing` ends without `atexit`, and prints exceptions without the hook.
    Finalize(None, _end_child, exitpriority=1)


def exception_text(error: BaseException) -> str:
    """Return type and message of an exception, on one line of bounded length."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 400 else f"{text[:400]}..."


def _end(error: BaseException | None) -> None:
    if _Hooks.ending is not None and _Hooks.pid == os.getpid():
        _Hooks.ending(error)


def _end_child() -> None:
    error = sys.exc_info()[1]
    is_well = isinstance(error, SystemExit) and error.code in (None, 0)
    _end(None if is_well else error)


_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def _chained(hook: _Hook) -> _Hook:
    def chained(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> object:
        try:
            return hook(kind, error, traceback)
        finally:
            _end(error)

    return chained
