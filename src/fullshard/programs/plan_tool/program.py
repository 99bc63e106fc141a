"""A step as the device sees it: what the host issues, to which stream, in the order in which the host issues it.

The engine itself writes it. It runs on a device that has streams, events and an allocator, but neither memory nor time
(`virtual_device`), and every operation, collective, event and allocation becomes an entry. So a program knows sizes
and order, and nothing about hardware. `playback` gives the entries their times on a machine.

    compute     | mm | add | wait A |      | mm | ...
    all-gather  | gather 1 | record A | gather 2 | ...
    memory      + activation   + buffer     - buffer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

KernelKind = Literal["matmul", "attention", "memory"]
"""What limits a kernel: arithmetic of matrix products, of attention, or the traffic to memory."""

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]

MemoryKind = Literal[
    "parameters", "gradients", "optimizer", "activations", "gathered", "reducing", "temporary"
]
"""What memory is for. Temporary: within an operation, the gradients of activations, and what the optimizer's step needs."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """The work of one operation of torch on the device."""

    name: str
    """Of the operation, such as ``aten.mm``."""
    kind: KernelKind
    dtype: str
    """Of the arithmetic: ``bfloat16``, ``float32``."""
    flops: int
    """Of matrix products and attention; 0 for others."""
    nbytes: int
    """Read and written, each input and output once."""
    shape: tuple[int, ...] = ()
    """Of a matrix product: batch, rows, columns, inner; of attention: batch * heads, queries, keys, width."""
    launches: int = 1
    """How many kernels it starts; the host takes its time for each."""
    scratch: int = 0
    """Bytes that it allocates and frees while it runs."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective, once for all ranks of its group."""

    kind: CollectiveKind
    nbytes: int
    """Of the whole: what a rank has after an all-gather, before a reduce-scatter, before and after an all-reduce."""
    ranks: int
    """How many take part."""
    stride: int
    """The distance between neighbours in the group: 1 for ranks next to each other, the shard size for replicas."""
    dtype: str
    group: str
    """The name of the parameter group, for people; empty if it is none of the engine's."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the step something happens."""

    phase: Literal["forward", "recompute", "backward", "optimizer", "between"]
    module: str
    """The innermost module of a parameter group; empty for the root."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel or a collective goes to a stream."""

    stream: int
    work: Kernel | Collective
    place: Place


@dataclass(frozen=True, slots=True)
class Record:
    """An event marks the end of a stream."""

    stream: int
    event: int


@dataclass(frozen=True, slots=True)
class Wait:
    """A stream waits for the last mark of an event; -1 is the host."""

    stream: int
    event: int


@dataclass(frozen=True, slots=True)
class Allocate:
    """Memory is taken from a stream's pool."""

    memory: int
    nbytes: int
    stream: int


@dataclass(frozen=True, slots=True)
class Free:
    """Memory goes back to the pool of the stream that took it."""

    memory: int


@dataclass(frozen=True, slots=True)
class HostWork:
    """The host is busy with something that is not an operation: hooks of the engine, Python of the model."""

    what: str
    count: int = 1


Entry: TypeAlias = Launch | Record | Wait | Allocate | Free | HostWork

COMPUTE = 0
"""The stream on which the model computes."""


@dataclass(slots=True)
class Program:
    """One step of one rank."""

    entries: list[Entry]
    streams: Sequence[str]
    """Their names, by number; the first is `COMPUTE`."""
    kinds: dict[int, MemoryKind] = field(default_factory=dict)
    """What each memory is for."""
    tokens: int = 0
    """That the rank trains on in the step."""
