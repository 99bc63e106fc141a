"""Reading what `fullshard.trace` wrote, and slow gathers for it on a clock that the test sets."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from fullshard.transport.comm_objects import DefaultAllGather

Event = dict[str, Any]


class HostClock:
    """In the place of `spans.host_ns`: reading it takes a microsecond, and only slow gathers take more."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        self.ns += 1_000
        return self.ns


class SlowAllGather(DefaultAllGather):
    """Gathers that are over some time after they were issued, by a test's clock."""

    def __init__(self, clock: HostClock, pause_s: float) -> None:
        self._clock, self._pause_ns = clock, round(pause_s * 1e9)

    def __call__(self, output_tensor, input_tensor, group, async_op=False) -> Any:
        work = super().__call__(output_tensor, input_tensor, group, async_op)
        return _SlowWork(work, self._clock, self._clock.ns + self._pause_ns)


class _SlowWork:
    def __init__(self, work: Any, clock: HostClock, over_at_ns: int) -> None:
        self._work, self._clock, self._over_at_ns = work, clock, over_at_ns

    def wait(self) -> None:
        self._clock.ns = max(self._clock.ns, self._over_at_ns)
        self._work.wait()


class Trace:
    """One rank's file."""

    def __init__(self, path: Path) -> None:
        self.content: dict[str, Any] = json.loads(path.read_text())
        self.events: list[Event] = self.content["traceEvents"]
        self.about: dict[str, Any] = self.content["fullshard"]

    def of(self, category: str) -> list[Event]:
        """Events of a category, in order of time; outer ones before those within."""
        return [event for event in self.events if event.get("cat") == category]

    def count(self, category: str) -> Counter[str]:
        """How many there are of each group."""
        return Counter(event["args"]["group"] for event in self.of(category))

    def memory(self, key: str) -> list[int]:
        """The values of a counter, in order of time."""
        counters = [event for event in self.events if event["ph"] == "C"]
        return [event["args"][key] for event in counters if key in event["args"]]

    def overlaps(self) -> list[tuple[str, str]]:
        """Pairs of spans of one lane that overlap without one being inside the other."""
        found = []
        for lane in range(1, 7):
            spans = [event for event in self.events if event["ph"] == "X" and event["tid"] == lane]
            spans.sort(key=lambda event: (event["ts"], -event["dur"]))
            inside: list[Event] = []
            for span in spans:
                inside = [outer for outer in inside if end_of(outer) > span["ts"] + 0.002]
                found += [
                    (outer["name"], span["name"])
                    for outer in inside
                    if end_of(outer) < end_of(span) - 0.002
                ]
                inside.append(span)
        return found


def end_of(span: Event) -> float:
    """When it ended; times are rounded to a nanosecond."""
    return float(round(span["ts"] + span["dur"], 3))
