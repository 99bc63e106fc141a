"""Measured rates of host memory and of the link to it: copies of both kinds of memory, updates and norms.

Under torchrun all ranks of a host measure at the same time. They share links, cores and memory in a step, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fullshard.programs.plan_tool.machine import GIB, MIB
from fullshard.programs.train.rank import num_cores

BYTES_OF_ADAMW = 28
"""Bytes of one parameter's update in float32: four numbers are read, and three written."""
SMALL_COPY = 4096

Stopwatch = Callable[[Callable[[], object]], float]
"""Returns the seconds of a call: the median of some, on the slowest rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRates:
    """Measured rates of a host, in bytes per second of one rank."""

    to_device: float
    to_host: float
    unpinned: float
    latency: float
    """Seconds of a small copy."""
    core: float
    """Rate of an update on one core."""
    update: float
    """Rate of an update on all cores that the rank has."""
    norm: float
    cores: int
    """Cores of the host."""
    memory_gib: float
    ranks: int
    """Ranks that measured at the same time on the host."""


def measure_host(
    device: torch.device, seconds_of: Stopwatch, *, ranks: int, mebibytes: int
) -> HostRates:
    """Measure copies between host memory and a GPU, and updates in host memory.

    Args:
        device: The GPU.
        seconds_of: The stopwatch.
        ranks: Ranks of this host, all of which must call this.
        mebibytes: Size of a copy, and of the parameters that are updated.
    """
    to_device, to_host = _copy_rates(device, seconds_of, mebibytes, is_pinned=True)
    unpinned = min(_copy_rates(device, seconds_of, mebibytes, is_pinned=False))
    small, there = _buffers(device, SMALL_COPY, is_pinned=True)
    cores, before = num_cores(), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        core, _ = update_rates(seconds_of, mebibytes)
        torch.set_num_threads(max(1, cores // ranks))
        update, norm = update_rates(seconds_of, mebibytes)
    finally:
        torch.set_num_threads(before)
    return HostRates(
        to_device=to_device,
        to_host=to_host,
        unpinned=unpinned,
        latency=seconds_of(lambda: there.copy_(small, non_blocking=True)),
        core=core,
        update=update,
        norm=norm,
        cores=cores,
        memory_gib=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB,
        ranks=ranks,
    )


def _buffers(device: torch.device, nbytes: int, *, is_pinned: bool) -> tuple[Tensor, Tensor]:
    on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_pinned)
    return on_host.fill_(1), torch.empty(nbytes, dtype=torch.uint8, device=device)


def _copy_rates(
    device: torch.device, seconds_of: Stopwatch, mebibytes: int, *, is_pinned: bool
) -> tuple[float, float]:
    """Return the bytes per second to the device, and to the host."""
    nbytes = mebibytes * MIB
    on_host, there = _buffers(device, nbytes, is_pinned=is_pinned)
    up = seconds_of(lambda: there.copy_(on_host, non_blocking=True))
    down = seconds_of(lambda: on_host.copy_(there, non_blocking=True))
    return nbytes / up, nbytes / down


def update_rates(seconds_of: Stopwatch, mebibytes: int) -> tuple[float, float]:
    """Return the bytes per second that AdamW reads and writes, and that norms read, with torch's present threads."""
    parameter = torch.zeros(mebibytes * MIB // 4).requires_grad_()
    parameter.sum().backward()
    gradient = parameter.grad
    assert gradient is not None, "backward has made it"
    optimizer = torch.optim.AdamW([parameter], fused=True)
    updated = seconds_of(optimizer.step)
    normed = seconds_of(lambda: torch._foreach_norm([gradient]))  # as clipping does
    return BYTES_OF_ADAMW * parameter.numel() / updated, gradient.nbytes / normed
