"""The recorder of a trace: what a step does and when, for `trace` to export.

`TraceRecorder` observes a step. Spans are kept as small tuples, and named and converted when the recording is over.

[Note: when things happened]
A device works later than the host asks it to, so the device takes the times. A mark is an event recorded
on the stream that is current at that point: it is reached when everything issued to that stream before it
is done, and nothing issued after it has begun. Where each mark stands:

    compute         on the compute stream: behind the wait for the gather, before the first kernel of the
                    module; after its last kernel, before anything is released
    wait            on the compute stream, right before and right behind the wait for an event of another
                    stream: there is nothing between the two but the wait
    collective      on the stream of the collective: behind the copies into its input, and behind the
                    collective, before any copy out of its output

Nobody waits for marks while a step runs. The host reads them all at the end, after one synchronisation. On the CPU a
mark is the host's time: compute is over when its call returns, and a wait is the time within `Work.wait`. A collective
that a backend carries on threads of its own has ended when its future says so; if it has none, when the program has
waited for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch.distributed import Work

from fullshard import torch_border
from fullshard.transport.observer import Collective, StepObserver

Mark = Any
"""A point in time: nanoseconds of the host, or an event in a stream."""
Pass = Literal["forward", "backward"]
"""Whether something happened within a backward."""
Reason = Literal["gather", "reduction"]
Kind = Literal["forward", "backward", "recompute"]

host_ns = time.perf_counter_ns


class Named(Protocol):
    """A state, or a group of parameters."""

    name: str


class Group(Named, Protocol):
    """What the recorder asks a group of parameters."""

    @property
    def held_bytes(self) -> int:
        """Bytes that the group has for gathering, now."""


class HostClock:
    """Marks are the host's time, at which everything before has been done."""

    on_streams = False

    def __init__(self) -> None:
        self.zero_ns = host_ns()

    def now(self) -> int:
        """Return the host's time."""
        return host_ns()

    def mark(self) -> Mark:
        """Now."""
        return self.now()

    def microseconds(self, mark: Mark) -> float:
        """From the clock's start to a mark."""
        return self.host_microseconds(mark)

    def host_microseconds(self, nanoseconds: int) -> float:
        """The same for a time of the host."""
        return (nanoseconds - self.zero_ns) / 1e3

    def synchronize(self) -> None:
        """Nothing is outstanding."""


ALLOCATOR_EVERY_NS = 4_000_000
"""The device's allocator is asked no more often than this: it takes some 50 microseconds to answer, 1 % of the host's
time then."""

PREPARED_MARKS = 4096
"""The number of events that are made before the first step: making one takes as long as recording it."""


class StreamClock(HostClock):
    """Marks are events in streams; each is taken once, and lives as long as what it marks."""

    on_streams = True

    def __init__(self, device: torch.device) -> None:
        """Wait for the device: then an event is reached when it is recorded, give or take some microseconds."""
        self._device = device
        self._unused: list[torch.Event] = []
        # An event is only made when it is first recorded.
        self._unused = [self.mark() for _ in range(PREPARED_MARKS)]
        torch.accelerator.synchronize(device)
        before = host_ns()
        self._zero = self.mark()
        torch.accelerator.synchronize(device)
        self.zero_ns = (before + host_ns()) // 2

    def mark(self) -> Mark:
        """The current end of the current stream."""
        unused = self._unused
        event = unused.pop() if unused else torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def microseconds(self, mark: Mark) -> float:
        """From the clock's start to a mark that has been reached.

        All are measured from one event, and rounding keeps their order; so spans that nest still do.
        """
        return float(self._zero.elapsed_time(mark)) * 1e3

    def synchronize(self) -> None:
        """Let all marks be reached."""
        torch.accelerator.synchronize(self._device)


class ComputeSpan(NamedTuple):
    """A module of a state computed."""

    state: Named
    kind: Kind
    within: Pass
    step: int
    begin: Mark
    end: Mark


class WaitSpan(NamedTuple):
    """Compute, or on the CPU the host, stood still for a group's collective."""

    group: Group
    reason: Reason
    within: Pass
    step: int
    begin: Mark
    end: Mark


class Release(NamedTuple):
    """A group's gathered memory was given back."""

    group: Group
    within: Pass
    step: int
    at_ns: int


class MemorySample(NamedTuple):
    """Bytes held, from this moment of the host on."""

    at_ns: int
    gathered: int
    reducing: int
    allocated: int | None
    """Bytes that the device's allocator has handed out, if it was asked: asking takes longer than everything else here."""


class StepSpan(NamedTuple):
    """One step of training."""

    step: int
    begin: Mark
    end: Mark


class _Open(NamedTuple):
    """A compute span that has begun."""

    state: Named
    kind: Kind
    begin: Mark
    call: int
    """For a backward: when the call began in forward, as a number that grows."""


MEETING_NS = 100_000
"""A call of a collective that takes longer has waited for other ranks: `meetings`."""


class CollectiveSpan:
    """One collective of one group, in flight or over."""

    def __init__(self, recorder: TraceRecorder, collective: Collective, group: Group) -> None:
        self.recorder, self.collective, self.group = recorder, collective, group
        self.step, self.within = recorder.step, _pass_now()
        self.issued_ns = recorder.clock.now()
        self.nbytes = 0
        self.begin: Mark = None
        self.ends: list[Mark] = []
        """When each of its calls ended; threads of the backend append to it, too."""
        self._num_works = 0

    def begins(self, nbytes: int) -> None:
        """Note that the collective is called next, on its stream; ``nbytes`` come from, or go to, other ranks."""
        self.nbytes = nbytes
        self.begin = self.recorder.clock.mark()
        self.recorder.collectives.append(self)

    def called(self, works: Sequence[Work | None]) -> None:
        """Note that the collective has been called; the stream is ordered after calls that have no work."""
        clock = self.recorder.clock
        pending = [work for work in works if work is not None]
        self._num_works = len(pending)
        if not pending:
            self.ends.append(clock.mark())
        elif not clock.on_streams:
            self._note_meeting()
            for work in pending:
                self.recorder.note_end(work, self)

    def _note_meeting(self) -> None:
        """Note how long the host waited before the collective, until all ranks had reached it."""
        now = self.recorder.clock.now()
        if now - self.begin > MEETING_NS:
            self.recorder.add_wait(self.group, _reason(self.collective), self.begin, now)

    def host_waited(self, begin: Mark) -> None:
        """Note that the host, which began at ``begin``, has waited for the collective."""
        recorder = self.recorder
        end = recorder.clock.mark()
        if len(self.ends) < max(self._num_works, 1):
            self.ends.append(end)
        if not recorder.clock.on_streams:
            recorder.add_wait(self.group, _reason(self.collective), begin, end)


class TraceRecorder(StepObserver):
    """The recorder of one trace: what happened since it was made.

    Invariant: on the compute lane, spans nest or are apart. Forwards are calls of modules, one inside the
    other. Backwards end in whatever order backward leaves states; one that ends also ends those that
    began within it.
    """

    capturable = False  # its events could not be read

    def __init__(self, device: torch.device, *, first_step: int, limit: int) -> None:
        self.device = device
        self.clock = _clock_of(device)
        self.started_unix_ns = time.time_ns() - (self.clock.now() - self.clock.zero_ns)
        self.first_step = self.step = first_step
        self.dropped = 0
        """How many events were not recorded, because the limit was reached."""
        self._room = limit
        self.steps: list[StepSpan] = []
        self.computes: list[ComputeSpan] = []
        self.wait_spans: list[WaitSpan] = []
        self.collectives: list[CollectiveSpan] = []
        self.releases: list[Release] = []
        self.memory: list[MemorySample] = []
        self._open: list[_Open] = []
        self._gathered: dict[Group, int] = {}
        self._reducing: dict[object, int] = {}
        self._total_gathered = self._total_reducing = 0
        self._without_future: set[tuple[type, Collective]] = set()
        """Classes of works that have no future, each with its collective: to ask some takes 0.4 ms."""
        self._allocator_asked_ns = 0
        self._in_flight: dict[tuple[Collective, Group], deque[CollectiveSpan | None]] = {}
        """Collectives that have been issued, oldest first; None for one without room."""
        self._wait_began: Mark = None
        self.begin_step()

    def _has_room(self) -> bool:
        """Return whether one more event may be recorded, and count it."""
        if self._room:
            self._room -= 1
            return True
        self.dropped += 1
        return False

    def begin_step(self) -> None:
        """Let the next step begin here, not where the last one ended."""
        self._step_began = self.clock.mark()

    def end_step(self) -> None:
        """Note that the user's step is over, and that the next begins."""
        now = self.clock.mark()
        self.steps.append(StepSpan(self.step, self._step_began, now))
        self.step += 1
        self._step_began = now
        self.sample_allocator()

    # --- compute ------------------------------------------------------------------------------------

    def forward_begins(self, state: Named) -> None:
        """Note that a module of ``state`` has its parameters and inputs; its forward, or recomputation, is next."""
        kind: Kind = "forward" if _pass_now() == "forward" else "recompute"
        self._open.append(_Open(state, kind, self.clock.mark(), 0))

    def forward_ends(self, state: Named) -> None:
        """Note that the module's forward has returned, or raised."""
        self._end(state, ("forward", "recompute"))
        self.sample_allocator()

    def backward_begins(self, state: Named, call: int) -> None:
        """Note that backward has reached ``state`` and its parameters are there; it may have been reached before.

        ``call`` is a number that is greater for calls which began later in forward. An outer call whose output is
        that of an inner one is reached after it; it then encloses what is there of those that began later.
        """
        if any(each.state is state and each.kind == "backward" for each in self._open):
            return
        place = len(self._open)
        while (
            place and self._open[place - 1].kind == "backward" and self._open[place - 1].call > call
        ):
            place -= 1
        begin = self._open[place].begin if place < len(self._open) else self.clock.mark()
        self._open.insert(place, _Open(state, "backward", begin, call))
        self.sample_allocator()

    def backward_ends(self, state: Named) -> None:
        """Note that backward has left ``state``; it may have reached it without our knowledge."""
        self._end(state, ("backward",))

    def abandoned(self, states: Collection[Named]) -> None:
        """Forget spans of ``states`` that have not ended: an exception was raised, and they never will."""
        if self._open:
            self._open = [each for each in self._open if each.state not in states]

    def _end(self, state: Named, kinds: tuple[Kind, ...]) -> None:
        for place in range(len(self._open) - 1, -1, -1):
            if self._open[place].state is state and self._open[place].kind in kinds:
                break
        else:
            return
        now, within = self.clock.mark(), _pass_now()
        for each in self._open[place:]:
            if self._has_room():
                self.computes.append(
                    ComputeSpan(each.state, each.kind, within, self.step, each.begin, now)
                )
        del self._open[place:]

    # --- communication ------------------------------------------------------------------------------

    def issues(self, collective: Collective, group: Group) -> None:
        """See `StepObserver`."""
        spans = self._in_flight.setdefault((collective, group), deque())
        if collective != "reduce":
            spans.clear()  # of others a group has one in flight; an older one was given up after a failure
        spans.append(CollectiveSpan(self, collective, group) if self._has_room() else None)

    def _latest(self, collective: Collective, group: Group) -> CollectiveSpan | None:
        """Return the span of the collective that was issued last."""
        spans = self._in_flight.get((collective, group))
        return spans[-1] if spans else None

    def calls(self, collective: Collective, group: Group, nbytes: int) -> None:
        """See `StepObserver`."""
        span = self._latest(collective, group)
        if span is not None:
            span.begins(nbytes)

    def called(self, collective: Collective, group: Group, works: Sequence[Work | None]) -> None:
        """See `StepObserver`."""
        span = self._latest(collective, group)
        if span is not None:
            span.called(works)
            if collective == "all-reduce" and not self.clock.on_streams:
                span.host_waited(span.begin)  # it is over when its call returns

    def waits(self, collective: Collective, group: Group, event: Any = None) -> None:
        """See `StepObserver`."""
        if event is None:
            self._wait_began = self.clock.now()
        elif self.clock.on_streams and not event.query():
            self._wait_began = self.clock.mark()
        else:  # it has been reached, so compute will not stand still for it
            self._wait_began = None

    def waited(self, collective: Collective, group: Group, event: Any = None) -> None:
        """See `StepObserver`."""
        spans = self._in_flight.get((collective, group))
        if event is None:
            if spans and spans[0] is not None:
                spans[0].host_waited(self._wait_began)
            return
        if spans:
            spans.popleft()
        if self._wait_began is not None:
            self.add_wait(group, _reason(collective), self._wait_began, self.clock.mark())

    def note_end(self, work: Work, span: CollectiveSpan) -> None:
        """Have the thread that completes ``work`` note its end, if it can."""
        kind = type(work), span.collective
        if kind in self._without_future:
            return
        ends = span.ends

        def ended(_: object) -> None:
            ends.append(host_ns())

        if not _call_when_done(work, ended):
            self._without_future.add(kind)

    def add_wait(self, group: Group, reason: Reason, begin: Mark, end: Mark) -> None:
        """Note that compute stood still."""
        if self._has_room():
            self.wait_spans.append(WaitSpan(group, reason, _pass_now(), self.step, begin, end))

    def released(self, group: Group) -> None:
        """Note that gathered memory was given back."""
        if self._has_room():
            self.releases.append(Release(group, _pass_now(), self.step, self.clock.now()))
        self.memory_of_gathers(group)

    # --- memory -------------------------------------------------------------------------------------

    def memory_of_gathers(self, group: Group) -> None:
        """Note how much memory ``group`` has for gathering now."""
        held, before = group.held_bytes, self._gathered.get(group, 0)
        if held != before:
            self._gathered[group] = held
            self._total_gathered += held - before
            self._add_memory(None)

    def memory_of_reductions(self, holder: object, nbytes: int) -> None:
        """See `StepObserver`."""
        before = self._reducing.get(holder, 0)
        if nbytes != before:
            self._reducing[holder] = nbytes
            self._total_reducing += nbytes - before
            self._add_memory(None)

    def sample_allocator(self) -> None:
        """Ask the device's allocator, unless it was asked a moment ago.

        A state has most activations where its forward ends, most parameters and gradients where its backward begins.
        """
        now = self.clock.now()
        if self.clock.on_streams and now - self._allocator_asked_ns >= ALLOCATOR_EVERY_NS:
            self._allocator_asked_ns = now
            allocated = torch_border.device_for(self.device).allocated_bytes()
            if allocated is not None:
                self._add_memory(allocated)

    def _add_memory(self, allocated: int | None) -> None:
        if self._has_room():
            self.memory.append(
                MemorySample(
                    self.clock.now(), self._total_gathered, self._total_reducing, allocated
                )
            )


def _pass_now() -> Pass:
    return "forward" if torch_border.backward_pass_id() == -1 else "backward"


def _reason(collective: Collective) -> Reason:
    return "gather" if collective == "gather" else "reduction"


def _call_when_done(work: Work, callback: Callable[[object], None]) -> bool:
    """Have ``callback`` called by the thread that completes ``work``; return False if no thread will."""
    get_future: Any = getattr(work, "get_future", None)
    if get_future is None:
        return False
    try:
        get_future().add_done_callback(callback)
    except RuntimeError:  # some works of gloo are done by those who wait for them
        return False
    return True


def _clock_of(device: torch.device) -> HostClock:
    clock = torch_border.device_for(device).new_clock()
    if clock is not None:
        return cast(HostClock, clock)
    return HostClock() if device.type == "cpu" else StreamClock(device)
