"""What a process says before it ends: that its program is done, or which exception has ended it.

    an exception reaches the top     `sys.excepthook`, and the end of a process of `multiprocessing`
    ... of a lost connection         the verdict is added to it as a note, since the backend does not know why
    the interpreter ends             `atexit`, which runs before torch tears anything down
    fork                             the child has no watchdog: threads do not survive a fork

Whoever is killed says nothing. Other ranks find that out by themselves.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.util import Finalize
from types import TracebackType

from fullshard.comm.journal import POSITION, Waiting
from fullshard.comm.verdict import VERDICT
from fullshard.errors import FullshardError

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


_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
"""What gloo says in a collective, not of ours, whose other rank has gone."""


def _explain(error: BaseException) -> None:
    """Add the watchdog's verdict to an error about a lost connection."""
    is_ours = isinstance(error, FullshardError)
    if (
        is_ours
        or not isinstance(error, RuntimeError)
        or not any(each in str(error) for each in _LOST)
    ):
        return
    # So that the watchdogs see somebody who waits for the rank that has gone.
    POSITION.waiting = Waiting(None, "a collective of torch.distributed", time.monotonic())
    verdict = str(VERDICT.explain(""))
    POSITION.waiting = None
    if verdict:
        error.add_note(verdict)


_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def _chained(hook: _Hook) -> _Hook:
    def chained(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> object:
        _explain(error)
        try:
            return hook(kind, error, traceback)
        finally:
            _end(error)

    return chained
