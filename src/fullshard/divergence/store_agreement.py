"""Ranks compare descriptions through the store of the default process group: no collective, no device.

Every rank brings a digest of its description. If all digests are equal, that is all. If not, one rank of each kind is
asked for the description itself, and all ranks get the same message about the differences.

[Note: agreement through the store]
Keys are below ``fullshard/agreement/<ranks>/<number>/``. The store has the number, and the rank that gives the verdict
of one comparison raises it for the next one. So keys are new each time, also in process groups that are made again, and
a rank that missed a comparison comes to the next one together with the others.

    arrive    each rank reads the number, sets its digest and counts itself in
    decide    the last to arrive reads all digests in one operation, and publishes the verdict
    learn     each rank polls for the verdict, at growing intervals, and reads it
    leave     each rank deletes its digest; the last to leave deletes the rest

That is a fixed number of operations per rank, besides looking. Looks get rarer the more ranks there are, so that the
store answers at most `LOOKS_PER_S` of them.

A rank that has waited for a second says so in the store. Another one, elected, then finds the missing ranks. If a
missing rank waits for a rank that waits here, in a comparison with other ranks, none of them can ever go on: both
comparisons get the verdict that the ranks use different process groups. Otherwise they wait on, as a rank may be slow,
until the timeout of the process group.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from fullshard.errors import DivergenceError, exception_text, ranks_text

LOOKS_PER_S = 20_000
"""Most looks for a verdict in a second, of all ranks together."""
_FIRST_LOOK_S = 0.000_5
_LONGEST_LOOK_S = 0.02
_SLOW_S = 0.5
"""After so long a rank says that it waits. After twice as long one looks for the missing ranks."""
_GRACE_S = 5.0
"""Time beyond the timeout for which a rank waits for the one that names the missing ranks."""

_ROOT = "fullshard/agreement"
_EQUAL, _DESCRIBE, _DIFFERENT = b"=", b"?", b"!"

Compose = Callable[[Sequence[tuple[list[int], str]]], str]
"""Makes a message of descriptions, each with the ranks that have it."""


class Store(Protocol):
    """The methods that are used of a store of torch's."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Return the value of a key; waits if there is none."""

    def add(self, key: str, amount: int) -> int:
        """Add to the number of a key, and return it."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys that are there."""

    def delete_key(self, key: str) -> bool:
        """Remove a key."""


class StoreAgreement:
    """One comparison of some ranks, seen from one of them: [Note: agreement through the store]."""

    def __init__(
        self,
        store: Store,
        ranks: Sequence[int],
        rank: int,
        *,
        timeout_s: float,
        between_looks: Callable[[], None] = lambda: None,
    ) -> None:
        """Compare with ``ranks`` as ``rank``, which is one of them.

        Args:
            store: A client of this rank's own.
            ranks: The same, in the same order, on all of them.
            rank: This one.
            timeout_s: Time to wait for a rank that does not come.
            between_looks: Called again and again while this rank waits; may raise.
        """
        self._store, self._ranks, self._rank = store, tuple(ranks), rank
        self._end = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._between_looks = between_looks
        self._base = f"{_ROOT}/{_short(self._ranks)}"
        self._key = ""
        """The key of this comparison; known after `arrive`."""
        self._asked: list[int] = []
        """Ranks that were asked for their descriptions."""
        self._has_claimed = False
        """Whether this rank gives the verdict."""
        self._is_elected = False
        """Whether this rank searches for the missing."""
        self._says_waiting = False

    def compare(self, digest: str, describe: Callable[[], str], compose: Compose) -> str | None:
        """Return None if all ranks bring the same digest; else a message, the same on all ranks.

        Args:
            digest: The digest of this rank's description.
            describe: Returns this rank's description; called if digests differ.
            compose: Makes the message; called on one rank if digests differ.
        """
        last = self.arrive(digest)
        try:
            if last:
                self.decide(describe, compose)
            return self.learn(describe)
        except BaseException as error:
            # The others need not wait for this rank, and the next comparison gets another number.
            with contextlib.suppress(Exception):  # of a store that is gone, say
                given_up = f"Rank {self._rank} has given up comparing: {exception_text(error)}"
                self._publish(str(error) if isinstance(error, DivergenceError) else given_up)
            raise

    # --- the four steps -------------------------------------------------------------------------------

    def arrive(self, digest: str) -> bool:
        """Bring this rank's digest; return whether all ranks have brought theirs now."""
        self._key = f"{self._base}/{self._store.add(f'{self._base}/number', 0)}"
        self._store.set(self._digest_key(self._rank), digest)
        return self._store.add(f"{self._key}/arrived", 1) == len(self._ranks)

    def decide(self, describe: Callable[[], str], compose: Compose) -> None:
        """Publish the verdict. All ranks have arrived."""
        if not self._claim(self._key):
            return  # this rank came so late that the others had given up
        digests = self._store.multi_get([self._digest_key(rank) for rank in self._ranks])
        alike: dict[bytes, list[int]] = {}
        for rank, digest in zip(self._ranks, digests, strict=True):
            alike.setdefault(digest, []).append(rank)
        if len(alike) == 1:
            self._set_verdict(self._key, _EQUAL)
            return
        kinds = [*alike.values()]
        self._asked = [
            self._rank if self._rank in ranks_of_kind else ranks_of_kind[0]
            for ranks_of_kind in kinds
        ]
        self._set_verdict(self._key, _DESCRIBE + json.dumps(self._asked).encode())
        described = []
        for rank, ranks_of_kind in zip(self._asked, kinds, strict=True):
            if rank == self._rank:
                text = describe()
            else:
                text = (self._wait_for(self._description_key(rank)) or b"").decode()
            described.append((ranks_of_kind, text))
        self._store.set(self._result, _DIFFERENT.decode() + compose(described))

    def learn(self, describe: Callable[[], str]) -> str | None:
        """Wait for the verdict, return its message if there is one, and leave."""
        decided_here = bool(self._asked)
        verdict = self._wait_for(self._verdict)
        if verdict is not None and verdict.startswith(_DESCRIBE):
            self._asked = json.loads(verdict[1:])
            if self._rank in self._asked and not decided_here:
                self._store.set(self._description_key(self._rank), describe())
            verdict = self._wait_for(self._result)
        if verdict is None:
            return self._missing_text(self._missing())
        self._leave()
        return verdict[1:].decode() if verdict.startswith(_DIFFERENT) else None

    def _leave(self) -> None:
        store, key = self._store, self._key
        if self._says_waiting:
            store.set(self._waiting_key(self._rank), "")
        store.delete_key(self._digest_key(self._rank))
        if store.add(f"{key}/left", 1) == len(self._ranks):
            rest = ["arrived", "judges", "verdict", "result", "elected", "left"]
            for each in (*rest, *(f"description/{rank}" for rank in self._asked)):
                store.delete_key(f"{key}/{each}")

    # --- waiting ----------------------------------------------------------------------------------------

    def _wait_for(self, key: str) -> bytes | None:
        """Return the value of a key when it is there; None if it does not come in time."""
        began, interval, next_search = time.monotonic(), _FIRST_LOOK_S, 2 * _SLOW_S
        longest = max(_LONGEST_LOOK_S, len(self._ranks) / LOOKS_PER_S)
        while not self._store.check([key]):
            self._between_looks()
            now = time.monotonic()
            if now - began > _SLOW_S:
                self._say_waiting()
            if now - began > next_search and key == self._verdict:
                next_search *= 2
                self._search_for_the_missing()
            if now > self._end + (0 if self._is_elected else _GRACE_S):
                if key != self._verdict:
                    return None
                self._publish(self._missing_text(self._missing()))
            time.sleep(interval)
            interval = min(1.5 * interval, longest)
        return self._store.get(key)

    def _say_waiting(self) -> None:
        """Say in the store, once, that this rank waits here."""
        if not self._says_waiting:
            self._says_waiting = True
            text = json.dumps([self._key, _packed(self._ranks)])
            self._store.set(self._waiting_key(self._rank), text)

    def _search_for_the_missing(self) -> None:
        """Publish a verdict if a missing rank waits for a rank that waits here. One rank does so, for all."""
        if not self._is_elected:
            self._is_elected = self._store.add(f"{self._key}/elected", 1) == 1
        if not self._is_elected:
            return
        missing = self._missing()
        for rank in missing:
            if not self._store.check([self._waiting_key(rank)]):
                continue
            said = self._store.get(self._waiting_key(rank))
            if not said:
                continue  # it has waited, and does not any more
            other_key, packed = json.loads(said)
            others = _unpacked(packed)
            waited_for = [
                each
                for each in others
                if each in self._ranks
                and each not in missing
                and not self._store.check([f"{other_key}/digest/{each}"])
            ]
            if waited_for:
                self._publish(self._other_ranks_text(missing, rank, others), other_key)
                return

    def _publish(self, message: str, *other_keys: str) -> None:
        """Let all ranks that wait here, and in other comparisons, raise the same error."""
        verdict = _DIFFERENT + message.encode()
        # Ranks of several comparisons may find each other at the same time. All claim in the same order, and claim
        # everything before they publish: the second at the first key claims nothing, and all get one message.
        first, *others = sorted({self._key, *other_keys})
        claimed = [first] if self._claim(first) else []
        if claimed or self._store.check([f"{first}/verdict"]):
            claimed += [key for key in others if self._claim(key)]
        for key in claimed:
            self._set_verdict(key, verdict)
        if self._has_claimed:
            if not self._store.check([self._verdict]):
                self._set_verdict(self._key, verdict)
            self._store.set(self._result, verdict.decode())

    def _claim(self, key: str) -> bool:
        """Return whether this rank gives the verdict of a comparison: the first one to ask does."""
        claimed = self._store.add(f"{key}/judges", 1) == 1
        self._has_claimed = self._has_claimed or (claimed and key == self._key)
        return claimed

    def _set_verdict(self, key: str, verdict: bytes) -> None:
        """Publish the verdict of a comparison.

        The number is raised before: a rank that has read the verdict may come to the next comparison at once.
        """
        self._store.add(f"{key.rpartition('/')[0]}/number", 1)
        self._store.set(f"{key}/verdict", verdict.decode())

    def _missing(self) -> list[int]:
        return [each for each in self._ranks if not self._store.check([self._digest_key(each)])]

    # --- messages ---------------------------------------------------------------------------------------

    def _missing_text(self, missing: Sequence[int]) -> str:
        who = f"{ranks_text(missing)} did" if missing else "the rank that compares them did"
        return (
            f"All ranks must run the model together. {ranks_text(self._ranks).capitalize()} compare their models before the "
            f"first collective, but {who} not arrive within {self._timeout_s:.0f} s. See what it does, or what it "
            "printed last."
        )

    def _other_ranks_text(self, missing: Sequence[int], rank: int, others: Sequence[int]) -> str:
        here = [each for each in self._ranks if each not in missing]
        return (
            "All ranks must shard a model over the same ranks, but they differ:\n"
            f"  {ranks_text([rank])}: shards over {ranks_text(others)}\n"
            f"  {ranks_text(here)}: {'shards' if len(here) == 1 else 'shard'} over {ranks_text(self._ranks)}\n"
            "No collective has been issued. Pass the same mesh or process group on all ranks, to the same modules."
        )

    # --- keys -------------------------------------------------------------------------------------------

    @property
    def _verdict(self) -> str:
        return f"{self._key}/verdict"

    @property
    def _result(self) -> str:
        """The key of the verdict that follows a request for descriptions."""
        return f"{self._key}/result"

    def _digest_key(self, rank: int) -> str:
        return f"{self._key}/digest/{rank}"

    def _description_key(self, rank: int) -> str:
        return f"{self._key}/description/{rank}"

    @staticmethod
    def _waiting_key(rank: int) -> str:
        return f"{_ROOT}/waiting/{rank}"


def _short(ranks: Sequence[int]) -> str:
    """Return a short text that stands for these ranks in keys."""
    listed = ",".join(map(str, ranks))
    return listed if len(listed) <= 40 else hashlib.sha256(listed.encode()).hexdigest()[:20]


def _packed(ranks: Sequence[int]) -> list[list[int]]:
    """Return ranks as runs of first, last and step: as many texts are in the store as ranks wait."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][0] == runs[-1][1]:
            runs[-1][1:] = [rank, rank - runs[-1][0]]
        elif runs and rank - runs[-1][1] == runs[-1][2]:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank, 1])
    return runs


def _unpacked(runs: Sequence[Sequence[int]]) -> list[int]:
    return [rank for first, last, step in runs for rank in range(first, last + 1, step)]
