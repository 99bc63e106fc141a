"""Process groups of ranks that do not exist: their collectives are only reported."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

VIRTUAL_BACKEND = "virtual"


class CollectiveReceiver(Protocol):
    """Receiver of the calls of collectives."""

    def note_collective(
        self,
        kind: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        group: ProcessGroup,
        *,
        is_asynchronous: bool,
    ) -> Any:
        """Take note of a collective, and return a `Work`.

        Args:
            kind: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, barrier, send or recv.
            outputs: Tensors that it writes.
            inputs: Tensors that it reads; the same as the outputs where it works in place.
            group: The ranks.
            is_asynchronous: Whether the caller waits for the work.
        """


class VirtualGroup(ProcessGroup):
    """The ranks of a virtual world. Collectives change no tensor."""

    receiver: ClassVar[CollectiveReceiver | None] = None

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)  # type: ignore[call-arg]  # the stub knows one of two
        self._world = world

    def size(self) -> int:
        """Return the number of ranks."""
        return self._world

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return VIRTUAL_BACKEND

    @property
    def group_name(self) -> Any:
        """Return the name under which torch knows the group."""
        return dist.distributed_c10d._world.pg_names[self]


_KINDS = {
    # torch 2.13 renamed some of them; 2.11 has only the older names.
    "all_gather_single_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "_allgather_base": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "alltoall_base": "all_to_all",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}
"""Methods of a process group, and the kind of their collectives."""
_FROM_ONE_TO_ANOTHER = ("all_gather", "reduce_scatter", "all_to_all")
"""Kinds whose first argument is what they write and whose second is what they read. The others work in place."""


def _method(kind: str) -> Callable[..., Any]:
    def note(group: VirtualGroup, *args: Any, **_: Any) -> Any:
        assert group.receiver is not None, "the groups of a plan are gone when it ends"
        first, second = ([*_tensors(each)] for each in (*args[:2], (), ())[:2])
        outputs, inputs = (first, second) if kind in _FROM_ONE_TO_ANOTHER else (first, first)
        if kind in ("send", "recv"):
            outputs, inputs = ([], first) if kind == "send" else (first, [])
        options = next((each for each in args if hasattr(each, "asyncOp")), None)
        waits = options is not None and not options.asyncOp
        return group.receiver.note_collective(
            kind, outputs, inputs, group, is_asynchronous=not waits
        )

    return note


def _tensors(argument: Any) -> Iterator[Tensor]:
    return (each for each in tree_leaves(argument) if isinstance(each, Tensor))


for _name, _kind in _KINDS.items():
    setattr(VirtualGroup, _name, _method(_kind))


def _new_group(_: object, rank: int, world: int, timeout: timedelta) -> VirtualGroup:
    return VirtualGroup(rank, world)


@contextlib.contextmanager
def virtual_process_group(world: int, receiver: CollectiveReceiver) -> Iterator[None]:
    """Be rank 0 of a default process group of ``world`` ranks without others; ``receiver`` is told of its collectives."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if VIRTUAL_BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(VIRTUAL_BACKEND, _new_group, devices=["cpu", "cuda", "meta"])
    VirtualGroup.receiver = receiver
    dist.init_process_group(VIRTUAL_BACKEND, rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        VirtualGroup.receiver = None
