"""Labelled ranges in the trace of torch's profiler: an observer of steps while a profiler runs."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from fullshard import torch_border
from fullshard.transport.observer import Part, StepObserver
from fullshard.transport.streams import FSDPCommContext


class ProfilerRanges(StepObserver):
    """A range for each part of a step, named after the part and its state or group."""

    def __init__(self) -> None:
        self._open: list[contextlib.AbstractContextManager[Any]] = []

    def begins(self, part: Part, of: Any) -> None:
        """See `StepObserver`."""
        label = f"FSDP::{part}"
        if of is not None:
            label += f" for {of.name}" if part.endswith("prefetch") else f" ({of.name})"
        found = torch.profiler.record_function(label)
        found.__enter__()
        self._open.append(found)

    def ends(self, part: Part, of: Any) -> None:
        """See `StepObserver`."""
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def failed(self) -> None:
        """See `StepObserver`."""
        while self._open:
            self._open.pop().__exit__(None, None, None)


def follow(context: FSDPCommContext) -> None:
    """Observe the steps on a context while a profiler runs, and no longer; asked where a hook begins."""
    ranges = context.profiler_ranges
    if torch_border.profiler_enabled() and ranges is None:
        context.profiler_ranges = ranges = ProfilerRanges()
        context.observe(ranges)
    elif ranges is not None:
        ranges.failed()
        context.profiler_ranges = None
        context.stop_observing(ranges)
