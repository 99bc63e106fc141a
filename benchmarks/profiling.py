"""What a contestant does in one step: a trace for a viewer, and its heaviest kernels as text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.contestants import Contestant

__all__ = ["profiler_of"]

TOP_KERNELS = 12


def profiler_of(folder: Path, preset: str, device: torch.device) -> Callable[[Contestant], None]:
    """Make a function that traces one step of a contestant and prints its heaviest kernels."""
    folder.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # On the CPU there are no kernels but operators; both are ranked by the time that is their own.
    attribute = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"

    def look(contestant: Contestant) -> None:
        contestant.zero_grad()
        with profile(activities=activities) as trace:
            contestant.forward_backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        trace.export_chrome_trace(str(folder / f"{preset}-{contestant.name}.json"))
        events: Any = trace.key_averages()
        if device.type == "cuda":
            events = [event for event in events if event.device_type.name == "CUDA"]
        print(f"\n{preset}, {contestant.name}: one step, most expensive first (ms, calls)")
        for event in sorted(events, key=lambda event: -getattr(event, attribute))[:TOP_KERNELS]:
            print(f"{getattr(event, attribute) / 1e3:10.3f} {event.count:6d}  {event.key[:80]}")

    return look
