"""The position of this process, as its watchdog sees it: the answer that it gives.

Everything here is read by the watchdog's thread while another thread trains. It takes no lock, calls nothing that
communicates, and asks a device only when nothing has moved for some time.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import CodeType, FrameType, TracebackType

import torch
import torch.distributed as dist

from fullshard import torch_border
from fullshard.divergence.control_channel import closed_connections
from fullshard.divergence.journal import PROGRESS, Journal, journals
from fullshard.divergence.verdict import VERDICT
from fullshard.divergence.watchdog.answers import ASYNC_WAIT, Answer, GroupAnswer, History, Wait
from fullshard.divergence.watchdog.connections import traffic
from fullshard.mesh.backends import backends_in_use
from fullshard.transport.monitor import POSITION
from fullshard.transport.streams import comm_contexts

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FULLSHARD = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = tuple(os.path.join(_PYTHON, name, "") for name in ("site-packages", "dist-packages"))
"""Folders within Python's library that are no part of it."""
_C10D = dist.distributed_c10d.__file__
_COMMUNICATING = (_C10D, _TORCH + os.path.join("distributed", "_functional_collectives.py"))
"""Files of torch whose functions wait for other ranks."""
_DISPATCH = (
    _TORCH + "_ops.py",
    _TORCH + os.path.join("_library", "autograd.py"),
    _TORCH + os.path.join("distributed", "c10d_logger.py"),
)
"""Files of torch that may stand between such a function and its caller, or below it."""
_CALLING = (
    *(_TORCH + os.path.join("distributed", name) + os.sep for name in ("tensor", "checkpoint")),
    _TORCH + os.path.join("distributed", "_state_dict_utils.py"),
    _TORCH + os.path.join("autograd", "function.py"),
    _TORCH + os.path.join("utils", "_contextlib.py"),
)
"""Files of torch whose functions call those, and that users call by name: DTensor, state dicts, checkpoints."""
_LOCAL = frozenset({"_object_to_tensor", "_tensor_to_object", "destroy_process_group"})
"""Functions there that wait for no other rank: pickling may take long, and so may the end of a backend."""
SETTLED_S = 2.0
"""Time without a move before a device is asked."""


class Observer:
    """Looks at the thread that trains."""

    def __init__(
        self,
        rank: int,
        thread: int,
        host: str,
        limit_s: float | None,
        store_port: int | None = None,
    ) -> None:
        self.rank = rank
        self.thread = thread
        """The number of the thread that trains."""
        self.host = host
        self.limit_s = limit_s
        self._store_port = store_port

    def wait(self) -> Wait | None:
        """Return the wait of the thread that trains; None if it does not wait for other ranks."""
        now = time.monotonic()
        waiting = PROGRESS.waiting
        if waiting is not None:
            journal = waiting.journal
            return Wait(
                text=waiting.text,
                kind="fullshard",
                group=None if journal is None else group_key(journal),
                count=0 if journal is None else journal.count + (not waiting.is_noted),
                seconds=round(now - waiting.since, 1),
                is_in_vain=VERDICT.is_sought,
            )
        frame = sys._current_frames().get(self.thread)
        called = _collective_of_torch(frame)
        if called is not None:
            text, caller, group = called
            return Wait(
                text=text,
                caller=caller,
                kind="torch",
                group=group,
                count=0,
                seconds=self._since(now, frame),
            )
        return _device_wait(now)

    _place: tuple[CodeType | None, int] = (None, -1)
    _arrived = 0.0

    def _since(self, now: float, frame: FrameType | None) -> float:
        """Return the time for which the thread has been at one place, as far as this observer has looked."""
        place = (None, -1) if frame is None else (frame.f_code, frame.f_lasti)
        if place != self._place or self._arrived < PROGRESS.moved:
            self._place, self._arrived = place, now
        return round(now - self._arrived, 1)

    def answer(self, states: Mapping[int, str], words: Mapping[int, tuple[str, str]]) -> Answer:
        """Return the position of this rank, with the states and last words of other processes on this host."""
        wait = self.wait()
        if wait is not None and wait.kind == "torch" and not _has_keepalives():
            wait = replace(wait, traffic=traffic(self._store_port))
        groups = {group_key(journal): _group_answer(journal) for journal in journals()}
        return Answer(
            rank=self.rank,
            host=self.host,
            step=PROGRESS.step,
            phase=POSITION.phase,
            module=POSITION.module,
            line=line_of(sys._current_frames().get(self.thread)),
            moved=moves(),
            wait=wait,
            raised=POSITION.raised,
            has_caught=POSITION.raised is not None and is_past_handlers(self.thread),
            limit_s=self.limit_s,
            groups=groups,
            closed=_closed_connections(),
            states=states,
            words=words,
        )


def _has_keepalives() -> bool:
    return any(each.has_keepalives for each in backends_in_use())


def _group_answer(journal: Journal) -> GroupAnswer:
    count, digest = journal.now()
    return GroupAnswer(ranks=journal.ranks, count=count, digest=digest, marks=marks_of(journal))


def _closed_connections() -> Sequence[int]:
    """Return the ranks that this one waits for, and that have closed their connections to it.

    Not those of other process groups: a rank may have destroyed one before this rank does.
    """
    waiting = PROGRESS.waiting
    if waiting is None or waiting.journal is None:
        return ()
    return sorted(closed_connections(waiting.journal))


def history() -> History:
    """Return the last collectives of this rank, and the last steps."""
    found = {group_key(journal): journal for journal in journals()}
    return History(
        tags={name: dict(journal.last_tags()) for name, journal in found.items()},
        steps={
            name: [(step, count) for step, count, _ in list(journal.marks)]
            for name, journal in found.items()
        },
        backend=torch_border.pending_in_backend(),
    )


def moves() -> int:
    """Return a number that is another one after every collective and step."""
    return PROGRESS.step + sum(journal.count for journal in journals())


def group_key(journal: Journal) -> str:
    """Return a name of a process group that no other group has: torch names groups that are split off alike."""
    ranks = journal.ranks
    return f"{journal.name} ({len(ranks)} ranks, {ranks[0]} to {ranks[-1]})"


MARKED = (1, 16, 256)
"""Ranks compare the ends of the last steps that are multiples of these."""


def marks_of(journal: Journal) -> tuple[tuple[int, int, int], ...]:
    """Return step, count and digest at the end of the last step, and of some before it."""
    marks = list(journal.marks)
    found = {
        next((mark for mark in reversed(marks) if mark[0] % multiple == 0), None)
        for multiple in MARKED
    }
    return tuple(sorted(mark for mark in found if mark is not None))


def differs_at_steps(journal: Journal, marks: Iterable[tuple[int, int, int]]) -> bool:
    """Return whether a step has ended here after other collectives than the marks of another rank say."""
    own = {step: (count, digest) for step, count, digest in list(journal.marks)}
    return any(own.get(step, (count, digest)) != (count, digest) for step, count, digest in marks)


def is_past_handlers(thread: int) -> bool:
    """Return whether a thread runs and handles no exception: any that it has raised before is dealt with."""
    handled = sys._current_exceptions()
    if thread not in handled:
        return False  # it has ended
    found = handled[thread]
    return found in (None, (None, None, None))


# --- the Python line --------------------------------------------------------------------------------


def line_of(frame: FrameType | None) -> str:
    """Return the innermost line of the user's program, or else the innermost one: "train.py:12 in main"."""
    innermost = frame
    while frame is not None and not _is_of_user(frame.f_code):
        frame = frame.f_back
    found = frame or innermost
    return "" if found is None else _line_text(found.f_code, found.f_lineno)


def line_of_traceback(traceback: TracebackType | None) -> str:
    """Return the innermost line of the user's program in an exception, or else its outermost one."""
    found = traceback
    while traceback is not None:
        if _is_of_user(traceback.tb_frame.f_code):
            found = traceback
        traceback = traceback.tb_next
    return "" if found is None else _line_text(found.tb_frame.f_code, found.tb_lineno)


def _is_of_user(code: CodeType) -> bool:
    """Return whether code is neither of torch, nor of fullshard, nor of Python's library.

    Python's library stands between the others: a context manager of ours is entered by ``contextlib``.
    """
    name = code.co_filename
    if name.startswith((_TORCH, _FULLSHARD, "<")):
        return False
    return not name.startswith(_PYTHON) or name.startswith(_INSTALLED)


def _line_text(code: CodeType, number: int) -> str:
    file = os.path.join(*code.co_filename.split(os.sep)[-2:])
    return f"{file}:{number} in {code.co_name}"


def _collective_of_torch(frame: FrameType | None) -> tuple[str, str, str | None] | None:
    """Return the function of torch.distributed that a thread is in, its caller, and its process group if that is known.

    Only if the innermost frame is one that waits for ranks: torch.distributed has much that works for long by itself
    (checkpoints, tensor operations). Or if it waits for a collective that was called before, with ``async_op=True``.
    """
    operation = None
    if frame is not None and torch_border.is_observed_wait(frame):
        operation, frame = torch_border.operation_waited_for(frame), frame.f_back
    while frame is not None and frame.f_code.co_filename in _DISPATCH:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename not in _COMMUNICATING:
        # Its caller, and the process group, are not known any more.
        return None if operation is None else (f"{ASYNC_WAIT} for {operation}", "", None)
    outermost = innermost = frame
    while frame is not None and frame.f_code.co_filename in (*_COMMUNICATING, *_DISPATCH):
        if frame.f_code.co_filename in _COMMUNICATING:
            outermost = frame
        frame = frame.f_back
    if {innermost.f_code.co_name, outermost.f_code.co_name} & _LOCAL:
        return None
    found = outermost.f_locals.get("group")
    group = found if isinstance(found, dist.ProcessGroup) else dist.group.WORLD
    return outermost.f_code.co_name, _caller(frame), group_name(group)


def _caller(frame: FrameType | None) -> str:
    """Return the outermost public function of DTensor, state dicts or checkpoints that a thread is in; "" for none."""
    found = ""
    while frame is not None and frame.f_code.co_filename.startswith((*_CALLING, *_DISPATCH)):
        name = frame.f_code.co_name
        if name[:1] not in "_<" and name not in ("apply", "decorate_context"):
            found = name
        frame = frame.f_back
    return found


def group_name(group: dist.ProcessGroup | None) -> str | None:
    """Return the key of a process group, as `group_key` has it."""
    if group is None:
        return None
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError):  # destroyed since
        return None
    return f"{group.group_name} ({len(ranks)} ranks, {ranks[0]} to {ranks[-1]})"


# --- devices ----------------------------------------------------------------------------------------


def _device_wait(now: float) -> Wait | None:
    """Return a wait of the device: nothing was called for some time, and the streams of collectives are not done."""
    seconds = now - PROGRESS.moved
    if seconds < SETTLED_S or not any(context.is_behind() for context in comm_contexts()):
        return None
    last = PROGRESS.journal
    if last is None or last.last_tag is None:
        return None
    return Wait(
        text=last.last_tag.text,
        kind="device",
        group=group_key(last),
        count=last.count,
        seconds=round(seconds, 1),
    )
