"""A race is found exactly where no chain of marks and waits leads from one access to the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st

from fullshard.checks.regions import Region
from fullshard.checks.stream_order import (
    Access,
    Entry,
    GivenBack,
    Mark,
    Taken,
    Wait,
    find_races,
    idle_waits,
)
from fullshard.virtual.observer import HOST

A, B, C = 0, 1, 2


def access(
    stream: int, memory: int = 0, *, writes: bool = True, begin: int = 0, end: int = 8
) -> Access:
    return Access(stream, memory, Region(begin, end, end - begin), writes, "op", (f"line {begin}",))


def read(stream: int, memory: int = 0, **region: int) -> Access:
    return access(stream, memory, writes=False, **region)


LEGAL: dict[str, list[Entry]] = {
    "one stream": [access(A), read(A), access(A)],
    "two reads": [read(A), read(B)],
    "other bytes": [access(A, end=4), access(B, begin=4)],
    "other memory": [access(A, 0), access(B, 1)],
    "a wait": [access(A), Mark(A, 1), Wait(B, 1), read(B)],
    "a chain of waits": [access(A), Mark(A, 1), Wait(B, 1), Mark(B, 2), Wait(C, 2), access(C)],
    "the host waits": [access(A), Mark(A, 1), Wait(HOST, 1), access(B)],
    "the host reads, then writes": [
        access(A),
        Mark(A, 1),
        Wait(HOST, 1),
        read(HOST),
        access(HOST),
        read(B),
    ],
    "an event that is recorded again": [
        *(Mark(A, 1), access(A), Mark(A, 1), Wait(B, 1), read(B)),
    ],
    "memory that was never given back is taken early and used late": [
        *(Taken(5, A), access(B, 5)),
    ],
    "memory that comes back to its own stream": [
        *(Taken(5, A), access(A, 5), GivenBack(5), Taken(6, A), access(A, 6)),
    ],
    "memory that is given back before the wait, and taken after it": [
        *(
            Taken(5, A),
            access(B, 5),
            Mark(B, 1),
            GivenBack(5),
            Wait(A, 1),
            Taken(6, A),
            access(A, 6),
        ),
    ],
    "memory that is taken before the wait, and used after it": [
        *(
            Taken(5, A),
            access(B, 5),
            Mark(B, 1),
            GivenBack(5),
            Taken(6, A),
            Wait(A, 1),
            access(A, 6),
        ),
    ],
    "memory of another stream's pool": [
        *(Taken(5, A), access(B, 5), GivenBack(5), Taken(6, C), access(C, 6)),
    ],
    "pinned memory, for which torch waits": [
        *(Taken(5, HOST), access(A, 5), GivenBack(5), Taken(6, HOST), access(HOST, 6)),
    ],
}

RACES: dict[str, list[Entry]] = {
    "no wait": [access(A), read(B)],
    "a read, then a write": [read(A), access(B)],
    "a mark before the access": [Mark(A, 1), access(A), Wait(B, 1), read(B)],
    "a wait behind the access": [access(A), Mark(A, 1), read(B), Wait(B, 1)],
    "a wait of another stream": [access(A), Mark(A, 1), Wait(C, 1), read(B)],
    "bytes in common": [access(A, end=5), access(B, begin=4)],
    "the host does not wait": [access(A), read(HOST)],
    "the host writes what is still read": [read(A), access(HOST)],
    "memory that another stream still reads is handed out again": [
        *(Taken(5, A), access(B, 5), GivenBack(5), Taken(6, A), access(A, 6)),
    ],
    "... and used by a third stream, which has waited for the second": [
        *(Taken(5, A), access(B, 5), GivenBack(5), Taken(6, A)),
        *(access(B, 9), Mark(C, 1), Wait(A, 1), access(A, 6)),
    ],
    "memory is handed out to a stream that does not wait for its pool's": [
        *(Taken(5, A), access(A, 5), GivenBack(5), Taken(6, A), access(B, 6)),
    ],
    "... also when it was given back twice": [
        *(Taken(5, A), access(B, 5), GivenBack(5), Taken(6, A), GivenBack(6), Taken(7, A)),
        *(access(A, 7),),
    ],
}


@pytest.mark.parametrize("program", LEGAL.values(), ids=LEGAL)
def test_a_legal_order_is_not_reported(program: list[Entry]) -> None:
    assert find_races(program) == []


@pytest.mark.parametrize("program", RACES.values(), ids=RACES)
def test_a_race_is_reported(program: list[Entry]) -> None:
    (race,) = find_races(program)
    assert {race.earlier, race.later} <= set(program)


def test_marks_and_waits_can_be_left_out_by_their_places() -> None:
    program: list[Entry] = [*(access(A), Mark(A, 1, ("marks",)), Wait(B, 1, ("waits",)), read(B))]
    assert not find_races(program)
    assert find_races(program, {("marks",)}) and find_races(program, {("waits",)})


def test_waits_that_bring_no_news_are_known() -> None:
    twice: list[Entry] = [
        Mark(A, 1),
        Wait(B, 1, ("first",)),
        Mark(A, 2),
        Wait(B, 2, ("second",)),
        read(B),
    ]
    assert idle_waits([access(A), *twice]) == {("second",)}


# --- against another way to find out -----------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn) -> list[Entry]:
    """Draw what three streams and the host do with two memories, marks and waits among it."""
    entries: list[Entry] = []
    streams = st.sampled_from([A, B, C, HOST])
    for _ in range(draw(st.integers(2, 14))):
        kind = draw(st.sampled_from(["access", "access", "mark", "wait"]))
        stream = draw(streams)
        if kind == "mark":
            entries.append(Mark(stream, draw(st.integers(1, 3))))
        elif kind == "wait":
            entries.append(Wait(stream, draw(st.integers(1, 3))))
        else:
            begin = draw(st.integers(0, 3))
            entries.append(
                access(
                    stream,
                    draw(st.integers(0, 1)),
                    writes=draw(st.booleans()),
                    begin=begin,
                    end=begin + draw(st.integers(1, 3)),
                )._replace(what=f"op {len(entries)}")
            )
    return entries


def unordered_pairs(program: Sequence[Entry]) -> set[tuple[str, str]]:
    """Return the conflicting accesses between which no path leads, in a graph of all entries."""
    before: defaultdict[int, list[int]] = defaultdict(list)
    last: dict[int, int] = {}
    marks: dict[int, int] = {}
    for number, entry in enumerate(program):
        if entry.stream in last:
            before[number].append(last[entry.stream])
        if entry.stream != HOST and HOST in last:
            before[number].append(
                last[HOST]
            )  # whatever is issued comes behind what the host has done
        if isinstance(entry, Wait) and entry.event in marks:
            before[number].append(marks[entry.event])
        if isinstance(entry, Mark):
            marks[entry.event] = number
        last[entry.stream] = number

    def leads(begin: int, end: int) -> bool:
        return begin == end or any(each >= begin and leads(begin, each) for each in before[end])

    return {
        (one.what, other.what)
        for i, one in enumerate(program)
        for j, other in enumerate(program[i + 1 :], i + 1)
        if isinstance(one, Access) and isinstance(other, Access)
        if one.memory == other.memory and (one.writes or other.writes)
        if one.region.begin < other.region.end and other.region.begin < one.region.end
        if not leads(i, j)
    }


@settings(max_examples=500, deadline=None)
@given(programs())
def test_races_are_those_of_a_search_through_the_graph(program: list[Entry]) -> None:
    found = {(race.earlier.what, race.later.what) for race in find_races(program)}
    expected = unordered_pairs(program)
    # An access that a later one covers is forgotten: who races with it, races with that one, too.
    assert found <= expected
    assert bool(found) == bool(expected)


@settings(max_examples=200, deadline=None)
@given(programs())
def test_a_program_whose_streams_wait_for_each_other_is_never_reported(
    program: list[Entry],
) -> None:
    ordered: list[Entry] = []
    for number, entry in enumerate(program):
        if isinstance(entry, Access):
            for other in {each.stream for each in program} - {entry.stream}:
                event = 100 + 10 * number + other + 1
                ordered += [Mark(other, event), Wait(entry.stream, event)]
        ordered.append(entry)
    assert find_races(ordered) == []
