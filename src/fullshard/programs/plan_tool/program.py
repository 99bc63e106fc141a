"""A step as the device sees it: what the host issues, to which stream, in the order in which the host issues it.

The engine itself writes it. It runs on a device that has streams, events and an allocator, but neither memory nor time
(`virtual_device`), and every operation, collective, event and allocation becomes an entry. So a program knows sizes
and order, and nothing about hardware. `playback` gives the entries their times on a machine.

    compute     | mm | add | wait A |      | mm | ...
    all-gather  | gather 1 | record A | gather 2 | ...
    memory      + activation   + buffer     - buffer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fullshard.virtual.observer import COMPUTE as COMPUTE, HOST as HOST

KernelKind = Literal["matmul", "attention", "memory"]
"""Limits of kernels: arithmetic of matrix products, of attention, or the traffic to memory."""

CollectiveKind = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "barrier"
]

MemoryKind = Literal[
    "parameters",
    "gradients",
    "accumulated",
    "optimizer",
    "activations",
    "gathered",
    "reducing",
    "temporary",
    "workspace",
]
"""Purposes of memory. Accumulated: gradients of whole parameters, from one microbatch to the next. Temporary: within an
operation, the gradients of activations, and what the optimizer's step needs.
Workspace: of the library for matrix products, and what the allocator rounds up."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """The work of one operation of torch on the device."""

    name: str
    """Name of the operation, such as ``aten.mm``."""
    kind: KernelKind
    dtype: str
    """Dtype of the arithmetic: ``bfloat16``, ``float32``."""
    flops: int
    """Flops of matrix products and attention; 0 for others."""
    nbytes: int
    """Bytes read and written, each input and output once."""
    shape: tuple[int, ...] = ()
    """Dimensions of a matrix product: batch, rows, columns, inner; of attention: batch * heads, queries, keys, width."""
    launches: int = 1
    """Number of kernels that it starts; the host takes its time for each."""
    scratch: int = 0
    """Bytes that it allocates and frees while it runs."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective, once for all ranks of its group."""

    kind: CollectiveKind
    nbytes: int
    """Bytes of the whole: those of a rank after an all-gather, before a reduce-scatter, before and after an all-reduce."""
    ranks: int
    """Number of ranks that take part."""
    stride: int
    """The distance between neighbours in the group: 1 for ranks next to each other, the shard size for replicas."""
    dtype: str
    messages: int = 1
    """Tensors that it has in one call."""


Direction = Literal["to device", "to host"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy between host memory and the device."""

    direction: Direction
    nbytes: int
    is_pinned: bool
    """Whether the host memory is page-locked. The device then copies by itself."""
    ranks: int
    """Ranks of the whole run: those of one host copy at the same time."""


Phase = Literal["build", "forward", "backward", "optimizer", "between"]
"""Parts of a step. Recomputation is part of backward."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, a collective or a transfer goes to a stream."""

    stream: int
    work: Kernel | Collective | Transfer
    phase: Phase
    is_repeated: bool = False
    """Whether backward computes again what forward did not keep."""


@dataclass(frozen=True, slots=True)
class Record:
    """An event marks the end of a stream."""

    stream: int
    event: int


@dataclass(frozen=True, slots=True)
class Wait:
    """A stream, or the `HOST`, waits for the last mark of an event."""

    stream: int
    event: int


@dataclass(frozen=True, slots=True)
class Allocate:
    """Memory is taken from a stream's pool; from host memory if the stream is `HOST`."""

    memory: int
    nbytes: int
    stream: int


@dataclass(frozen=True, slots=True)
class Free:
    """Memory goes back to the pool of the stream that took it."""

    memory: int


HostWorkKind = Literal["hook", "checkpoint", "recomputation", "decision"]
"""A hook of the engine: one group in one pass. A call whose activations are recomputed: what it costs beside the operations to
keep none in forward, and to compute them again in backward. An operation about which a policy of selective recomputation
decides, each time it runs."""


@dataclass(frozen=True, slots=True)
class HostWork:
    """The host does something that is no operation. Views and Python of the model count with launches."""

    count: int
    kind: HostWorkKind = "hook"


@dataclass(frozen=True, slots=True)
class HostCompute:
    """The host computes on tensors in host memory, with its share of the cores. It issues nothing meanwhile."""

    kernel: Kernel
    phase: Phase
    ranks: int
    """Ranks of the whole run: those of one host share its cores and its memory."""


Entry: TypeAlias = Launch | Record | Wait | Allocate | Free | HostWork | HostCompute


@dataclass(frozen=True, slots=True)
class Program:
    """One step of one rank, behind all that happened before it."""

    entries: Sequence[Entry]
    begin: int
    """The first entry of the step."""
    end: int
    """The index behind its last entry."""
    streams: Sequence[str]
    """Names of streams, by number; the first is `COMPUTE`."""
    kinds: Mapping[int, MemoryKind]
    """Purpose of each memory."""
