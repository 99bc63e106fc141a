"""The watchdog's thread: its questions, and its actions after a judgement.

    every 0.25 s   looks at this process: has the thread that trains waited for longer than the patience?
    every tick     one operation on the store: has another rank asked? A tick is a second, more in a large world.
                   Are the processes of the other ranks on this host alive?
                   The position is published, for the case that the process is killed.
    every 5 ticks  compares its journal with that of the rank before it in each process group

If the store does not answer, each rank judges alone, by what it sees on its own host and what others there have told it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import weakref
from collections import deque
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from fullshard import torch_border
from fullshard.divergence.journal import PROGRESS, journals
from fullshard.divergence.verdict import VERDICT
from fullshard.divergence.watchdog import last_words, process_end, release
from fullshard.divergence.watchdog.alone import LostStore, judge_alone
from fullshard.divergence.watchdog.answers import Answer, Wait
from fullshard.divergence.watchdog.judge import AGAIN, DIVERGED, SLOW, Judgement
from fullshard.divergence.watchdog.observation import (
    Observer,
    differs_at_steps,
    group_key,
    history,
    line_of_traceback,
    marks_of,
    moves,
)
from fullshard.divergence.watchdog.peers import Peers
from fullshard.divergence.watchdog.probes import register
from fullshard.divergence.watchdog.rounds import Member, Rounds, tick_of
from fullshard.divergence.watchdog.silences import LEASE_S
from fullshard.divergence.watchdog.stalls import FIRST_REPEAT_S, StallReports
from fullshard.divergence.watchdog.store_client import (
    LIMIT_S,
    OpenStore,
    StoreClient,
    StoreFailedError,
    StoreOperations,
)
from fullshard.mesh.backends import abort_all
from fullshard.transport.monitor import POSITION

logger = logging.getLogger("fullshard")

LOOK_S = 0.25
"""Time between the thread's looks at its own process, if that stands still or if ranks ask each other."""
REST_S = 1.0
"""Time between looks while all is well. Each look takes the interpreter lock from the thread that trains, which then has to be
woken up."""
PATIENCE_S = 5.0
MAX_PATIENCE_S = 7.0
"""The patience grows with the steps up to this limit, so that a proven divergence is found within 15 s."""
FINDING_S = 20.0
"""Time for which a watchdog looks for other ranks on its host at every tick; later, it does so less often."""
REPEAT_S = 10.0
"""Time after which a rank that still waits asks again."""
AGAIN_S = 1.0
"""Time that the asker of a round waits before it looks whether any rank has moved."""
URGENT_S = 6.0
URGENT_ROUNDS = 2
"""Time for which, and number of rounds in which, a rank that has lost another one asks why, before it gives up."""
CLOSED_S = 2.0
"""Time for which a rank that waits looks for the reason why the store has closed the connection."""
FAREWELL_S = 4.0
"""Longest delay of a process's end by a store that does not answer."""
KNOWN_S = 3.0
"""Longest time that a rank with a verdict waits until all others that run know it, before it raises."""
RELEASE_S = 1.0
"""Time that a blocked thread has to come back by itself, before it is made to."""
PREFIX = "fullshard/watchdog/"
"""The prefix of all keys in the store."""
EXIT_S = 60.0
"""Time that a blocked thread has to come back after its collectives were aborted, before the process is ended."""


class Current:
    """The watchdog of this process."""

    lock = threading.Lock()
    watchdog: Watchdog | None = None
    forgotten: list[Watchdog] = []  # noqa: RUF012
    """In a forked process: the watchdogs of its parent. Their stores must not be destroyed here."""


# --- the thread -------------------------------------------------------------------------------------


class Watchdog:
    """Watches this process as a rank of one default process group, and ends with it."""

    def __init__(self, group: ProcessGroup, thread: int) -> None:
        self.group = weakref.ref(group, lambda _: self.end())
        self._wake = threading.Event()
        self._wake.set()  # others look for this process from now on
        self._is_over = False
        self._final: tuple[BaseException | None] | None = None
        """The end of the process, once known: the exception, or None if its program is done."""
        self._has_told = False
        self._said_farewell = threading.Event()

        rank, world = group.rank(), group.size()
        store = torch_border.default_store()
        self._port = torch_border.store_port(store)
        self._mailbox = last_words.Mailbox()
        self._own = register(rank, self._mailbox.address)
        timeout = torch_border.timeout_of(group)
        limit = os.environ.get("FULLSHARD_WATCHDOG_ABORT")
        limit_s = float(limit) if limit else timeout.total_seconds() if timeout else None
        self._observer = Observer(rank, thread, self._own.text(), limit_s, self._port)
        self._lease_s = float(os.environ.get("FULLSHARD_WATCHDOG_LEASE") or LEASE_S)
        """Time for which another rank, or the store, may be silent before that counts as proof."""
        self._least_patience = float(os.environ.get("FULLSHARD_WATCHDOG_PATIENCE") or PATIENCE_S)
        self._tick_s = tick_of(world)
        self._is_small = world <= 64
        """Whether positions are published at every tick, not only at every fifth."""

        stores = [store]  # the thread must not keep a store alive that serves others
        self._store = StoreClient(lambda: torch_border.own_client(stores.pop()), PREFIX)
        self._rounds = Rounds(self._store, self._member(rank, world))
        self.registered = threading.Event()
        """Set when others on this host can find this process."""
        self._searches: deque[threading.Event] = deque()
        """Events of threads that wait until the others on this host have been found; they are set then."""
        self._peers = Peers(self._store, self._own, self._mailbox)
        self._gone_before: set[int] = set()
        """Ranks on this host that were gone when the store last answered."""
        self._seen: dict[int, str] = {}
        """The last positions of some other ranks."""
        self._published: tuple[str, dict[str, tuple[int, int]]] = ("", {})
        """The position that was published last."""
        self._ahead: dict[str, tuple[int, int]] = {}
        """A number of calls that another rank had come to before this one, and the digest after them, by process group."""

        self._init_observations()
        VERDICT.wake = self._wake
        VERDICT.message, VERDICT.taken, VERDICT.watched = None, False, True
        VERDICT.wanted.clear()
        POSITION.raised = None  # with another process group
        self.thread = threading.Thread(target=self._run, name="fullshard-watchdog", daemon=True)
        self.thread.start()

    def _init_observations(self) -> None:
        """Begin with nothing seen."""
        self._began = now = time.monotonic()
        self._next_tick = self._next_beat = self._next_poll = now
        self._next_ask = 0.0
        self._is_urgent = False
        """Whether this rank has lost another one, and asks why."""
        self._urgent_until = 0.0
        self._urgent_rounds = 0
        self._is_suspicious = False
        """Whether this rank's journal differs from another one's."""
        self._failed_since: float | None = None
        """The time at which the store last began to fail."""
        self._next_complaint = 0.0
        """The time at which this rank says next that the store does not answer."""
        self._moves, self._moved = moves(), now
        self._gaps: deque[float] = deque(maxlen=16)
        """Lengths of the last times in which nothing moved."""
        self._reports = StallReports()
        self._stands_still = True
        """Whether nothing has moved between the last two looks."""

    def _member(self, rank: int, world: int) -> Member:
        return Member(
            rank=rank,
            world=world,
            answer=self._answer,
            history=history,
            clock=time.monotonic,
            lease_s=self._lease_s,
            is_gone=lambda other: self._peers.is_gone(other),
        )

    def _answer(self) -> Answer:
        return self._observer.answer(self._peers.states, self._peers.words)

    def trains_in(self, thread: int) -> bool:
        """Return whether this is the thread that is watched."""
        return thread == self._observer.thread

    def end(self) -> None:
        """Stop watching: the process group is gone, and so is what was found out about it."""
        self._is_over = True
        if Current.watchdog is self or Current.watchdog is None:
            VERDICT.message, VERDICT.taken, VERDICT.watched = None, False, False
        self._wake.set()

    def forget(self) -> None:
        """Do nothing any more. In a forked process, which has no thread; the thread may have held the lock of its event."""
        self._is_over = True
        self._wake = threading.Event()
        self._mailbox.close()

    def find_peers(self) -> None:
        """Find the other ranks on this host now. Called by the thread that trains, which waits for some seconds at most."""
        found = threading.Event()
        self._searches.append(found)
        self._wake.set()
        if self.thread.is_alive():
            found.wait(LIMIT_S)

    def farewell(self, error: BaseException | None) -> None:
        """Say that this process ends, and why. Called by the thread that trains, at the end."""
        if self._final is None:
            # Here and not in the watchdog's thread, which may be waiting for the store.
            self._tell(error)
            self._final = (error,)
        self._wake.set()
        done = -1
        while self._store.num_done != done:  # on a crowded machine, each operation may take long
            done = self._store.num_done
            if self._said_farewell.wait(FAREWELL_S):
                break
        # A thread that comes back from torch while the interpreter ends would abort the process.
        if not self._store.is_stuck:
            self.thread.join(FAREWELL_S)
            self._store.thread.join(FAREWELL_S)

    def _tell(self, error: BaseException | None) -> None:
        """Tell the others on this host that this rank ends, and why, unless they know. It needs no store."""
        if VERDICT.message is None and not self._has_told:
            self._has_told = True
            self._peers.tell(*last_words_of(error))

    def _run(self) -> None:
        try:
            while not self._has_to_end():
                self._wake.wait(LOOK_S if self._is_alert else REST_S)
                self._wake.clear()
                if self._final is None and not self._is_over:
                    self._look(time.monotonic())
            self._say_farewell()
        except Exception:
            logger.exception("The watchdog of rank %d has failed; it stops.", self._own.rank)
        finally:
            if Current.watchdog is self:
                VERDICT.watched = False
            self._said_farewell.set()
            self._store.close()
            self._mailbox.close()

    @property
    def _is_alert(self) -> bool:
        """Whether something may be wrong, or is to be done soon."""
        return (
            self._stands_still
            or self._rounds.is_running
            or self._is_urgent
            or self._is_suspicious
            or self._rounds.must_ask_again
            or self._failed_since is not None
            or not self.registered.is_set()
        )

    def _has_to_end(self) -> bool:
        return not self._watches_still() or self._final is not None or VERDICT.message is not None

    def _watches_still(self) -> bool:
        """Return whether the process group that is watched is still the default one; end if it is not."""
        if not self._is_over and self.group() is not dist.group.WORLD:
            self.end()
        return not self._is_over

    def _say_farewell(self) -> None:
        if VERDICT.message is not None:
            return  # all ranks know
        (error,) = self._final or (None,)
        try:
            self._register()
            self._tell(error)
            say_farewell(self._store, self._rounds, self._own.rank, error)
        except StoreFailedError as failure:
            if failure.is_late and self._store.num_done == 0:
                # The store has not even accepted this watchdog's connection yet, and no rank knows this process. A message
                # of the client of the thread that trains reaches the store later, also if this process has ended by then.
                with contextlib.suppress(Exception):
                    store = OpenStore(torch_border.default_store(), PREFIX)
                    _leave_last_words(store, self._own.rank, error)
            # Otherwise others find out by themselves.

    # --- looking ------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        self._notice_moves(now)
        wait = self._wait(now)
        try:
            self._use_store(now, wait)
            self._failed_since = None
            self._gone_before = self._peers.gone
        except StoreFailedError as error:
            self._judge_alone(error, wait)

    def _notice_moves(self, now: float) -> None:
        count = moves()
        self._stands_still = count == self._moves
        if self._stands_still:
            self._reports.grow()
            return
        self._gaps.append(now - self._moved)
        self._moves, self._moved = count, now
        if self._reports.end():
            self._next_ask = 0.0

    def _wait(self, now: float) -> Wait | None:
        """Return the wait of the thread that trains; most of the time without looking at it."""
        if PROGRESS.waiting is None and now - PROGRESS.moved < 1.0:
            return None
        return self._observer.wait()

    @property
    def _patience(self) -> float:
        longest = max(self._gaps, default=0.0)
        grown = min(3 * longest, MAX_PATIENCE_S)
        return max(self._least_patience, grown)

    def _use_store(self, now: float, wait: Wait | None) -> None:
        self._register()
        if self._searches:
            self._find_peers()
        if self._rounds.is_running:
            if now >= self._next_poll:
                self._peers.look()
                self._next_poll = now + LOOK_S * self._tick_s
                judgement = self._rounds.poll()
                if judgement is not None:
                    self._follow(judgement, now)
            return
        if self._should_ask(now, wait):
            self._peers.find()
            self._peers.look()
            self._rounds.ask()
            return
        if now >= self._next_tick:
            self._next_tick = now + self._tick_s
            if now - self._began < FINDING_S:
                self._peers.find()
            self._peers.look()
            news = self._position() if self._is_small or now >= self._next_beat else None
            self._rounds.poll(news)
            if now >= self._next_beat or PROGRESS.step <= 2:
                self._next_beat = now + 5 * self._tick_s
                self._compare_journals()

    def _register(self) -> None:
        if not self.registered.is_set():
            self._peers.register()
            self._rounds.join()
            self.registered.set()

    def _find_peers(self) -> None:
        searches = [self._searches.popleft() for _ in range(len(self._searches))]
        try:
            self._peers.find()
        finally:
            for found in searches:
                found.set()

    def _should_ask(self, now: float, wait: Wait | None) -> bool:
        if VERDICT.wanted.is_set():
            VERDICT.wanted.clear()
            self._is_urgent, self._urgent_until, self._urgent_rounds = True, now + URGENT_S, 0
            return True
        if wait is not None and wait.seconds >= 1.0 and self._peers.has_newly_gone():
            return True  # also if it was only slow when this rank last asked
        if now < self._next_ask:
            return False
        if self._rounds.must_ask_again or self._is_suspicious or self._is_urgent:
            self._is_suspicious = False
            return True
        return wait is not None and wait.seconds >= self._patience

    # --- the store ------------------------------------------------------------------------------------

    def _position(self) -> tuple[str, str] | None:
        """Return the position as a key and a value to publish, if it has changed: the last that is known if this process is killed."""
        last = PROGRESS.journal.last_tag if PROGRESS.journal is not None else None
        called = f", last called {last.text}" if last is not None else ""
        text = f"{POSITION.text()}{called}"
        found = journals()
        calls = {group_key(journal): journal.now() for journal in found}
        if (text, calls) == self._published:
            return None
        self._published = text, calls
        marks = {group_key(journal): marks_of(journal) for journal in found}
        text = f"{text}, at {time.strftime('%H:%M:%S')}"
        position = {"text": text, "marks": marks, "calls": calls}
        return f"position/{self._own.rank}", json.dumps(position)

    def _compare_journals(self) -> None:
        """Compare the journals with those of the ranks before this one: at the ends of equal steps, and after as many calls."""
        self._peers.find()
        for journal in journals():
            before = journal.ranks[journal.rank - 1]
            if before != self._own.rank:
                found = self._store.find(f"position/{before}")
                theirs: dict[str, Any] = json.loads(found) if found else {}
                self._seen[before] = theirs.get("text", "")
                name = group_key(journal)
                self._is_suspicious |= differs_at_steps(
                    journal, theirs.get("marks", {}).get(name, ())
                )
                # Collectives that this rank has not called yet are compared when it has.
                count, digest = self._ahead.setdefault(
                    name, tuple(theirs.get("calls", {}).get(name, (0, 0)))
                )
                if count <= journal.count:
                    del self._ahead[name]
                    self._is_suspicious |= journal.digest_after(count) not in (None, digest)

    # --- judgements -----------------------------------------------------------------------------------

    def _follow(self, judgement: Judgement, now: float) -> None:
        self._next_ask = now + REPEAT_S * self._tick_s
        wait, limit_s = self._observer.wait(), self._observer.limit_s
        if wait is not None and limit_s is not None and wait.seconds < limit_s:
            self._next_ask = min(self._next_ask, now + limit_s - wait.seconds)
        if judgement.kind == AGAIN:
            self._next_ask = now + (AGAIN_S if self._rounds.must_ask_again else 3 * AGAIN_S)
        elif judgement.kind == DIVERGED:
            self._diverge(judgement.message)
        elif self._is_urgent:
            self._next_ask = now + LOOK_S
            self._urgent_rounds += 1
            if self._urgent_rounds >= URGENT_ROUNDS and now >= self._urgent_until:
                self._is_urgent, VERDICT.is_unknown = False, True
        elif judgement.kind == SLOW:
            speaks = self._peers.is_first_besides(judgement.culprits)
            self._reports.note(judgement, now - self._moved, now, speaks=speaks)

    def _judge_alone(self, error: StoreFailedError, wait: Wait | None) -> None:
        """Judge by what is seen and heard on this host, since the store does not answer."""
        now = time.monotonic()
        self._failed_since = since = self._failed_since or now
        # A connection that is closed proves that the store has ended. Silence does not: see `silences`.
        is_given_up = now - since >= (self._lease_s if error.is_late else CLOSED_S)
        self._peers.look(patiently=not is_given_up)
        if self._peers.verdict is not None:
            # The rank that reported it may have ended since. That is not a second divergence.
            self._diverge(self._peers.verdict)
            return
        is_urgent = VERDICT.wanted.is_set() or self._is_urgent
        if wait is None or (wait.seconds < self._patience and not is_urgent):
            return  # this rank waits for no other; the store may be gone because all is done
        if error.is_late and now - since >= self._patience and now >= self._next_complaint:
            self._next_complaint = now + FIRST_REPEAT_S
            logger.warning(
                "Rank %d waits, and %s, for %.0f s so far. Nothing is proven, so it goes on waiting, for %.0f s "
                "(FULLSHARD_WATCHDOG_LEASE).",
                *(self._own.rank, error, now - since, self._lease_s),
            )
        lost = LostStore(
            text=str(error),
            port=self._port,
            is_late=error.is_late,
            is_given_up=is_given_up,
            gone_before=self._gone_before,
        )
        own = self._answer()
        message = judge_alone(own, self._peers.absences(self._seen), lost)
        if message is not None:
            self._diverge(message)

    def _diverge(self, message: str) -> None:
        """Say that ranks have diverged, and bring the thread that trains back if it waits for them."""
        logger.error("%s", message)
        self._peers.tell(last_words.DIVERGED, message)  # before anything of this process can end
        wait = self._observer.wait()
        if wait is not None and wait.kind == "torch":
            # Functions of torch.distributed handle the error of the backend, to log it. There, this one is raised instead.
            release.raise_in(self._observer.thread, message)
        # All ranks know of it before the first one raises, and ends: its end would be an error of the backend for others.
        self._wait_until_all_know()
        if not self._watches_still():
            return  # the program has left the process group since, and may have made another one
        VERDICT.message = message
        if self._comes_back(RELEASE_S):
            if not VERDICT.taken and torch_border.pending_in_backend():
                # It seems to run, but may be blocked in a launch, or wait for the device. What that computes from now on is void.
                abort_all()
                release.raise_in(self._observer.thread, message)
            return
        release.abort_collectives(self._port)
        if self._comes_back(RELEASE_S):
            return
        if wait is not None and wait.kind != "torch":
            release.raise_in(self._observer.thread, message)
        release.leave_store(self._port)  # no other rank needs it: all know
        if not self._comes_back(EXIT_S):
            logger.error(
                "Rank %d has not returned from an aborted collective; the process ends.",
                self._own.rank,
            )
            logging.shutdown()
            os._exit(1)

    def _wait_until_all_know(self) -> None:
        pause = LOOK_S * self._tick_s
        end = time.monotonic() + max(KNOWN_S, 1.5 * pause)
        try:
            self._rounds.say_known()
            while not self._rounds.all_know() and time.monotonic() < end:
                time.sleep(pause)
        except StoreFailedError:
            time.sleep(1.5 * pause)  # others find out by themselves, at about the same time

    def _comes_back(self, seconds: float) -> bool:
        """Wait until the thread that trains has raised the verdict, or waits for no rank; return whether it does."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if VERDICT.taken or self._observer.wait() is None or self._is_over or self._final:
                return True
            time.sleep(0.05)
        return False


# --- last words ---------------------------------------------------------------------------------------


def say_farewell(
    store: StoreOperations, rounds: Rounds, rank: int, error: BaseException | None
) -> None:
    """Tell the others why a rank takes part in no more rounds."""
    _leave_last_words(store, rank, error)
    rounds.hand_over()
    if error is not None:
        rounds.open_for_others()


def _leave_last_words(store: StoreOperations, rank: int, error: BaseException | None) -> None:
    store.set(f"final/{rank}", json.dumps(last_words_of(error)), FAREWELL_S)
    store.add("finals", 1)


def last_words_of(error: BaseException | None) -> tuple[str, str]:
    """Return the state in which a rank ends, and the reason."""
    return ("left", "") if error is None else ("raised", _place_of(error))


def _place_of(error: BaseException) -> str:
    """Return an exception that ends this process, and the place where it was raised."""
    place = POSITION.raised_in if POSITION.raised else POSITION.text()
    line = line_of_traceback(error.__traceback__)
    where = place if place.startswith("outside") else f"in {place}"
    return f"{process_end.line_about(error)}, {where}{', at ' if line else ''}{line}"
