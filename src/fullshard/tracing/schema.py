"""The schema of trace files, which `fullshard.trace` writes and the report reads.

A `Trace` is the content of one rank's file. `to_document` turns it into Chrome's trace format, with a section "fullshard"
beside the events, and `parse_trace` reads it back. Times are microseconds from the start of the recording. Nothing here
imports torch: the report works without it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast, get_args

from fullshard.tracing.json_values import as_number, read_fields

FORMAT = 1
"""The version: of the section "fullshard", and of names, categories and arguments of events."""

LARGEST = 1e18
"""Largest time or number of bytes that is read. Sums of larger numbers would lose digits."""

Kind = Literal["step", "compute", "wait", "gather", "reduce", "all-reduce"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Categories of the events that are spans."""

COLLECTIVES: dict[Kind, str] = {
    "gather": "all-gather",
    "reduce": "reduce-scatter",
    "all-reduce": "all-reduce",
}
"""Kinds of spans on the wire, and the names of their lanes in the trace and in the report."""

LANES = ("step", "compute", *COLLECTIVES.values(), "host")
"""Rows in a viewer, from the top. The number of a lane counts from 1."""
_LANE_NUMBERS: dict[Kind, int] = {
    kind: LANES.index(COLLECTIVES.get(kind, "compute" if kind == "wait" else kind)) + 1
    for kind in KINDS
}
_HOST = len(LANES)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFacts:
    """One group of parameters that are gathered and reduced together, as one rank has it."""

    name: str
    """The names of its modules, joined by commas; "root" for the outermost. Equal names get a number."""
    modules: tuple[str, ...]
    """The modules that were given to `fully_shard` or the wrapper; "" is the outermost."""
    parameters: int
    """Number of tensors."""
    numel: int
    """Elements of the full parameters."""
    padded_numel: int
    """Elements of the shards of all ranks: with padding."""
    shard_bytes: int
    """This rank's shard, between steps."""
    gathered_bytes: int
    """Memory of the full parameters in the compute dtype, with padding; 0 if nothing has to be gathered."""
    gather_bytes: int
    """Received from other ranks by one gather."""
    reduce_bytes: int
    """Sent to other ranks by one reduction of all trainable parameters."""
    all_reduce_bytes: int
    """Sent to other replicas by the same reduction."""
    param_dtype: str
    compute_dtype: str
    reduce_dtype: str
    wire_dtype: str
    """Dtype of gradients on the wire; "" if nothing is trainable."""
    world: int
    """Ranks that share one copy of the group."""
    replicas: int
    """Copies of the group."""
    division: str = ""
    """Division of parameters: "rows" or "flat", regardless of rows; "" in older files."""
    flat_padded_numel: int = 0
    """The `padded_numel` of parameters cut regardless of rows. 0 if it is not known, as in the next two."""
    balanced_padded_numel: int = 0
    """The same with `balanced_placement`."""
    halved_padded_numel: int = 0
    """The same over half of the ranks; 0 also if their number is odd."""
    trained_share: float = 1.0
    """Elements of parameters that are not frozen, as a share of all; 1 in older files."""

    @property
    def padding_share(self) -> float:
        """Padding as a share of what is stored and sent."""
        return 1 - self.numel / self.padded_numel if self.padded_numel else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedFacts:
    """A group that `plan_groups` would make of the same model."""

    modules: tuple[str, ...]
    """Their names; "" is the outermost."""
    gathered_bytes: int
    """Memory of the full parameters in the compute dtype, without padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A step, a computation, a wait or a collective."""

    kind: Kind
    name: str = ""
    """Name in viewers."""
    step: int
    group: str = ""
    """Empty for a step."""
    phase: str = ""
    """forward or backward; empty for a step."""
    start_us: float
    duration_us: float
    nbytes: float = 0
    """Bytes on the wire, for collectives."""
    awaited: str = ""
    """The awaited collective of a wait: gather or reduction."""
    issued_us: float | None = None
    """Time at which the host issued it, for collectives."""

    @property
    def end_us(self) -> float:
        """The time of its end."""
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
    """Bytes of gather buffers."""
    reducing: float
    """Bytes of reduce buffers."""
    allocated: float | None
    """Bytes that the allocator has given out; None where it was not asked, and on the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The section "fullshard" of a file: the format, and each of these fields under its own name."""

    rank: int
    world: int
    device: str
    first_step: int
    num_steps: int
    zero_unix_ns: int
    """The wall clock at time 0."""
    groups: tuple[GroupFacts, ...]
    """Groups in the order of forward."""
    dropped: int
    """Events beyond the limit, which were not recorded."""
    planned: tuple[PlannedFacts, ...] = ()
    """The plan for this model, the outermost group first; empty if it is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace(Header):
    """Some steps of one rank: the content of one file."""

    spans: tuple[Span, ...]
    """Spans by start; of those that start together, the outer first."""
    releases: tuple[Release, ...] = ()
    """Releases, in the order of time."""
    memory: tuple[MemorySample, ...]
    """Samples, in the order of time."""
    num_broken: int = 0
    """Events that could not be read; not written."""


# --- writing --------------------------------------------------------------------------------------


def to_document(trace: Trace) -> dict[str, Any]:
    """Return the content of a trace's file, ready to be written as JSON."""
    events = [*map(_span_event, trace.spans), *map(_release_event, trace.releases)]
    events += map(_memory_event, trace.memory)
    # Of spans that start together, viewers expect the outer one first.
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
            "planned": [asdict(group) for group in trace.planned],
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
    """Return the trace in the content of a file. Its texts may be anything.

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
    header = read_fields(Header, {**facts, "groups": None, "planned": None}, is_strict=True)
    header |= {"world": header["world"] or 1, "device": header["device"] or "cpu"}
    header["groups"] = tuple(map(_group, _objects(facts.get("groups"))))
    header["planned"] = tuple(
        PlannedFacts(**read_fields(PlannedFacts, each, is_strict=True))
        for each in _objects(facts.get("planned"))
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
    # These are divisors, so a missing value must not be zero.
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


def _objects(value: object) -> list[Mapping[str, Any]]:
    """Return the objects of a list; what else is in it is left out."""
    return [each for each in _list(value) if isinstance(each, Mapping)]


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
