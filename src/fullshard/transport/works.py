"""Works of collectives, for which the host may have to wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from fullshard import torch_border
from fullshard.mesh.backends import Backend
from fullshard.transport.monitor import GroupMonitor


def ordered(work: Work, backend: Backend) -> Work | None:
    """Order the current stream after ``work``, and return None: nothing is left to wait for."""
    if not backend.is_on_stream:
        work.wait()
    return None


def watched(work: Work, monitor: GroupMonitor, backend: Backend) -> Work:
    """Return a work whose wait the monitor sees, if the host waits for it."""
    return work if backend.is_on_stream else monitor.waited(work)


class JoinedGather:
    """Several gathers in one message, in memory of its own; only `wait` writes the outputs.

    A `Work` for [Note: names of gloo's work]. The outputs may be read only after `wait`, as with any other work.
    """

    _work: Work

    def __init__(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: ProcessGroup
    ) -> None:
        self._own = torch.cat(list(inputs))
        self._message = self._own.new_empty(group.size() * self._own.numel())
        self._outputs = [output.view(group.size(), -1) for output in outputs]
        sizes = [tensor.numel() for tensor in inputs]
        self._gathered = self._message.view(group.size(), -1).split(sizes, dim=1)

    def start(self, group: ProcessGroup, monitor: GroupMonitor, options: Any) -> None:
        """Send the message."""
        work = torch_border.all_gather_single(group)(self._message, self._own, options)
        self._work = monitor.waited(work)

    def get_future(self) -> Any:
        """Return a future that is completed when the message has arrived."""
        return self._work.get_future()

    def wait(self) -> None:
        """Wait for the message and distribute it."""
        self._work.wait()
        torch._foreach_copy_(self._outputs, self._gathered)


def as_real(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones, flat, in the same memory: not every backend sums complex ones.

    Real tensors are returned as they are.
    """
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
