"""A program, played on a machine: when everything happens, and what compute waits for.

The host issues entries one after the other, each in its time. A stream works through what was issued to it, in order. A
wait holds it until the mark is reached that the event had when the host issued the wait. Whatever runs at the same time
shares the machine:

    a kernel        takes longer while a collective runs on the same device: `OverlapFacts`
    a collective    shares its link with other collectives, which halves the speed of two
    a transfer      shares the link to host memory with other transfers in the same direction

Speeds change whenever something begins or ends, so the clock goes from one such moment to the next.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from fullshard.programs.plan_tool.machine import Machine
from fullshard.programs.plan_tool.program import (
    COMPUTE,
    HOST,
    Collective,
    HostCompute,
    Kernel,
    Launch,
    Phase,
    Program,
    Record,
    Transfer,
    Wait,
)

Idle = Literal["gather", "reduction", "copy", "update", "host", "other"]
"""Reasons why compute stands still: for a gather, for a reduction, for a copy from or to host memory, for the host that updates
parameters in its own memory, for the host that has not issued anything yet, for other work or since it has none any more."""

_AWAITED: dict[str, Idle] = {
    "all-gather": "gather",
    "reduce-scatter": "reduction",
    "all-reduce": "reduction",
}
"""Reasons of waits, by the name of the stream that compute waits for."""

_WIRE = "wire"
"""The link of collectives. Those of transfers are their directions."""

_TINY = 1e-12
"""Seconds that are no time: what rounding leaves of finished work."""


def _seconds() -> defaultdict[Any, float]:
    return defaultdict(float)


class _Work(NamedTuple):
    seconds: float
    issued: float
    link: str
    """The resource that it shares with others that run at the same time; empty for a kernel."""
    phase: Phase
    entry: int = -1
    """Its place in the program, if it is work of the compute stream."""


class _Mark(NamedTuple):
    instance: int


class _Until(NamedTuple):
    instance: int
    stream: int
    """The stream of the mark."""


@dataclass(slots=True)
class _Queue:
    """The remaining work of a stream."""

    items: deque[_Work | _Mark | _Until] = field(default_factory=deque)
    running: _Work | None = None
    left: float = 0.0
    """Seconds that the running work would still need by itself."""


@dataclass(slots=True)
class Playback:
    """The times of a program's step. They count from the moment at which the host begins with it."""

    seconds: float = 0.0
    """Time until all is done."""
    gradient_seconds: float = 0.0
    """Time until forward and backward are done, and the optimizer begins."""
    compute: defaultdict[str, float] = field(default_factory=_seconds)
    """Seconds on the compute stream: matmul, attention, memory, collective."""
    phases: defaultdict[Phase, float] = field(default_factory=_seconds)
    """Seconds of work on the compute stream by phase, without waits."""
    collectives: defaultdict[str, float] = field(default_factory=_seconds)
    """Seconds on the wire, by kind."""
    transfers: defaultdict[str, float] = field(default_factory=_seconds)
    """Seconds of copies between host memory and the device, by direction."""
    update_seconds: float = 0.0
    """Seconds for which the host computes in its own memory."""
    idle: defaultdict[Idle, float] = field(default_factory=_seconds)
    """Seconds for which compute stood still, by reason."""
    host_seconds: float = 0.0
    """Seconds until the host has issued everything."""
    launches: list[tuple[int, float]] = field(default_factory=list)
    """Entries that the compute stream has worked on, and the seconds at which it began with each."""
    _marks: dict[int, float] = field(default_factory=dict)
    _hosts: list[float] = field(default_factory=list)
    _first: int = 0

    def of_event(self, event: int) -> float:
        """Return the seconds at which an event's mark was reached, of its first record in the step."""
        return self._marks[event]

    def of_host(self, entry: int) -> float:
        """Return the seconds at which the host came to an entry of the program."""
        place = min(max(entry - self._first, 0), len(self._hosts) - 1)
        return self._hosts[place]


def play(program: Program, machine: Machine, *, is_compiled: bool = False) -> Playback:
    """Return the times of a program's step on a machine.

    Args:
        program: A step.
        machine: The machine that it runs on.
        is_compiled: The model's blocks are compiled.
    """
    return _Player(program, machine, is_compiled=is_compiled).play()


class _Player:
    def __init__(self, program: Program, machine: Machine, *, is_compiled: bool) -> None:
        self._program, self._machine, self._is_compiled = program, machine, is_compiled
        self._queues = [_Queue() for _ in program.streams]
        self._now = 0.0
        """Time until which the device has been simulated."""
        self._is_issuing = True
        """Whether the host has not issued everything yet."""
        self._reached: dict[int, float] = {}
        self._result = Playback(_first=program.begin)
        self._kernel_seconds: dict[int, float] = {}
        self._link_seconds: dict[Collective | Transfer, float] = {}
        self._awaited: int | None = None
        """The stream that the host waits for, if it waits."""
        self._updates: deque[tuple[float, float]] = deque()
        """Begin and end of what the host has computed in its own memory, as far as the device has not got there."""

    def play(self) -> Playback:
        program, machine, result = self._program, self._machine, self._result
        latest: dict[int, tuple[int, int]] = {}
        """The last mark of each event, and its stream."""
        firsts: dict[int, int] = {}
        host, instances = 0.0, 0
        for index in range(program.begin, program.end):
            entry = program.entries[index]
            result._hosts.append(host)
            begin = host
            host += machine.host_seconds(entry, is_compiled=self._is_compiled)
            if isinstance(entry, HostCompute):
                self._note_update(entry, begin, host)
            elif isinstance(entry, Launch):
                self._queues[entry.stream].items.append(self._work(entry, host, index))
            elif isinstance(entry, Record):
                instances += 1
                latest[entry.event] = instances, entry.stream
                firsts.setdefault(entry.event, instances)
                self._queues[entry.stream].items.append(_Mark(instances))
            elif isinstance(entry, Wait) and entry.event in latest:
                instance, stream = latest[entry.event]
                if entry.stream == HOST:
                    self._awaited = stream
                    host = max(host, self._run(instance))
                    self._awaited = None
                elif entry.stream != stream:
                    self._queues[entry.stream].items.append(_Until(instance, stream))
        result._hosts.append(host)
        result.host_seconds = host
        self._is_issuing = False
        result.seconds = max(self._run(None), host)
        self._note_host(result.seconds - self._now)
        result.gradient_seconds = result.gradient_seconds or result.seconds
        result._marks = {event: self._reached[mark] for event, mark in firsts.items()}
        return result

    def _work(self, entry: Launch, issued: float, index: int) -> _Work:
        """Return the work of a launch, and note it."""
        work, result = entry.work, self._result
        if isinstance(work, Kernel):
            # Equal operations are one object, so its identity is enough.
            seconds = self._kernel_seconds.get(id(work))
            if seconds is None:
                seconds = self._machine.kernel_seconds(work, is_compiled=self._is_compiled)
                self._kernel_seconds[id(work)] = seconds
            if entry.stream == COMPUTE:
                result.compute[work.kind] += seconds
                result.phases[entry.phase] += seconds
            place = index if entry.stream == COMPUTE else -1
            return _Work(seconds, issued, "", entry.phase, place)
        seconds = self._link_seconds.get(work)
        if seconds is None:
            seconds = self._link_seconds[work] = self._seconds_on_link(work)
        if isinstance(work, Transfer):
            result.transfers[work.direction] += seconds
            kind, link = "transfer", str(work.direction)
        else:
            result.collectives[work.kind] += seconds
            kind, link = "collective", _WIRE if work.ranks > 1 else ""
        if entry.stream == COMPUTE:
            result.compute[kind] += seconds
            result.phases[entry.phase] += seconds
        return _Work(seconds, issued, link, entry.phase)

    def _seconds_on_link(self, work: Collective | Transfer) -> float:
        if isinstance(work, Transfer):
            return self._machine.transfer_seconds(work)
        return self._machine.collective_seconds(work)

    def _note_update(self, entry: HostCompute, begin: float, end: float) -> None:
        self._updates.append((begin, end))
        self._result.update_seconds += end - begin
        if entry.phase == "optimizer" and not self._result.gradient_seconds:
            self._result.gradient_seconds = begin

    # --- the device -------------------------------------------------------------------------------

    def _run(self, instance: int | None) -> float:
        """Let the device work until a mark is reached, or until nothing is left; return when."""
        while instance is None or instance not in self._reached:
            if not self._advance():
                break
        return self._now if instance is None else self._reached[instance]

    def _advance(self) -> bool:
        """Go to the next moment at which something begins or ends; return False if nothing is left."""
        while self._start():
            pass  # a mark that was reached lets others go on
        queues = self._queues
        running = [queue for queue in queues if queue.running is not None]
        # How much longer each takes than by itself.
        links = Counter(each.running.link for each in running if each.running)
        factors: dict[str, float] = dict(links)
        factors[""] = self._machine.overlap.compute_slowdown if links[_WIRE] else 1.0
        step = min(
            (each.left * factors[each.running.link] for each in running if each.running),
            default=None,
        )
        for queue in queues:
            head = queue.items[0] if queue.running is None and queue.items else None
            if isinstance(head, _Work):
                until = head.issued - self._now
                step = until if step is None else min(step, until)
        if step is None:
            return False
        self._note_idle(step)
        self._now += step
        for queue in running:
            assert queue.running is not None
            queue.left -= step / factors[queue.running.link]
            if queue.left <= _TINY:
                queue.running = None
        return True

    def _start(self) -> bool:
        """Begin all work that can begin now; return whether a mark was reached that a stream or the host may wait for."""
        was_reached = False
        for queue in self._queues:
            items = queue.items
            while queue.running is None and items:
                head = items[0]
                if isinstance(head, _Mark):
                    self._reached[head.instance] = self._now
                    was_reached = True
                elif isinstance(head, _Until):
                    if head.instance not in self._reached:
                        break
                elif head.issued > self._now + _TINY:
                    break
                else:
                    queue.running, queue.left = head, head.seconds
                    if head.entry >= 0:
                        self._result.launches.append((head.entry, self._now))
                    if head.phase == "optimizer" and not self._result.gradient_seconds:
                        self._result.gradient_seconds = self._now
                items.popleft()
        return was_reached

    def _note_idle(self, seconds: float) -> None:
        queue = self._queues[COMPUTE]
        if queue.running is not None:
            return
        awaited = self._awaited
        if queue.items and isinstance(head := queue.items[0], _Until):
            awaited = head.stream
        if awaited is None or awaited == COMPUTE:
            if self._is_issuing or queue.items:
                self._note_host(seconds)
            else:
                self._result.idle["other"] += seconds
            return
        reason = _AWAITED.get(self._program.streams[awaited], "other")
        work = self._queues[awaited].running
        if work is not None and work.link not in ("", _WIRE):
            reason = "copy"
        self._result.idle[reason] += seconds

    def _note_host(self, seconds: float) -> None:
        """Note that compute waits for the host from now on: for its updates as long as they take, otherwise for its launches."""
        now, until, updating = self._now, self._now + seconds, 0.0
        while self._updates and self._updates[0][0] < until:
            begin, end = self._updates[0]
            updating += max(0.0, min(end, until) - max(begin, now))
            if end > until:
                break
            self._updates.popleft()
        if updating:
            self._result.idle["update"] += updating
        if seconds - updating > _TINY:
            self._result.idle["host"] += seconds - updating
