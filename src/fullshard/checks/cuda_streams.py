"""`fullshard.debug("streams")` on a GPU: operations as a dispatch mode sees them, events and memory as torch tells of them.

The step runs as usual, on real streams. What is proven does not depend on how it happened to run. A capture in a CUDA
graph is seen as it is issued; replays are not seen.

[Note: the stream of a collective]
A collective that NCCL runs on a stream of its own shows that by a wait of that stream within the call. Without one, it runs
on the current stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from fullshard import torch_border
from fullshard.checks.checked_block import CheckedBlock
from fullshard.checks.places import here
from fullshard.checks.step_trace import accesses, read_and_written
from fullshard.checks.stream_order import Entry, GivenBack, Mark, Taken, Wait
from fullshard.virtual.observer import HOST, Call
from fullshard.virtual.operations import starts_work

_FROM_ONE_TO_ANOTHER = ("allgather", "reduce_scatter", "alltoall")
"""Collectives of c10d whose first argument is written and whose second is read; the others work in place."""


class CudaStreamCheck(CheckedBlock):
    """A checked block on the current CUDA device."""

    def __init__(self, *, device_type: str = "cuda", raises: bool = True) -> None:
        """Watch tensors of a type of device; tests take the CPU's."""
        super().__init__(raises=raises)
        self._device_type = device_type
        self._entries: list[Entry] = []
        self._names: list[str] = []
        self._streams: dict[int, int] = {}
        """Numbers of streams, by torch's handle."""
        self._memory: dict[int, int] = {}
        """Number of the memory that is now at each address."""
        self._storages: dict[int, int] = {}
        """The storage seen last in each memory, by its number."""
        self._never_reused: set[int] = set()
        self._numbers = itertools.count(1)
        self._waiting: int | None = None
        """The stream that waited last within the operation that is running."""

    @property
    def program(self) -> list[Entry]:
        """The accesses, marks and waits that the host has issued so far."""
        return self._entries

    @property
    def stream_names(self) -> Sequence[str]:
        """The names of streams, by number."""
        return self._names

    def memory_by_storage(self) -> dict[int, int]:
        """Return for each memory, the storage seen in it last."""
        return self._storages

    def enter(self, stack: ExitStack) -> None:
        """Hear of events and memory, and see operations."""
        calls: dict[str, Callable[..., None]] = {
            "marked": self._marked,
            "waited": self._waited,
            "taken": self._taken,
            "given_back": self._given_back,
            "host_waits_for_event": self._host_waits_for_event,
            "host_waits_for_stream": self._host_waits_for_stream,
            "host_waits": self._host_waits,
        }
        stack.enter_context(torch_border.heard_gpu_events(calls))
        stack.enter_context(_Operations(self))

    # --- operations -------------------------------------------------------------------------------

    def operated(self, call: Call) -> None:
        """Note the reads and writes of an operation."""
        stream = self._current()
        signature = torch_border.signature_of(call.operator)
        if signature.name == "record_stream":
            # The allocator waits for that stream before it hands the memory out.
            memory = self._memory_of(call.args[0])
            if memory is not None:
                self._never_reused.add(memory)
            return
        if signature.namespace == "c10d":
            first, second = (_tensors(each) for each in (*call.args[:2], (), ())[:2])
            moves = signature.name.startswith(_FROM_ONE_TO_ANOTHER)
            read, written = (second, first) if moves else (first, first)
            if self._waiting is not None:
                stream = self._waiting
        elif starts_work(call.operator):
            read, written = read_and_written(call)
        else:
            return
        self._entries += accesses(stream, str(call.operator), read, written, self._memory_of)

    def begin_operation(self) -> None:
        """Forget which stream has waited before."""
        self._waiting = None

    def _memory_of(self, tensor: Tensor) -> int | None:
        if tensor.device.type != self._device_type:
            return None
        address = tensor.untyped_storage().data_ptr()
        if not address:
            return None
        if address not in self._memory:
            self._memory[address] = next(self._numbers)  # taken before the block
        number = self._memory[address]
        self._storages[number] = torch_border.storage_id(tensor)
        return number

    def _current(self) -> int:
        if self._device_type == "cpu":
            return self._number(0)
        return self._number(torch.cuda.current_stream().cuda_stream)

    def _number(self, handle: int) -> int:
        number = self._streams.get(handle)
        if number is None:
            number = self._streams[handle] = len(self._names)
            self._names.append("default" if not handle else f"{handle:#x}")
        return number

    # --- events and memory, as torch tells of them ------------------------------------------------

    def _marked(self, event: int, stream: int) -> None:
        self._entries.append(Mark(self._number(stream), event, here()))

    def _waited(self, event: int, stream: int) -> None:
        number = self._number(stream)
        if number != self._current():
            self._waiting = number
        self._entries.append(Wait(number, event, here()))

    def _taken(self, address: int) -> None:
        number = self._memory[address] = next(self._numbers)
        self._entries.append(Taken(number, self._current(), here()))

    def _given_back(self, address: int) -> None:
        number = self._memory.pop(address, None)
        if number is not None and number not in self._never_reused:
            self._entries.append(GivenBack(number, here()))

    def _host_waits_for_event(self, event: int) -> None:
        self._entries.append(Wait(HOST, event, here()))

    def _host_waits_for_stream(self, stream: int) -> None:
        event = -next(self._numbers)  # torch's own are addresses
        self._entries += [Mark(self._number(stream), event), Wait(HOST, event, here())]

    def _host_waits(self) -> None:
        for handle in tuple(self._streams):
            self._host_waits_for_stream(handle)


class _Operations(torch_border.OperatorMode):
    """Tells a check of each operation."""

    def __init__(self, check: CudaStreamCheck) -> None:
        super().__init__()
        self._check = check

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation and tell of it."""
        if any(map(torch_border.takes_itself_apart, types)):
            return NotImplemented  # it comes again with plain tensors
        self._check.begin_operation()
        result = func(*args, **(kwargs or {}))
        self._check.operated(Call(func, args, kwargs or {}, result))
        return result


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in torch_border.leaves_in(value) if isinstance(each, Tensor)]
