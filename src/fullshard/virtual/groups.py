"""Process groups of ranks that do not exist: their collectives are only reported."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fullshard import torch_border
from fullshard.mesh.backends import Backend, know
from fullshard.virtual import torch_internals

know(Backend(name=(NAME := "virtual"), ranks="imagined"))


class CollectiveListener(Protocol):
    """Listener to which collectives are reported."""

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

    listener: ClassVar[CollectiveListener | None] = None

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)  # type: ignore[call-arg]  # the stub knows one of two
        self._world = world

    def size(self) -> int:
        """Return the number of ranks."""
        return self._world

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return NAME

    @property
    def group_name(self) -> Any:
        """Return the name under which torch knows the group."""
        return torch_internals.name_of(self)


_FROM_ONE_TO_ANOTHER = ("all_gather", "reduce_scatter", "all_to_all")
"""Kinds whose first argument is what they write and whose second is what they read. The others work in place."""


def _method(kind: str) -> Callable[..., Any]:
    def note(group: VirtualGroup, *args: Any, **_: Any) -> Any:
        assert group.listener is not None, "the groups of a plan are gone when it ends"
        first, second = ([*_tensors(each)] for each in (*args[:2], (), ())[:2])
        outputs, inputs = (first, second) if kind in _FROM_ONE_TO_ANOTHER else (first, first)
        if kind in ("send", "recv"):
            outputs, inputs = ([], first) if kind == "send" else (first, [])
        options = next((each for each in args if hasattr(each, "asyncOp")), None)
        waits = options is not None and not options.asyncOp
        return group.listener.note_collective(
            kind, outputs, inputs, group, is_asynchronous=not waits
        )

    return note


def _tensors(argument: Any) -> Iterator[Tensor]:
    return (each for each in torch_border.leaves_in(argument) if isinstance(each, Tensor))


for _name, _kind in torch_internals.KINDS.items():
    setattr(VirtualGroup, _name, _method(_kind))


def _new_group(_: object, rank: int, world: int, timeout: timedelta) -> VirtualGroup:
    return VirtualGroup(rank, world)


@contextlib.contextmanager
def virtual_process_group(world: int, listener: CollectiveListener) -> Iterator[None]:
    """Be rank 0 of a default process group of ``world`` ranks without others; ``listener`` is told of its collectives."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _new_group, devices=["cpu", "cuda", "meta"])
    VirtualGroup.listener = listener
    dist.init_process_group(NAME, rank=0, world_size=world, store=torch_internals.fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()
        VirtualGroup.listener = None
