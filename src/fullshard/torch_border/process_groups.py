"""Collectives, memory and timeouts of process groups."""

from __future__ import annotations

import contextlib
import functools
import json
import operator
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Store
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    ReduceOp,
    ReduceScatterOptions,
    Work,
)

# torch 2.13 renamed the coalesced collectives of ProcessGroup; 2.11 has only the older names.
_RENAMED = hasattr(ProcessGroup, "all_gather_single_coalesced")

_ALL_GATHER = "all_gather_single_coalesced" if _RENAMED else "allgather_into_tensor_coalesced"

_REDUCE_SCATTER = (
    "reduce_scatter_single_coalesced" if _RENAMED else "reduce_scatter_tensor_coalesced"
)


@contextlib.contextmanager
def fake_process_group(world: int) -> Iterator[None]:
    """Be rank 0 of a default process group without other ranks, whose collectives send nothing."""
    # Importing it is what makes the backend known; nothing else that trains needs it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def all_gather_options(*, async_op: bool) -> AllgatherOptions:
    """Make options to reuse for every all-gather; with ``async_op`` False, NCCL runs on the current stream."""
    options = AllgatherOptions()
    options.asyncOp = async_op
    return options


def reduce_scatter_options(op: ReduceOp.RedOpType, *, async_op: bool) -> ReduceScatterOptions:
    """Make options to reuse for every reduce-scatter with this ``op``."""
    options = ReduceScatterOptions()
    options.reduceOp = cast(ReduceOp, op)  # the enum converts; the stub does not say so
    options.asyncOp = async_op
    return options


# Called for every group in every step, so these are the group's own methods, without a Python frame around them:
# ``all_gather_coalesced(group)(outputs, inputs, options)``.

all_gather_coalesced: Callable[
    [ProcessGroup], Callable[[Sequence[Tensor], Sequence[Tensor], AllgatherOptions], Work]
] = operator.attrgetter(_ALL_GATHER)
"""Gathers ``inputs[i]`` of every rank into ``outputs[i]``, all in one call; inputs may lie in the outputs."""

reduce_scatter_coalesced: Callable[
    [ProcessGroup], Callable[[Sequence[Tensor], Sequence[Tensor], ReduceScatterOptions], Work]
] = operator.attrgetter(_REDUCE_SCATTER)
"""Reduces ``inputs[i]`` over ranks and leaves this rank's shard in ``outputs[i]``, all in one call."""

all_gather_single: Callable[[ProcessGroup], Callable[[Tensor, Tensor, AllgatherOptions], Work]] = (
    operator.attrgetter("all_gather_single" if _RENAMED else "_allgather_base")
)
"""Gathers one tensor of every rank into one output."""

reduce_scatter_single: Callable[
    [ProcessGroup], Callable[[Tensor, Tensor, ReduceScatterOptions], Work]
] = operator.attrgetter("reduce_scatter_single" if _RENAMED else "_reduce_scatter_base")
"""Reduces one tensor over ranks and leaves this rank's shard in the output."""


def all_to_all_options(*, async_op: bool) -> AllToAllOptions:
    """Make options to reuse for every all-to-all."""
    options = AllToAllOptions()
    options.asyncOp = async_op
    return options


def all_to_all_single(
    group: ProcessGroup,
    output: Tensor,
    tensor: Tensor,
    options: AllToAllOptions,
    sizes: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> Work:
    """Send part r of ``tensor`` to rank r; ``output`` has what all ranks sent, in their order.

    ``sizes`` are those of the parts of the output and of the input; all parts are of equal size if there are none.
    """
    name = "all_to_all_single" if _RENAMED else "alltoall_base"
    received, sent = map(list, sizes)
    return cast(Work, getattr(group, name)(output, tensor, received, sent, options))


def allocates_tensors(group: ProcessGroup, device: torch.device) -> bool:
    """Whether a group's backend has an allocator of its own for memory on ``device``."""
    return group._get_backend(device).supports_tensor_alloc(device)


def allocate_tensor(
    group: ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Allocate a flat tensor from the backend's allocator, cached by stream as ordinary memory is.

    NCCL's wants a group that has communicated.
    """
    return group._get_backend(device).allocate_tensor(numel, dtype=dtype, device=device)


def choose_symmetric_backend(name: str) -> None:
    """Take symmetric memory from backend ``name`` in this process; RuntimeError if that is impossible, or too late."""
    import torch.distributed._symmetric_memory as symmetric_memory  # slow, and rarely needed

    symmetric_memory.set_backend(cast(Any, name))


def symmetric_bytes(nbytes: int, device: torch.device, group: ProcessGroup) -> Tensor:
    """Allocate symmetric memory that all ranks of a group know, which must have communicated. Collective and slow."""
    import torch.distributed._symmetric_memory as symmetric_memory

    tensor = symmetric_memory.empty((nbytes,), dtype=torch.uint8, device=device)
    symmetric_memory.rendezvous(tensor, group.group_name)
    return tensor


def timeout_of(group: ProcessGroup) -> timedelta | None:
    """Return how long a collective of a group waits for other ranks; None if its backends do not say."""
    timeouts = []
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):  # a device for which the group has no backend
            options = getattr(group._get_backend(device), "options", None)
            timeouts.append(getattr(options, "_timeout", None))
    return min((timeout for timeout in timeouts if timeout is not None), default=None)


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Set how long the collectives of a group wait for other ranks."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def exists(group: ProcessGroup) -> bool:
    """Return whether a process group has not been destroyed. Its object may live on, for example in a traceback."""
    return group in dist.distributed_c10d._world.pg_group_ranks


def store_of(group: ProcessGroup) -> Store:
    """Return the store through which the ranks of a group found each other, with keys of the group's own."""
    return dist.distributed_c10d._world.pg_map[group][1]


def store_host(store: Store) -> str | None:
    """Return the host that serves a store, as its clients name it; None if no host does."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else None


def store_port(store: Store) -> int | None:
    """Return the port at which a store is served; None if it is not served by a host."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, dist.TCPStore) else None


def default_store() -> Store:
    """Return the store that the default process group was made with."""
    return dist.distributed_c10d._get_default_store()


def own_client(store: Store) -> Store:
    """Return a client of the store that no other thread uses: the operations of one client wait for each other.

    Of a store that is served by a host. Others are returned as they are: their operations are short, and the destructor
    of a second `FileStore` would count as the end of a rank.
    """
    return cast(Any, store).clone() if store_port(store) is not None else store


def own_store_client() -> Store:
    """Return a client of the default process group's store that no other thread uses.

    A client that waits for a key blocks all threads that share it.
    """
    return own_client(default_store())


def all_groups() -> list[ProcessGroup]:
    """Return the process groups of this process that have not been destroyed."""
    return list(dist.distributed_c10d._world.pg_map)


def before_shutdown(call: Callable[[], None]) -> None:
    """Call a function whenever ``destroy_process_group`` is about to end the collectives of a group; registered once.

    It is torch's method for that which is given a frame: programs may have imported the function before.
    """
    _observe_shutdowns()
    if call not in _BEFORE_SHUTDOWN:
        _BEFORE_SHUTDOWN.append(call)


_BEFORE_SHUTDOWN: list[Callable[[], None]] = []


@functools.cache
def _observe_shutdowns() -> None:
    original = ProcessGroup.shutdown

    def shutdown(self: ProcessGroup) -> None:
        for call in _BEFORE_SHUTDOWN:
            call()
        original(self)

    cast(Any, ProcessGroup).shutdown = functools.update_wrapper(shutdown, original)


@functools.cache
def observe_waits() -> None:
    """Let a watchdog see, from now on, that a thread waits for a collective which was called with ``async_op=True``.

    Python frames do not show which function of torch's a thread is in, so this one is given a frame.
    """
    # pybind looks for the name and for `self` to see that this is no override.
    original = Work.wait

    def wait(self: Work, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except RuntimeError:
            _step_of_python()
            raise

    _OBSERVED_WAITS.add(wait.__code__)
    cast(Any, Work).wait = functools.update_wrapper(wait, original)


_OBSERVED_WAITS: set[CodeType] = set()


def _step_of_python() -> None:
    """Do nothing: here Python raises what another thread has set for this one, in the place of the backend's error."""


def is_observed_wait(frame: FrameType) -> bool:
    """Return whether a thread whose innermost frame this is waits for an asynchronous collective: see `observe_waits`."""
    return frame.f_code in _OBSERVED_WAITS


def operation_waited_for(frame: FrameType) -> str:
    """Return the operation that such a thread waits for, as torch names it."""
    work: Any = frame.f_locals.get("self")
    try:
        number = int(work._get_op_type())
    except (AttributeError, RuntimeError, TypeError):  # of a class of Python's, say
        number = -1
    return _OPERATIONS.get(number, "an operation")


_OPERATIONS = {
    **dict(enumerate(("broadcast", "all_reduce", "all_reduce_coalesced", "reduce", "all_gather"))),
    **dict(enumerate(("all_gather_into_tensor", "all_gather_coalesced", "gather", "scatter"), 5)),
    **dict(enumerate(("reduce_scatter", "all_to_all_single", "all_to_all", "isend", "irecv"), 9)),
    **dict(enumerate(("irecv", "barrier"), 14)),
}
"""Functions that return such work, by torch's numbers."""


def abort_of(group: ProcessGroup, device: torch.device) -> Callable[[], None]:
    """Return the function that ends all collectives of a process group on a device; it may take long.

    RuntimeError if the group has no backend for the device.
    """
    return group._get_backend(device).abort


def pending_in_backend() -> str:
    """Return the entry of NCCL's flight recorder about the oldest collective that has not ended; "" if it has none."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return ""
    try:
        entries = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", [])
    except (RuntimeError, TypeError, ValueError):
        return ""
    if not entries:
        return ""
    oldest = min(entries, key=lambda entry: entry.get("record_id", 0))
    seen = (oldest.get(key, "?") for key in ("profiling_name", "state", "collective_seq_id"))
    name, state, number = seen
    return f"{name}, {state}, number {number} of its process group"


def arrived(tensor: Tensor) -> Tensor:
    """Return the tensor itself, after waiting for a collective that still writes it."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
