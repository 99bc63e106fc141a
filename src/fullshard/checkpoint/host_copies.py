"""Copies of tensors in host memory, made while training goes on.

On an accelerator they are made by a stream of their own, into memory that it can write to by itself. The
tensors must not change before that is done: optimizers wait for it (`Snapshot.hold_back`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fullshard import torch_border

ALIGNMENT = 64


class HostMemory:
    """Memory that copies are put into, kept from one snapshot to the next if it is pinned: pinning is slow."""

    def __init__(self) -> None:
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self._writes: list[torch.Event] = []
        """Ends of the copies into pinned memory, whoever waits for them or does not."""

    def views(self, tensors: Sequence[Tensor], *, pinned: bool) -> list[Tensor]:
        """A place for each tensor; those handed out before are taken back."""
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        memory = self._at_least(end) if pinned else torch.empty(end, dtype=torch.uint8)
        return [
            memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]

    def _at_least(self, nbytes: int) -> Tensor:
        """Pinned memory of just this size, or what there is; torch's own would be of the next power of two.

        A snapshot that was dropped (another rank could not take its own) may still be copied into it: that ends first.
        """
        while self._writes:
            self._writes.pop().synchronize()
        if self._pinned.numel() < nbytes:
            torch_border.unpin(self._pinned)
            self._pinned = torch.empty(0, dtype=torch.uint8)  # give back before taking more
            self._pinned = torch.empty(nbytes, dtype=torch.uint8)
            torch_border.pin(self._pinned)
        return self._pinned

    def note_write(self, event: torch.Event) -> None:
        """Copies are on their way into pinned memory until ``event``."""
        self._writes.append(event)


class Snapshot:
    """Copies of tensors as they are now."""

    def __init__(self, tensors: Sequence[Tensor], memory: HostMemory) -> None:
        """Copy tensors of the CPU now, and let those of an accelerator be copied beside what it computes."""
        devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        self.copies = memory.views(tensors, pinned=bool(devices))
        # The tensors are held until they have been copied: their owner may let go of them.
        self._sources = list(tensors)
        self._events: dict[torch.device, torch.Event] = {}
        for device in devices:
            self._copy_from(device, memory)
        with torch.no_grad():
            for tensor, copy in zip(tensors, self.copies, strict=True):
                if tensor.device.type == "cpu":
                    copy.copy_(tensor)

    def _copy_from(self, device: torch.device, memory: HostMemory) -> None:
        stream = torch.Stream(device=device)
        # What was computed so far is what is copied.
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream, torch.no_grad():
            for tensor, copy in zip(self._sources, self.copies, strict=True):
                if tensor.device == device:
                    copy.copy_(tensor, non_blocking=True)
            self._events[device] = stream.record_event()
        memory.note_write(self._events[device])

    def hold_back(self, optimizer: Optimizer | None) -> None:
        """Let nothing change the tensors before they are copied.

        Forward and backward do not, so until the optimizer's next step the device goes on; without an optimizer it
        waits at once. The host never waits.
        """
        if not self._events:
            return
        if optimizer is None:
            self._let_device_wait()
            return

        def wait(*_: Any) -> None:
            handle.remove()
            self._let_device_wait()

        handle = optimizer.register_step_pre_hook(wait)

    def _let_device_wait(self) -> None:
        for device, event in self._events.items():
            torch.accelerator.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Let the host wait until the copies are made."""
        for event in self._events.values():
            event.synchronize()
        self._sources.clear()
