"""Prove the order of streams: every configuration, every wait and mark left out once, every release too early.

    python benchmarks/stream_order.py                 configurations, accesses, waits, marks, races
    python benchmarks/stream_order.py --without       ... and what is noticed when a wait or a mark is left out
    python benchmarks/stream_order.py --early         ... and when memory is given back before the wait that makes it safe
    python benchmarks/stream_order.py PART [PART ...] only configurations whose names contain one of these

Nothing runs on a GPU: see docs/streams.md. Left out, a wait or mark is in one of these cases:

    noticed           a race is found
    knew already      the waiting stream knew everything that the wait brings
    another covers    no race, but there is one when another wait or mark is left out as well
    nothing to order  none of these: what the wait brings is of no use in this configuration
"""

import argparse
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from fullshard.checks.stream_order import (
    Access,
    Entry,
    GivenBack,
    Mark,
    Order,
    Place,
    Taken,
    Wait,
    find_races,
    idle_waits,
)
from fullshard.virtual.observer import HOST

__all__ = ["Verdict", "early_releases", "places", "verdicts"]

Verdict = str
"""noticed, knew already, another covers or nothing to order."""
Kind = type[Mark] | type[Wait]


def key_of(place: Place) -> Place:
    """Return the lines of fullshard in a place; the user's line if there are none."""
    own = tuple(line for line in place if line.startswith("fullshard/"))
    return own or place[-1:]


def places(program: Sequence[Entry], kind: Kind) -> dict[Place, set[Place]]:
    """Return the places of waits or marks, by their lines of fullshard."""
    found: defaultdict[Place, set[Place]] = defaultdict(set)
    for entry in program:
        if isinstance(entry, kind) and entry.place:
            found[key_of(entry.place)].add(entry.place)
    return dict(found)


def verdicts(program: Sequence[Entry]) -> dict[tuple[str, Place], tuple[Verdict, Place]]:
    """Leave out each wait and each mark; return what was noticed, and what else covers it."""
    waits, marks = places(program, Wait), places(program, Mark)
    idle = idle_waits(program)
    found: dict[tuple[str, Place], tuple[Verdict, Place]] = {}
    for kind, sites in (("wait", waits), ("mark", marks)):
        for key, full in sites.items():
            found[kind, key] = _verdict(program, kind, full, waits, idle)
    return found


def _verdict(
    program: Sequence[Entry],
    kind: str,
    full: set[Place],
    waits: dict[Place, set[Place]],
    idle: set[Place],
) -> tuple[Verdict, Place]:
    if find_races(program, full):
        return "noticed", ()
    if kind == "wait" and full <= idle:
        return "knew already", ()
    for other, theirs in waits.items():
        if theirs <= full:
            continue
        alone = len(find_races(program, theirs))
        if len(find_races(program, theirs | full)) > alone:
            return "another covers", other
    return "nothing to order", ()


def early_releases(program: Sequence[Entry]) -> tuple[int, list[GivenBack]]:
    """Give back each memory before the wait that made it safe; return how many there are, and those that go unnoticed.

    That is the wait by which the pool's stream learned of the last access on another stream. Right behind the early
    release, the pool's stream takes memory and writes to it, as it may do at any time.
    """
    tried = 0
    missed: list[GivenBack] = []
    for release, (wait, pool, access) in _releases(program).items():
        entry = program[release]
        assert isinstance(entry, GivenBack)
        probe = access._replace(memory=-1, stream=pool, writes=True, what="probe", place=())
        # What comes behind the probe says nothing about it.
        changed = [*program[:wait], entry, Taken(-1, pool), probe]
        tried += 1
        if not any(race.later.what == "probe" for race in find_races(changed)):
            missed.append(entry)
    return tried, missed


def _releases(program: Sequence[Entry]) -> dict[int, tuple[int, int, Access]]:
    """Return for each release of memory that other streams have used: the wait that made it safe, the pool, an access.

    One release for each place. Where memory is given back before it is safe, the pool's stream waits before it takes memory
    again, and to leave out that wait is another test.
    """
    order = Order()
    pools: dict[int, int] = {}
    latest: defaultdict[int, dict[int, int]] = defaultdict(dict)
    last: dict[int, Access] = {}
    safe: dict[int, int] = {}
    found: dict[int, tuple[int, int, Access]] = {}
    seen: set[Place] = set()
    for number, entry in enumerate(program):
        order.issue(entry)
        if isinstance(entry, Taken):
            pools[entry.memory] = entry.stream
        elif isinstance(entry, Access) and entry.stream != pools.get(entry.memory, entry.stream):
            latest[entry.memory][entry.stream] = order.time_of(entry.stream)
            last[entry.memory] = entry
            safe.pop(entry.memory, None)
        elif isinstance(entry, Wait):
            for memory in latest.keys() - safe.keys():
                if order.knows(pools[memory], latest[memory]):
                    safe[memory] = number
        elif isinstance(entry, GivenBack) and latest.pop(entry.memory, {}):
            wait = safe.pop(entry.memory, None)
            pool = pools.pop(entry.memory)
            if wait is not None and pool != HOST and entry.place not in seen:
                seen.add(entry.place)
                found[number] = wait, pool, last[entry.memory]
    return found


def main() -> int:
    """Run the configurations and print what was found."""
    parser = argparse.ArgumentParser(description="Prove the order of streams.")
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--without", action="store_true")
    parser.add_argument("--early", action="store_true")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    from benchmarks.stream_settings import SETTINGS, checked

    table: defaultdict[tuple[str, Place], dict[str, tuple[Verdict, Place]]] = defaultdict(dict)
    totals: Counter[str] = Counter()
    begin = time.monotonic()
    for name in SETTINGS:
        if asked.parts and not any(part in name for part in asked.parts):
            continue
        check = checked(name)
        program = check.program
        counts = Counter(type(entry).__name__ for entry in program)
        totals += Counter(configurations=1, races=len(check.races)) + counts
        line = f"{name:58}{counts['Access']:7} accesses {counts['Wait']:5} waits {counts['Mark']:5} marks"
        print(f"{line}  {len(check.races) or 'no'} races", flush=True)
        if check.races:
            print(check.text)
        if asked.early:
            tried, missed = early_releases(program)
            totals += Counter(early=tried, missed=len(missed))
            for entry in missed:
                print(f"    given back early, not noticed: {' < '.join(key_of(entry.place))}")
        if asked.without:
            for site, judged in verdicts(program).items():
                table[site][name] = judged
    seconds = time.monotonic() - begin
    print(f"{dict(totals)} in {seconds:.0f} s")
    _print_table(table)
    return int(totals["races"] > 0)


def _print_table(table: dict[tuple[str, Place], dict[str, tuple[Verdict, Place]]]) -> None:
    for (kind, place), found in sorted(table.items()):
        counts = Counter(said for said, _ in found.values())
        print(f"\n{kind} at {' < '.join(place)}")
        print("    " + ", ".join(f"{said}: {count}" for said, count in counts.most_common()))
        _print_others(found.items())


def _print_others(found: Iterable[tuple[str, tuple[Verdict, Place]]]) -> None:
    others: defaultdict[tuple[Verdict, Place], list[str]] = defaultdict(list)
    for name, judged in found:
        if judged[0] in ("another covers", "nothing to order"):
            others[judged].append(name)
    for (said, other), names in others.items():
        where = f" ({' < '.join(other)})" if other else ""
        print(f"    {said}{where}: {'; '.join(names[:6])}{' ...' if len(names) > 6 else ''}")


if __name__ == "__main__":
    sys.exit(main())
