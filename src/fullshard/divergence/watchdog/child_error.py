"""The error that ends a process of `multiprocessing`. Python prints it and stores it nowhere.

Until Python 3.13 the functions that such a process calls at its end find the error as the one that is handled. From 3.14 on
they are called when it is gone, by `atexit`. So the process notes it: what `multiprocessing` runs in a child is wrapped
there, when the library is first used. A child that is started anew, and uses it only within the function that it runs, has
no note with 3.14.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar, cast


class _Child:
    """The error noted in this process."""

    pid: ClassVar[int] = 0
    """The process that notes its error."""
    error: ClassVar[BaseException | None] = None


def error_of_child() -> BaseException | None:
    """Return the error that ends this process, if it is one of `multiprocessing`; None while there is none, or for `sys.exit(0)`."""
    # A process that is forked while an error is handled goes on handling it, and one that notes knows better.
    error = _Child.error if _Child.pid == os.getpid() else sys.exception()
    is_well = isinstance(error, SystemExit) and error.code in (None, 0)
    return None if is_well else error


def _noting(run: Callable[[], object]) -> Callable[[], None]:
    def noted() -> None:
        _Child.pid, _Child.error = os.getpid(), None
        try:
            run()
        except BaseException as error:
            _Child.error = error
            raise

    return noted


@functools.cache
def note_errors() -> None:
    """Let processes of `multiprocessing` that begin from now on, and forget nothing of this one, note their errors."""
    _bootstrap: Any = cast(Any, BaseProcess)._bootstrap

    def bootstrap_noting(process: Any, *args: Any, **kwargs: Any) -> Any:
        process.run = _noting(process.run)
        return _bootstrap(process, *args, **kwargs)

    cast(Any, BaseProcess)._bootstrap = bootstrap_noting
