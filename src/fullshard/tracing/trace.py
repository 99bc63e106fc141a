"""A recording of a few steps of training, written as a Chrome trace, which Perfetto opens, too.

    with fullshard.trace(model, "traces", first_step=20) as recording:
        for _ in range(3):
            train_one_step()
            recording.step()

writes ``traces/rank_00000.json``, one file for each rank that records. `comm.spans` records spans and says where their
times come from; `schema` has the format of the file. This file starts and ends a recording, and exports its spans.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import nn

from fullshard.errors import ConfigurationError, LifecycleError
from fullshard.files import atomic_write, local_path
from fullshard.mesh.axes import global_rank, world_size
from fullshard.tracing.group_facts import facts_of_groups, outermost_states, states_in
from fullshard.tracing.planned_facts import planned_facts
from fullshard.tracing.recorder import (
    CollectiveSpan,
    ComputeSpan,
    Mark,
    Named,
    StepSpan,
    TraceRecorder,
    WaitSpan,
)
from fullshard.tracing.schema import (
    COLLECTIVES,
    Kind,
    MemorySample,
    Release,
    Span,
    Trace,
    to_document,
)
from fullshard.transport.streams import FSDPCommContext


def trace(
    model: nn.Module, folder: str | os.PathLike[str], *, first_step: int = 1, limit: int = 200_000
) -> Recording:
    """Record a few steps of a sharded model: when each group is gathered, used by compute, released and reduced.

    Within ``with trace(...) as recording``, call ``recording.step()`` after each step. Leaving the block, also by an
    exception, writes ``folder/rank_00000.json`` (by rank) for Perfetto or chrome://tracing, and replaces an older file.
    Ranks do not wait for each other, so some may record and others not. Recording changes no result. On a GPU it
    synchronises with the device when it begins and when it ends, not in between.

    Args:
        model: The outermost sharded module, or a module that contains it.
        folder: Folder of the files. It is created if it does not exist.
        first_step: The number of the first recorded step.
        limit: The most events to keep. Later events are only counted.

    Raises:
        ConfigurationError: nothing in ``model`` is sharded, or it is on several devices.
        LifecycleError: the model is being recorded already.
    """
    if limit < 1:
        raise ConfigurationError(f"limit must be at least 1, got {limit}.")
    # The file is written later, and the program may change its working folder meanwhile.
    path = Path(os.path.abspath(local_path(folder)))
    return Recording(model, path, first_step=first_step, limit=limit)


class Recording:
    """The result of `trace`: steps that are being recorded, for as long as its block."""

    def __init__(self, model: nn.Module, folder: Path, *, first_step: int, limit: int) -> None:
        self._model = model
        self._first_step, self._limit = first_step, limit
        self.path = folder / f"rank_{global_rank():05}.json"
        """The file that is written at the end."""
        self._contexts = contexts_of(model)
        devices = {context.device for context in self._contexts}
        if len(devices) > 1:
            raise ConfigurationError(
                f"A recording is of one device; the model is on {sorted(map(str, devices))}. Record one device after "
                "the other."
            )
        self._device = devices.pop()
        self._recorder: TraceRecorder | None = None

    def __enter__(self) -> Self:
        if any(
            isinstance(each, TraceRecorder)
            for context in self._contexts
            for each in context.observers
        ):
            raise LifecycleError(
                "A model can have one recording at a time, and this one is being recorded. Leave the other block first."
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._recorder = TraceRecorder(self._device, first_step=self._first_step, limit=self._limit)
        attach(self._recorder, self._model, self._contexts)
        return self

    def step(self) -> None:
        """End a step, after `optimizer.step()`, and begin the next."""
        if self._recorder is None:
            raise LifecycleError(
                "A step can only be recorded within the block: with trace(...) as recording."
            )
        self._recorder.end_step()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause between two steps: what happens within the block, such as an evaluation, is not recorded."""
        recorder = self._recorder
        if recorder is None:
            raise LifecycleError(
                "A recording can only be paused within its block: with trace(...) as recording."
            )
        for context in self._contexts:
            context.stop_observing(recorder)
        try:
            yield
        finally:
            attach(recorder, self._model, self._contexts)
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
            context.stop_observing(recorder)
        try:
            recorder.clock.synchronize()
            document = to_document(export(self._model, recorder))
            # Not worth a wait for the disk: a lost trace can be recorded again.
            with atomic_write(self.path, durable=False) as file:
                file.write(json.dumps(document, separators=(",", ":"), allow_nan=False).encode())
        except Exception:
            if error is None:  # otherwise this error would hide the one that ended the block
                raise
        if error is None and contexts_of(self._model) != self._contexts:
            raise LifecycleError(
                "The model must keep its streams while it is recorded; it now has others, and what it did on them is missing. "
                "Pass the outermost module, and call share_comm_ctx before the recording."
            )


def attach(recorder: TraceRecorder, model: nn.Module, contexts: Sequence[FSDPCommContext]) -> None:
    """Let the engine report to the recorder from now on, starting with the memory in use."""
    for state, _, _ in states_in(model):
        for group in state.groups:
            group.tell_memory(recorder)
    for context in contexts:
        context.observe(recorder)


def contexts_of(model: nn.Module) -> list[FSDPCommContext]:
    """Return the contexts where the models in ``model`` look for a recorder. A model that never ran is given one."""
    contexts = []
    for root in outermost_states(model).values():
        if root.step is not None:
            contexts.append(root.step.context)
            continue
        root.shared_context = root.shared_context or FSDPCommContext(root.device)
        contexts.append(root.shared_context)
    return list(dict.fromkeys(contexts))


# --- from what was recorded to what is written ------------------------------------------------------


def export(model: nn.Module, recorder: TraceRecorder) -> Trace:
    """Return the recorded steps of a model, with the names and times of the file. All marks have been reached."""
    return _Export(model, recorder).trace()


class _Export:
    """The export of what was recorded, with the names and times of the file."""

    def __init__(self, model: nn.Module, recorder: TraceRecorder) -> None:
        self._facts = facts_of_groups(model)
        self._planned = planned_facts(model)
        self._recorder = recorder
        self._clock = recorder.clock
        self._names: dict[Named, str] = {state: name for state, name, _ in states_in(model)}
        self._names.update((group, facts.name) for group, facts in self._facts)

    def trace(self) -> Trace:
        recorder = self._recorder
        return Trace(
            rank=global_rank(),
            world=world_size(),
            device=recorder.device.type,
            first_step=recorder.first_step,
            num_steps=len(recorder.steps),
            zero_unix_ns=recorder.started_unix_ns,
            groups=tuple(facts for _, facts in self._facts),
            dropped=recorder.dropped,
            planned=self._planned,
            # A stable sort: of spans with the same times, the one that was recorded first is the outer.
            spans=tuple(sorted(self._spans(), key=lambda span: (span.start_us, -span.duration_us))),
            releases=tuple(
                Release(
                    group=self._name(release.group),
                    phase=release.within,
                    step=release.step,
                    time_us=self._host_us(release.at_ns),
                )
                for release in recorder.releases
            ),
            memory=tuple(
                MemorySample(
                    time_us=self._host_us(sample.at_ns),
                    gathered=sample.gathered,
                    reducing=sample.reducing,
                    allocated=sample.allocated,
                )
                for sample in recorder.memory
            ),
        )

    def _spans(self) -> Iterator[Span]:
        recorder = self._recorder
        for step in recorder.steps:
            yield self._span("step", f"step {step.step}", step)
        for compute in recorder.computes:
            group = self._name(compute.state)
            name = f"{compute.kind} {group}"
            yield self._span("compute", name, compute, group=group, phase=compute.within)
        for wait in recorder.wait_spans:
            group = self._name(wait.group)
            yield self._span(
                "wait",
                f"wait for {group}",
                wait,
                group=group,
                phase=wait.within,
                awaited=wait.reason,
            )
        for kind in COLLECTIVES:
            # A collective that the program has not waited for has no end.
            ended = [each for each in recorder.collectives if each.collective == kind and each.ends]
            yield from one_at_a_time([self._collective(each) for each in ended])

    def _collective(self, span: CollectiveSpan) -> Span:
        group = self._name(span.group)
        start_us, duration_us = self._times(
            span.begin, max(span.ends, key=self._clock.microseconds)
        )
        return Span(
            kind=span.collective,
            name=f"{span.collective} {group}",
            step=span.step,
            group=group,
            phase=span.within,
            nbytes=span.nbytes,
            issued_us=self._host_us(span.issued_ns),
            start_us=start_us,
            duration_us=duration_us,
        )

    def _span(
        self,
        kind: Kind,
        name: str,
        recorded: StepSpan | ComputeSpan | WaitSpan,
        *,
        group: str = "",
        phase: str = "",
        awaited: str = "",
    ) -> Span:
        start_us, duration_us = self._times(recorded.begin, recorded.end)
        return Span(
            kind=kind,
            name=name,
            step=recorded.step,
            start_us=start_us,
            duration_us=duration_us,
            group=group,
            phase=phase,
            awaited=awaited,
        )

    def _times(self, begin: Mark, end: Mark) -> tuple[float, float]:
        """Return start and duration in microseconds."""
        start, stop = (round(self._clock.microseconds(mark), 3) for mark in (begin, end))
        return start, round(stop - start, 3)

    def _host_us(self, at_ns: int) -> float:
        return round(self._clock.host_microseconds(at_ns), 3)

    def _name(self, owner: Named) -> str:
        return self._names.get(owner) or owner.name  # of a model that shares the streams


def one_at_a_time(spans: list[Span]) -> list[Span]:
    """Return the spans of a lane, changed such that each pair nests or is apart: viewers cannot draw other overlaps.

    A stream carries one collective after the other. A backend without streams may have several in flight; a later one
    is then drawn from the end of the earlier one.
    """
    drawn = []
    ends: list[float] = []
    for span in sorted(spans, key=lambda each: (each.start_us, -each.duration_us)):
        end = span.end_us
        ends = [each for each in ends if each > span.start_us]
        overlapped = [each for each in ends if each < end]
        if overlapped:
            start = max(overlapped)
            span = replace(span, start_us=start, duration_us=round(end - start, 3))
        drawn.append(span)
        ends.append(end)
    return drawn
