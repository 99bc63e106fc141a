"""Stalls: times in which ranks waited for others that were slow, and the lines printed about them."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from dataclasses import dataclass

from fullshard.divergence.watchdog.judge import Judgement

logger = logging.getLogger("fullshard")

FIRST_REPEAT_S = 20.0
LONGEST_REPEAT_S = 600.0
"""A stall is reported again after these times, which double."""


@dataclass(kw_only=True, slots=True)
class Stall:
    """A time in which ranks waited for others that were slow."""

    number: int
    """Counted from 1 in this process."""
    began: float
    """Its beginning, by `time.time`."""
    seconds: float
    """Its length; grows until it ends."""
    ranks: tuple[int, ...]
    """The ranks that others waited for."""
    where: str
    """The work of the first of them, and its line."""
    report: str
    """The place of each rank when the stall was first noticed."""


_STALLS: deque[Stall] = deque(maxlen=256)
_NUMBERS = itertools.count(1)


def stalls() -> list[Stall]:
    """Return the stalls that this process has seen, oldest first."""
    return list(_STALLS)


class StallReports:
    """Notes stalls, and prints them: once, then less and less often; on one rank of each host."""

    def __init__(self) -> None:
        self._stall: Stall | None = None
        """The stall that lasts."""
        self._next_report = 0.0
        self._repeat_s = FIRST_REPEAT_S

    def note(self, judgement: Judgement, waited: float, now: float, *, speaks: bool) -> None:
        """Note that ranks are slow; nothing has moved here for ``waited`` seconds. Print it if this rank ``speaks``."""
        if self._stall is None:
            self._stall = Stall(
                number=next(_NUMBERS),
                began=time.time() - waited,
                seconds=waited,
                ranks=judgement.culprits,
                where=judgement.where,
                report=judgement.message,
            )
            _STALLS.append(self._stall)
            self._next_report = now
            self._repeat_s = FIRST_REPEAT_S
        if speaks and now >= self._next_report:
            logger.warning("%s", judgement.message)
            self._next_report = now + self._repeat_s
            self._repeat_s = min(2 * self._repeat_s, LONGEST_REPEAT_S)

    def grow(self) -> None:
        """Note that nothing has moved yet."""
        if self._stall is not None:
            self._stall.seconds = time.time() - self._stall.began

    def end(self) -> bool:
        """Note that this rank has moved; return whether a stall has ended by that."""
        ended = self._stall is not None
        self._stall = None
        return ended
