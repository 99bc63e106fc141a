"""The other ranks on this host: their registrations, whether their processes run, and their last words."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from fullshard.divergence.watchdog.answers import (
    ALIVE,
    STOPPED,
    Absence,
    Registration,
    encode,
    registration_from,
)
from fullshard.divergence.watchdog.last_words import DIVERGED, Mailbox, Words, send
from fullshard.divergence.watchdog.probes import state_of
from fullshard.divergence.watchdog.store_client import StoreOperations

STOPPED_S = 3.5
"""Time for which a process must be stopped to count as gone. Less than the patience, so that the first question finds it."""


class Peers:
    """The ranks whose processes this one can see.

    All ranks of a host write themselves into one list of the store, one after the other. No rank reads the
    registrations of all ranks: in a large world that would be too much.
    """

    def __init__(
        self, store: StoreOperations, own: Registration, mailbox: Mailbox | None = None
    ) -> None:
        """Belong to them as ``own``; ``mailbox`` is the one that the registration names."""
        self._store = store
        self._own = own
        self._mailbox = mailbox
        self._key = f"host/{own.host_key}"
        self._peers: dict[int, Registration] = {}
        self._read: set[int] = set()
        """Places of the list that have been read."""
        self.states: dict[int, str] = {}
        """Their states when they were last looked at."""
        self._stopped_since: dict[int, float] = {}
        """The time at which a stopped process was first seen so, by rank."""
        self._gone: set[int] = set()
        """Ranks that were found dead or stopped before."""
        self.words: dict[int, tuple[str, str]] = {}
        """The last words of ranks before they left, as state and text."""
        self.verdict: str | None = None
        """The reason why ranks have diverged: the first verdict that another rank has told."""

    def announce(self) -> None:
        """Let the others on this host see whether this process runs; it answers none of their questions yet."""
        self._store.set(f"announced/{self._own.rank}", encode(self._own))
        self._enlist()

    def register(self) -> None:
        """Say that this process is a rank on this host, and answers."""
        rank = self._own.rank
        self._store.set(f"final/{rank}", "")  # of an earlier process group that had this store
        self._store.set(f"registration/{rank}", encode(self._own))
        self._enlist()

    def _enlist(self) -> None:
        place = self._store.add(self._key, 1)
        self._store.set(f"{self._key}/{place}", encode(self._own))

    def find(self) -> None:
        """Find ranks that have registered since.

        A place may stay empty for good: its rank has ended before it wrote itself there, or the store answered so late
        that it has taken another place.
        """
        new = set(range(1, self._store.add(self._key, 0) + 1)) - self._read
        if new and not self._store.has(self._keys(new)):
            new = {place for place in new if self._store.has(self._keys({place}))}
        if new:
            found = map(registration_from, self._store.get_all(self._keys(new)))
            self._peers |= {each.rank: each for each in found if each.rank != self._own.rank}
            self._read |= new

    def _keys(self, places: Iterable[int]) -> list[str]:
        return [f"{self._key}/{place}" for place in sorted(places)]

    def look(self, *, patiently: bool = True) -> None:
        """Look whether their processes run, and read their last words.

        ``patiently``: one that has just been stopped may go on at once, and counts as running.
        """
        now = time.monotonic()
        states = {rank: state_of(peer) for rank, peer in self._peers.items()}
        stopped = [rank for rank, state in states.items() if state == STOPPED]
        self._stopped_since = {rank: self._stopped_since.get(rank, now) for rank in stopped}
        for rank, since in self._stopped_since.items():
            if patiently and now - since < STOPPED_S:
                states[rank] = ALIVE
        self.states = states
        self._hear()  # now the words of all are there that were found dead

    def tell(self, state: str, text: str) -> None:
        """Tell the others this rank's last words."""
        words = Words(rank=self._own.rank, state=state, text=text)
        for peer in list(self._peers.values()):  # another thread may find one
            if peer.mailbox:
                send(peer.mailbox, words)

    def _hear(self) -> None:
        for words in self._mailbox.read() if self._mailbox is not None else ():
            if words.state == DIVERGED:
                self.verdict = self.verdict or words.text
            else:
                self.words.setdefault(words.rank, (words.state, words.text))

    @property
    def gone(self) -> set[int]:
        """The ranks whose processes were found dead or stopped."""
        return {rank for rank, state in self.states.items() if state != ALIVE}

    def is_first_besides(self, ranks: Collection[int]) -> bool:
        """Return whether this rank is the first one on its host that is none of the given ones."""
        others = {self._own.rank, *self._peers}.difference(ranks)
        return min(others, default=None) == self._own.rank

    def is_gone(self, rank: int) -> bool:
        """Return whether a process was found dead or stopped."""
        return self.states.get(rank, ALIVE) != ALIVE

    def has_newly_gone(self) -> bool:
        """Return whether a process was found dead or stopped that was not before."""
        new = self.gone - self._gone
        self._gone |= new
        return bool(new)

    def absences(self, last: dict[int, str]) -> dict[int, Absence]:
        """Return those that have said their last words, or are dead or stopped without.

        ``last`` are the last positions that are known.
        """
        states = {rank: (self.states[rank], "") for rank in self.gone}
        states |= {rank: words for rank, words in self.words.items() if rank in self._peers}
        return {
            rank: Absence(
                rank=rank,
                state=state,
                text=text,
                host=self._peers[rank].text(),
                last=last.get(rank, ""),
            )
            for rank, (state, text) in states.items()
        }
