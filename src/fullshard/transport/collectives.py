"""Collectives of the library beside those of a step's gathers and reductions: values, sums, exchanges."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.distributed.tensor import DTensor

from fullshard import torch_border
from fullshard.errors import ConfigurationError
from fullshard.mesh.axes import DataParallelAxes, global_rank
from fullshard.mesh.backends import NOTHING, backend_of, backends_of
from fullshard.transport.messages import length_of, message_of, value_in
from fullshard.transport.monitor import monitor, monitor_of
from fullshard.transport.tags import Tag, tag as make_tag
from fullshard.transport.transports import Coalesced
from fullshard.transport.works import as_real, watched

T = TypeVar("T")

_CPU = torch.device("cpu")
_CONNECTING = make_tag("first collective of a process group")


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
) -> Work | None:
    """Gather ``inputs[i]`` of all ranks into ``outputs[i]``, in one call; all are bytes. See `Transport.gather`."""
    if not outputs:
        return None
    return Coalesced(group, outputs[0].device).gather(outputs, inputs, tag, async_op=async_op)


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
    told = monitor_of(group, tensor.device)
    told.before(tag)  # messages differ in size: the tag says what is exchanged
    options = _exchange_options(async_op=True)
    with told.calling(tag):
        work = torch_border.all_to_all_single(group, output, tensor, options, sizes)
    return watched(work, told, backend_of(group, tensor.device))


def all_reduce(tensor: Tensor, group: ProcessGroup, op: ReduceOp.RedOpType, tag: Tag) -> None:
    """Reduce ``tensor`` over the group in place; the current stream is ordered after it."""
    with _in_order(group, tag, tensor.device, [tensor]):
        dist.all_reduce(as_real(tensor), op=op, group=group)


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
    texts = monitor().of_group(group, backend).before(tag, text=text)
    return values_of_all_ranks(text, group, tag) if texts is None else texts


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
    told = monitor().of_group(group, backend)
    told.before(tag, inputs)
    with told.waiting(tag):
        yield


# Options are the same for every call, so they are made once.
_exchange_options = functools.cache(torch_border.all_to_all_options)
