"""Power and clock of a GPU while it is busy, as the driver's library (NVML) counts them.

The library counts energy in ticks, some of them a second. So power is taken between the first and the last tick of a
busy stretch: a reading between two ticks would miss a part of one.

    tick        |     100 J     |     170 J     |     240 J     |
    busy     [------------------------------------------------------]
    power                  (240 - 100) J / (time between these two ticks)
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Draw", "PowerMeter"]

LIBRARY = "libnvidia-ml.so.1"
POLL_S = 0.002
SM_CLOCK = 1
"""NVML's number for the clock of the multiprocessors."""
POWER_CAP = 0x4
"""NVML's bit for a clock that is lowered to stay below the power limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """What a GPU drew in one busy stretch."""

    watts: float
    megahertz: float
    """Mean clock of the multiprocessors."""
    capped: bool
    """Whether the clock was lowered to stay below the power limit."""


class PowerMeter:
    """Reads one GPU's counters."""

    def __init__(self, library: Any, handle: Any, clock: Callable[[], float] = time.perf_counter):
        self._library, self._handle, self._clock = library, handle, clock

    @classmethod
    def of(cls, device: torch.device) -> "PowerMeter | None":
        """Return a meter of a CUDA device; None where the library is missing or does not know it."""
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError:
            return None
        handle = ctypes.c_void_p()
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
            return None
        return cls(library, handle)

    @contextmanager
    def watching(self) -> Iterator[list[Draw]]:
        """Watch while this is open, in a thread of its own; then the list has what was drawn, if that is known."""
        found: list[Draw] = []
        closed = threading.Event()

        def watch() -> None:
            draw = self.watch(closed.is_set)
            if draw is not None:
                found.append(draw)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield found
        finally:
            closed.set()
            thread.join()

    def watch(self, is_done: Callable[[], bool]) -> Draw | None:
        """Read the counters until ``is_done``; None if there were not two ticks, or the counters cannot be read."""
        ticks: list[tuple[float, float]] = []
        clocks: list[int] = []
        capped, last = False, self._joules()
        while not is_done():
            joules, mhz, reasons = self._joules(), self._megahertz(), self._reasons()
            if joules is None or last is None or mhz is None or reasons is None:
                return None
            if joules != last:
                ticks.append((self._clock(), joules))
                last = joules
            clocks.append(mhz)
            capped = capped or bool(reasons & POWER_CAP)
            time.sleep(POLL_S)
        if len(ticks) < 2:
            return None
        (begin, first), (end, final) = ticks[0], ticks[-1]
        return Draw(
            watts=(final - first) / (end - begin),
            megahertz=sum(clocks) / len(clocks),
            capped=capped,
        )

    def _joules(self) -> float | None:
        millijoules = ctypes.c_ulonglong()
        if self._library.nvmlDeviceGetTotalEnergyConsumption(
            self._handle, ctypes.byref(millijoules)
        ):
            return None
        return millijoules.value / 1e3

    def _megahertz(self) -> int | None:
        clock = ctypes.c_uint()
        if self._library.nvmlDeviceGetClockInfo(self._handle, SM_CLOCK, ctypes.byref(clock)):
            return None
        return clock.value

    def _reasons(self) -> int | None:
        reasons = ctypes.c_ulonglong()
        if self._library.nvmlDeviceGetCurrentClocksThrottleReasons(
            self._handle, ctypes.byref(reasons)
        ):
            return None
        return reasons.value
