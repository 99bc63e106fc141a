"""The end of a process while one of its threads still writes a checkpoint.

    the main thread has ended well    the process waits for the checkpoint, and so does the end of a process group
    the main thread has failed        the process ends: other ranks, and the launcher, must see that

Python has no such threads: a process always waits for an ordinary thread, and never for a daemon.
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

from fullshard import torch_border
from fullshard.divergence.watchdog.child_error import error_of_child, note_errors


class _ExitState:
    """Facts of this process about its own end."""

    threads: ClassVar[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()
    """Threads to wait for."""
    registered_pid = 0
    """The process that has registered the functions below: a forked process must register them again."""
    child_failed = False
    """Whether this is a process of `multiprocessing` that has failed."""


def join_at_exit(thread: threading.Thread) -> None:
    """Let the process wait for a daemon thread before it ends, unless its main thread has failed."""
    assert thread.daemon, "the process waits for other threads in any case"
    if _ExitState.registered_pid != os.getpid():
        _ExitState.registered_pid = os.getpid()
        note_errors()
        # `atexit` would be too late: executors refuse work by then, and the thread could not go on writing.
        threading._register_atexit(_wait)  # type: ignore[attr-defined]
        Finalize(None, _note_failure_of_child, exitpriority=0)
    _ExitState.threads.add(thread)
    torch_border.before_shutdown(_wait_before_shutdown)


def _wait_before_shutdown() -> None:
    """Wait for the threads before a process group is destroyed: they communicate. Not if an error is on its way."""
    if sys.exc_info()[1] is None and threading.current_thread() not in _ExitState.threads:
        for thread in list(_ExitState.threads):
            thread.join()


def _wait() -> None:
    left = [thread for thread in _ExitState.threads if thread.is_alive()]
    if not _main_thread_failed():
        for thread in left:
            thread.join()
    elif left:
        atexit.register(_exit_now)  # the function that is registered last is called first


def _exit_now() -> None:
    """End the process without tearing down the interpreter: the teardown aborts while a thread is in torch."""
    atexit.unregister(_exit_now)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be closed, or a pipe without a reader
            stream.flush()
    interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    os._exit(128 + signal.SIGINT if interrupted else 1)


def _main_thread_failed() -> bool:
    """Return whether an error has ended the main thread.

    Python stores the error in ``sys.last_value`` before it prints it. An interactive session does so after every error,
    and goes on.
    """
    was_shown = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    return was_shown or _ExitState.child_failed or error_of_child() is not None


def _note_failure_of_child() -> None:
    """Note an error while it is handled; Python 3.14 calls this too late for that."""
    _ExitState.child_failed = error_of_child() is not None
