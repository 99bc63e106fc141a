"""Comm objects: the public names of `fullshard.transport.comm_objects`, which users subclass to bring collectives of their own."""

from fullshard.transport.comm_objects import (
    AllGather,
    Comm,
    DefaultAllGather,
    DefaultReduceScatter,
    ProcessGroupAllGather,
    ProcessGroupReduceScatter,
    ReduceScatter,
    SymmetricAllGather,
    SymmetricPool,
    SymmetricReduceScatter,
)

__all__ = [
    "AllGather",
    "Comm",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "ProcessGroupAllGather",
    "ProcessGroupReduceScatter",
    "ReduceScatter",
    "SymmetricAllGather",
    "SymmetricPool",
    "SymmetricReduceScatter",
]
