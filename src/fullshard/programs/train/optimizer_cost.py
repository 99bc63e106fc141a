"""Cost of an optimizer: the bytes of its state on this rank, and the time of its steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from fullshard import torch_border
from fullshard.engine.tensor_trees import tensors_in
from fullshard.optim import AdamW8bit


class OptimizerCost:
    """Measures an optimizer. On CUDA the host does not wait for the device."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        # To ask another one for its state could copy it, or gather it.
        self._holder = (
            optimizer.inner
            if isinstance(optimizer, torch_border.DelegatingOptimizer)
            else optimizer
        )
        self._on_cuda = device.type == "cuda"
        self._last_s = 0.0
        self._running: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        """Events of the last step on CUDA, which may not have ended."""
        self._known = (0, 0)
        """Number of parameters with state at the last count, and the bytes of the state."""

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure a step of the optimizer."""
        if self._on_cuda:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            yield
            ended.record()
            self._note_ended()
            self._running = began, ended
        else:
            began_s = time.perf_counter()
            yield
            self._last_s = time.perf_counter() - began_s

    @property
    def seconds(self) -> float:
        """The time of the last step that has ended: on CUDA usually the step before, and 0 after the first."""
        self._note_ended()
        return self._last_s

    def _note_ended(self) -> None:
        if self._running is not None and self._running[1].query():
            began, ended = self._running
            self._last_s = began.elapsed_time(ended) / 1e3
            self._running = None

    @property
    def state_bytes(self) -> int:
        """Bytes of all tensors in the state, as far as this rank holds them."""
        if isinstance(self._holder, AdamW8bit):  # its state as others see it takes more
            return self._holder.state_bytes
        states = self._holder.state
        if self._known[0] != len(states):  # optimizers make all state of a parameter at once
            tensors = [tensor for state in states.values() for tensor in tensors_in(state)]
            nbytes = sum(
                (torch_border.local_of(each) if isinstance(each, DTensor) else each).nbytes
                for each in tensors
            )
            self._known = len(states), nbytes
        return self._known[1]
