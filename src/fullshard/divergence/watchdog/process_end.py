"""The message of a process before it ends: that its program is done, or which exception has ended it.

    an exception reaches the top     `sys.excepthook`, and the end of a process of `multiprocessing`
    ... of a thread                  `threading.excepthook`: the process may live on without the thread that trains
    ... of a lost connection         the verdict is raised from it, since the backend does not know why
    the interpreter ends             `atexit`, which runs before torch tears anything down; from Python 3.14 on also at the
                                     end of a process of `multiprocessing`, which has forgotten what its parent registered
    fork                             the child has no watchdog: threads do not survive a fork

A process that ends between sharding and its first forward has no watchdog yet, but others may wait for its model. So
one function is registered when the library is first used (`at_unwatched_end`). Nothing is registered by an import.

A rank that is killed says nothing. Other ranks find that out by themselves.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.util import Finalize, register_after_fork
from types import TracebackType

import torch.distributed as dist

from fullshard.divergence.journal import PROGRESS, Waiting
from fullshard.divergence.verdict import VERDICT
from fullshard.divergence.watchdog.answers import is_of_lost_connection
from fullshard.divergence.watchdog.child_error import error_of_child, note_errors
from fullshard.errors import FullshardError, exception_text
from fullshard.mesh.backends import abort_all
from fullshard.storage import mixed_tensors

Ending = Callable[[BaseException | None], None]
ThreadEnding = Callable[[int, BaseException], None]


class _Hooks:
    """The functions installed in this process."""

    pid = 0
    """The process that has installed the functions below; a forked one must do so again."""
    ending: Ending | None = None
    thread_ending: ThreadEnding | None = None
    unwatched: Ending | None = None
    """Called instead, in a process that never had the one above."""


def at_end(ending: Ending, *, of_thread: ThreadEnding, forked: Callable[[], None]) -> None:
    """Call ``ending`` with the exception that ends this process, or with None if its program is done.

    ``of_thread`` is called with the number of a thread and the exception that ends it, ``forked`` in a child after a fork.
    """
    _Hooks.ending, _Hooks.thread_ending = ending, of_thread
    if _Hooks.pid == os.getpid():
        return
    if _Hooks.pid == 0:
        os.register_at_fork(after_in_child=forked)
        sys.excepthook = _chained(sys.excepthook)
        threading.excepthook = _chained_in_threads(threading.excepthook)
        atexit.register(_end_now)
    _Hooks.pid = os.getpid()
    # Until Python 3.13 a process of `multiprocessing` ends without `atexit`. It prints exceptions without the hook.
    Finalize(None, _end_now, exitpriority=1)


def at_unwatched_end(ending: Ending) -> None:
    """Call ``ending`` in the same way in processes that end without having called `at_end`. Called once."""
    _Hooks.unwatched = ending
    note_errors()
    atexit.register(_end_unwatched)
    os.register_at_fork(after_in_child=_notice_fork)
    register_after_fork(_Hooks, _begin_child)
    if parent_process() is not None:
        Finalize(None, _end_now, exitpriority=1)


def _begin_child(_: type[_Hooks]) -> None:
    """Register again, in a forked process of `multiprocessing`, the functions that it has forgotten."""
    Finalize(None, _end_now, exitpriority=1)
    atexit.unregister(_end_unwatched)  # until Python 3.13 it is still there
    atexit.register(_end_unwatched)


def _notice_fork() -> None:
    """Let a child say nothing if its parent is the rank: a worker of a data loader, for example."""
    if dist.is_initialized():
        _Hooks.unwatched = None


def line_about(error: BaseException) -> str:
    """Return type and message of an exception, on one line of bounded length."""
    text = " ".join(exception_text(error).split())
    return text if len(text) <= 400 else f"{text[:400]}..."


def _end(error: BaseException | None) -> None:
    if _Hooks.pid == os.getpid():
        if _Hooks.ending is not None:
            _Hooks.ending(error)
    elif _Hooks.unwatched is not None:
        unwatched, _Hooks.unwatched = _Hooks.unwatched, None
        unwatched(error)


def _end_unwatched() -> None:
    # The interpreter has put the exception that ends it there. At a prompt, it is one that ended nothing.
    last = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    _end(error_of_child() or last)


def _end_now() -> None:
    _end(error_of_child())


def _explained(error: BaseException) -> BaseException:
    """Return the watchdog's verdict for an error about a lost connection, in a collective that is not ours.

    An error about sharded parameters gets its remedy, too: it was raised outside of all forwards.
    """
    mixed_tensors.explain(error)
    is_ours = isinstance(error, FullshardError)
    if (
        is_ours
        or not isinstance(error, RuntimeError)
        or not is_of_lost_connection(exception_text(error))
    ):
        return error
    if isinstance(error, dist.DistBackendError):
        abort_all()
    # So that the watchdogs see a rank that waits for the one that has gone.
    PROGRESS.waiting = Waiting(None, "a collective of torch.distributed", time.monotonic())
    verdict = VERDICT.explain("")
    PROGRESS.waiting = None
    if not str(verdict):
        return error
    verdict.__cause__ = error
    return verdict


def _chained_in_threads(
    hook: Callable[[threading.ExceptHookArgs], object],
) -> Callable[[threading.ExceptHookArgs], object]:
    def chained(args: threading.ExceptHookArgs) -> object:
        if _Hooks.thread_ending is not None and args.exc_value is not None:
            _Hooks.thread_ending(threading.get_ident(), args.exc_value)
        return hook(args)

    return chained


_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def _chained(hook: _Hook) -> _Hook:
    def chained(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> object:
        explained = _explained(error)
        try:
            if explained is error:
                return hook(kind, error, traceback)
            return hook(type(explained), explained, explained.__traceback__)
        finally:
            _end(error)

    return chained
