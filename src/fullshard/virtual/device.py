"""A device that does not exist: it has streams, events and an allocator, but neither memory nor time.

Tensors are on the meta device: operations know their sizes and compute nothing.
`VirtualDevice` is what the engine gets its streams and events from. It sees every operation and collective (as a dispatch
mode and as the receiver of collectives), every tensor that is made and every storage that is resized or dies. It
keeps no record: it tells its observers.

[Note: what observers are told]
    order       in the order of the host. What a device does later depends on nothing else: streams run
                in order, and wait for events.
    memory      memory is taken and given back at the moment of the host, as by CUDA's caching allocator. So the most
                bytes that are allocated need no clock.
    values      there are none. A program that asks for one gets a one, and the host waits.
    collectives are those of a virtual process group, which moves nothing and tells the device.
    host memory with offload, see `host_memory`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.distributed import ProcessGroup

from fullshard import torch_border
from fullshard.virtual import torch_internals
from fullshard.virtual.host_memory import HostMemory
from fullshard.virtual.known_operations import run_known
from fullshard.virtual.observer import (
    COMPUTE,
    HOST,
    Call,
    CollectiveCall,
    DeviceObserver,
    Transfer,
)
from fullshard.virtual.operations import makes_tensors, starts_work

META = torch.device("meta")


class VirtualStream:
    """A stream of the virtual device; a context manager like `torch.Stream`."""

    def __init__(self, device: VirtualDevice, number: int) -> None:
        self._device = device
        self.stream_id = number
        self._before: list[VirtualStream] = []

    def __enter__(self) -> None:
        self._before.append(self._device.stream)
        self._device.stream = self

    def __exit__(self, *_: object) -> None:
        self._device.stream = self._before.pop()

    def wait_stream(self, other: VirtualStream) -> None:
        """Wait for what has been issued to another stream."""
        if other is not self:
            event = VirtualEvent(self._device)
            event.record_on(other)
            self.wait_event(event)

    def wait_event(self, event: VirtualEvent) -> None:
        """Wait for an event."""
        for each in self._device.observers:
            each.waited(self.stream_id, event.number)

    def record_event(self) -> VirtualEvent:
        """Return a new event that marks the end of the stream."""
        event = VirtualEvent(self._device)
        event.record_on(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for the stream."""
        event = VirtualEvent(self._device)
        event.record_on(self)
        self._device.host_waits(event)

    def query(self) -> bool:
        """Return True: only the watchdog asks, and it does not run beside a virtual device."""
        return True


class VirtualEvent:
    """An event of the virtual device."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self.number = device.new_number()

    def record(self) -> None:
        """Mark the end of the current stream."""
        self.record_on(self._device.stream)

    def record_on(self, stream: VirtualStream) -> None:
        """Mark the end of a stream."""
        for each in self._device.observers:
            each.marked(stream.stream_id, self.number)

    def wait(self) -> None:
        """Let the current stream wait for the mark."""
        self._device.stream.wait_event(self)

    def query(self) -> bool:
        """Return False: the virtual device has no clock, so the mark may not have been reached."""
        return False

    def synchronize(self) -> None:
        """Let the host wait for the mark."""
        self._device.host_waits(self)


class VirtualWork(dist.Work):
    """A collective that the host, or the current stream, can wait for."""

    def __init__(self, device: VirtualDevice, event: VirtualEvent, held: object) -> None:
        super().__init__()
        self._device, self._event, self._held = device, event, held

    def wait(self, *_: object) -> bool:
        """Wait for the collective: the host where there are no streams, otherwise the current stream."""
        if self._device.has_streams:
            self._event.wait()
        else:
            self._device.host_waits(self._event)
        self._held = None  # NCCL holds the tensors of an asynchronous collective until then
        return True

    def is_completed(self) -> bool:
        """Return False: a rank has to wait for it."""
        return False


class VirtualDevice(torch_border.OperatorMode):
    """Streams, events, memory and collectives of a device that does not exist."""

    is_planned: ClassVar[bool] = True

    def __init__(
        self,
        observers: Sequence[DeviceObserver],
        *,
        has_streams: bool = True,
        offloads: bool = False,
        new_clock: Callable[[], Any] = lambda: None,
    ) -> None:
        """Make a device whose tensors are those of the meta device.

        Args:
            observers: Told of all that happens.
            has_streams: Whether work is issued now and done later; otherwise the host computes, as on a CPU.
            offloads: Whether tensors of the CPU are memory beside the device, too.
            new_clock: Returns a clock for traces; None for the host's.
        """
        super().__init__()
        self.observers = observers
        self.has_streams = has_streams
        self.note_kernel = self._note_kernel if has_streams else None
        self.new_clock = new_clock
        self.is_building = True
        """Whether a model is being built, which takes no memory, as it would be for a real device."""
        self.stream_names = ["compute"]
        self._host = HostMemory(self) if offloads else None
        """The content of host memory, if shards are there."""
        self._numbers = 0
        self._memory: dict[int, _Memory] = {}
        """Living memory, by the identity of its storage."""
        self._storages: dict[int, weakref.ref[UntypedStorage]] = {}
        """The storage that has each memory, or had it, by the memory's number."""
        self._allocated = 0
        self.stream = VirtualStream(self, COMPUTE)
        self._wire = None if has_streams else self.new_stream(priority=0, name="all-gather")

    # --- requests of the engine -------------------------------------------------------------------

    def new_number(self) -> int:
        """Return a number that no other event or memory has."""
        self._numbers += 1
        return self._numbers

    def current(self) -> torch.device:
        """Return the device of its tensors."""
        return META

    def new_stream(self, *, priority: int, name: str = "other") -> VirtualStream:
        """Return a stream of its own; the engine asks for those of all-gathers, reduce-scatters and all-reduces."""
        self.stream_names.append(name)
        return VirtualStream(self, len(self.stream_names) - 1)

    def new_event(self) -> VirtualEvent:
        """Return a new event."""
        return VirtualEvent(self)

    def current_stream(self) -> VirtualStream:
        """Return the stream to which operations go now."""
        return self.stream

    def host_waits(self, event: VirtualEvent) -> None:
        """Let the host wait for an event."""
        for each in self.observers:
            each.waited(HOST, event.number)

    def allocated_bytes(self) -> int:
        """Return the bytes of all storages."""
        return self._allocated

    # --- operations -------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation and tell the observers."""
        if any(map(torch_border.takes_itself_apart, types)):
            return NotImplemented  # it comes again with plain tensors
        kwargs = kwargs or {}
        if self._host is not None:
            result = self._host.run(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if func is torch_border.VALUE_OF and args[0].is_meta:
            for each in self.observers:
                each.read_value(self.stream.stream_id, args[0])
            self.stream.synchronize()
            return 1.0 if args[0].is_floating_point() else 1
        if not starts_work(func):
            result = func(*args, **kwargs)
            if makes_tensors(func):
                self._see_all(result)
            return result
        known, result = run_known(func, args, kwargs)
        if known.is_of_host:
            return result
        if makes_tensors(func):
            self._see_all(result)
        call = Call(func, args, kwargs, result, known)
        for each in self.observers:
            each.operated(self.stream.stream_id, call)
        return result

    def _see_all(self, result: Any) -> None:
        """Note the storages of an operation's results on the device."""
        for each in (result,) if isinstance(result, Tensor) else torch_border.leaves_in(result):
            if isinstance(each, Tensor) and each.is_meta:
                self.see(each.untyped_storage())

    def note_collective(
        self,
        kind: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        group: ProcessGroup,
        *,
        is_asynchronous: bool,
    ) -> VirtualWork:
        """Note a collective on the current stream; without streams, on a wire that the host can wait for."""
        call = CollectiveCall(kind, outputs, inputs, group, is_asynchronous)
        if kind in ("all_gather", "all_to_all"):
            _repeat(outputs, inputs)
        stream = self._wire or self.stream
        event = VirtualEvent(self)
        for each in self.observers:
            each.communicated(stream.stream_id, call, event.number)
        held = call if is_asynchronous else None
        return VirtualWork(self, event, held)

    def _note_kernel(self, name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Note a kernel that passes over tensors once, as compiled functions do: without memory for what is between."""
        for each in self.observers:
            each.fused(self.stream.stream_id, name, read, written)

    def note_transfer(self, transfer: Transfer) -> None:
        """Note a copy between host and device on the current stream."""
        for each in self.observers:
            each.transferred(self.stream.stream_id, transfer)
        if transfer.waits:
            self.stream.synchronize()

    def pin(self, memory: Tensor) -> None:
        """Let the device copy from and to host memory by itself from now on."""
        if self._host is not None:
            self._host.pin(memory)

    def unpin(self, memory: Tensor) -> None:
        """Do nothing: memory is pinned for as long as it lives."""

    def note_host_operation(self, call: Call, meta: Call) -> None:
        """Note that the host computes on tensors in its own memory."""
        for each in self.observers:
            each.computed(call, meta)

    # --- memory -----------------------------------------------------------------------------------

    def see(self, storage: UntypedStorage) -> None:
        """Note a storage that was not there before."""
        key = torch_border.id_of_storage(storage)
        if key in self._memory or self.is_building:
            return
        if storage.device.type == "cpu" and not self.is_of_host_memory(storage):
            return  # small tensors with values, such as the number of a step
        memory = self._memory[key] = _Memory()
        memory.reference = weakref.ref(storage, lambda _: self._forget(key))
        memory.is_on_host = storage.device.type == "cpu"
        self._resize(memory, self._host.nbytes(storage) if self._host else storage.nbytes())

    @property
    def offloads(self) -> bool:
        """Whether tensors of the CPU are memory beside the device."""
        return self._host is not None

    def is_of_host_memory(self, storage: UntypedStorage) -> bool:
        """Return whether a storage is host memory that the device copies from or to."""
        return self._host is not None and self._host.has(storage)

    def memory_of(self, storage: UntypedStorage) -> int | None:
        """Return the number of a storage's memory, as observers know it; None if it has none, or is not the device's."""
        self.see(storage)
        memory = self._memory.get(torch_border.id_of_storage(storage))
        return memory.number if memory is not None and memory.nbytes else None

    def living_storages(self) -> dict[int, int]:
        """Return for the number of each memory the storage that has it, or had it, if that is still there."""
        alive = ((memory, reference()) for memory, reference in self._storages.items())
        return {
            memory: torch_border.id_of_storage(storage)
            for memory, storage in alive
            if storage is not None
        }

    def _forget(self, key: int) -> None:
        self._resize(self._memory.pop(key), 0)

    def _resized(self, storage: UntypedStorage) -> None:
        if storage.device.type != "meta":
            return
        if torch_border.id_of_storage(storage) not in self._memory:
            self.see(storage)
        else:
            self._resize(self._memory[torch_border.id_of_storage(storage)], storage.nbytes())

    def _resize(self, memory: _Memory, nbytes: int) -> None:
        if memory.nbytes == nbytes:
            return
        if memory.nbytes:
            for each in self.observers:
                each.freed(memory.number)
        if nbytes:
            memory.number = self.new_number()
            if memory.reference is not None:
                self._storages[memory.number] = memory.reference
            stream = HOST if memory.is_on_host else self.stream.stream_id
            for each in self.observers:
                each.allocated(memory.number, nbytes, stream)
        if not memory.is_on_host:
            self._allocated += nbytes - memory.nbytes
        memory.nbytes = nbytes

    # --- the whole --------------------------------------------------------------------------------

    @contextmanager
    def active(self) -> Iterator[None]:
        """Be the device of all that happens within the block."""
        with ExitStack() as stack:
            stack.enter_context(torch_border.device_instead("meta", self))
            stack.enter_context(torch_internals.devices_per_host_on_meta())
            stack.enter_context(torch_internals.watched_resizes(self._resized))
            stack.enter_context(torch_internals.watched_propagation(self.building))
            stack.enter_context(torch_internals.fast_optimizers_on_meta())
            stack.enter_context(self)
            yield

    @contextmanager
    def building(self) -> Iterator[None]:
        """Let tensors take no memory within the block."""
        before, self.is_building = self.is_building, True
        try:
            yield
        finally:
            self.is_building = before


def _repeat(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Let all ranks say what this one says, in tensors of the CPU that have values: ranks agree by such messages."""
    if not inputs or not all(each.is_cpu for each in (*outputs, *inputs)):
        return
    for index, output in enumerate(outputs):
        own = inputs[index * len(inputs) // len(outputs)].view(-1)
        for part in output.view(-1).split(max(own.numel(), 1)):
            part.copy_(own[: part.numel()])


class _Memory:
    """A storage that lives."""

    def __init__(self) -> None:
        self.number = 0
        self.nbytes = 0
        self.is_on_host = False
        self.reference: weakref.ref[UntypedStorage] | None = None
