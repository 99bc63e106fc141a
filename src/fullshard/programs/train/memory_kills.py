"""Processes that the kernel has killed because memory ran out, as it counts them.

A process that is killed so gets SIGKILL, like one that a user kills. Only these counters tell them apart:

    /proc/vmstat                       of the whole machine
    memory.events, memory.oom_control  of the control group (version 2, version 1), a container, say
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

COUNTER = "oom_kill"


def memory_kills(root: Path = Path("/")) -> Mapping[Path, int]:
    """Return the counts so far, by file; empty where there are none, as on macOS."""
    counts = {}
    for path in _counters(root):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == COUNTER and value.strip().isdecimal():
                counts[path] = int(value)
    return counts


def _counters(root: Path) -> Iterator[Path]:
    yield root / "proc/vmstat"
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for group in groups:
        _, _, rest = group.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield root / "sys/fs/cgroup" / path.strip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            yield root / "sys/fs/cgroup/memory" / path.strip("/") / "memory.oom_control"
