"""Steps in CUDA graphs, without CUDA: what the engine issues in a capture is cut out of a program, and put back by each replay."""

import contextlib
from collections.abc import Iterator, Sequence
from unittest.mock import patch

from fullshard.checks.stream_check import StreamCheck
from fullshard.checks.stream_order import Access, Entry, Mark, Wait
from fullshard.mesh.backends import backend_named
from fullshard.virtual.observer import COMPUTE

__all__ = ["CapturedStep", "faults_of_capture"]

_ASKING = ("transport.streams", "engine.routes", "engine.captures")
"""Modules that ask whether the current stream is being captured."""


class CapturedStep:
    """A part of a program that runs when it is replayed.

    A graph is one piece of work of the stream that replays it: each of its streams begins behind what that stream was
    issued before, and what comes after waits for all of them.
    """

    def __init__(self, check: StreamCheck) -> None:
        self._check = check
        self.entries: list[Entry] = []

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Let the engine take what is run within the block for a capture."""
        program = self._check.program
        begin = len(program)
        with contextlib.ExitStack() as stack:
            for module in _ASKING:
                stack.enter_context(patch(f"fullshard.{module}.is_capturing", lambda: True))
            of_a_device = backend_named("nccl")
            stack.enter_context(
                patch("fullshard.engine.captures.backend_of", return_value=of_a_device)
            )
            yield
        self.entries = program[begin:]
        del program[begin:]

    def replay(self) -> None:
        """Issue what was captured."""
        program, device = self._check.program, self._check.device
        others = sorted({each.stream for each in self.entries if isinstance(each, Access)})
        others.remove(COMPUTE)
        event = device.new_number()
        program.append(Mark(COMPUTE, event))
        program += [Wait(stream, event) for stream in others]
        program += self.entries
        for stream in others:
            event = device.new_number()
            program += [Mark(stream, event), Wait(COMPUTE, event)]


def faults_of_capture(entries: Sequence[Entry]) -> list[str]:
    """Return what CUDA would refuse in a capture: waits across its border, and streams that are not forked or not joined."""
    faults = []
    known: dict[int, dict[int, int]] = {COMPUTE: {}}
    marks: dict[int, dict[int, int]] = {}
    for number, entry in enumerate(entries):
        if isinstance(entry, Wait):
            if entry.event not in marks:
                faults.append(f"waits for an event from before the capture: {entry.place}")
                continue
            clock = known.setdefault(entry.stream, {})
            for stream, time in marks[entry.event].items():
                clock[stream] = max(clock.get(stream, 0), time)
        elif isinstance(entry, Mark | Access):
            if entry.stream not in known:
                faults.append(f"stream {entry.stream} is not part of the capture: {entry.place}")
            known.setdefault(entry.stream, {})[entry.stream] = number
            if isinstance(entry, Mark):
                marks[entry.event] = dict(known[entry.stream])
    last = {each.stream: i for i, each in enumerate(entries) if isinstance(each, Access)}
    for stream, number in last.items():
        if stream != COMPUTE and known[COMPUTE].get(stream, -1) < number:
            faults.append(f"the capture ends before stream {stream} is joined: {entries[number]}")
    return faults
