"""Races in words: the two places, the streams, the memory by name, and the wait that is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fullshard.checks.stream_order import Access, Place, Race
from fullshard.virtual.observer import HOST

_SHOWN = 10
"""Races that a message shows in full; others are counted."""

StreamName = Callable[[int], str]
MemoryName = Callable[[int], str]


def race_text(races: Sequence[Race], stream: StreamName, memory: MemoryName) -> str:
    """Return a message about races, the rule first and the remedy last."""
    found = f"{len(races)} pairs of accesses are" if len(races) > 1 else "Two accesses are"
    lines = [
        "Two accesses to the same memory, one of which writes, must be ordered by a stream, or by an event that one stream "
        f"records and the other waits for. {found} not, so results depend on timing:"
    ]
    for number, race in enumerate(races[:_SHOWN], 1):
        lines += [
            f"  {number}. {line}" if not i else f"     {line}"
            for i, line in enumerate(_lines(race, stream, memory))
        ]
    if len(races) > _SHOWN:
        lines.append(f"  ... and {len(races) - _SHOWN} more")
    return "\n".join(lines)


def _lines(race: Race, stream: StreamName, memory: MemoryName) -> list[str]:
    earlier, later = race.earlier, race.later
    lines = [
        f"{stream(earlier.stream)} {_verb(earlier)} {memory(earlier.memory)} ({earlier.what})",
        *_at(earlier.place),
    ]
    if race.given_back is not None:
        lines += ["  this memory is given back, and may be handed out again", *_at(race.given_back)]
    lines += [
        f"{stream(later.stream)} {_verb(later)} {_same(race, memory)} ({later.what})",
        *_at(later.place),
        f"Missing: {stream(later.stream)} must wait for an event that {stream(earlier.stream)} records behind the first access"
        + (", before the memory is taken again." if race.given_back is not None else "."),
    ]
    return lines


def _same(race: Race, memory: MemoryName) -> str:
    return (
        "it"
        if race.given_back is None
        else f"{memory(race.later.memory)}, which may be the same memory"
    )


def _verb(access: Access) -> str:
    return "writes" if access.writes else "reads"


def _at(place: Place) -> list[str]:
    return [f"    at {line}" for line in place]


def stream_namer(names: Sequence[str]) -> StreamName:
    """Return a function that names a stream by its number."""

    def name(stream: int) -> str:
        if stream == HOST:
            return "the host"
        if stream < len(names):
            return f"the {names[stream]} stream"
        return "the stream of an asynchronous collective"

    return name
