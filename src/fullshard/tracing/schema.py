"""The trace file: what `fullshard.trace` writes and the report reads, in one place.

A `Trace` is one rank's file. `to_document` turns it into Chrome's trace format, with a section "fullshard" beside
the events; `parse_trace` turns that back. `docs/tracing.md` describes the file. Times are microseconds from the start
of the recording. Nothing here imports torch: the report works without it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast, get_args

from fullshard.tracing.json_values import as_number, read_fields

FORMAT = 1
"""Version of the section "fullshard", and of names, categories and arguments of the events."""

LARGEST = 1e18
"""Of times and bytes in events: no larger number was measured, and sums of such numbers lose their digits."""

Kind = Literal["step", "compute", "wait", "gather", "reduce", "all-reduce"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Categories of the events that are spans."""

COLLECTIVES: dict[Kind, str] = {
    "gather": "all-gather",
    "reduce": "reduce-scatter",
    "all-reduce": "all-reduce",
}
"""Kinds of spans on the wire, and what their lanes are called in the trace and in the report."""

LANES = ("step", "compute", *COLLECTIVES.values(), "host")
"""Rows that a viewer draws, from above; a lane's number counts from 1."""
_LANE_NUMBERS: dict[Kind, int] = {
    kind: LANES.index(COLLECTIVES.get(kind, "compute" if kind == "wait" else kind)) + 1
    for kind in KINDS
}
_HOST = len(LANES)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFacts:
    """One group of parameters that are gathered and reduced together, as one rank has it."""

    name: str
    """Of its modules, joined by commas; "root" for the outermost. A number follows where several have the same."""
    modules: tuple[str, ...]
    """The modules that `fully_shard` or the wrapper were given; "" is the outermost."""
    parameters: int
    """How many tensors."""
    numel: int
    """Elements of the full parameters."""
    padded_numel: int
    """The same with padding: elements of the shards of all ranks."""
    shard_bytes: int
    """This rank's shard, between steps."""
    gathered_bytes: int
    """Memory of the full parameters in the compute dtype, with padding; 0 if nothing has to be gathered."""
    gather_bytes: int
    """Received from other ranks by one gather."""
    reduce_bytes: int
    """Sent to other ranks by one reduction of all trainable parameters."""
    all_reduce_bytes: int
    """Sent to other replicas by the same."""
    param_dtype: str
    compute_dtype: str
    reduce_dtype: str
    wire_dtype: str
    """In which gradients travel; "" if nothing is trainable."""
    world: int
    """Ranks that it is sharded over."""
    replicas: int
    """How often all of it exists."""

    @property
    def padding_share(self) -> float:
        """Padding as a part of what is stored and sent."""
        return 1 - self.numel / self.padded_numel if self.padded_numel else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that took time."""

    kind: Kind
    name: str = ""
    """What viewers show."""
    step: int
    group: str = ""
    """Empty for a step."""
    phase: str = ""
    """forward or backward; empty for a step."""
    start_us: float
    duration_us: float
    nbytes: float = 0
    """On the wire, for collectives."""
    awaited: str = ""
    """What compute waited for: gather or reduction."""
    issued_us: float | None = None
    """When the host asked for it, for collectives."""

    @property
    def end_us(self) -> float:
        """When it ended."""
        return self.start_us + self.duration_us


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """A group's gathered memory was given back."""

    group: str
    phase: str
    step: int
    time_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySample:
    """Bytes in use from this moment on."""

    time_us: float
    gathered: float
    """Of gather buffers."""
    reducing: float
    """Of reduce buffers."""
    allocated: float | None
    """All that the allocator has given out; None where it was not asked, and on CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The section "fullshard" of a file, but for the format: each field under its own name."""

    rank: int
    world: int
    device: str
    first_step: int
    num_steps: int
    zero_unix_ns: int
    """The wall clock at time 0."""
    groups: tuple[GroupFacts, ...]
    """In order of forward."""
    dropped: int
    """Events that were not recorded, since there was no room for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace(Header):
    """Some steps of one rank: the content of one file."""

    spans: tuple[Span, ...]
    """By start; of those that start together, the outer first."""
    releases: tuple[Release, ...] = ()
    """By time."""
    memory: tuple[MemorySample, ...]
    """By time."""
    num_broken: int = 0
    """Events that were found and could not be read. Not written."""


# --- writing --------------------------------------------------------------------------------------


def to_document(trace: Trace) -> dict[str, Any]:
    """Return the content of a trace's file, ready to be written as JSON."""
    events = [*map(_span_event, trace.spans), *map(_release_event, trace.releases)]
    events += map(_memory_event, trace.memory)
    # Viewers want the outer one first of spans that start together.
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    header = {field.name: getattr(trace, field.name) for field in fields(Header)}
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            {**event, "pid": trace.rank} for event in (*_lane_names(trace.rank), *events)
        ],
        "fullshard": {
            "format": FORMAT,
            **header,
            "groups": [asdict(group) for group in trace.groups],
        },
    }


def _lane_names(rank: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "args": {"name": f"rank {rank}"}}
    for lane, name in enumerate(LANES, start=1):
        yield {"ph": "M", "name": "thread_name", "tid": lane, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "tid": lane, "args": {"sort_index": lane}}


def _span_event(span: Span) -> dict[str, Any]:
    args: dict[str, Any] = {"step": span.step}
    if span.kind != "step":
        args = {"group": span.group, "step": span.step, "pass": span.phase}
    if span.kind == "wait":
        args["for"] = span.awaited
    if span.kind in COLLECTIVES:
        args |= {"bytes": span.nbytes, "issued": span.issued_us}
    return {
        "ph": "X",
        "cat": span.kind,
        "name": span.name,
        "tid": _LANE_NUMBERS[span.kind],
        "ts": span.start_us,
        "dur": span.duration_us,
        "args": args,
    }


def _release_event(release: Release) -> dict[str, Any]:
    return {
        "ph": "i",
        "s": "t",
        "cat": "release",
        "name": f"release {release.group}",
        "tid": _HOST,
        "ts": release.time_us,
        "args": {"group": release.group, "step": release.step, "pass": release.phase},
    }


def _memory_event(sample: MemorySample) -> dict[str, Any]:
    held = {"gathered": sample.gathered, "reducing": sample.reducing}
    if sample.allocated is not None:
        held["allocated"] = sample.allocated
    return {"ph": "C", "name": "memory", "tid": _HOST, "ts": sample.time_us, "args": held}


# --- reading --------------------------------------------------------------------------------------


def parse_trace(document: object) -> Trace:
    """Read the content of a trace's file. Texts in it may be anything.

    Raises:
        ValueError: It was not written by `fullshard.trace`, or in another format.
    """
    facts = document.get("fullshard") if isinstance(document, Mapping) else None
    if not isinstance(document, Mapping) or not isinstance(facts, Mapping):
        raise ValueError("it was not written by fullshard.trace")
    if facts.get("format") != FORMAT:
        raise ValueError(
            f"its format is {reprlib.repr(facts.get('format'))}, this version of fullshard reads {FORMAT}"
        )
    header = read_fields(Header, {**facts, "groups": None}, is_strict=True)
    header |= {"world": header["world"] or 1, "device": header["device"] or "cpu"}
    header["groups"] = tuple(
        _group(each) for each in _list(facts.get("groups")) if isinstance(each, Mapping)
    )
    spans: list[Span] = []
    releases: list[Release] = []
    memory: list[MemorySample] = []
    num_broken = 0
    for event in _list(document.get("traceEvents")):
        try:
            if not isinstance(event, Mapping):
                raise ValueError("an event is an object")
            if event.get("ph") == "X" and event.get("cat") in KINDS:
                spans.append(_span(event))
            elif event.get("ph") == "i" and event.get("cat") == "release":
                releases.append(_release(event))
            elif event.get("ph") == "C" and event.get("name") == "memory":
                memory.append(_sample(event))
        except ValueError:
            num_broken += 1
    return Trace(
        **header,
        spans=tuple(sorted(spans, key=lambda span: (span.start_us, -span.duration_us))),
        releases=tuple(sorted(releases, key=lambda release: release.time_us)),
        memory=tuple(sorted(memory, key=lambda sample: sample.time_us)),
        num_broken=num_broken,
    )


def _group(facts: Mapping[str, Any]) -> GroupFacts:
    found = read_fields(GroupFacts, facts, is_strict=True)
    # Shares are of these, so that none of them may be missing.
    found["padded_numel"] = found["padded_numel"] or found["numel"]
    found |= {"world": found["world"] or 1, "replicas": found["replicas"] or 1}
    return GroupFacts(**found)


def _span(event: Mapping[str, Any]) -> Span:
    args = _args(event)
    duration_us = _finite(event.get("dur"))
    issued = args.get("issued")
    if duration_us < 0:
        raise ValueError("a span ends after it begins")
    return Span(
        kind=cast(Kind, event["cat"]),
        name=_text(event.get("name")),
        step=int(_finite(args.get("step"))),
        group=_text(args.get("group")),
        phase=_text(args.get("pass")),
        start_us=_finite(event.get("ts")),
        duration_us=duration_us,
        nbytes=_number(args.get("bytes")),
        awaited=_text(args.get("for")),
        issued_us=None if issued is None else _finite(issued),
    )


def _release(event: Mapping[str, Any]) -> Release:
    args = _args(event)
    return Release(
        group=_text(args.get("group")),
        phase=_text(args.get("pass")),
        step=int(_finite(args.get("step"))),
        time_us=_finite(event.get("ts")),
    )


def _sample(event: Mapping[str, Any]) -> MemorySample:
    args = _args(event)
    allocated = args.get("allocated")
    return MemorySample(
        time_us=_finite(event.get("ts")),
        gathered=_number(args.get("gathered")),
        reducing=_number(args.get("reducing")),
        allocated=None if allocated is None else _finite(allocated),
    )


def _args(event: Mapping[str, Any]) -> Mapping[str, Any]:
    args = event.get("args")
    if not isinstance(args, Mapping):
        raise ValueError("an event has args")
    return args


def _list(value: object) -> list[Any]:
    """Return a list; a missing one is empty."""
    if value is not None and not isinstance(value, list):
        raise ValueError("it has something else where a list should be")
    return value or []


def _text(value: object) -> str:
    """Return a text; anything else is empty."""
    return value if isinstance(value, str) else ""


def _number(value: object) -> float:
    """Return a number; a missing one is zero."""
    return 0.0 if value is None else _finite(value)


def _finite(value: object) -> float:
    number = as_number(value, largest=LARGEST)
    if number is None:
        raise ValueError("it has something else where a number should be")
    return number
