"""CUDA graphs: captures that have failed, and the memory of a pool."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def mend_after_failed_capture(pool: tuple[int, int], stream: torch.cuda.Stream) -> None:
    """Clean up after a capture into ``pool`` that CUDA could not end; ``stream`` was the current one before it.

    torch (2.11 to 2.13) does not reach the end of `capture_end` then: the capture's stream is the current one, the
    allocator waits for the end of the capture before it gives memory back, and the random number generator believes that
    it is captured. The last is mended by another capture, which has an end.
    """
    torch.cuda.set_stream(stream)
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(stream.device.index, pool)
    nothing: Any = torch.zeros(1, device=stream.device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        nothing.add_(1)


def pool_bytes(pool: tuple[int, int]) -> int:
    """Return how many bytes torch's allocator holds for a pool of graphs."""
    return sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == tuple(pool)
    )


def keep_gpu_busy(cycles: int) -> None:
    """Let the current stream do nothing for so many cycles, in which the host gets ahead of it."""
    torch.cuda._sleep(cycles)
