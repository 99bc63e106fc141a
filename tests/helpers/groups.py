"""Entering and leaving a process group in the process of the tests, without a trace for the next one."""

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

MAX_COLLECTIONS = 5
"""What one collection frees lets the next one free more: a mesh, and with it the threads of its groups."""


@contextmanager
def alone() -> Iterator[None]:
    """Be the only rank of a real (gloo) default process group."""
    gc.freeze()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        leave_group()


def leave_group() -> None:
    """Destroy the default process group, if there still is one, and free all that held on to it.

    Whoever enters one calls `gc.freeze` before. What is there then is modules and caches, and it stays; without
    that, the collections here walk all of torch, and in the process of the tests all tests: a second each time.
    A group that is left over is frozen by the next one, and its threads wake a hundred times a second to the end.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_meshes()
    for _ in range(MAX_COLLECTIONS):
        if not gc.collect():
            break
    assert not dist.is_initialized(), "the default process group survived its destruction"


def spare_collections() -> None:
    """Let more garbage come together before it is collected: jobs are short, and collect it at their end."""
    gc.set_threshold(20_000, 10, 10)


def forget_meshes() -> None:
    """Clear the caches that DTensor keeps for this thread.

    It remembers the outcome of every operation by mesh, and meshes of two tests compare equal: the
    second test would get results on the first one's mesh, whose groups are gone. And a mesh that
    is remembered keeps the threads of its groups.
    """
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return
    # What torch.distributed.tensor.debug does, which takes a second to import.
    tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    if hasattr(tensor._redistribute, "clear_redistribute_planner_cache"):  # not in torch 2.11
        tensor._redistribute.clear_redistribute_planner_cache()
    for clear in _cache_clears():
        clear()


@functools.cache
def _cache_clears() -> list[Callable[[], None]]:
    """Of all functions and methods of DTensor's that remember by means of functools."""
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith("torch.distributed.tensor._")
    ]
    owners = [*modules, *(c for m in modules for c in vars(m).values() if isinstance(c, type))]
    members = [getattr(owner, name, None) for owner in owners for name in vars(owner)]
    found = {id(m): m for m in members if hasattr(m, "cache_info") and not isinstance(m, type)}
    return [member.cache_clear for member in found.values()]
