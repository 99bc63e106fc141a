"""What a process that ends does about a checkpoint that a thread of it still writes.

    the main thread has ended well    it waits for the checkpoint
    it has failed                     it ends: other ranks, and who started them, must see that

A thread of Python's own kinds cannot do that: a process always waits for an ordinary one, and never for a daemon.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import weakref
from multiprocessing.util import Finalize
from typing import ClassVar


class _ExitState:
    """What is known about the end of this process."""

    threads: ClassVar[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()
    """That it waits for."""
    prepared_for = 0
    """The process that the functions below are called by at its end: a forked one has to be prepared again."""
    child_failed = False


def join_at_exit(thread: threading.Thread) -> None:
    """Let the process wait for a daemon thread before it ends, unless its main thread has failed."""
    assert thread.daemon, "the process would wait for any other in any case"
    if _ExitState.prepared_for != os.getpid():
        _ExitState.prepared_for = os.getpid()
        # Before executors refuse work and threads cannot be started any more: `atexit` would be too late for a thread
        # that still has to write.
        threading._register_atexit(_wait)  # type: ignore[attr-defined]
        Finalize(None, _note_failure_of_child, exitpriority=0)
    _ExitState.threads.add(thread)


def _wait() -> None:
    left = [thread for thread in _ExitState.threads if thread.is_alive()]
    if not _main_thread_failed():
        for thread in left:
            thread.join()
    elif left:
        atexit.register(_leave)  # what is registered last is called first


def _leave() -> None:
    """End the process as Python does, but for taking down the interpreter: that aborts while a thread is in torch."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or nobody reads it
            stream.flush()
    interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    os._exit(128 + signal.SIGINT if interrupted else 1)


def _main_thread_failed() -> bool:
    """Whether an error has ended the main thread.

    Python notes it before it is shown. An interactive session notes every error, and goes on.
    """
    was_shown = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    return was_shown or _ExitState.child_failed


def _note_failure_of_child() -> None:
    """In a process of `multiprocessing`, which shows its errors in a way of its own: called while one is on its way."""
    error = sys.exc_info()[1]
    went_well = isinstance(error, SystemExit) and error.code in (None, 0)
    _ExitState.child_failed = error is not None and not went_well
