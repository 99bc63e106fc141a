"""Reading what `fullshard.trace` wrote."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

Event = dict[str, Any]


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
