"""One capture of a step in a CUDA graph, with the memory around it: static inputs, results, gradients.

inputs      copied into static memory before every replay
graph       all kernels and collectives of the step; its memory is in a pool that graphs of one `graphed` share
results     lie in the pool; copied, since the next replay overwrites them
gradients   lie in the pool; put into `.grad` again after a replay, if it was cleared
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fullshard import torch_border
from fullshard.divergence.journal import Journal
from fullshard.engine.tensor_trees import map_tensors, tensors_in
from fullshard.storage.sharded_params import restore_gradients

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Pool = Any
"""torch's handle of a pool, two numbers."""


class CapturedStep:
    """A step in a CUDA graph."""

    def __init__(
        self,
        step: Callable[..., Any],
        inputs: Inputs,
        params: Sequence[Tensor],
        journals: Sequence[Journal],
        *,
        device: torch.device,
        pool: Pool,
        stream: torch.cuda.Stream,
    ) -> None:
        """Capture a step; nothing of it is run.

        Args:
            step: The step.
            inputs: Inputs of the kind that it is captured for.
            params: Parameters that may get gradients. They have none now.
            journals: Those of the process groups on which it communicates.
            device: Where it runs.
            pool: Where its memory comes from.
            stream: Where it is captured.

        Raises:
            Exception: it cannot be captured. The device, the allocator and random numbers are as before.
        """
        self._inputs: Inputs = map_tensors(
            lambda tensor: torch.empty_like(tensor, device=device, requires_grad=False), inputs
        )
        self._targets = tensors_in(self._inputs)
        self.copy_inputs(inputs)
        self._graph = torch.cuda.CUDAGraph()
        steps = [journal.step for journal in journals]
        before = torch.cuda.current_stream(device)
        # Other threads may go on: those that load data, write checkpoints or watch.
        capture: Any = torch.cuda.graph(
            self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"
        )
        try:
            with capture:
                args, kwargs = self._inputs
                results = step(*args, **kwargs)
        except BaseException:
            torch_border.mend_after_failed_capture(pool, before)
            raise
        self._results = map_tensors(Tensor.detach, results)
        self.gradients = [(param, param.grad) for param in params if param.grad is not None]
        self.optimizer_steps = [
            journal.step - step for journal, step in zip(journals, steps, strict=True)
        ]
        """Per journal, the steps of optimizers that are in the graph; the capture has counted them once."""

    def copy_inputs(self, inputs: Inputs) -> None:
        """Copy inputs into static memory."""
        for target, source in zip(self._targets, tensors_in(inputs), strict=True):
            target.copy_(source.detach(), non_blocking=True)

    def replay(self, inputs: Inputs) -> Any:
        """Run the step on these inputs, and return copies of what it returns."""
        self.copy_inputs(inputs)
        self._graph.replay()
        restore_gradients(self.gradients)
        return map_tensors(torch.clone, self._results)

    def forget(self) -> None:
        """Give the memory back; gradients that are in `.grad` stay."""
        self.gradients = []
        self._results = None
        with contextlib.suppress(RuntimeError):
            self._graph.reset()
