"""The program of a step, written down while the engine runs it on a device that does not exist.

`Recorder` observes the virtual device (`virtual.device`): each operation, collective, event and allocation becomes an entry,
in the order of the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage

from fullshard.errors import ConfigurationError
from fullshard.programs.plan_tool.op_costs import kernel_of
from fullshard.programs.plan_tool.operations import dtype_name
from fullshard.programs.plan_tool.program import (
    COMPUTE,
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
from fullshard.tracing.recorder import ALLOCATOR_EVERY_NS, HostClock, Mark, Named, TraceRecorder
from fullshard.virtual import observer, torch_internals
from fullshard.virtual.device import META, VirtualDevice, VirtualEvent
from fullshard.virtual.observer import Call, CollectiveCall

NO_HOST_COLLECTIVES = (
    "With sharding.offload, muon, adamw8bit and optimizer.shard_over_replicas send tensors that are in host memory, and profiles "
    "do not know how long that takes, so such a run cannot be planned. Leave sharding.offload out, or take adamw."
)
MAX_EVENTS = 1_000_000
"""Most events in the trace of one step."""


class Times(Protocol):
    """Times of events and of the host, known after a program was played."""

    def of_event(self, event: int) -> float:
        """Return the seconds at which an event was reached, the first time."""

    def of_host(self, entry: int) -> float:
        """Return the seconds at which the host came to an entry."""


class RecordedClock(HostClock):
    """A clock for traces. Its marks are events, and a time of the host is the number of an entry; `times` makes seconds of both."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.on_streams = recorder.device.has_streams
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
        event = self._recorder.device.new_event()
        event.record()
        return event

    def microseconds(self, mark: Mark) -> float:
        """Return the time of a mark."""
        if not isinstance(mark, VirtualEvent):
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

    def memory_of_reductions(self, holder: object, nbytes: int) -> None:
        """Do as `TraceRecorder` says."""
        if isinstance(holder, Buffer):
            self._recorder.name_storage(holder.storage, "reducing")
        super().memory_of_reductions(holder, nbytes)


class Recorder(observer.DeviceObserver):
    """Writes down what the engine and the model ask of a virtual device."""

    def __init__(self, *, has_streams: bool = True, offloads: bool = False) -> None:
        self.entries: list[Entry] = []
        self.kinds: dict[int, MemoryKind] = {}
        self._phase: Phase = "build"
        self._phases: dict[int, Phase] = {}
        """The phase in which each memory was taken."""
        self.device = VirtualDevice(
            [self],
            has_streams=has_streams,
            offloads=offloads,
            new_clock=partial(RecordedClock, self),
        )

    @property
    def phase(self) -> Phase:
        """The phase of the step that the host is in."""
        return "build" if self.device.is_building else self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._phase = phase
        self.device.is_building = phase == "build"

    def add(self, entry: Entry) -> None:
        """Note the host's next work."""
        self.entries.append(entry)

    # --- what the device tells --------------------------------------------------------------------

    def operated(self, stream: int, call: Call) -> None:
        """Note the kernel of an operation, and the memory that it takes meanwhile."""
        if call.known not in _KERNELS:
            _KERNELS[call.known] = kernel_of(call.operator, call.args, call.kwargs, call.result)
        kernel = _KERNELS[call.known]
        if kernel is None:
            return
        if kernel.scratch:
            number = self.device.new_number()
            self.kinds[number] = "temporary"
            self.add(Allocate(number, kernel.scratch, stream))
            self.add(Free(number))
        # Backward itself makes no graph. Recomputation makes one, as forward did.
        is_repeated = self.phase == "backward" and torch.is_grad_enabled()
        self.add(Launch(stream, kernel, self.phase, is_repeated))

    def computed(self, call: Call, meta: Call) -> None:
        """Note that the host computes on tensors in its own memory."""
        kernel = kernel_of(meta.operator, meta.args, meta.kwargs, meta.result)
        if kernel is not None:
            self.add(HostCompute(kernel, self.phase, dist.get_world_size()))

    def fused(
        self, stream: int, name: str, read: Sequence[Tensor], written: Sequence[Tensor]
    ) -> None:
        """Note a kernel that passes over tensors once, as compiled functions do: without memory for what is between."""
        nbytes = sum(each.nbytes for each in (*read, *written))
        kernel = Kernel(name, "memory", dtype_name(written[0].dtype), 0, nbytes)
        self.add(Launch(stream, kernel, self.phase))

    def transferred(self, stream: int, transfer: observer.Transfer) -> None:
        """Note a copy between host and device."""
        direction: Direction = "to device" if transfer.sources[0].is_cpu else "to host"
        nbytes = sum(each.nbytes for each in transfer.sources)
        work = Transfer(direction, nbytes, transfer.is_pinned, dist.get_world_size())
        self.add(Launch(stream, work, self.phase))

    def communicated(self, stream: int, call: CollectiveCall, event: int) -> None:
        """Note a collective on its stream."""
        ranks = dist.get_process_group_ranks(call.group)
        messages = call.whole
        if self.device.offloads and messages[0].is_cpu:
            raise ConfigurationError(NO_HOST_COLLECTIVES)
        work = Collective(
            cast(CollectiveKind, call.kind),
            sum(message.nbytes for message in messages),
            ranks=len(ranks),
            stride=ranks[1] - ranks[0] if len(ranks) > 1 else 1,
            dtype=dtype_name(messages[0].dtype),
            messages=len(messages),
        )
        self.add(Launch(stream, work, self.phase))
        self.add(Record(stream, event))

    def marked(self, stream: int, event: int) -> None:
        """Note a mark."""
        self.add(Record(stream, event))

    def waited(self, stream: int, event: int) -> None:
        """Note a wait."""
        self.add(Wait(stream, event))

    def allocated(self, memory: int, nbytes: int, stream: int) -> None:
        """Note memory that was taken, and what it is for by the look of it."""
        self._phases[memory] = self.phase
        self.kinds[memory] = self._kind_now()
        self.add(Allocate(memory, nbytes, stream))

    def freed(self, memory: int) -> None:
        """Note memory that was given back."""
        del self._phases[memory]
        self.add(Free(memory))

    # --- memory -----------------------------------------------------------------------------------

    def _kind_now(self) -> MemoryKind:
        if self.device.stream.stream_id != COMPUTE:
            return "gathered"
        return "activations" if self.phase == "forward" else "temporary"

    def name_what_stayed(self, phase: Phase, kind: MemoryKind) -> None:
        """Give a purpose to memory that was taken in a phase and is still there."""
        self.kinds.update(
            (memory, kind) for memory, taken in self._phases.items() if taken == phase
        )

    def name_accumulated(self) -> None:
        """Make memory that backward has taken, and that is still there after it, that of gradients of whole parameters."""
        for memory, taken in self._phases.items():
            if taken == "backward" and self.kinds[memory] == "temporary":
                self.kinds[memory] = "accumulated"

    def name_memory(self, tensors: Sequence[Tensor], kind: MemoryKind) -> None:
        """Give a purpose to memory that is there now."""
        for tensor in tensors:
            self.name_storage(tensor.untyped_storage(), kind)

    def name_storage(self, storage: UntypedStorage, kind: MemoryKind) -> None:
        """Give a purpose to the memory of a storage, if it has any now."""
        memory = self.device.memory_of(storage)
        if memory is not None:
            self.kinds[memory] = kind

    # --- the whole --------------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Write down all that happens within the block."""
        with ExitStack() as stack:
            stack.enter_context(
                torch_internals.watched_recomputation(
                    partial(self.add, HostWork(1, "checkpoint")),
                    partial(self.add, HostWork(1, "recomputation")),
                    partial(self.add, HostWork(1, "decision")),
                )
            )
            stack.enter_context(self.device.active())
            yield

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Be in a phase of the step within the block."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def program(self, begin: int) -> Program:
        """Return the program that was recorded so far; the step begins at an entry."""
        return Program(
            entries=self.entries,
            begin=begin,
            end=len(self.entries),
            streams=tuple(self.device.stream_names),
            kinds=self.kinds,
        )


_KERNELS: dict[object, Kernel | None] = {}
"""Kernels of operations that were seen before, by what is known of the operations."""
