"""Comm objects: ways to communicate that users bring, or that bring memory of their own.

A comm object implements `AllGather` or `ReduceScatter`:

    Default...       the process group's collectives, in ordinary memory
    ProcessGroup...  ... in memory that the process group's backend allocates
    Symmetric...     ... in symmetric memory, which is kept and handed out again
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from fullshard import torch_border
from fullshard.errors import CommunicationError, ConfigurationError
from fullshard.mesh.backends import backend_of
from fullshard.transport.collectives import connect
from fullshard.transport.monitor import monitor_of
from fullshard.transport.tags import tag as make_tag
from fullshard.transport.works import ordered, watched

_GATHER_OPTIONS = {flag: torch_border.all_gather_options(async_op=flag) for flag in (False, True)}


class Comm(ABC):  # noqa: B024 (what it shares is concrete)
    """A way to communicate, with its own staging memory."""

    recycles = False
    """Whether `allocate` hands memory out again after `release`, so that results must not stay in it."""
    capturable = True
    """Whether its calls may be captured in a CUDA graph: the host must not wait, and memory must come from torch's allocator."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a staged input or output; override for registered or symmetric memory.

        Called on the stream that fills the memory. If that stream did not use it last, it has waited for the one
        that did.
        """
        return torch.empty(*size, dtype=dtype, device=device)

    def release(self, tensor: Tensor) -> None:  # noqa: B027 (memory that is dropped is given back)
        """Take back memory that `allocate` returned; the stream it was allocated on is ordered after its last use."""

    def moved_to(self, group: ProcessGroup) -> Self:
        """Return the same way to communicate over another group; a user's comm object gets the group in each call."""
        return self


class AllGather(Comm):
    """An all-gather of one input into one output."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> Work | None:
        """Gather ``input_tensor`` of all ranks into ``output_tensor``, rank after rank."""


class ReduceScatter(Comm):
    """A reduce-scatter of one input into one output."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce ``input_tensor`` over ranks with ``op``; leave this rank's shard in ``output_tensor``."""


class DefaultAllGather(AllGather):
    """The process group's own all-gather."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> Work | None:
        """Gather through the process group."""
        options = _GATHER_OPTIONS[async_op]
        work = torch_border.all_gather_single(group)(output_tensor, input_tensor, options)
        backend = backend_of(group, output_tensor.device)
        work = watched(work, monitor_of(group, output_tensor.device), backend)
        return work if async_op else ordered(work, backend)


class DefaultReduceScatter(ReduceScatter):
    """The process group's own reduce-scatter."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce and scatter through the process group."""
        options = torch_border.reduce_scatter_options(op, async_op=async_op)
        work = torch_border.reduce_scatter_single(group)(output_tensor, input_tensor, options)
        backend = backend_of(group, output_tensor.device)
        work = watched(work, monitor_of(group, output_tensor.device), backend)
        return work if async_op else ordered(work, backend)


class _InMemoryOf(Comm):
    """A comm object whose staging memory belongs to a process group."""

    capturable = False  # new memory is registered with the group, by the host

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        """Let the group communicate once, which is collective: before that, no memory can be registered with it."""
        connect(group, device)
        self.group = group
        self.device = device

    def moved_to(self, group: ProcessGroup) -> Self:
        """Return a comm object of the same kind with memory of the other group."""
        return self if group is self.group else type(self)(group, self.device)


class _AllocatedByGroup(_InMemoryOf):
    """A comm object that stages in memory of the backend's allocator: cached by stream, as ordinary memory is."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory from the process group's backend."""
        flat = torch_border.allocate_tensor(self.group, math.prod(size), dtype, device)
        return flat.view(*size)


class _Symmetric(_InMemoryOf):
    """A comm object that stages in symmetric memory of the group's pool."""

    recycles = True

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return symmetric memory; collective when the pool has to grow, so in the same order on all ranks."""
        pool = _pool_of(self.group)
        return pool.take(math.prod(size) * dtype.itemsize, device).view(dtype).view(*size)

    def release(self, tensor: Tensor) -> None:
        """Give memory back to the pool."""
        _pool_of(self.group).give(tensor)


class ProcessGroupAllGather(_AllocatedByGroup, DefaultAllGather):
    """The process group's all-gather in memory of its own."""


class ProcessGroupReduceScatter(_AllocatedByGroup, DefaultReduceScatter):
    """The process group's reduce-scatter in memory of its own."""


class SymmetricAllGather(_Symmetric, DefaultAllGather):
    """The process group's all-gather in symmetric memory."""


class SymmetricReduceScatter(_Symmetric, DefaultReduceScatter):
    """The process group's reduce-scatter in symmetric memory; NCCL's can only sum."""


class SymmetricPool:
    """The symmetric memory of one process group; lives as long as the group.

    Allocating symmetric memory is slow and collective. So it is allocated only if no free block fits, in the first
    steps, and never freed; all models that communicate over the group share it. Memory that one stream gave back goes
    to the same stream only, as with the caching allocator: the order of the stream keeps the next user behind the last
    one ([Note: memory and streams]).
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._free: dict[tuple[torch.device, int], list[Tensor]] = {}
        """Free blocks of bytes, by device and stream."""
        self._lent: dict[int, tuple[tuple[torch.device, int], Tensor]] = {}
        """Blocks in use, each with its device and stream, by the identity of their storage."""

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """Return bytes for the current stream: of the smallest free block that is large enough, else of a new one."""
        key = device, torch_border.current_stream_id(device)
        free = self._free.setdefault(key, [])
        fitting = [index for index, block in enumerate(free) if block.numel() >= nbytes]
        if fitting:
            block = free.pop(min(fitting, key=lambda index: free[index].numel()))
        else:
            block = self._new_block(max(nbytes, 1), device)
        self._lent[torch_border.storage_id(block)] = key, block
        return block.narrow(0, 0, nbytes)

    def give(self, tensor: Tensor) -> None:
        """Take back memory that `take` returned, or any view of it."""
        key, block = self._lent.pop(torch_border.storage_id(tensor))
        self._free[key].append(block)

    def _new_block(self, nbytes: int, device: torch.device) -> Tensor:
        group = self._group()
        assert group is not None, "a group is alive while its memory is used"
        # The one thing that takes memory after ranks have met: all of them must come to register it.
        monitor_of(group, device).before(make_tag(f"{nbytes} bytes of symmetric memory"))
        try:
            return torch_border.symmetric_bytes(nbytes, device, group)
        except RuntimeError as error:
            raise CommunicationError(
                f"Symmetric memory must be registered with all ranks of the process group; {nbytes} bytes on "
                f"{device} could not be: {error}. Leave set_symm_mem_for_comm out on this machine, or see "
                "what NCCL_DEBUG=WARN says."
            ) from error


_POOLS: weakref.WeakKeyDictionary[ProcessGroup, SymmetricPool] = weakref.WeakKeyDictionary()


def _pool_of(group: ProcessGroup) -> SymmetricPool:
    if group not in _POOLS:
        _POOLS[group] = SymmetricPool(group)
    return _POOLS[group]


def check_group_allocates(group: ProcessGroup, device: torch.device) -> None:
    """Raise unless the group's backend has an allocator for communication memory on the device.

    Raises:
        ConfigurationError: it has none.
    """
    if not torch_border.allocates_tensors(group, device):
        raise ConfigurationError(
            "set_allocate_memory_from_process_group_for_comm needs a process group whose backend allocates "
            f"memory on {device.type}; {backend_of(group, device).name} does not on this machine. Leave the call "
            "out, or use NCCL on GPUs with multicast (NVLink SHARP)."
        )


def choose_symmetric_memory(backend: str, group: ProcessGroup, device: torch.device) -> None:
    """Make ``backend`` the one that symmetric memory comes from in this process.

    Raises:
        ConfigurationError: the group does not communicate through it, or torch does not have it.
    """
    carrier = backend_of(group, device).name
    if carrier != backend.lower():
        raise ConfigurationError(
            f"Symmetric memory of {backend} needs a process group that communicates through it; this one uses "
            f"{carrier} on {device.type}. Leave set_symm_mem_for_comm out, or use a CUDA mesh and "
            f"init_process_group('{backend.lower()}')."
        )
    try:
        torch_border.choose_symmetric_backend(backend)
    except RuntimeError as error:
        raise ConfigurationError(
            f"Symmetric memory of {backend} must be part of this torch, and be chosen before a process uses "
            f"any other; torch {torch.__version__} says: {error}. Leave set_symm_mem_for_comm out, or call it "
            "earlier or with another torch."
        ) from error
