"""Comm objects: the public names of `fullshard.transport.collectives`, which users subclass to bring collectives of their own."""

from fullshard.transport.collectives import (
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
