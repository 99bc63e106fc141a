"""Plans of one model, several at a time: a search makes many, and each keeps one core busy.

The processes are forked after the first plan, so they know its operations (`known_operations`) and import nothing. A fork
is safe only where there is one thread: another could hold a lock that the child then waits for forever. Where there are
more, or no `fork`, or one core, plans are made one after the other. The answers are the same. If a process is killed, the first one
makes the rest of the plans itself.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar, cast

from fullshard.programs.plan_tool.planned_step import PlannedStep
from fullshard.programs.plan_tool.question import Question
from fullshard.programs.train.model_source import ModelSource

MAX_PROCESSES = 8
"""A search has rarely more plans to make at a time."""

Answer = TypeVar("Answer")
Plan: TypeAlias = Callable[[Question, ModelSource], Answer]
"""`planning.planned` or `planning.estimated`, or what calls these."""


class Planner(Protocol):
    """Answers questions about one model, in their order."""

    def __call__(self, plan: Plan[Answer], questions: Sequence[Question], /) -> Iterator[Answer]:
        """Yield the answers of ``plan``."""


def one_by_one(source: ModelSource) -> Planner:
    """Return a planner that makes each plan when it is asked for."""

    def answers(plan: Plan[Answer], questions: Sequence[Question], /) -> Iterator[Answer]:
        return (plan(question, source) for question in questions)

    return answers


@contextmanager
def several_at_a_time(source: ModelSource) -> Iterator[Planner]:
    """Yield a planner that uses several processes, if that is safe; their traces stay there."""
    processes = min(_num_cores(), MAX_PROCESSES)
    if processes < 2 or not _is_safe_to_fork():
        yield one_by_one(source)
        return
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("fork"), initializer=_begin, initargs=(source,)
    )

    def answers(plan: Plan[Answer], questions: Sequence[Question], /) -> Iterator[Answer]:
        done = 0
        try:
            for answer in pool.map(functools.partial(_answer, plan), questions):
                done += 1
                yield answer
        except BrokenProcessPool:  # a process was killed, for lack of memory: go on in this one
            yield from one_by_one(source)(plan, questions[done:])

    try:
        yield answers
    finally:
        pool.shutdown(cancel_futures=True)


def _num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _is_safe_to_fork() -> bool:
    """Return whether this process has one thread, also of those that Python has not started."""
    tasks = Path("/proc/self/task")
    return (
        "fork" in multiprocessing.get_all_start_methods()
        and threading.active_count() == 1
        and tasks.is_dir()
        and sum(1 for _ in tasks.iterdir()) == 1
    )


_sources: list[ModelSource] = []
"""The model, in a forked process."""


def _begin(source: ModelSource) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
    _sources.append(source)


def _answer(plan: Plan[Answer], question: Question) -> Answer:
    answer = plan(question, _sources[0])
    if not isinstance(answer, PlannedStep):
        return answer
    # Parts that only a page shows stay here: to send them would take longer to send than all else.
    playback = replace(answer.playback, launches=[])
    without = replace(answer, trace=None, memory_moments=(), playback=playback)
    return cast("Answer", without)
