"""One rank's trace, as `fullshard.trace` writes it: Chrome's format, with facts of ours beside the events.

Times are microseconds from the start of the recording; `docs/tracing.md` has the format.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from fullshard.programs.console.safe_text import harmless_line

FORMAT = 1
LARGEST = 1e18
"""Of times, bytes and counts: beyond it a number is none that was measured, and sums lose their digits."""

Kind = Literal["step", "compute", "wait", "gather", "reduce", "all-reduce"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that took time."""

    kind: Kind
    step: int
    group: str
    """Empty for a step."""
    phase: str
    """forward, backward, or empty."""
    start_us: float
    end_us: float
    nbytes: float = 0
    """On the wire, for collectives."""
    awaited: str = ""
    """What compute waited for: gather or reduction."""
    issued_us: float | None = None
    """When the host asked for it, for collectives."""

    @property
    def duration_us(self) -> float:
        """How long it took."""
        return self.end_us - self.start_us


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySample:
    """Bytes alive from this moment on."""

    time_us: float
    gathered: float
    reducing: float
    allocated: float | None
    """All that the allocator has given out; None where it was not asked, and on CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Parameters that are communicated together, as `fullshard.tracing.group_facts` describes them."""

    name: str
    parameters: int
    numel: int
    padded_numel: int
    shard_bytes: int
    gathered_bytes: int
    gather_bytes: int
    reduce_bytes: int
    param_dtype: str
    compute_dtype: str
    reduce_dtype: str
    wire_dtype: str
    world: int
    replicas: int

    @property
    def padding_share(self) -> float:
        """Part of what is stored and sent that is no parameter."""
        return 1 - self.numel / self.padded_numel if self.padded_numel else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Some steps of one rank."""

    rank: int
    world: int
    device: str
    groups: tuple[Group, ...]
    """In order of forward."""
    spans: tuple[Span, ...]
    """By start."""
    memory: tuple[MemorySample, ...]
    """By time."""
    num_dropped: int
    """Events that were not recorded."""
    num_broken: int
    """Events that could not be read."""


def parse_trace(document: object) -> Trace:
    """Make sense of a trace file.

    Raises:
        ValueError: It is none of ours.
    """
    facts = document.get("fullshard") if isinstance(document, Mapping) else None
    if not isinstance(document, Mapping) or not isinstance(facts, Mapping):
        raise ValueError("it was not written by fullshard.trace")
    if facts.get("format") != FORMAT:
        raise ValueError(
            f"its format is {reprlib.repr(facts.get('format'))}, this version of fullshard reads {FORMAT}"
        )
    spans, memory, num_broken = _parse_events(_list(document.get("traceEvents")))
    groups = _list(facts.get("groups"))
    return Trace(
        rank=int(_number(facts.get("rank"))),
        world=int(_number(facts.get("world"))) or 1,
        device=_text(facts.get("device", "cpu")),
        groups=tuple(_group(each) for each in groups if isinstance(each, Mapping)),
        spans=tuple(sorted(spans, key=lambda span: (span.start_us, -span.end_us))),
        memory=tuple(sorted(memory, key=lambda sample: sample.time_us)),
        num_dropped=int(_number(facts.get("dropped"))),
        num_broken=num_broken,
    )


def _parse_events(events: Iterable[object]) -> tuple[list[Span], list[MemorySample], int]:
    spans: list[Span] = []
    memory: list[MemorySample] = []
    num_broken = 0
    for event in events:
        try:
            if not isinstance(event, Mapping):
                raise ValueError("an event is an object")
            if event.get("ph") == "X" and event.get("cat") in KINDS:
                spans.append(_span(event))
            elif event.get("ph") == "C" and event.get("name") == "memory":
                memory.append(_sample(event))
        except ValueError:
            num_broken += 1
    return spans, memory, num_broken


def _span(event: Mapping[str, Any]) -> Span:
    args = event.get("args")
    if not isinstance(args, Mapping):
        raise ValueError("a span has args")
    start_us, duration_us = _finite(event.get("ts")), _finite(event.get("dur"))
    issued = args.get("issued")
    if duration_us < 0:
        raise ValueError("a span ends after it begins")
    return Span(
        kind=cast(Kind, event["cat"]),
        step=int(_finite(args.get("step"))),
        group=_text(args.get("group")),
        phase=_text(args.get("pass")),
        start_us=start_us,
        end_us=start_us + duration_us,
        nbytes=_number(args.get("bytes")),
        awaited=_text(args.get("for")),
        issued_us=None if issued is None else _finite(issued),
    )


def _sample(event: Mapping[str, Any]) -> MemorySample:
    args = event.get("args")
    if not isinstance(args, Mapping):
        raise ValueError("a counter has args")
    allocated = args.get("allocated")
    return MemorySample(
        time_us=_finite(event.get("ts")),
        gathered=_number(args.get("gathered")),
        reducing=_number(args.get("reducing")),
        allocated=None if allocated is None else _finite(allocated),
    )


def _group(facts: Mapping[str, Any]) -> Group:
    def count(name: str) -> int:
        return int(_number(facts.get(name)))

    def dtype(name: str) -> str:
        return _text(facts.get(f"{name}_dtype")).removeprefix("torch.")

    numel = count("numel")
    return Group(
        name=_text(facts.get("name")),
        parameters=count("parameters"),
        numel=numel,
        padded_numel=count("padded_numel") or numel,
        shard_bytes=count("shard_bytes"),
        gathered_bytes=count("gathered_bytes"),
        gather_bytes=count("gather_bytes"),
        reduce_bytes=count("reduce_bytes"),
        param_dtype=dtype("param"),
        compute_dtype=dtype("compute"),
        reduce_dtype=dtype("reduce"),
        wire_dtype=dtype("wire"),
        world=count("world") or 1,
        replicas=count("replicas") or 1,
    )


def _list(value: object) -> list[Any]:
    """Nothing stands for what was not written."""
    if value is not None and not isinstance(value, list):
        raise ValueError("it has something else where a list should be")
    return value or []


def _text(value: object) -> str:
    """Nothing stands for what is no text."""
    return harmless_line(value) if isinstance(value, str) else ""


def _number(value: object) -> float:
    """Zero stands for what was not written."""
    return 0.0 if value is None else _finite(value)


def _finite(value: object) -> float:
    number = as_number(value, largest=LARGEST)
    if number is None:
        raise ValueError("it has something else where a number should be")
    return number


def as_number(value: object, *, largest: float) -> float | None:
    """A number that was read, or None for anything else: no number, not finite, or larger than any that is meant.

    What is very small is zero: nothing is measured that finely, and to divide by it would be infinite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # In this order: an integer may be too long to be a float, and a NaN is not below anything.
    if not -largest <= value <= largest:
        return None
    return float(value) if abs(value) >= 1 / largest else 0.0
