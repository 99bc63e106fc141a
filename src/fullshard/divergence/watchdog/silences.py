"""The time for which ranks have been silent: they do not answer, and no other rank can see their processes.

Silence is no proof. A rank may hold the interpreter lock, its host may be paused, the network may fail over. Each rank
hears at the end of a round which ranks were silent in it, and keeps count, whichever rank asks next. The count begins anew
after a time without rounds: ranks went on then, or this host was paused, too.
"""

from __future__ import annotations

from collections.abc import Iterable

LEASE_S = 300.0
"""Time for which a rank may be silent, while others wait for it, before it counts as gone."""


class Silences:
    """The silent ranks that this rank has heard of."""

    def __init__(self, longest_gap_s: float) -> None:
        """Count across rounds that are no further apart than ``longest_gap_s``."""
        self._longest_gap_s = longest_gap_s
        self._since: dict[int, float] = {}
        self._noted = 0.0

    def note(self, silent: Iterable[int], now: float) -> None:
        """Note the ranks that were silent in a round that ends now."""
        known = self._since if now - self._noted <= self._longest_gap_s else {}
        self._since = {rank: known.get(rank, now) for rank in silent}
        self._noted = now

    def seconds(self, rank: int, now: float) -> float:
        """Return the time for which a rank that is silent now has been so."""
        if now - self._noted > self._longest_gap_s:
            return 0.0
        return now - self._since.get(rank, now)
