"""The accesses, marks and waits of a step, written down as a virtual device tells of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard import torch_border
from fullshard.checks.places import here
from fullshard.checks.regions import region_of
from fullshard.checks.stream_order import (
    Access,
    Entry,
    GivenBack,
    Mark,
    Taken,
    Wait,
)
from fullshard.virtual.observer import HOST, Call, CollectiveCall, DeviceObserver, Transfer

if TYPE_CHECKING:
    from fullshard.virtual.device import VirtualDevice

FIRST_COMMUNICATOR = 1000
"""Streams from here on are those of communicators, on which asynchronous collectives run."""


class StepTrace(DeviceObserver):
    """Writes down what `stream_order` has to know.

    [Note: what a collective accesses]
    A collective that its caller waits for at once runs on the caller's stream, as NCCL's do. An asynchronous one runs on its
    communicator's stream: behind what its caller had issued, and before what comes after `Work.wait`.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.device: VirtualDevice
        """The device that tells; set when there is one."""
        self._communicators: dict[Any, int] = {}
        self._marked_by: dict[int, int] = {}
        """The stream whose end each event marks."""

    # --- accesses ---------------------------------------------------------------------------------

    def operated(self, stream: int, call: Call) -> None:
        """Note the reads and writes of an operation."""
        if self.device.is_building:
            return
        read, written = read_and_written(call)
        self._access(stream, str(call.operator), read, written)

    def computed(self, call: Call, meta: Call) -> None:
        """Note the reads and writes of the host."""
        read, written = read_and_written(call)
        self._access(HOST, str(call.operator), read, written)

    def fused(
        self, stream: int, name: str, read: Sequence[Tensor], written: Sequence[Tensor]
    ) -> None:
        """Note the reads and writes of a fused kernel."""
        self._access(stream, name, read, written)

    def transferred(self, stream: int, transfer: Transfer) -> None:
        """Note a copy."""
        self._access(stream, "copy of host memory", transfer.sources, transfer.targets)
        if transfer.waits:
            self._let_host_wait(stream)

    def communicated(self, stream: int, call: CollectiveCall, event: int) -> None:
        """Note a collective: see [Note: what a collective accesses]."""
        if any(each.is_cpu for each in call.whole):
            stream = HOST
        elif call.is_asynchronous:
            own = self._communicators.setdefault(
                call.group, FIRST_COMMUNICATOR + len(self._communicators)
            )
            begin = self.device.new_number()
            self.entries += [Mark(stream, begin), Wait(own, begin)]
            stream = own
        self._access(stream, call.kind, call.inputs, call.outputs)
        self._marked_by[event] = stream
        self.entries.append(Mark(stream, event))

    def read_value(self, stream: int, tensor: Tensor) -> None:
        """Note that the host reads a value, for which it waits."""
        self._let_host_wait(stream)
        self._access(HOST, "reading a value", (tensor,), ())

    def _access(
        self, stream: int, what: str, read: Iterable[Tensor], written: Iterable[Tensor]
    ) -> None:
        self.entries += accesses(stream, what, read, written, self._memory_of)

    def _memory_of(self, tensor: Tensor) -> int | None:
        storage = tensor.untyped_storage()
        if not tensor.is_meta and not self.device.is_of_host_memory(storage):
            return None
        return self.device.memory_of(storage)

    def _let_host_wait(self, stream: int) -> None:
        """Note a wait that is part of an operation of torch."""
        event = self.device.new_number()
        self.entries += [Mark(stream, event), Wait(HOST, event)]

    # --- order and memory -------------------------------------------------------------------------

    def marked(self, stream: int, event: int) -> None:
        """Note a mark."""
        self._marked_by[event] = stream
        self.entries.append(Mark(stream, event, here()))

    def waited(self, stream: int, event: int) -> None:
        """Note a wait. One of a stream for itself, or for what the host has done, orders nothing."""
        if self._marked_by.get(event) not in (stream, HOST):
            self.entries.append(Wait(stream, event, here()))

    def allocated(self, memory: int, nbytes: int, stream: int) -> None:
        """Note memory that was taken."""
        self.entries.append(Taken(memory, stream, here()))

    def freed(self, memory: int) -> None:
        """Note memory that was given back."""
        self.entries.append(GivenBack(memory, here()))


def accesses(
    stream: int,
    what: str,
    read: Iterable[Tensor],
    written: Iterable[Tensor],
    memory_of: Callable[[Tensor], int | None],
) -> Iterator[Access]:
    """Yield the accesses of one piece of work; ``memory_of`` returns the number of a tensor's memory, if that is watched."""
    place = here()
    for tensors, writes in ((read, False), (written, True)):
        for tensor in tensors:
            local = torch_border.local_of(tensor) if isinstance(tensor, DTensor) else tensor
            memory, region = memory_of(local), region_of(local)
            if memory is not None and region is not None:
                yield Access(stream, memory, region, writes, what, place)


def read_and_written(call: Call) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that a call reads, and those that it writes."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    signature = torch_border.signature_of(call.operator)
    named = {each.name: each for each in signature.arguments}
    pairs = [
        *zip(signature.arguments, call.args, strict=False),
        *((named[name], value) for name, value in call.kwargs.items()),
    ]
    for argument, value in pairs:
        if isinstance(value, Tensor | list | tuple):
            (written if argument.is_written else read).extend(_tensors(value))
    given = {torch_border.storage_id(each) for each in (*read, *written)}
    written += [
        each for each in _tensors(call.result) if torch_border.storage_id(each) not in given
    ]
    return read, written


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in torch_border.leaves_in(value) if isinstance(each, Tensor)]
