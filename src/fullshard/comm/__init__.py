"""Communication: streams, collectives, all-gathers and reduce-scatters, and the spans recorded of them.

It may import `storage`, `plan` and what they import. It owns every collective, every stream and event, and the order in
which memory is allocated and released on them.

The names below are the public ones: what users subclass to bring collectives of their own.
"""

from fullshard.comm.collectives import (
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
