"""The error that ends a process of `multiprocessing` is known until the process has ended."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest

from fullshard.divergence.watchdog.child_error import error_of_child, note_errors

CONTEXT = multiprocessing.get_context("fork")
note_errors()


def run(does: Callable[[], None], connection: Connection) -> None:
    """Do it, and say what is known of the error once it is handled and gone, as it is for `atexit` with Python 3.14."""

    def say() -> None:
        connection.send((repr(error_of_child()), repr(sys.exception())))

    threading._register_atexit(say)  # type: ignore[attr-defined]
    does()


def fail() -> None:
    raise ValueError("bad sample 7")


def end_well() -> None:
    sys.exit(0)


def end_badly() -> None:
    sys.exit(3)


def do_nothing() -> None:
    pass


def start(does: Callable[[], None]) -> tuple[str, str, int | None]:
    """Return what is known, what Python handles then, and the exit code."""
    ours, theirs = CONTEXT.Pipe()
    child = CONTEXT.Process(target=run, args=(does, theirs))
    child.start()
    theirs.close()
    child.join()
    return *ours.recv(), child.exitcode


@pytest.mark.parametrize(
    ("does", "error", "code"),
    [
        (fail, "ValueError('bad sample 7')", 1),
        (end_badly, "SystemExit(3)", 3),
        (end_well, "None", 0),
        (do_nothing, "None", 0),
    ],
)
def test_what_ends_a_child_is_known_when_it_is_gone(
    does: Callable[[], None], error: str, code: int
) -> None:
    assert start(does) == (error, "None", code)


class Own(CONTEXT.Process):  # type: ignore[name-defined, misc]
    """Has a `run` of its own, as users' processes do."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection

    def run(self) -> None:
        run(fail, self.connection)


def test_processes_may_have_a_run_of_their_own() -> None:
    ours, theirs = CONTEXT.Pipe()
    child = Own(theirs)
    child.start()
    theirs.close()
    child.join()
    assert ours.recv() == ("ValueError('bad sample 7')", "None")


def starts_a_child_when_it_fails() -> None:
    try:
        fail()
    except ValueError:
        os._exit(7 if start(do_nothing)[0] == "None" else 1)


def test_an_error_of_the_parent_ends_no_child() -> None:
    child = CONTEXT.Process(target=starts_a_child_when_it_fails)
    child.start()
    child.join()
    assert child.exitcode == 7
    assert error_of_child() is None
