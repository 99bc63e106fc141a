"""Streams, events and the work in flight on them.

Compute runs on the user's current stream. All-gathers, reduce-scatters and all-reduces have streams of
their own.

    all-gather stream      allocates, fills and frees gather buffers
    reduce-scatter stream  reads reduce inputs, writes reduce outputs; runs exchanges and their sums, too
    all-reduce stream      sums reduce outputs over replicas (HSDP)

A stream is a context manager: what is issued inside goes to it. On the CPU the same calls do
nothing: the host orders all work, and finishes a collective by waiting for its `Work`.
Code may ask one question, `asynchronous`: can work be issued now and waited for by an event?
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from typing import Any, Protocol

import torch

from fullshard import torch_border
from fullshard.storage.copy_out import Indices
from fullshard.transport.observer import Observers, StepObserver


class Event(Protocol):
    """A point in a stream."""

    def record(self) -> None:
        """Mark the current end of the current stream; replaces an earlier mark."""

    def wait(self) -> None:
        """Make work issued to the current stream from now on wait for the mark."""

    def query(self) -> bool:
        """Return whether the mark has been reached; the host does not wait."""


class InFlight(Protocol):
    """A reduction that has been issued and is not finished: `reduction.ReductionInFlight`.

    Both methods are called on the compute stream, `finish_input` first.
    """

    def finish_input(self) -> None:
        """Order the current stream after the last read of the reduction's input, and give the input back."""

    def finish(self, *, accumulate: bool = True) -> None:
        """Order the current stream after the whole reduction, and drop what it kept alive.

        With ``accumulate`` False, gradients that are not in `.grad` yet are dropped.
        """


class FSDPCommContext:
    """The streams of one sharded model and the work in flight on them; shared by all its groups.

    [Note: memory and streams]
    The caching allocator hands freed memory out again to the stream that allocated it, without
    waiting for other streams that read it. So the owner of a buffer that another stream reads also holds the event
    that ends the read. Three rules ensure that memory is reused only after that event, without record_stream and
    without stopping the host:

    1. Gather buffers are allocated and freed on the all-gather stream and read by compute. Releasing one records an
       event on the compute stream (`releases`); before the next allocation the all-gather stream waits for all such
       events (`wait_for_releases`).
    2. Reduce inputs, what exchanges receive, and reduce outputs are allocated on the compute
       stream and used by the reduce-scatter and all-reduce streams, which wait for compute first.
       Their reduction refers to them until the compute stream has waited for it
       (`make_room_for_reduction`, `join`).
    3. The compute stream waits for every gather before its group is released, even if the group was not used. So a
       later write to the shards (the optimizer) comes after the gather's read of them.

    Staging memory of comm objects follows rules 1 and 2. That of gathers is used on the all-gather
    stream, from allocation to the copy out. That of reductions is allocated on the compute stream, and
    released when this stream has waited for the last read of the input. So a comm object that keeps
    its memory may hand it out again to the stream that allocated it, without an event of its own.

    [Note: borders of a capture]
    Inside of a CUDA graph's capture, no stream may wait for an event that was recorded outside of it, and the other way
    round. Events are kept from step to step, and nothing tells us that a capture begins or ends. So every pass asks
    whether it is captured, and the context does two things at the beginning of each captured pass, and of the first one
    after a capture (`cross_border`):

    1. The streams are forked from the current stream and joined to it. In a capture, they are part of it from here on.
       The current stream has waited for all that they did earlier in this capture.
    2. All events are recorded again on the current stream. A later wait for one of them waits at least for this point.

    This drops waits for work from before the capture. That is safe: `torch.cuda.graph` lets the host wait for the device
    before a capture begins, and a graph is replayed in the order of the stream that replays it.
    At the end of a pass, the current stream has waited for all work on other streams: a capture may end there.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._device = torch_border.device_for(device)
        self.asynchronous = self._device.has_streams
        CONTEXTS.add(self)
        self.max_reductions = 1
        """Most reduce inputs that may be in flight; before one more, compute waits for the oldest."""

        # Compute waits for gathers and for the inputs of reductions, so their kernels go before its own.
        # It waits for all-reduces at the end of backward only.
        self.all_gather = self._stream("all-gather", priority=-1)
        self.reduce_scatter = self._stream("reduce-scatter", priority=-1)
        self.all_reduce = self._stream("all-reduce", priority=0)
        self.observer: StepObserver | None = None
        """The observer of steps; usually none."""
        self.observers: tuple[StepObserver, ...] = ()
        """The observers that `observer` tells, if they are several."""
        self.profiler_ranges: Any = None
        """The observer for torch's profiler, while that runs."""
        self.host_reads_results = False
        """Whether sharded gradients are in host memory, so that the host must wait for them."""
        self.indices: Indices = weakref.WeakValueDictionary()
        """Indices that the all-gather stream copies by."""
        self.releases: list[Event] = []
        """Events that mark the last read of each released gather buffer on the compute stream."""
        self.latest_graph: weakref.ref[object] | None = None
        """Refers to an object that lives as long as the backward graph of the model's latest forward."""
        self.has_room = True
        """Whether memory for one more small group raises no peak: [Note: memory first] in `engine.step`."""
        self.reduce_inputs: deque[InFlight] = deque()
        """Reductions whose input may still be read, oldest first."""
        self._reductions: deque[InFlight] = deque()
        """Reductions that are not finished, oldest first."""
        self._kept: list[object] = []
        """Memory that a reduction in flight may use, and that has no other reference."""
        self.in_capture = False
        """Whether the last pass was captured in a CUDA graph."""
        self.enters_or_leaves = False
        """Whether exactly one of the last two passes was captured; known after `at_border`."""
        self.replay_end: Event | None = None
        """Marks the end of the last replay by `graphed`; None if there was none, and during a capture."""
        self._events: weakref.WeakSet[Any] = weakref.WeakSet()
        """All events that a stream or the host may wait for."""
        self._written = self.new_event()
        """On the current stream: the shards are written, as far as gathers have to wait for it."""

    def _stream(self, name: str, *, priority: int) -> Any:
        if not self.asynchronous:
            return _HOST_STREAM
        return self._device.new_stream(priority=priority, name=name)

    def new_event(self) -> Event:
        """Return an event that may be recorded and waited for any number of times."""
        if not self.asynchronous:
            return torch.cpu.Event()
        event: Event = self._device.new_event()
        self._events.add(event)
        return event

    def observe(self, observer: StepObserver) -> None:
        """Tell an observer of the steps from now on."""
        self._set_observers((*self.observers, observer))

    def stop_observing(self, observer: StepObserver) -> None:
        """Tell it no longer."""
        self._set_observers(tuple(each for each in self.observers if each is not observer))

    def _set_observers(self, observers: tuple[StepObserver, ...]) -> None:
        self.observers = observers
        self.observer = None
        if observers:
            self.observer = observers[0] if len(observers) == 1 else Observers(observers)

    def at_border(self) -> bool:
        """Return whether the pass that begins now, or the one before it, is captured: [Note: borders of a capture]."""
        before, self.in_capture = self.in_capture, is_capturing()
        self.enters_or_leaves = before is not self.in_capture
        return before or self.in_capture

    def cross_border(self) -> None:
        """Make all streams and events those of the pass that begins now: [Note: borders of a capture]."""
        self.fork_and_join()
        for event in self._events:
            event.record()
        # The all-gather stream is behind all of them now.
        self.releases.clear()

    def fork_and_join(self) -> None:
        """Order all streams after the current one, and that one after them: in a capture, they are part of it then."""
        current = self._device.current_stream()
        for stream in (self.all_gather, self.reduce_scatter, self.all_reduce):
            stream.wait_stream(current)
            current.wait_stream(stream)

    def note_replay(self) -> None:
        """Note that a captured step was replayed on the current stream: the next pass is at a border."""
        if not self.asynchronous:
            return
        self.in_capture = True
        if self.replay_end is None:
            self.replay_end = self._device.new_event()
        self.replay_end.record()

    def gathers_wait_for(self, event: Any = None) -> None:
        """Let gathers issued from now on see what was written to the shards before ``event``.

        None means everything issued to the current stream so far.
        """
        if not self.asynchronous:
            return
        if event is None:
            event = self._written  # one that is kept: `wait_stream` makes a new one each time
            event.record()
        self.all_gather.wait_event(event)

    def wait_for_releases(self) -> None:
        """Order the current stream, the all-gather stream, after all reads of buffers given back so far."""
        for event in self.releases:
            event.wait()
        self.releases.clear()

    def make_room_for_reduction(self) -> None:
        """Keep the reduce inputs in flight below `max_reductions`.

        Called on the compute stream before the next input is allocated. The input that is released here went to
        the same stream's pool, so the next one can have its memory: peak memory counts `max_reductions` inputs.
        """
        while len(self.reduce_inputs) >= self.max_reductions:
            self.reduce_inputs.popleft().finish_input()
        # Work that outlives the input (an all-reduce, a cast) is small. It had the time of one more group's
        # compute, so waiting for it here costs nothing.
        while len(self._reductions) > self.max_reductions:
            self._reductions.popleft().finish()

    def note_reduction(self, reduction: InFlight) -> None:
        """Take over a reduction that was issued: `make_room_for_reduction` or `join` finishes it."""
        self.reduce_inputs.append(reduction)
        self._reductions.append(reduction)

    def keep_until_joined(self, memory: object) -> None:
        """Keep memory alive that a reduction may still use, and that has no other reference: rule 2."""
        if self._reductions:
            self._kept.append(memory)

    def finish_inputs(self) -> None:
        """Order the current stream after the last read of every reduce input in flight."""
        while self.reduce_inputs:
            self.reduce_inputs.popleft().finish_input()

    def join(self, *, accumulate: bool = True) -> None:
        """Order the current stream after every reduction in flight; see `InFlight.finish`."""
        self.finish_inputs()
        while self._reductions:
            self._reductions.popleft().finish(accumulate=accumulate)
        self._kept.clear()
        if self.host_reads_results:
            self.synchronize()

    def synchronize(self) -> None:
        """Make the host wait for all streams of this context, so that it may use host memory that they read and write."""
        if self.asynchronous:
            for stream in (self.all_gather, self.reduce_scatter, self.all_reduce):
                stream.synchronize()

    def is_behind(self) -> bool:
        """Return whether the device has collectives left to do that the host has issued. The host does not wait.

        For another thread than the one that trains, which calls it only when nothing has been issued for some time. To
        ask the device would break a capture that is under way, of whatever model.
        """
        if not self.asynchronous or any(each.may_be_capturing for each in comm_contexts()):
            return False
        if self.in_capture:
            return self.replay_end is not None and not self.replay_end.query()
        return not all(
            stream.query() for stream in (self.all_gather, self.reduce_scatter, self.all_reduce)
        )

    @property
    def may_be_capturing(self) -> bool:
        """Whether the last pass was captured, and no replay has followed that we know of."""
        return self.in_capture and self.replay_end is None


def is_capturing() -> bool:
    """Return whether the current stream is being captured in a CUDA graph."""
    # A torch that is built for CUDA, on a machine without a GPU, fails when it is asked for a stream.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


CONTEXTS: weakref.WeakSet[FSDPCommContext] = weakref.WeakSet()


def comm_contexts() -> list[FSDPCommContext]:
    """Return the contexts of all models of this process."""
    return list(CONTEXTS)


_HOST_STREAM = contextlib.nullcontext()
