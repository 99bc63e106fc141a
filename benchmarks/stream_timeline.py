"""The life of one group on the streams, as two tables for docs/design.md: drawn from a recorded step.

python -m benchmarks.stream_timeline     prints the tables; a test compares them with the page
"""

import linecache
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fullshard
from fullshard.checks.memory_names import named_storages
from fullshard.checks.stream_check import StreamCheck
from fullshard.checks.stream_order import (
    Access,
    Entry,
    GivenBack,
    Mark,
    Place,
    Race,
    Wait,
    find_races,
)
from fullshard.engine.state import state_of

__all__ = ["tables"]

GROUP = "blocks.1"
STREAMS = ("compute", "all-gather", "reduce-scatter")
SOURCE = Path(fullshard.__file__).parents[1]


def tables() -> str:
    """Return both tables: what happens to a group in the order of the host, and what each event protects."""
    from benchmarks.stream_settings import BF16, adamw, decoder, sharded, step

    with StreamCheck(8, raises=False) as check:
        model = sharded(decoder(), mp_policy=BF16)
        optimizer = adamw(model)
        for _ in range(3):
            begin = len(check.program)
            step(model, optimizer)
        (group,) = state_of(model.get_submodule(GROUP)).groups  # type: ignore[union-attr]
        own = _events_of(group)
        names = dict(named_storages())
        held = {m: names.get(s, "") for m, s in check.memory_by_storage().items()}
    life = "\n".join(_life(check.program[begin:], held, own))
    return f"{life}\n\n" + "\n".join(_protected(check.program, held))


# --- the life of a group --------------------------------------------------------------------------------


def _life(program: Sequence[Entry], held: dict[int, str], own: set[int]) -> Iterator[str]:
    yield f"| {' | '.join(STREAMS)} |"
    yield f"|{'---|' * len(STREAMS)}"
    rows: list[tuple[int, list[str]]] = []
    for stream, words in _events(program, held, own):
        if not rows or rows[-1][0] != stream:
            rows.append((stream, []))
        if words not in rows[-1][1]:
            rows[-1][1].append(words)
    for stream, said in rows:
        cells = ["; ".join(said) if number == stream else "" for number in range(len(STREAMS))]
        yield f"| {' | '.join(cells)} |".replace("|  ", "| ")


def _events(
    program: Sequence[Entry], held: dict[int, str], own: set[int]
) -> Iterator[tuple[int, str]]:
    """Yield what happens to the group, and the marks and waits of its own events, each with its stream."""
    labels: dict[int, str] = {}
    stream = 0
    for entry in program:
        if isinstance(entry, Access) and held.get(entry.memory, "").endswith(GROUP):
            stream = entry.stream
            yield stream, _did(entry, held[entry.memory])
        elif isinstance(entry, GivenBack) and held.get(entry.memory, "").endswith(GROUP):
            yield stream, f"the {_kind(held[entry.memory])} is given back"
        elif isinstance(entry, Mark) and entry.event in own:
            stream, labels[entry.event] = entry.stream, label(entry.place)
            yield stream, f"**mark `{labels[entry.event]}`**"
        elif isinstance(entry, Wait) and entry.event in labels:
            stream = entry.stream
            yield stream, f"**wait for `{labels[entry.event]}`**"


def _events_of(group: Any) -> set[int]:
    """Return the numbers of the events of a group, and of the one that gathers wait for."""
    reduced = group.reduction.events
    found = (group.gather._gathered, group.gather._released, group.context._written)
    return {each.number for each in (*found, reduced.ready, reduced.input_read)}


def _did(entry: Access, name: str) -> str:
    """Return who reads or writes what: the engine's operation, or the module's forward and backward."""
    what = entry.what.removeprefix("aten.").split(".")[0].replace("_", " ").strip()
    where = entry.place[0]
    if "run_backward" in where:
        what = "backward"
    elif where.endswith(("_adam", "step", "update")) or "optim" in where:
        what = "the optimizer"
    elif not where.startswith("fullshard/"):
        what = "forward"
    return f"{what} {'writes' if entry.writes else 'reads'} the {_kind(name)}"


def _kind(name: str) -> str:
    return re.sub(r"^the (.*) of .*$", r"\1", name)


def label(place: Place) -> str:
    """Return the name of the event that is marked at a place, from the line of code there."""
    path, _, rest = place[0].partition(":")
    line = linecache.getline(str(SOURCE / path), int(rest.split(" ")[0]))
    found = re.search(r"(\w+)\.record\(", line)
    name = found.group(1).strip("_").removesuffix("_event") if found else "stream"
    return "written" if name == "event" else name


# --- what events protect --------------------------------------------------------------------------------


def _protected(program: Sequence[Entry], held: dict[int, str]) -> Iterator[str]:
    yield "| event | marked by | awaited by | left out, a race |"
    yield "|---|---|---|---|"
    sites: dict[tuple[str, int, int], set[Place]] = defaultdict(set)
    marks: dict[int, Mark] = {}
    for entry in program:
        if isinstance(entry, Mark) and entry.place:
            marks[entry.event] = entry
        elif isinstance(entry, Wait) and entry.event in marks:
            mark = marks[entry.event]
            sites[label(mark.place), mark.stream, entry.stream].add(entry.place)
    for (name, marking, waiting), full in sites.items():
        races = find_races(program, full)
        said = dict.fromkeys(_race_words(race, held) for race in races)
        words = "; ".join([*said][:2]) or "none here"
        yield f"| `{name}` | {STREAMS[marking]} | {STREAMS[waiting]} | {words} |"


def _race_words(race: Race, held: dict[int, str]) -> str:
    def words(access: Access) -> str:
        kind = _kind(held.get(access.memory, "")) or "other memory"
        return f"{STREAMS[access.stream]} {'writes' if access.writes else 'reads'} {kind}"

    again = " in the same memory" if race.given_back is not None else ""
    return f"{words(race.earlier)}, {words(race.later)}{again}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.stdout.write(tables() + "\n")
