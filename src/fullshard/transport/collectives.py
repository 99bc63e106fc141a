"""Every call of a collective, and the objects that carry them.

Two ways to all-gather and to reduce-scatter, over the same layout:

    in place   one coalesced call over the segments, no staging: for large segments
    packed     one input and one output tensor, staged rank after rank: for small segments, and for comm objects

A comm object, a user's or one of ours, implements `AllGather` or `ReduceScatter`:

    Default...       the process group's collectives, in ordinary memory
    ProcessGroup...  ... in memory that the process group's backend allocates
    Symmetric...     ... in symmetric memory, which is kept and handed out again
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import DistBackendError, ProcessGroup, ReduceOp, Work
from torch.distributed.tensor import DTensor

from fullshard import torch_border
from fullshard.divergence.journal import Carrier, Tag, journal_of, tag as make_tag
from fullshard.divergence.meetings import WatchedWork, calling, meet, refused, waiting_for
from fullshard.errors import CommunicationError, ConfigurationError
from fullshard.mesh.axes import DataParallelAxes, global_rank
from fullshard.mesh.backends import NOTHING, Backend, backend_of, backends_of
from fullshard.transport.messages import length_of, message_of, value_in

T = TypeVar("T")

_CPU = torch.device("cpu")
_CONNECTING = make_tag("first collective of a process group")


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
        """Take back what `allocate` returned; the stream it was allocated on is ordered after its last use."""

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
        work = _watched(work, group, backend)
        return work if async_op else _ordered(work, backend)


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
        work = _watched(work, group, backend)
        return work if async_op else _ordered(work, backend)


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
        """By device and stream, free blocks of bytes."""
        self._lent: dict[int, tuple[tuple[torch.device, int], Tensor]] = {}
        """By the identity of their storage, blocks in use, each with its device and stream."""

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
        """Take back what `take` returned, or any view of it."""
        key, block = self._lent.pop(torch_border.storage_id(tensor))
        self._free[key].append(block)

    def _new_block(self, nbytes: int, device: torch.device) -> Tensor:
        group = self._group()
        assert group is not None, "a group is alive while its memory is used"
        # The one thing that takes memory after ranks have met: all of them must come to register it.
        meet(group, make_tag(f"{nbytes} bytes of symmetric memory"), backend_of(group, device))
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


def carrier_of(group: ProcessGroup, device: torch.device) -> Carrier:
    """Return what carries a group's collectives on a device."""
    return Carrier(backend_of(group, device), journal_of(group))


_CONNECTED: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def connect(group: ProcessGroup, device: torch.device) -> None:
    """Make sure that a group has communicated: NCCL connects the ranks at a group's first collective.

    Collective, the first time.
    """
    if group not in _CONNECTED:
        all_reduce(torch.zeros(1, device=device), group, ReduceOp.SUM, _CONNECTING)
        _CONNECTED.add(group)


def all_gather(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    group: ProcessGroup,
    tag: Tag,
    *,
    async_op: bool,
    carrier: Carrier | None = None,
) -> Work | None:
    """Gather ``inputs[i]`` of all ranks into ``outputs[i]``, in one call; all are bytes.

    With ``async_op`` False the current stream is ordered after the gather; the host waits for a
    backend that has no streams. ``carrier`` is what `carrier_of` returns, if the caller has it at hand.

    [Note: names of gloo's work]
    Never a coalesced gather on gloo. torch's ProcessGroupGloo has two threads, and each notes the
    name of the work it has completed in one std::string, outside of the lock (torch 2.13, `runLoop`,
    lastCompletedWorkName). Names of up to 15 characters lie in the string itself. ALLGATHER_COALESCED
    does not: one thread frees it while the other writes ALLREDUCE there, and a later malloc aborts, or
    hands out the same memory twice. Two collectives in flight on a group are enough. ALLGATHER,
    ALLREDUCE and ALLTOALL_BASE, as which gloo carries all that we call, are short.
    """
    if not outputs:
        return None
    backend, journal = carrier or carrier_of(group, outputs[0].device)
    joined = None
    if not backend.has_coalesced_gathers and len(outputs) > 1:
        joined = _JoinedGather(outputs, inputs, group)  # takes memory, so before the ranks meet
    meet(group, tag, backend, inputs, journal=journal)
    options = _GATHER_OPTIONS[async_op]
    try:
        if joined is not None:
            joined.start(group, backend, options)
            work = cast(Work, joined)
        elif len(outputs) == 1:
            work = torch_border.all_gather_single(group)(outputs[0], inputs[0], options)
        else:
            work = torch_border.all_gather_coalesced(group)(outputs, inputs, options)
    except DistBackendError as error:
        raise refused(group, tag, error) from error
    if joined is None:
        work = _watched(work, group, backend)
    return work if async_op else _ordered(work, backend)


class _JoinedGather:
    """Several gathers in one message, in memory of its own; only `wait` writes the outputs.

    A `Work` for [Note: names of gloo's work]. Nobody may read the outputs before `wait`, as with any other work.
    """

    _work: WatchedWork

    def __init__(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: ProcessGroup
    ) -> None:
        self._own = torch.cat(list(inputs))
        self._message = self._own.new_empty(group.size() * self._own.numel())
        self._outputs = [output.view(group.size(), -1) for output in outputs]
        sizes = [tensor.numel() for tensor in inputs]
        self._gathered = self._message.view(group.size(), -1).split(sizes, dim=1)

    def start(self, group: ProcessGroup, backend: Backend, options: Any) -> None:
        """Send the message."""
        work = torch_border.all_gather_single(group)(self._message, self._own, options)
        self._work = WatchedWork(work, group, backend)

    def get_future(self) -> Any:
        """Return a future that is completed when the message has arrived."""
        return self._work.get_future()

    def wait(self) -> None:
        """Wait for the message and distribute it."""
        self._work.wait()
        torch._foreach_copy_(self._outputs, self._gathered)


def reduce_scatter(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    group: ProcessGroup,
    op: ReduceOp.RedOpType,
    tag: Tag,
    *,
    async_op: bool,
    carrier: Carrier | None = None,
) -> Work | None:
    """Reduce ``inputs[i]`` over ranks and leave this rank's shard in ``outputs[i]``, in one call.

    With ``async_op`` False the current stream is ordered after it. ``carrier`` is as for `all_gather`, too.
    """
    if not outputs:
        return None
    options = _reduce_options(op, async_op=async_op)
    if outputs[0].is_complex():  # as are all others, then
        outputs, inputs = [*map(as_real, outputs)], [*map(as_real, inputs)]
    backend, journal = carrier or carrier_of(group, outputs[0].device)
    meet(group, tag, backend, inputs, journal=journal)
    try:
        work = torch_border.reduce_scatter_coalesced(group)(outputs, inputs, options)
    except DistBackendError as error:
        raise refused(group, tag, error) from error
    work = _watched(work, group, backend)
    return work if async_op else _ordered(work, backend)


def check_exchanges(wire_dtype: torch.dtype, axes: DataParallelAxes, device: torch.device) -> None:
    """Refuse to exchange gradients in ``wire_dtype`` where there are none to exchange, or the backend cannot.

    A world of one rank may ask for it.

    Raises:
        ConfigurationError: there are replicas only, or the backend cannot.
    """
    if axes.shard_mesh_size == 1 < axes.replicate_mesh_size:
        raise ConfigurationError(
            "wire_dtype is for gradients that are reduce-scattered, but nothing is sharded here: "
            f"{axes.replicate_mesh_size} replicas average whole gradients, in reduce_dtype. Leave wire_dtype out, or "
            "shard over more than one rank."
        )
    group = axes.shard_process_group
    if (
        group is not None
        and group.size() > 1
        and device.type != "cpu"
        and not backend_of(group, device).exchanges_device_memory
    ):
        # torch 2.11 does not say so, but crashes.
        raise ConfigurationError(
            f"wire_dtype={wire_dtype} needs a process group that exchanges memory on {device.type}, and "
            f"{backend_of(group, device).name} only exchanges that of CPUs. Use NCCL, or leave wire_dtype out."
        )


def all_to_all(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    group: ProcessGroup,
    tag: Tag,
    *,
    async_op: bool,
) -> list[Work | None]:
    """Send block r of ``inputs[i]`` to rank r; ``outputs[i]`` gets what all ranks sent, in their order.

    One call for each, since no backend coalesces them: small ones should be in one message.
    """
    options = _exchange_options(async_op=async_op)
    pairs = [pair for pair in zip(outputs, inputs, strict=True) if pair[0].numel()]
    if not pairs:
        return []
    backend = backend_of(group, pairs[0][0].device)
    meet(group, tag, backend, inputs)
    with calling(group, tag):
        works = [
            _watched(torch_border.all_to_all_single(group, output, tensor, options), group, backend)
            for output, tensor in pairs
        ]
    return [work if async_op else _ordered(work, backend) for work in works]


def exchange(
    output: Tensor,
    sizes: tuple[Sequence[int], Sequence[int]],
    tensor: Tensor,
    group: ProcessGroup,
    tag: Tag,
) -> Work:
    """Send parts of ``tensor`` to the ranks, and get parts of ``output`` from them; wait for the work before reading it.

    ``sizes`` are those of the received and of the sent parts, by rank of the group.
    """
    backend = backend_of(group, tensor.device)
    meet(group, tag, backend)  # messages differ in size: the tag says what is exchanged
    options = _exchange_options(async_op=True)
    with calling(group, tag):
        work = torch_border.all_to_all_single(group, output, tensor, options, sizes)
    return _watched(work, group, backend)


def all_reduce(tensor: Tensor, group: ProcessGroup, op: ReduceOp.RedOpType, tag: Tag) -> None:
    """Reduce ``tensor`` over the group in place; the current stream is ordered after it."""
    with _in_order(group, tag, tensor.device, [tensor]):
        dist.all_reduce(as_real(tensor), op=op, group=group)


def as_real(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones, flat, in the same memory: not every backend sums complex ones.

    Real tensors are returned as they are.
    """
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def broadcast(tensor: Tensor, group: ProcessGroup, tag: Tag) -> None:
    """Give all ranks of the group the tensor of its first rank; the current stream is ordered after it."""
    with _in_order(group, tag, tensor.device, [tensor]):
        dist.broadcast(tensor, group=group, group_src=0)


def whole_of_dtensor(tensor: DTensor, tag: Tag) -> Tensor:
    """Return the full tensor of which each rank of a DTensor has a shard."""
    with contextlib.ExitStack() as stack:
        for group in tensor.device_mesh.get_all_groups():
            if group.size() > 1:
                stack.enter_context(_in_order(group, tag, tensor.device))
        return tensor.full_tensor()


def values_of_all_ranks(value: T, group: ProcessGroup, tag: Tag) -> list[T]:
    """Return a small picklable value of every rank, by rank; the host waits for it."""
    own = _message(value, group)
    with _in_order(group, tag, None):
        lengths = torch.stack(_of_all_ranks(length_of(own), group)).flatten().tolist()
        messages = _of_all_ranks(F.pad(own, (0, max(lengths) - len(own))), group)
    return [value_in(each[:length]) for each, length in zip(messages, lengths, strict=True)]


def values_by_rank(value: T, groups: Iterable[ProcessGroup], tag: Tag) -> dict[int, T]:
    """Return a small picklable value of all ranks in the groups, or reached through them, by global rank."""
    values = {global_rank(): value}
    for group in groups:
        everyones = values_of_all_ranks(values, group, tag)
        values = {rank: each for theirs in everyones for rank, each in theirs.items()}
    return dict(sorted(values.items()))


def value_of_first_rank(value: T, group: ProcessGroup, tag: Tag) -> T:
    """Return the value of the group's first rank, on all of them; the host waits for it."""
    return value_of_rank(value, 0, group, tag)


def value_of_rank(value: T, source: int, group: ProcessGroup, tag: Tag) -> T:
    """Return the value of the rank at place ``source`` of the group, on all of them; the host waits for it."""
    sends = group.rank() == source
    message = _message(value if sends else None, group)
    # Another name than that of `values_of_all_ranks`: the two would wait for each other's messages.
    with _in_order(group, make_tag(f"{tag.text}, from one rank", of_step=tag.of_step), None):
        dist.broadcast(length := length_of(message), group=group, group_src=source)
        message = message if sends else message.new_empty(int(length))
        dist.broadcast(message, group=group, group_src=source)
    return value if sends else value_in(message)


def _message(value: object, group: ProcessGroup) -> Tensor:
    """Return a value's bytes where the group can send them: in host memory, if it has a backend for that."""
    backends = backends_of(group)
    device = "cpu" if "cpu" in backends else next(iter(backends))
    return message_of(value, torch.device(device))


def _of_all_ranks(tensor: Tensor, group: ProcessGroup) -> list[Tensor]:
    tensors = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(tensors, tensor, group=group)
    return tensors


def texts_of_all_ranks(
    text: str, group: ProcessGroup, tag: Tag, device: torch.device
) -> Sequence[str]:
    """Return a short text of every rank, by rank; the host waits for the other hosts, and for no device."""
    backend = backend_of(group, device)
    if backend.ranks == "imagined":
        return [text] * group.size()
    texts = meet(group, tag, backend, text=text)
    return values_of_all_ranks(text, group, tag) if texts is None else texts


def packed_all_gather(
    comm: AllGather,
    output: Tensor,
    own: Tensor,
    group: ProcessGroup,
    tag: Tag,
    *,
    async_op: bool,
) -> Work | None:
    """Gather one staged shard per rank with a comm object."""
    backend = backend_of(group, output.device)
    meet(group, tag, backend, [own])
    with calling(group, tag):
        return _checked(comm, comm(output, own, group, async_op=async_op))


def packed_reduce_scatter(
    comm: ReduceScatter,
    output: Tensor,
    packed: Tensor,
    group: ProcessGroup,
    op: ReduceOp.RedOpType,
    tag: Tag,
    *,
    async_op: bool,
) -> Work | None:
    """Reduce one staged input with a comm object."""
    meet(group, tag, backend_of(group, output.device), [packed])
    with calling(group, tag):
        return _checked(comm, comm(as_real(output), as_real(packed), group, op, async_op=async_op))


def _checked(comm: Comm, work: object) -> Work | None:
    if work is not None and not hasattr(work, "wait"):
        raise CommunicationError(
            f"A comm object must return a Work (something with wait()) or None; "
            f"{type(comm).__name__} returned {type(work).__name__}."
        )
    return work  # type: ignore[return-value]


def _ordered(work: Work, backend: Backend) -> Work | None:
    """Order the current stream after ``work``, and return None: nothing is left to wait for."""
    if not backend.is_on_stream:
        work.wait()
    return None


def _watched(work: Work, group: ProcessGroup, backend: Backend) -> Work:
    """Return a work whose wait others can see and that ends with the reason, if the host waits for it."""
    return work if backend.is_on_stream else cast(Work, WatchedWork(work, group, backend))


@contextlib.contextmanager
def _in_order(
    group: ProcessGroup, tag: Tag, device: torch.device | None, inputs: Sequence[Tensor] = ()
) -> Iterator[None]:
    """Let the ranks meet before a collective of torch's that returns when it is done.

    Without a device, the collective goes where torch sends objects: over the CPU, if the group can.
    """
    if device is None:
        cpu = backend_of(group, _CPU)
        backend = cpu if cpu is not NOTHING else next(iter(backends_of(group).values()))
    else:
        backend = backend_of(group, device)
    meet(group, tag, backend, inputs)
    with waiting_for(group, tag):
        yield


# Options are the same for every call, so each is made once.
_GATHER_OPTIONS = {flag: torch_border.all_gather_options(async_op=flag) for flag in (False, True)}
_reduce_options = functools.cache(torch_border.reduce_scatter_options)
_exchange_options = functools.cache(torch_border.all_to_all_options)
