"""A process group of one rank on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def lone_rank(backend: str = "nccl") -> Iterator[None]:
    """Have a process group of one rank within. Its store takes a free port, since test files run side by side."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    device = torch.device("cuda", 0)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device)
    try:
        yield
    finally:
        dist.destroy_process_group()
