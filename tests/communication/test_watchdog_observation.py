"""What a watchdog sees of its own process: the line of the thread that trains, and what it waits for."""

from __future__ import annotations

import sys
import threading

from fullshard.comm.journal import Journal, tag
from fullshard.comm.watchdog.observation import Observer, line_of, marks_of


def test_the_line_is_the_innermost_one_that_is_the_user_s() -> None:
    frame = sys._getframe()
    line = line_of(frame)
    assert line.startswith("communication/test_watchdog_observation.py:")
    assert line.endswith(" in test_the_line_is_the_innermost_one_that_is_the_user_s")


def test_marks_are_those_of_the_last_steps_and_of_round_numbers() -> None:
    journal = Journal("0", 0, (0, 1))
    for _ in range(40):
        journal.note(tag("all-gather of a"))
        journal.end_step()
    assert [(step, count) for step, count, _ in marks_of(journal)] == [(32, 32), (40, 40)]


def test_a_thread_that_runs_python_of_its_own_does_not_wait() -> None:
    observer = Observer(0, threading.get_ident(), "here", None)
    assert observer.wait() is None
    assert observer.answer({}).line.startswith("communication/test_watchdog_observation.py:")
