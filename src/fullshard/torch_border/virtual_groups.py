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


class Carrier(Protocol):
    """What collectives are reported to."""

    def carry(self, kind: str, messages: Sequence[Tensor], group: ProcessGroup) -> Any:
        """Take note of a collective, and return a `Work`.

        Args:
            kind: all_gather, reduce_scatter, all_reduce, all_to_all or broadcast.
            messages: The whole: what a rank has after a gather, or before anything else.
            group: The ranks.
        """


class VirtualGroup(ProcessGroup):
    """The ranks of a virtual world. Collectives change no tensor."""

    carrier: ClassVar[Carrier | None] = None

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


_COLLECTIVES = {
    # torch 2.13 renamed some of them; 2.11 has only the older names.
    "all_gather_single_coalesced": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "allgather": ("all_gather", 0),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "all_to_all_single": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
}
"""Methods of a process group: the kind of the collective, and which argument has the whole of it."""


def _method(kind: str, place: int) -> Callable[..., Any]:
    def carry(group: VirtualGroup, *args: Any, **_: Any) -> Any:
        assert group.carrier is not None, "the groups of a plan are gone when it ends"
        return group.carrier.carry(kind, tree_leaves(args[place]), group)

    return carry


for _name, (_kind, _place) in _COLLECTIVES.items():
    setattr(VirtualGroup, _name, _method(_kind, _place))


def _new_group(_: object, rank: int, world: int, timeout: timedelta) -> VirtualGroup:
    return VirtualGroup(rank, world)


@contextlib.contextmanager
def virtual_process_group(world: int, carrier: Carrier) -> Iterator[None]:
    """Be rank 0 of a default process group of ``world`` ranks without others; ``carrier`` is told of its collectives."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if VIRTUAL_BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(VIRTUAL_BACKEND, _new_group, devices=["cpu", "cuda", "meta"])
    VirtualGroup.carrier = carrier
    dist.init_process_group(VIRTUAL_BACKEND, rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        VirtualGroup.carrier = None
