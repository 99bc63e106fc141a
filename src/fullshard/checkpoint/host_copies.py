"""Copies of tensors in host memory, made while training goes on.

An accelerator makes them on a stream of their own, into pinned memory. The tensors must not change before the copies are
done: optimizers wait for them (`Snapshot.hold_back`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from fullshard import torch_border
from fullshard.features.graphs.step_hook import StepHook
from fullshard.optim import EMA

ALIGNMENT = 64


class HostMemory:
    """Memory for copies. Pinned memory is kept from one snapshot to the next, because pinning is slow."""

    def __init__(self) -> None:
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self._device: torch_border.Device | None = None
        """The device for which memory is pinned."""
        self._writes: list[torch.Event] = []
        """The ends of copies into pinned memory."""

    def views(self, tensors: Sequence[Tensor], device: torch.device | None) -> list[Tensor]:
        """Return memory for a copy of each tensor, pinned for a device if there is one. Memory of earlier calls may be reused."""
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        memory = (
            torch.empty(end, dtype=torch.uint8) if device is None else self._at_least(end, device)
        )
        return [
            memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]

    def _at_least(self, nbytes: int, device: torch.device) -> Tensor:
        """Return pinned memory of at least this size. torch's own allocator would round up to a power of two.

        A snapshot may have been dropped, because another rank failed, and still be copied into this memory. So wait for
        all earlier copies first.
        """
        while self._writes:
            self._writes.pop().synchronize()
        if self._pinned.numel() < nbytes:
            if self._device is not None:
                self._device.unpin(self._pinned)
            self._device = torch_border.device_for(device)
            # Free the old memory before allocating the new.
            self._pinned = torch.empty(0, dtype=torch.uint8)
            self._pinned = torch.empty(nbytes, dtype=torch.uint8)
            self._device.pin(self._pinned)
        return self._pinned

    def note_write(self, event: torch.Event) -> None:
        """Remember that copies into pinned memory go on until ``event``."""
        self._writes.append(event)


class Snapshot:
    """Copies of tensors as they were at one moment."""

    def __init__(self, tensors: Sequence[Tensor], memory: HostMemory) -> None:
        """Copy tensors on the CPU now; start copies of tensors on an accelerator, beside what it computes."""
        devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        self.copies = memory.views(tensors, next(iter(devices), None))
        # Keep the tensors until they are copied: their owner may drop them before.
        self._sources = list(tensors)
        self._events: dict[torch.device, torch.Event] = {}
        for device in devices:
            self._copy_from(device, memory)
        with torch.no_grad():
            for tensor, copy in zip(tensors, self.copies, strict=True):
                if tensor.device.type == "cpu":
                    copy.copy_(tensor)

    def _copy_from(self, device: torch.device, memory: HostMemory) -> None:
        own = torch_border.device_for(device)
        stream = own.new_stream(priority=0)
        # The copies are of what was computed so far.
        stream.wait_stream(own.current_stream())
        with stream, torch.no_grad():
            for tensor, copy in zip(self._sources, self.copies, strict=True):
                if tensor.device == device:
                    copy.copy_(tensor, non_blocking=True)
            self._events[device] = stream.record_event()
        memory.note_write(self._events[device])

    def hold_back(self, optimizer: Optimizer | None, ema: EMA | None = None) -> None:
        """Keep the tensors from changing before they are copied.

        Forward and backward do not change them, so the device waits for the copies at the optimizer's next step, and
        before ``ema`` writes. Without an optimizer it waits at once. The host never waits.
        """
        if not self._events:
            return
        if optimizer is None:
            self._let_device_wait()
            return

        _before_next_step(optimizer).append(self._let_device_wait)
        if ema is not None:
            ema.call_before_write(self._let_device_wait)

    def _let_device_wait(self) -> None:
        for device, event in self._events.items():
            torch_border.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Let the host wait until the copies are done."""
        for event in self._events.values():
            event.synchronize()
        self._sources.clear()


_BEFORE_STEP: weakref.WeakKeyDictionary[Optimizer, list[Callable[[], None]]] = (
    weakref.WeakKeyDictionary()
)
"""Functions to call once before the next step of an optimizer."""


def _before_next_step(optimizer: Optimizer) -> list[Callable[[], None]]:
    """Return the list of functions to call once before the optimizer's next step.

    Its hook stays. A hook that removes itself breaks the step if there is another one behind it, since torch walks
    through the hooks.
    """
    calls = _BEFORE_STEP.get(optimizer)
    if calls is None:
        calls = _BEFORE_STEP[optimizer] = []
        optimizer.register_step_pre_hook(StepHook(partial(_call_once, calls)))
    return calls


def _call_once(calls: list[Callable[[], None]]) -> None:
    while calls:
        calls.pop()()
