"""Devices as the library asks for their streams, events and memory: torch's own, or one that takes the place of a type.

A type of device that torch has no hardware for, such as meta, can get a device for the duration of a block: a step runs on it,
and it notes what the step asks for. The library asks a device for its properties, and never which one it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fullshard.torch_border.cuda_streams import CUDAStream

NoteKernel = Callable[[str, Sequence[Tensor], Sequence[Tensor]], None]
"""Takes the name of a kernel that passes over tensors once, those that it reads and those that it writes."""


class Device(Protocol):
    """A device, besides the operations that run on it."""

    @property
    def is_planned(self) -> bool:
        """Whether its tensors stand for those of a device that is not there."""

    @property
    def has_streams(self) -> bool:
        """Whether work is issued now and done later; otherwise the host does it, as on the CPU."""

    @property
    def note_kernel(self) -> NoteKernel | None:
        """Function that notes a compiled kernel; None where the kernel itself has to run."""

    def current(self) -> torch.device:
        """Return the current device of its type."""

    def new_stream(self, *, priority: int, name: str = "other") -> Any:
        """Return a new stream like `torch.Stream`; the name says what it is for."""

    def new_event(self) -> Any:
        """Return a new event like `torch.Event`."""

    def current_stream(self) -> Any:
        """Return the stream to which operations go now."""

    def new_clock(self) -> Any:
        """Return a clock for traces; None if the times are those of the host, or of events."""

    def allocated_bytes(self) -> int | None:
        """Return the bytes of memory that are in use, where it is cheap to ask; otherwise None."""

    def pin(self, memory: Tensor) -> None:
        """Page-lock host memory, from which and to which the device then copies without staging."""

    def unpin(self, memory: Tensor) -> None:
        """Undo `pin`, before the memory is freed."""


class TorchDevice:
    """A device of torch's."""

    is_planned: ClassVar[bool] = False
    note_kernel: ClassVar[None] = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._type = device.type
        self.has_streams = device.type != "cpu"

    def current(self) -> torch.device:
        """Return the current device of its type."""
        if self._type == "cpu":
            return torch.device(self._type)
        return torch.device(self._type, torch.get_device_module(self._type).current_device())

    def new_stream(self, *, priority: int, name: str = "other") -> Any:
        """Return a new stream; torch's have no names."""
        kind = CUDAStream if self._type == "cuda" else torch.Stream
        return kind(self._device, priority=priority)

    def new_event(self) -> Any:
        """Return a new event."""
        return torch.Event(self._type)

    def current_stream(self) -> Any:
        """Return the current stream."""
        return torch.accelerator.current_stream(self._device)

    def new_clock(self) -> Any:
        """Return None: its streams have times of their own."""

    def allocated_bytes(self) -> int | None:
        """Return the bytes of CUDA's caching allocator that are in use."""
        if self._type != "cuda":
            return None
        statistics = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(statistics["allocated_bytes"]["all"]["current"])

    def pin(self, memory: Tensor) -> None:
        """Page-lock host memory for CUDA; no other device is known to need it."""
        if memory.numel() and torch.cuda.is_available():
            error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
            torch.cuda.check_error(int(error))

    def unpin(self, memory: Tensor) -> None:
        """Undo `pin`, before the memory is freed."""
        if memory.numel() and torch.cuda.is_available():
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())))


_INSTEAD: dict[str, Device] = {}
"""Devices in the place of torch's, by type."""
_torch_device = functools.cache(TorchDevice)


def device_for(device: torch.device) -> Device:
    """Return the device that stands for one of torch's now: torch's own, but within `device_instead`."""
    return _INSTEAD.get(device.type) or _torch_device(device)


def current_stream(device: torch.device) -> Any:
    """Return the current stream of a device."""
    return device_for(device).current_stream()


@contextmanager
def device_instead(kind: str, device: Device) -> Iterator[None]:
    """Let a device take the place of torch's of a type within the block; one at a time for each type."""
    assert kind not in _INSTEAD, "one at a time"
    _INSTEAD[kind] = device
    try:
        yield
    finally:
        del _INSTEAD[kind]
