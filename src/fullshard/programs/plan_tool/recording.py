"""The program of a step, written down while the engine runs it on a device that does not exist.

Tensors are on the meta device: operations know their sizes and compute nothing.
`Recorder` is the device: the engine gets its streams and events from it, and it sees every operation and collective
(as a dispatch mode and as the carrier of the process group), every tensor that is made and every storage that is resized or dies.

[Note: what is recorded]
    order       entries are in the order of the host. What a device does later depends on nothing else: streams run
                in order, and wait for events.
    memory      memory is taken and given back at the moment of the host, as by CUDA's caching allocator. So the most
                bytes that are allocated need no clock.
    values      there are none. Who asks for one lets the host wait, and gets a one.
    collectives are those of a virtual process group, which moves nothing and tells the recorder.
    host memory with offload, see `host_memory`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fullshard import torch_border
from fullshard.comm.spans import ALLOCATOR_EVERY_NS, HostClock, Mark, Named, TraceRecorder
from fullshard.errors import ConfigurationError
from fullshard.programs.plan_tool.host_memory import HostMemory
from fullshard.programs.plan_tool.known_operations import makes_tensors, run_known
from fullshard.programs.plan_tool.op_costs import may_start_kernel
from fullshard.programs.plan_tool.operations import dtype_name, tensors_in
from fullshard.programs.plan_tool.program import (
    COMPUTE,
    HOST,
    Allocate,
    Collective,
    CollectiveKind,
    Direction,
    Entry,
    Free,
    HostCompute,
    HostWork,
    Kernel,
    Launch,
    MemoryKind,
    Phase,
    Program,
    Record,
    Transfer,
    Wait,
)
from fullshard.storage.buffers import Buffer

META = torch.device("meta")
MAX_EVENTS = 1_000_000
"""Of the trace of one step."""

NO_HOST_COLLECTIVES = (
    "With sharding.offload, muon, adamw8bit and optimizer.shard_over_replicas send tensors that are in host memory, and profiles "
    "do not know how long that takes, so such a run cannot be planned. Leave sharding.offload out, or take adamw."
)


class RecordedStream:
    """A stream of the virtual device; a context manager like `torch.Stream`."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder = recorder
        self.stream_id = number
        self._before: list[RecordedStream] = []

    def __enter__(self) -> None:
        self._before.append(self._recorder.stream)
        self._recorder.stream = self

    def __exit__(self, *_: object) -> None:
        self._recorder.stream = self._before.pop()

    def wait_stream(self, other: RecordedStream) -> None:
        """Wait for what has been issued to another stream."""
        if other is not self:
            event = RecordedEvent(self._recorder)
            event.record_on(other)
            self.wait_event(event)

    def wait_event(self, event: RecordedEvent) -> None:
        """Wait for an event."""
        self._recorder.add(Wait(self.stream_id, event.number))

    def synchronize(self) -> None:
        """Let the host wait for the stream."""
        event = RecordedEvent(self._recorder)
        event.record_on(self)
        self._recorder.add(Wait(HOST, event.number))

    def query(self) -> bool:
        """Return True: only the watchdog asks, and nobody watches a plan."""
        return True


class RecordedEvent:
    """An event of the virtual device."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.number = recorder.new_number()

    def record(self) -> None:
        """Mark the end of the current stream."""
        self.record_on(self._recorder.stream)

    def record_on(self, stream: RecordedStream) -> None:
        """Mark the end of a stream."""
        self._recorder.add(Record(stream.stream_id, self.number))

    def wait(self) -> None:
        """Let the current stream wait for the mark."""
        self._recorder.stream.wait_event(self)

    def query(self) -> bool:
        """Return False: whether it has been reached is known when the program is played."""
        return False


class RecordedWork(dist.Work):
    """A collective that the host, or the current stream, can wait for."""

    def __init__(self, recorder: Recorder, event: RecordedEvent) -> None:
        super().__init__()
        self._recorder, self._event = recorder, event

    def wait(self, *_: object) -> bool:
        """Wait for the collective: the host where there are no streams, otherwise the current stream."""
        if self._recorder.has_streams:
            self._event.wait()
        else:
            self._recorder.add(Wait(HOST, self._event.number))
        return True

    def is_completed(self) -> bool:
        """Return False: somebody has to wait for it."""
        return False


class Times(Protocol):
    """When things happen: what is known after a program was played."""

    def of_event(self, event: int) -> float:
        """Return the seconds at which an event was reached, the first time."""

    def of_host(self, entry: int) -> float:
        """Return the seconds at which the host came to an entry."""


class RecordedClock(HostClock):
    """A clock for traces. Its marks are events, and a time of the host is the number of an entry; `times` makes seconds of both."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.on_streams = recorder.has_streams
        self.zero_ns = 0
        self.times: Times | None = None
        """Set when the program has been played."""

    def now(self) -> int:
        """Return where the host is: entries count as so long that the allocator is asked wherever it can be."""
        return len(self._recorder.entries) * ALLOCATOR_EVERY_NS

    def mark(self) -> Mark:
        """Return the current end of the current stream."""
        if not self.on_streams:
            return self.now()
        event = RecordedEvent(self._recorder)
        event.record()
        return event

    def microseconds(self, mark: Mark) -> float:
        """Return the time of a mark."""
        if not isinstance(mark, RecordedEvent):
            return self.host_microseconds(mark)
        assert self.times is not None, "the program has been played"
        return self.times.of_event(mark.number) * 1e6

    def host_microseconds(self, nanoseconds: int) -> float:
        """Return the time of the host at an entry."""
        assert self.times is not None, "the program has been played"
        return self.times.of_host(nanoseconds // ALLOCATOR_EVERY_NS) * 1e6


class HookRecorder(TraceRecorder):
    """A recorder of traces that also tells the device where the engine's hooks run."""

    def __init__(self, device: Recorder) -> None:
        super().__init__(META, first_step=1, limit=MAX_EVENTS)
        self._recorder = device

    def forward_begins(self, state: Named) -> None:
        """Do as `TraceRecorder` says."""
        self._recorder.add(HostWork(1))
        super().forward_begins(state)

    def backward_begins(self, state: Named, call: int) -> None:
        """Do as `TraceRecorder` says."""
        self._recorder.add(HostWork(1))
        super().backward_begins(state, call)

    def note_reducing(self, buffer: object, held: int) -> None:
        """Do as `TraceRecorder` says."""
        if isinstance(buffer, Buffer):
            self._recorder.keep_for(buffer.storage, "reducing")
        super().note_reducing(buffer, held)


class Recorder(torch_border.OperatorMode):
    """A virtual device that notes what the engine and the model ask of it."""

    def __init__(self, *, has_streams: bool = True, offloads: bool = False) -> None:
        super().__init__()
        self.has_streams = has_streams
        self._host = HostMemory(self) if offloads else None
        """What is in host memory, if shards are."""
        self.entries: list[Entry] = []
        self.phase: Phase = "build"
        self._streams = ["compute"]
        self._numbers = 0
        self._memory: dict[int, _Memory] = {}
        """By the identity of its storage, what lives."""
        self.kinds: dict[int, MemoryKind] = {}
        self._allocated = 0
        self.stream = RecordedStream(self, COMPUTE)
        self._wire = None if has_streams else self.new_stream(priority=0)

    # --- what the engine asks a device for --------------------------------------------------------

    def new_number(self) -> int:
        """Return a number that no other event or memory has."""
        self._numbers += 1
        return self._numbers

    def new_stream(self, *, priority: int) -> RecordedStream:
        """Return a stream of its own; the engine asks for those of all-gathers, reduce-scatters and all-reduces."""
        number = len(self._streams)
        self._streams.append(_STREAM_NAMES[min(number, len(_STREAM_NAMES)) - 1])
        return RecordedStream(self, number)

    def new_event(self) -> RecordedEvent:
        """Return a new event."""
        return RecordedEvent(self)

    def current_stream(self) -> RecordedStream:
        """Return the stream to which operations go now."""
        return self.stream

    def allocated_bytes(self) -> int:
        """Return the bytes of all storages."""
        return self._allocated

    def add(self, entry: Entry) -> None:
        """Note what the host does next."""
        self.entries.append(entry)

    # --- operations -------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation and note it."""
        if types and any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes again with local tensors
        kwargs = kwargs or {}
        if self._host is not None:
            result = self._host.run(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if func is torch_border.VALUE_OF and args[0].is_meta:
            self.stream.synchronize()
            return 1.0 if args[0].is_floating_point() else 1
        if not may_start_kernel(func):
            result = func(*args, **kwargs)
            if makes_tensors(func):
                self._see_all(result)
            return result
        known, result = run_known(func, args, kwargs)
        if known.is_of_host:
            return result
        if makes_tensors(func):
            self._see_all(result)
        kernel = known.kernel
        if kernel is not None:
            self._add_scratch(kernel.scratch)
            # Backward itself makes no graph. Recomputation makes one, as forward did.
            is_repeated = self.phase == "backward" and torch.is_grad_enabled()
            self.add(Launch(self.stream.stream_id, kernel, self.phase, is_repeated))
        return result

    def _see_all(self, result: Any) -> None:
        """Note the storages of an operation's results on the device."""
        for each in (result,) if isinstance(result, Tensor) else tensors_in(result):
            if each.is_meta:
                self.see(each.untyped_storage())

    def _add_scratch(self, nbytes: int) -> None:
        if nbytes:
            number = self.new_number()
            self.kinds[number] = "temporary"
            self.add(Allocate(number, nbytes, self.stream.stream_id))
            self.add(Free(number))

    def carry(self, kind: str, messages: Sequence[Tensor], group: ProcessGroup) -> RecordedWork:
        """Note a collective on the current stream; without streams, on a wire that the host can wait for."""
        if self._host is not None and messages[0].is_cpu:
            raise ConfigurationError(NO_HOST_COLLECTIVES)
        ranks = dist.get_process_group_ranks(group)
        work = Collective(
            cast(CollectiveKind, kind),
            sum(message.nbytes for message in messages),
            ranks=len(ranks),
            stride=ranks[1] - ranks[0] if len(ranks) > 1 else 1,
            dtype=str(messages[0].dtype).removeprefix("torch."),
            messages=len(messages),
        )
        stream = self._wire or self.stream
        self.add(Launch(stream.stream_id, work, self.phase))
        event = RecordedEvent(self)
        event.record_on(stream)
        return RecordedWork(self, event)

    def note_transfer(
        self, direction: Direction, nbytes: int, *, is_pinned: bool, waits: bool
    ) -> None:
        """Note a copy between host and device on the current stream; if it ``waits``, the host goes on when it is done."""
        work = Transfer(direction, nbytes, is_pinned, dist.get_world_size())
        self.add(Launch(self.stream.stream_id, work, self.phase))
        if waits:
            self.stream.synchronize()

    def note_kernel(self, name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Note a kernel that passes over tensors once, as compiled functions do: without memory for what is between."""
        nbytes = sum(each.nbytes for each in (*read, *written))
        kernel = Kernel(name, "memory", dtype_name(written[0].dtype), 0, nbytes)
        self.add(Launch(self.stream.stream_id, kernel, self.phase))

    def note_host_kernel(self, kernel: Kernel) -> None:
        """Note that the host computes on tensors in its own memory."""
        self.add(HostCompute(kernel, self.phase, dist.get_world_size()))

    # --- memory -----------------------------------------------------------------------------------

    def see(self, storage: UntypedStorage) -> None:
        """Note a storage that was not there before. A model is built without memory, as it would be for a real device."""
        key = torch_border.id_of_storage(storage)
        if key in self._memory or self.phase == "build":
            return
        if storage.device.type == "cpu" and not (self._host and self._host.has(storage)):
            return  # small tensors with values, such as the number of a step
        memory = self._memory[key] = _Memory()
        memory.reference = weakref.ref(storage, lambda _: self._forget(key))
        memory.is_on_host = storage.device.type == "cpu"
        self._resize(memory, self._host.nbytes(storage) if self._host else storage.nbytes())

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
            self.add(Free(memory.number))
        if nbytes:
            memory.number, memory.phase = self.new_number(), self.phase
            self.kinds[memory.number] = memory.kind or self._kind_now()
            stream = HOST if memory.is_on_host else self.stream.stream_id
            self.add(Allocate(memory.number, nbytes, stream))
        if not memory.is_on_host:
            self._allocated += nbytes - memory.nbytes
        memory.nbytes = nbytes

    def _kind_now(self) -> MemoryKind:
        if self.stream.stream_id != COMPUTE:
            return "gathered"
        return "activations" if self.phase == "forward" else "temporary"

    def keep_for(self, storage: UntypedStorage, kind: MemoryKind) -> None:
        """Say what a storage is for, whenever it has memory."""
        self.see(storage)
        self._memory[torch_border.id_of_storage(storage)].kind = kind

    def name_what_stayed(self, phase: Phase, kind: MemoryKind) -> None:
        """Say what memory is for that was taken in a phase and is still there."""
        for memory in self._memory.values():
            if memory.nbytes and memory.phase == phase:
                self.kinds[memory.number] = kind

    def name_accumulated(self) -> None:
        """Say that what backward has taken, and what is still there after it, are gradients of whole parameters."""
        for memory in self._memory.values():
            is_left = memory.nbytes and memory.phase == "backward"
            if is_left and self.kinds[memory.number] == "temporary":
                self.kinds[memory.number] = "accumulated"

    def name_memory(self, tensors: Sequence[Tensor], kind: MemoryKind) -> None:
        """Say what memory is for that is there now."""
        for tensor in tensors:
            self.see(tensor.untyped_storage())
            memory = self._memory.get(torch_border.storage_id(tensor))
            if memory is not None and memory.nbytes:
                self.kinds[memory.number] = kind

    # --- the whole --------------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Be the device of all that happens within the block."""
        with ExitStack() as stack:
            stack.enter_context(torch_border.virtual_device(self))
            stack.enter_context(torch_border.watched_resizes(self._resized))
            stack.enter_context(torch_border.watched_propagation(partial(self.during, "build")))
            stack.enter_context(
                torch_border.watched_recomputation(
                    partial(self.add, HostWork(1, "checkpoint")),
                    partial(self.add, HostWork(1, "recomputation")),
                    partial(self.add, HostWork(1, "decision")),
                )
            )
            stack.enter_context(torch_border.fast_optimizers_on_meta())
            stack.enter_context(self)
            yield

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Be in a phase of the step within the block."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def new_clock(self) -> RecordedClock:
        """Return the clock of a trace."""
        return RecordedClock(self)

    def program(self, begin: int) -> Program:
        """Return what was recorded so far; the step begins at an entry."""
        return Program(
            entries=self.entries,
            begin=begin,
            end=len(self.entries),
            streams=tuple(self._streams),
            kinds=self.kinds,
            has_streams=self.has_streams,
        )


class _Memory:
    """A storage that lives."""

    def __init__(self) -> None:
        self.number = 0
        self.nbytes = 0
        self.is_on_host = False
        self.phase: Phase = "build"
        """Where in a step the memory was taken."""
        self.kind: MemoryKind | None = None
        """What it is always for; None if that depends on the moment."""
        self.reference: weakref.ref[UntypedStorage] | None = None


_STREAM_NAMES = ("all-gather", "reduce-scatter", "all-reduce", "other")
