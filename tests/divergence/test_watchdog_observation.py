"""What a watchdog sees of its own process: the line of the thread that trains, and what it waits for."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist

from fullshard.divergence.journal import Journal, journal_of, journals
from fullshard.divergence.watchdog import observation
from fullshard.divergence.watchdog.answers import Wait
from fullshard.divergence.watchdog.connections import UNKNOWN, traffic
from fullshard.divergence.watchdog.judge import Judgement
from fullshard.divergence.watchdog.observation import (
    Observer,
    _collective_of_torch,
    is_past_handlers,
    line_of,
    line_of_traceback,
    marks_of,
)
from fullshard.divergence.watchdog.stalls import FIRST_REPEAT_S, StallReports, stalls
from fullshard.mesh.backends import backend_named
from fullshard.transport.tags import tag
from tests.helpers.fake import fake_world


def test_the_line_is_the_innermost_one_that_is_the_user_s() -> None:
    frame = sys._getframe()
    line = line_of(frame)
    assert line.startswith("divergence/test_watchdog_observation.py:")
    assert line.endswith(" in test_the_line_is_the_innermost_one_that_is_the_user_s")


def _function_in(file: str, called: Callable[[], object]) -> Callable[[], None]:
    """Return a function of one line that calls another one and is in this file, as far as its code says."""
    names: dict[str, Any] = {"called": called}
    exec(compile("def inside(): called()", file, "exec"), names)
    function: Callable[[], None] = names["inside"]
    return function


def _frame_in(file: str) -> FrameType:
    frames: list[FrameType] = []
    _function_in(file, lambda: frames.append(sys._getframe(1)))()
    return frames[0]


class HeldUp:
    """A context manager that an engine may have."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self.lines.append(line_of(sys._getframe(1)))
        yield


def test_lines_of_python_s_own_library_are_not_the_user_s() -> None:
    held_up = HeldUp()
    with held_up.waiting():
        pass
    for line in held_up.lines:
        assert line.endswith(" in test_lines_of_python_s_own_library_are_not_the_user_s"), line
    try:
        json.loads("{")
    except ValueError as error:
        line = line_of_traceback(error.__traceback__)
    assert line.endswith(" in test_lines_of_python_s_own_library_are_not_the_user_s")
    # What is installed is the user's, also where it is installed into Python's library.
    library = sysconfig.get_path("stdlib")
    installed = _frame_in(f"{library}/site-packages/trl/train.py")
    assert line_of(installed) == "trl/train.py:1 in inside"
    # Where there is no other line, the innermost is better than none.
    lines: list[str] = []
    inside = _function_in(
        f"{library}/threading.py", lambda: lines.append(line_of(sys._getframe(1)))
    )
    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert lines[0].endswith("threading.py:1 in inside")


def test_marks_are_those_of_the_last_steps_and_of_round_numbers() -> None:
    journal = Journal("0", 0, (0, 1))
    for _ in range(40):
        journal.note(tag("all-gather of a"))
        journal.end_step()
    assert [(step, count) for step, count, _ in marks_of(journal)] == [(32, 32), (40, 40)]


def test_journals_of_destroyed_groups_are_not_compared_with_those_of_new_ones() -> None:
    held = []
    for collective in ("all-gather of a", "all-gather of b"):
        with fake_world(2):
            assert dist.group.WORLD is not None
            held.append(dist.group.WORLD)  # as a traceback may, on one rank
            journal_of(held[-1]).note(tag(collective))
            assert [each.last_tag for each in journals()] == [tag(collective)]
    assert held[0].group_name == held[1].group_name
    assert journals() == []


def test_a_thread_that_runs_python_of_its_own_does_not_wait() -> None:
    observer = Observer(0, threading.get_ident(), "here", None)
    assert observer.wait() is None
    assert observer.answer({}, {}).line.startswith("divergence/test_watchdog_observation.py:")


def test_an_exception_is_caught_when_its_handlers_have_ended() -> None:
    thread = threading.get_ident()
    try:
        raise ValueError
    except ValueError:
        assert not is_past_handlers(thread)
    assert is_past_handlers(thread)
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    assert ended.ident is not None
    assert not is_past_handlers(ended.ident)


def test_traffic_counts_what_comes_and_goes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as one:
            other, _ = listener.accept()
            with other:
                before = traffic(store_port=None)
                one.sendall(b"x" * 1000)
                other.recv(1000, socket.MSG_WAITALL)
                assert traffic(store_port=None) >= before + 1000
                assert traffic(store_port=port) < before + 1000


def test_bytes_count_only_where_nothing_but_collectives_sends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = Wait(text="barrier", kind="torch", group=None, count=0, seconds=1.0)
    observer = Observer(0, threading.get_ident(), "here", None)
    monkeypatch.setattr(observer, "wait", lambda: waiting)
    for backend, counts in (("gloo", True), ("nccl", False)):
        found = [backend_named(backend)]
        monkeypatch.setattr(observation, "backends_in_use", lambda found=found: found)
        wait = observer.answer({}, {}).wait
        assert wait is not None and (wait.traffic != UNKNOWN) == counts


def test_a_wait_in_torch_has_the_name_of_the_function_that_users_call() -> None:
    folder = os.path.dirname(dist.__file__)
    layers = {  # the innermost first, as in `DTensor.full_tensor` and in the state dicts of torch
        "unwrap": "_functional_collectives.py",
        "_to_torch": "tensor/_redistribute.py",
        "apply": "../autograd/function.py",
        "full_tensor": "tensor/_api.py",
        "_gather_state_dict": "_state_dict_utils.py",
        "get_model_state_dict": "checkpoint/state_dict.py",
    }
    frames: list[Any] = []
    names: dict[str, Any] = {"__inner__": lambda: frames.append(sys._getframe(1))}
    for inner, (name, file) in zip(["__inner__", *layers], layers.items(), strict=False):
        path = os.path.normpath(os.path.join(folder, file))
        code = compile(f"def {name}():\n    {inner}()", path, "exec")
        exec(code, names)
    names["get_model_state_dict"]()
    found = _collective_of_torch(frames[0])
    assert found is not None
    assert found[:2] == ("unwrap", "get_model_state_dict")


def test_a_stall_is_noted_once_and_printed_less_and_less_often_by_one_rank(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(stalls())
    slow = Judgement(
        kind="slow", message="rank 1 keeps others waiting", culprits=(1,), where="here"
    )
    with caplog.at_level(logging.WARNING, "fullshard"):
        speaking, silent = StallReports(), StallReports()
        for now in (0.0, 10.0, FIRST_REPEAT_S, FIRST_REPEAT_S + 10):
            speaking.note(slow, now + 5, now, speaks=True)
            silent.note(slow, now + 5, now, speaks=False)
        for now in (
            2 * FIRST_REPEAT_S,
            3 * FIRST_REPEAT_S,
        ):
            speaking.note(slow, now, now, speaks=True)
    assert [record.message for record in caplog.records] == [slow.message] * 3
    noted = stalls()[before:]
    began = noted[0].began
    monkeypatch.setattr(time, "time", lambda: began + 50.0)
    speaking.grow()
    assert [noted[0].seconds, noted[1].seconds] == [pytest.approx(50.0), 5.0], "it lasts"
    assert [(each.ranks, each.where) for each in noted] == [((1,), "here")] * 2
    assert speaking.end() and not speaking.end()
    speaking.note(slow, 5.0, 100.0, speaks=True)
    assert [each.number - noted[0].number for each in stalls()[before:]] == [0, 1, 2]
