"""The watchdog of this process: its start, its news of the process's end, and its absence in a forked process."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref

import torch.distributed as dist
from torch.distributed import ProcessGroup

from fullshard import torch_border
from fullshard.divergence.journal import note_exception
from fullshard.divergence.verdict import VERDICT
from fullshard.divergence.watchdog import process_end
from fullshard.divergence.watchdog.answers import Answer
from fullshard.divergence.watchdog.observation import history
from fullshard.divergence.watchdog.peers import Peers
from fullshard.divergence.watchdog.probes import register
from fullshard.divergence.watchdog.rounds import Member, Rounds
from fullshard.divergence.watchdog.store_client import LIMIT_S, OpenStore
from fullshard.divergence.watchdog.thread import (
    FAREWELL_S,
    PREFIX,
    Current,
    Watchdog,
    last_words_of,
    say_farewell,
)
from fullshard.mesh.backends import backends_in_use, backends_of
from fullshard.transport.streams import comm_contexts

SHUTDOWN_LOOK_S = 0.005
"""Time between looks whether devices are done, before a process group is destroyed."""


def start() -> None:
    """Watch the ranks of the default process group, unless that is done already or is turned off."""
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None or os.environ.get("FULLSHARD_WATCHDOG") == "0":
        return
    with Current.lock:
        running = Current.watchdog
        if (running is not None and running.group() is group) or not _can_be_watched(group):
            return
        if running is not None:
            running.end()
        if any(not each.is_on_stream for each in backends_in_use()):  # waits block the host
            torch_border.observe_waits()
        if any(each.has_aborts for each in backends_in_use()):
            torch_border.before_shutdown(_await_devices)
        Current.watchdog = Watchdog(group, thread=threading.get_ident())
        process_end.at_end(_process_ends, of_thread=_thread_ends, forked=_forget)


class _Announced:
    """The announcement of this process before it has a watchdog."""

    pid = 0
    """The process in which the functions for its end have been registered."""
    group: weakref.ref[ProcessGroup] | None = None
    """The default process group whose ranks on this host can see this process."""


def announce() -> None:
    """Let this process say when it ends, and let others on its host see whether it runs. Nothing runs for that."""
    if os.environ.get("FULLSHARD_WATCHDOG") == "0":
        return
    if not _Announced.pid:
        process_end.at_unwatched_end(_unwatched_process_ends)
        _Announced.pid = os.getpid()
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None or (_Announced.group is not None and _Announced.group() is group):
        return
    _Announced.group = weakref.ref(group)
    watchdog = Current.watchdog
    if (watchdog is None or watchdog.group() is not group) and _can_be_watched(group):
        with contextlib.suppress(
            RuntimeError
        ):  # the store is gone, and the next caller that needs it says so
            store = OpenStore(torch_border.default_store(), PREFIX)
            Peers(store, register(group.rank())).announce()


def _await_devices() -> None:
    """Wait for collectives that devices have left to do before a process group is destroyed. Not if an error is on its way.

    torch waits for them, too, and holds meanwhile what an abort needs.

    Raises:
        DivergenceError: they were aborted, or will never end.
    """
    while VERDICT.watched and not VERDICT.taken and sys.exc_info()[1] is None:
        VERDICT.raise_if_diverged()
        if not any(context.is_behind() for context in comm_contexts()):
            return
        time.sleep(SHUTDOWN_LOOK_S)


def introduce() -> None:
    """Wait until the other ranks on this host can find this one; for some seconds at most.

    [Note: acquaintance]
    A rank calls it before the ranks compare their models, and `find_peers` after that. So when a rank comes to its
    first collective, it knows all processes on its host that take part, and when one ends, the others need no store to
    see that. The store may end with it.
    """
    watchdog = Current.watchdog
    if watchdog is not None and watchdog.thread.is_alive():
        watchdog.registered.wait(LIMIT_S)


def find_peers() -> None:
    """Let this rank find the others on its host: [Note: acquaintance]."""
    if Current.watchdog is not None:
        Current.watchdog.find_peers()


def _can_be_watched(group: ProcessGroup) -> bool:
    backends = backends_of(group).values()
    is_alone = group.size() == 1 and not any(each.hangs_alone for each in backends)
    return not is_alone and all(each.ranks == "processes" for each in backends)


def _process_ends(error: BaseException | None) -> None:
    watchdog = Current.watchdog
    if watchdog is not None:
        watchdog.farewell(error)


def _thread_ends(thread: int, error: BaseException) -> None:
    """Note the exception that ends a thread, if it is the one that trains: others need not wait for it."""
    watchdog = Current.watchdog
    if watchdog is not None and watchdog.trains_in(thread):
        note_exception(error)


def _unwatched_process_ends(error: BaseException | None) -> None:
    """Say that this process ends; its program has initialised a process group and run no sharded model."""
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None or os.environ.get("FULLSHARD_WATCHDOG") == "0" or not _can_be_watched(group):
        return
    rank, world = group.rank(), group.size()

    def say() -> None:
        with contextlib.suppress(
            Exception
        ):  # the store is gone: so are the ranks that would have listened
            store = OpenStore(torch_border.default_store(), PREFIX)
            peers = Peers(store, register(rank))
            peers.register()
            peers.find()
            member = Member(
                rank=rank,
                world=world,
                answer=lambda: Answer(rank=rank),
                history=history,
                clock=time.monotonic,
            )
            rounds = Rounds(store, member)
            rounds.join()
            peers.tell(*last_words_of(error))
            say_farewell(store, rounds, rank, error)

    thread = threading.Thread(target=say, name="fullshard-farewell", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # newer interpreters start no thread at their end
        say()
    else:
        thread.join(FAREWELL_S)


def _forget() -> None:
    """Let a forked process begin without a watchdog."""
    if Current.watchdog is not None:
        Current.watchdog.forget()
        Current.forgotten.append(Current.watchdog)
    Current.lock = threading.Lock()
    Current.watchdog = None
    VERDICT.wake = None  # the thread may have held its lock
    VERDICT.message, VERDICT.taken, VERDICT.watched = None, False, False
