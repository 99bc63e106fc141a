"""Worlds of any size in one process, whose collectives move nothing between ranks."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import benchmarks.echo_group  # noqa: F401  # which makes the backend known
from tests.helpers.groups import leave_group


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """Be `rank` of `size` in a `fake` default process group: shapes are true, values are not."""
    gc.freeze()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        leave_group()


@contextmanager
def echo_world(size: int) -> Iterator[None]:
    """Be rank 0 of `size` ranks that all send what this one sends, so values are defined. Not so in a `fake` group before torch 2.13."""
    gc.freeze()
    dist.init_process_group("echo", rank=0, world_size=size, store=dist.HashStore())
    try:
        yield
    finally:
        leave_group()
