"""A watchdog's answer about its rank, as it travels through the store.

An `Answer` is short, since every rank sends one in every round: some hundred bytes. The last collectives of a rank
(`History`) are longer, so the asker asks few ranks for them: one of those that are at the same place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields as dataclass_fields
from typing import Any

from fullshard.divergence.watchdog.connections import UNKNOWN

ALIVE, DEAD, STOPPED = "alive", "dead", "stopped"
"""States of a process, as another process on its host sees them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """The process of a rank. Written once, when its watchdog starts."""

    rank: int
    host: str
    """The host's name, for people."""
    host_key: str
    """Equal for processes that can see each other; see `probes`."""
    pid: int
    started: int
    """The start of the process, in the kernel's clock ticks: tells it from a later one with the same number."""
    mailbox: str = ""
    """The address at which it receives last words of others on its host; see `last_words`."""

    def text(self) -> str:
        """Return the rank's host and process, for a message."""
        return f"host {self.host}, process {self.pid}"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAnswer:
    """The progress of a rank in one process group."""

    ranks: Sequence[int]
    """Its ranks; a `range` where that is possible, since there may be as many answers as ranks."""
    count: int
    """Number of fullshard's collectives that it has called there."""
    digest: int
    """A hash of their tags."""
    marks: tuple[tuple[int, int, int], ...] = ()
    """Step, count and digest at the end of some of the last steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """A wait of the thread that trains for other ranks."""

    text: str
    """The event that it waits for: the text of a tag, or a function of torch.distributed."""
    caller: str = ""
    """The function of torch that has called that one, if it says more to people: "full_tensor"."""
    kind: str
    """ "fullshard": a collective of ours; "torch": one that the user has called; "device": the host has issued
    all that it can, and the device has not come to the end of it."""
    group: str | None
    """The process group's name; None if it is not known: then any rank may be meant."""
    count: int
    """For a collective of fullshard: its number in the group."""
    seconds: float
    traffic: int = UNKNOWN
    """For a wait in torch: number of bytes that have come and gone over this process's connections so far."""
    is_in_vain: bool = False
    """Whether the rank has lost a connection to another one, which it needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The position of a rank."""

    rank: int
    step: int = 0
    phase: str = "outside"
    module: str = ""
    host: str = ""
    """Host and process, for people."""
    line: str = ""
    """The line of Python that the thread which trains is at: the user's, if there is one."""
    moved: int = 0
    """A number that is another one after every collective and step."""
    wait: Wait | None = None
    raised: str | None = None
    """Type and message of an exception that has left a sharded forward or backward."""
    has_caught: bool = False
    """Whether the program has handled that exception and goes on: all ranks may leave a forward by one."""
    limit_s: float | None = None
    """Longest time of a collective before it counts as hung."""
    groups: Mapping[str, GroupAnswer] = field(default_factory=dict)
    states: Mapping[int, str] = field(default_factory=dict)
    """States of the processes of the ranks on the same host, this one excluded."""
    closed: Sequence[int] = ()
    """Ranks that this one waits for, and that have closed a connection to it."""
    words: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """The last words of ranks on the same host, as state and text: see `last_words`."""

    def place(self) -> str:
        """Return step, phase and module, for a message."""
        module = f" of {self.module}" if self.module and self.phase != "outside" else ""
        return f"step {self.step}, {self.phase}{module}"


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The last collectives of a rank, and the backend's knowledge of those that are pending."""

    tags: Mapping[str, Mapping[int, str]]
    """Number and text of collectives, by process group."""
    steps: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    """Steps that have ended, by process group, oldest first, each with the number of collectives that were called until then."""
    backend: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Absence:
    """The reason why a rank has not answered."""

    rank: int
    state: str
    """ "left", "raised", "dead", "stopped"; "busy" if its process runs and does not answer; "lost" if no rank can see it;
    "unregistered" if it has no watchdog yet."""
    text: str = ""
    """For a rank that has raised: type and message of the exception."""
    host: str = ""
    last: str = ""
    """The last position that it has published, and when."""
    silent_s: float = 0.0
    """For a rank that is lost: the time for which it has been."""


ASYNC_WAIT = "Work.wait"
"""The beginning of a wait's text, if it is for a function that was called before, with ``async_op=True``."""

_LOST_CONNECTION = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
)
"""Gloo's errors in a collective whose other rank has gone. NCCL's error has a type of its own, `DistBackendError`."""


def is_of_lost_connection(exception: str) -> bool:
    """Return whether an exception, as type and message, comes from a backend that has lost a rank."""
    return exception.startswith("DistBackendError: ") or any(
        each in exception for each in _LOST_CONNECTION
    )


def is_consequence(exception: str) -> bool:
    """Return whether an exception, as type and message, tells of another rank: then another one failed first."""
    return exception.startswith("DivergenceError: ") or is_of_lost_connection(exception)


# --- encoding ---------------------------------------------------------------------------------------


def encode(value: Registration | Answer | History) -> str:
    """Return a value as text."""
    if isinstance(value, History):
        tags = {name: _packed_tags(found) for name, found in value.tags.items()}
        return json.dumps([tags, value.steps, value.backend], separators=(",", ":"))
    if not isinstance(value, Answer):
        return json.dumps(asdict(value), separators=(",", ":"))
    names = (each.name for each in dataclass_fields(value) if each.name not in ("groups", "wait"))
    fields = {
        name: found
        for name in names
        if (found := getattr(value, name)) not in (None, "", {}, ()) and found is not False
    }
    fields["groups"] = {
        name: [_packed(each.ranks), each.count, each.digest, each.marks]
        for name, each in value.groups.items()
    }
    if value.wait is not None:
        fields["wait"] = asdict(value.wait)
    return json.dumps(fields, separators=(",", ":"))


def registration_from(text: str | bytes) -> Registration:
    """Return the registration that `encode` has made this text of."""
    return Registration(**json.loads(text))


def answer_from(text: str | bytes) -> Answer:
    """Return the answer that `encode` has made this text of."""
    fields: dict[str, Any] = json.loads(text)
    groups = {
        name: GroupAnswer(
            ranks=_unpacked(ranks), count=count, digest=digest, marks=tuple(map(tuple, marks))
        )
        for name, (ranks, count, digest, marks) in fields.pop("groups", {}).items()
    }
    states = {int(rank): state for rank, state in fields.pop("states", {}).items()}
    words = {int(rank): (state, text) for rank, (state, text) in fields.pop("words", {}).items()}
    wait = Wait(**fields.pop("wait")) if "wait" in fields else None
    closed = tuple(fields.pop("closed", ()))
    return Answer(**fields, groups=groups, states=states, words=words, wait=wait, closed=closed)


def history_from(text: str | bytes) -> History:
    """Return the history that `encode` has made this text of."""
    packed, steps, backend = json.loads(text)
    return History(
        tags={name: _unpacked_tags(*each) for name, each in packed.items()},
        steps={name: [(step, count) for step, count in each] for name, each in steps.items()},
        backend=backend,
    )


def _packed_tags(tags: Mapping[int, str]) -> tuple[list[str], list[int], list[int]]:
    """Return texts, each once; the first number of each run of numbers and its length; and the place of each text."""
    places = {text: place for place, text in enumerate(dict.fromkeys(tags.values()))}
    runs: list[int] = []
    for count in tags:
        if runs and count == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += [count, 1]
    return list(places), runs, [places[text] for text in tags.values()]


def _unpacked_tags(texts: list[str], runs: list[int], places: list[int]) -> dict[int, str]:
    counts = (
        count
        for first, length in zip(runs[::2], runs[1::2], strict=True)
        for count in range(first, first + length)
    )
    return dict(zip(counts, (texts[place] for place in places), strict=True))


def _packed(ranks: Sequence[int]) -> list[Any]:
    """Return ranks with even distances as a range: groups of a mesh are such."""
    if len(ranks) > 2:
        span = range(ranks[0], ranks[-1] + 1, max(1, ranks[1] - ranks[0]))
        if span == ranks or tuple(span) == tuple(ranks):
            return ["range", span.start, span.stop, span.step]
    return list(ranks)


def _unpacked(ranks: Sequence[Any]) -> Sequence[int]:
    return range(*ranks[1:]) if ranks[:1] == ["range"] else tuple(ranks)
