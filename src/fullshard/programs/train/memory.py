"""The device of a rank: its name, and the memory that the rank uses, as far as device and platform report it."""

from __future__ import annotations

import sys

import torch


def memory_bytes(device: torch.device) -> int:
    """Return the peak of allocated memory on CUDA, and the resident memory of this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _resident_bytes()


def device_name(device: torch.device) -> str:
    """Return the name of a GPU; a CPU has no name that says what it can do."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def _resident_bytes() -> int:
    try:
        import psutil
    except ModuleNotFoundError:
        return _peak_resident_bytes()
    return int(psutil.Process().memory_info().rss)


def _peak_resident_bytes() -> int:
    """Return the peak of resident memory, which the standard library knows without psutil."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
