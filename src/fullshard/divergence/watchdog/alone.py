"""A rank's judgement without the store: from what it sees on its host, and from the last words of others there.

The store does not answer. So no rank can be asked, and answers in the store cannot be read. Two things may
be the reason, and must not be confused:

    a rank is gone, and the store with it, or the store is only slow
    the process that serves the store is gone, and ranks have ended since because of that

A rank that was gone while the store still answered is the reason, and so is rank 0, which may serve the store. Of any
other rank that is found gone after the store, nothing tells which came first. The message says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fullshard.divergence.watchdog.answers import Absence, Answer
from fullshard.divergence.watchdog.judge import DIVERGED, Round, judge, lines
from fullshard.errors import ranks_text


@dataclass(frozen=True, kw_only=True, slots=True)
class LostStore:
    """A store that does not answer."""

    text: str
    """The way it fails: "the store is gone"."""
    port: int | None
    """The port of the store, if a host serves it."""
    is_late: bool
    """Whether it has not answered in time, rather than failed at once."""
    is_given_up: bool
    """Whether it has failed for so long that this rank waits no more."""
    gone_before: Collection[int]
    """Ranks that were gone while it still answered."""


def judge_alone(own: Answer, absences: Mapping[int, Absence], store: LostStore) -> str | None:
    """Return the reason why a rank that waits cannot go on; None if nothing is proven yet.

    Args:
        own: The answer of this rank.
        absences: The other ranks on its host that are gone.
        store: The store that cannot be asked.
    """
    judgement = judge({own.rank: own}, absences)
    place = "" if store.port is None else f" at port {store.port}"
    if judgement.kind == DIVERGED and (
        store.is_late or {0, *store.gone_before}.intersection(judgement.culprits)
    ):
        return (
            f"{judgement.message}\nThis is what rank {own.rank} sees on its own host: {store.text}, which rank 0 or the "
            f"launcher serves{place}."
        )
    if judgement.kind != DIVERGED and not store.is_given_up:
        return None
    found = Round(answers={own.rank: own}, absences=absences, histories={}, previous=None)
    ended = (
        f" {ranks_text(judgement.culprits).capitalize()} {'is' if len(judgement.culprits) == 1 else 'are'} gone, too; "
        "without the store, nothing tells who was first."
        if judgement.kind == DIVERGED
        else ""
    )
    return (
        f"Ranks have diverged: {store.text}. It is served{place} by rank 0 or by the launcher, which has ended, is "
        f"stopped, or cannot be reached.{ended}\n{lines(found)}\n"
        "See what rank 0 and the launcher printed last; see docs/divergence.md."
    )
