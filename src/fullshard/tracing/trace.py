"""Recording a few steps of training and writing them as a Chrome trace, which Perfetto opens, too.

    with fullshard.trace(model, "traces", first_step=20) as recording:
        for _ in range(3):
            train_one_step()
            recording.step()

leaves ``traces/rank_00000.json``, one file for each rank that records. What is recorded and where its times
come from is in `recording`; this file has the beginning and the end of it, and the format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn

from fullshard.comm.spans import CollectiveSpan, Named, TraceRecorder, Wire
from fullshard.comm.streams import FSDPCommContext
from fullshard.errors import ConfigurationError, LifecycleError
from fullshard.files import atomic_write
from fullshard.plan.mesh import global_rank, world_size
from fullshard.tracing.group_facts import facts_of_groups, outermost_states, states_in

FORMAT = 1
"""Of the section "fullshard" of a file, and of names, categories and arguments of its events."""

LANES = ("step", "compute", "all-gather", "reduce-scatter", "all-reduce", "host")
_STEP, _COMPUTE, _HOST = 1, 2, 6
_LANE_OF: dict[Wire, int] = {"gather": 3, "reduce": 4, "all-reduce": 5}


def trace(
    model: nn.Module, folder: str | os.PathLike[str], *, first_step: int = 1, limit: int = 200_000
) -> Recording:
    """Record what a sharded model does in a few steps: when each group is gathered, computed with, released and reduced.

    Within ``with trace(...) as recording``, call ``recording.step()`` after each step. Leaving the block writes
    ``folder/rank_00000.json`` (by rank), over an older one, for Perfetto or chrome://tracing; after an exception,
    too. Ranks do not wait for each other, so some may record and others not. Recording changes no result. On a GPU
    it waits for the device when it begins and when it ends, not in between.

    Args:
        model: The outermost sharded module, of either door, or a module that contains it.
        folder: Where to; made if it is not there.
        first_step: The number of the first recorded step.
        limit: Events to keep; what comes later is counted as dropped.

    Raises:
        ConfigurationError: nothing in ``model`` is sharded, or parts of it are on different devices.
        LifecycleError: it is being recorded already.
    """
    if limit < 1:
        raise ConfigurationError(f"limit must be at least 1, got {limit}.")
    return Recording(model, Path(folder), first_step=first_step, limit=limit)


class Recording:
    """What `trace` returns: a few steps that are being recorded; lives as long as its block."""

    def __init__(self, model: nn.Module, folder: Path, *, first_step: int, limit: int) -> None:
        self._model = model
        self._first_step, self._limit = first_step, limit
        self.path = folder / f"rank_{global_rank():05}.json"
        """The file that is written at the end."""
        self._contexts = _contexts_of(model)
        devices = {context.device for context in self._contexts}
        if len(devices) > 1:
            raise ConfigurationError(
                f"A recording is of one device; the model has parts on {sorted(map(str, devices))}. Record them one "
                "after the other."
            )
        self._device = devices.pop()
        self._recorder: TraceRecorder | None = None

    def __enter__(self) -> Self:
        if any(context.recorder is not None for context in self._contexts):
            raise LifecycleError(
                "A model can have one recording at a time, and this one is being recorded. Leave the other block first."
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._recorder = TraceRecorder(self._device, first_step=self._first_step, limit=self._limit)
        self._attach(self._recorder)
        return self

    def _attach(self, recorder: TraceRecorder) -> None:
        """Let the engine tell it from now on, and tell it what is in memory."""
        for state, _, _ in states_in(self._model):
            for group in state.groups:
                group.note_memory(recorder)
        for context in self._contexts:
            context.recorder = recorder

    def step(self) -> None:
        """A step is over, after its optimizer's, and the next begins."""
        if self._recorder is None:
            raise LifecycleError(
                "A step can be recorded within the block only: with trace(...) as recording."
            )
        self._recorder.end_step()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Between two steps: what happens within the block, an evaluation say, is not recorded and in no step."""
        recorder = self._recorder
        if recorder is None:
            raise LifecycleError(
                "A recording can be paused within its block only: with trace(...) as recording."
            )
        for context in self._contexts:
            context.recorder = None
        try:
            yield
        finally:
            self._attach(recorder)
            recorder.begin_step()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None, "entered before"
        for context in self._contexts:
            context.recorder = None
        try:
            recorder.clock.synchronize()
            content = _trace_of(self._model, recorder, self._first_step)
            # A trace is worth no wait for the disk: the run that wrote it can write another.
            with atomic_write(self.path, durable=False) as file:
                file.write(json.dumps(content, separators=(",", ":"), allow_nan=False).encode())
        except Exception:
            if error is None:  # else it would hide why the block was left
                raise
        if error is None and _contexts_of(self._model) != self._contexts:
            raise LifecycleError(
                "A recording is of the streams that the model had when it began, and now it has others: what it did on "
                "these is missing. Pass the outermost module, and call share_comm_ctx before."
            )


def _contexts_of(model: nn.Module) -> list[FSDPCommContext]:
    """Where the models in ``model`` look for a recorder; those that never ran are given a context to start with."""
    contexts = []
    for root in outermost_states(model).values():
        if root.runtime is not None:
            contexts.append(root.runtime.context)
            continue
        root.shared_context = root.shared_context or FSDPCommContext(root.device)
        contexts.append(root.shared_context)
    return list(dict.fromkeys(contexts))


# --- the format -----------------------------------------------------------------------------------


def _trace_of(model: nn.Module, recorder: TraceRecorder, first_step: int) -> dict[str, Any]:
    facts = facts_of_groups(model)
    names: dict[Named, str] = {state: name for state, name, _ in states_in(model)}
    names.update((group, about.name) for group, about in facts)
    rank = global_rank()
    # An outer span before the inner ones that begin with it: of equal ones, the one recorded first is the outer.
    recorded = sorted(
        _Export(recorder, names).events(), key=lambda event: (event["ts"], -event.get("dur", 0))
    )
    events = [{**event, "pid": rank} for event in (*_lane_names(rank), *recorded)]
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "fullshard": {
            "format": FORMAT,
            "rank": rank,
            "world": world_size(),
            "device": recorder.device.type,
            "first_step": first_step,
            "num_steps": len(recorder.steps),
            "zero_unix_ns": recorder.started_unix_ns,
            "groups": [asdict(about) for _, about in facts],
            "dropped": recorder.dropped,
        },
    }


def _lane_names(rank: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "args": {"name": f"rank {rank}"}}
    for lane, name in enumerate(LANES, start=1):
        yield {"ph": "M", "name": "thread_name", "tid": lane, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "tid": lane, "args": {"sort_index": lane}}


class _Export:
    """Turns what was recorded into events of the format."""

    def __init__(self, recorder: TraceRecorder, names: dict[Named, str]) -> None:
        """``names`` are those of states and groups."""
        self._recorder = recorder
        self._names = names
        self._clock = recorder.clock

    def events(self) -> Iterator[dict[str, Any]]:
        recorder = self._recorder
        for step in recorder.steps:
            yield self._span(
                "step", _STEP, f"step {step.step}", step.begin, step.end, {"step": step.step}
            )
        for compute in recorder.computes:
            group = self._name(compute.state)
            args = {"group": group, "step": compute.step, "pass": compute.within}
            title = f"{compute.kind} {group}"
            yield self._span("compute", _COMPUTE, title, compute.begin, compute.end, args)
        for wait in recorder.waits:
            group = self._name(wait.group)
            args = {"group": group, "step": wait.step, "pass": wait.within, "for": wait.reason}
            yield self._span("wait", _COMPUTE, f"wait for {group}", wait.begin, wait.end, args)
        for wire in _LANE_OF:
            # One that nobody has waited for has no end.
            ended = [each for each in recorder.transfers if each.wire == wire and each.ends]
            yield from one_at_a_time([self._transfer(each) for each in ended])
        yield from self._instants()

    def _transfer(self, transfer: CollectiveSpan) -> dict[str, Any]:
        group, wire = self._name(transfer.group), transfer.wire
        args = {
            "group": group,
            "step": transfer.step,
            "pass": transfer.within,
            "bytes": transfer.nbytes,
            "issued": round(self._clock.host_microseconds(transfer.issued_ns), 3),
        }
        end = max(transfer.ends, key=self._clock.microseconds)
        return self._span(wire, _LANE_OF[wire], f"{wire} {group}", transfer.begin, end, args)

    def _instants(self) -> Iterator[dict[str, Any]]:
        for release in self._recorder.releases:
            group = self._name(release.group)
            yield {
                "ph": "i",
                "s": "t",
                "cat": "release",
                "name": f"release {group}",
                "tid": _HOST,
                "ts": round(self._clock.host_microseconds(release.at_ns), 3),
                "args": {"group": group, "step": release.step, "pass": release.within},
            }
        for sample in self._recorder.memory:
            held = {"gathered": sample.gathered, "reducing": sample.reducing}
            if sample.allocated is not None:
                held["allocated"] = sample.allocated
            yield {
                "ph": "C",
                "name": "memory",
                "tid": _HOST,
                "ts": round(self._clock.host_microseconds(sample.at_ns), 3),
                "args": held,
            }

    def _span(
        self, category: str, lane: int, name: str, begin: Any, end: Any, args: dict[str, Any]
    ) -> dict[str, Any]:
        start, stop = (round(self._clock.microseconds(mark), 3) for mark in (begin, end))
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "tid": lane,
            "ts": start,
            "dur": round(stop - start, 3),
            "args": args,
        }

    def _name(self, owner: Named) -> str:
        return self._names.get(owner) or owner.name  # of a model that shares the streams


def one_at_a_time(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Spans of a lane, such that none begins within one that ends before it: viewers cannot draw these.

    Streams carry one collective after the other. Of a backend without streams several may be on their way; the
    later one then begins when the earlier has ended.
    """
    ends: list[float] = []
    for span in sorted(spans, key=lambda each: (each["ts"], -each["dur"])):
        end = span["ts"] + span["dur"]
        ends = [each for each in ends if each > span["ts"]]
        overlapped = [each for each in ends if each < end]
        if overlapped:
            span["ts"] = max(overlapped)
            span["dur"] = round(end - span["ts"], 3)
        ends.append(end)
    return spans
