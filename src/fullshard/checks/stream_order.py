"""Proof that the order of streams and events allows no race, for all interleavings at once.

A program is what a host has issued: accesses to memory on streams, marks, waits, and memory that is taken and given back.
A device may run streams in any order that marks and waits allow. So two accesses to the same bytes, one of which writes,
must be **ordered**: on one stream, or the stream of the later one has waited for a mark behind the earlier one, maybe by way
of others. If all are, every run computes the same; if two are not, some run computes something else.

[Note: what is known when]
Each stream has a clock, which counts its accesses. A stream **knows** an access if it is on that stream, or if the stream has
waited for a mark that knew it. So a mark keeps what its stream knows, as one count per stream, and a wait takes over the
larger counts. The host is a stream, too: what it has waited for, everything that it issues later knows.

[Note: memory that is handed out again]
Memory that was given back goes to the pool of the stream that took it, and the next memory taken from that pool may be the same,
while work that was issued earlier still reads it. So a new memory begins with the latest accesses, on every stream, to
anything that was given back to its pool. They conflict with each access to the new memory. That the memory is taken is no
access: it may be taken early and used late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple, TypeAlias

from fullshard.checks.regions import EVERYTHING, Region, overlap
from fullshard.virtual.observer import HOST

Place: TypeAlias = tuple[str, ...]
"""Lines of code where the host was, the innermost first. Empty for what torch does by itself."""


class Access(NamedTuple):
    """An operation, a collective, a copy, or the host reads or writes bytes."""

    stream: int
    memory: int
    region: Region
    writes: bool
    what: str
    place: Place


class Mark(NamedTuple):
    """An event marks the end of a stream."""

    stream: int
    event: int
    place: Place = ()


class Wait(NamedTuple):
    """A stream waits for the last mark of an event."""

    stream: int
    event: int
    place: Place = ()


class Taken(NamedTuple):
    """Memory is taken from a stream's pool."""

    memory: int
    stream: int
    place: Place = ()


class GivenBack(NamedTuple):
    """Memory goes back to the pool of the stream that took it."""

    memory: int
    place: Place = ()


Entry: TypeAlias = Access | Mark | Wait | Taken | GivenBack


class Race(NamedTuple):
    """Two accesses that no marks and waits order."""

    earlier: Access
    """The access that the host issued first."""
    later: Access
    given_back: Place | None
    """Place where the earlier one's memory was given back, if the later one is to other memory, which may be the same."""


class _Known(NamedTuple):
    """An access that later ones may conflict with."""

    time: int
    """Its time on its stream."""
    access: Access
    region: Region
    given_back: Place | None = None


Clock: TypeAlias = dict[int, int]
"""Number of known accesses of each stream."""


def find_races(program: Iterable[Entry], without: Collection[Place] = ()) -> list[Race]:
    """Return the races of a program, each pair of places once.

    Args:
        program: In the order in which the host issued it.
        without: Leave out marks and waits at these places, to see whether they are needed.
    """
    order = Order()
    for entry in program:
        if not (entry.place in without and isinstance(entry, Mark | Wait)):
            order.issue(entry)
    return [*order.races.values()]


class Order:
    """The accesses that each stream knows, and the accesses to each memory."""

    def __init__(self) -> None:
        self.races: dict[object, Race] = {}
        self._clocks: defaultdict[int, Clock] = defaultdict(dict)
        self._marks: dict[int, Clock] = {}
        """The clock that each event marks."""
        self._accesses: defaultdict[int, list[_Known]] = defaultdict(list)
        """Accesses to each memory."""
        self._pool_of: dict[int, int] = {}
        """The stream that took each memory."""
        self._pools: defaultdict[int, dict[int, _Known]] = defaultdict(dict)
        """The latest access to memory that was given back, by pool and stream: a stream that knows it knows those before."""

    def issue(self, entry: Entry) -> None:
        """Take note of what the host issues next."""
        kind = type(entry)
        if kind is Access:
            self._access(entry)  # type: ignore[arg-type]
        elif kind is Mark:
            self._mark(entry)  # type: ignore[arg-type]
        elif kind is Wait:
            self._wait(entry)  # type: ignore[arg-type]
        elif kind is Taken:
            self._take(entry)  # type: ignore[arg-type]
        else:
            self._give_back(entry)  # type: ignore[arg-type]

    def _mark(self, entry: Mark) -> None:
        self._marks[entry.event] = dict(self._clock(entry.stream))

    def _wait(self, entry: Wait) -> None:
        _join(self._clocks[entry.stream], self._marks.get(entry.event, {}))

    def brings_news(self, entry: Wait) -> bool:
        """Return whether a stream learns of something by waiting."""
        clock = self._clock(entry.stream)
        return any(
            clock.get(stream, 0) < time
            for stream, time in self._marks.get(entry.event, {}).items()
            if stream != entry.stream
        )

    def knows(self, stream: int, accesses: Clock) -> bool:
        """Return whether a stream knows accesses, given as a time for each of their streams."""
        clock = self._clock(stream)
        return all(clock.get(other, 0) >= time for other, time in accesses.items())

    def time_of(self, stream: int) -> int:
        """Return the time of a stream's latest access."""
        return self._clocks[stream].get(stream, 0)

    def _take(self, entry: Taken) -> None:
        self._pool_of[entry.memory] = entry.stream
        left = self._pools[entry.stream].values() if entry.stream != HOST else ()
        self._accesses[entry.memory] = [*left]

    def _give_back(self, entry: GivenBack) -> None:
        pool = self._pool_of.pop(entry.memory, HOST)
        found = self._accesses.pop(entry.memory, ())
        if pool == HOST:
            return  # torch's allocator of pinned memory waits for copies by itself
        latest = self._pools[pool]
        for known in found:
            stream = known.access.stream
            if stream not in latest or latest[stream].time < known.time:
                place = entry.place if known.given_back is None else known.given_back
                latest[stream] = _Known(known.time, known.access, EVERYTHING, place)

    def _access(self, entry: Access) -> None:
        stream, region, writes = entry.stream, entry.region, entry.writes
        clock = self._clock(stream)
        now = clock[stream] = clock.get(stream, 0) + 1
        kept = []
        for known in self._accesses[entry.memory]:
            before = known.access
            is_known = clock.get(before.stream, 0) >= known.time
            if (
                not is_known
                and (writes or before.writes or known.given_back is not None)
                and overlap(region, known.region)
            ):
                self._note(Race(before, entry, known.given_back))
            is_of_same_kind = writes or (before.stream == stream and not before.writes)
            if not (is_known and is_of_same_kind and region.covers(known.region)):
                kept.append(known)
        kept.append(_Known(now, entry, region))
        self._accesses[entry.memory] = kept

    def _clock(self, stream: int) -> Clock:
        """Return the accesses that a stream knows when it is issued something: all that the host knows, too."""
        clock = self._clocks[stream]
        if stream != HOST:
            _join(clock, self._clocks[HOST])
        return clock

    def _note(self, race: Race) -> None:
        earlier, later = race.earlier, race.later
        key = (earlier.what, earlier.place, later.what, later.place, earlier.stream, later.stream)
        self.races.setdefault(key, race)


def _join(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time


def idle_waits(program: Iterable[Entry]) -> set[Place]:
    """Return the places of waits by which no stream ever learns of anything that it did not know."""
    order = Order()
    seen: set[Place] = set()
    useful: set[Place] = set()
    for entry in program:
        if isinstance(entry, Wait):
            seen.add(entry.place)
            if order.brings_news(entry):
                useful.add(entry.place)
        order.issue(entry)
    return seen - useful
