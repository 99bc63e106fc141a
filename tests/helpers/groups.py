"""Entering and leaving a process group in the process of the tests, without a trace for the next one."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def alone() -> Iterator[None]:
    """Be the only rank of a real (gloo) default process group."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        leave_group()


def leave_group() -> None:
    """Destroy the default process group, if there still is one, and free all that held on to it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_meshes()
    gc.collect()
    assert not dist.is_initialized(), "the default process group survived its destruction"


def forget_meshes() -> None:
    """Clear the caches that DTensor keeps for this thread.

    It remembers the outcome of every operation by mesh, and meshes of two tests compare equal: the
    second test would get results on the first one's mesh, whose groups are gone.
    """
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is not None:
        # What torch.distributed.tensor.debug does, which takes a second to import.
        tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()
