"""`fullshard.debug("streams")` without a GPU: a program runs on a virtual device, and the order of its streams is proven."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch.distributed as dist

from fullshard import torch_border
from fullshard.checks.memory_names import named_storages
from fullshard.checks.race_report import race_text, stream_namer
from fullshard.checks.step_trace import StepTrace
from fullshard.checks.stream_order import Access, Entry, Race, Taken, find_races
from fullshard.errors import StreamOrderError, UsageError
from fullshard.virtual.device import VirtualDevice
from fullshard.virtual.without_values import without_values


class StreamCheck:
    """A block whose accesses, marks and waits are checked at its end."""

    def __init__(self, world_size: int, *, offloads: bool) -> None:
        self._trace = StepTrace()
        self._world_size = world_size
        self.device = VirtualDevice([self._trace], offloads=offloads)
        self.device.is_building = False
        self._trace.device = self.device
        self._stack = ExitStack()
        self._races: list[Race] = []
        self._checked = 0
        """Entries that `_races` are those of."""

    def __enter__(self) -> Self:
        if dist.is_initialized():
            raise UsageError(
                "On a machine without a GPU, fullshard.debug('streams') needs ranks that do not exist, but there is a default "
                "process group. Leave init_process_group out: the block starts the ranks, and the program is rank 0 of them."
            )
        with ExitStack() as stack:
            stack.enter_context(torch_border.virtual_process_group(self._world_size, self.device))
            stack.enter_context(self.device.active())
            stack.enter_context(without_values())
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        text = ""
        try:
            if error is None and self.races:
                text = self.report()
        finally:
            self._stack.__exit__(kind, error, trace)
        if text:
            raise StreamOrderError(text, self.races)

    @property
    def program(self) -> list[Entry]:
        """What the host has issued so far."""
        return self._trace.entries

    @property
    def races(self) -> list[Race]:
        """What is not ordered, in what was issued so far."""
        if self._checked != len(self.program):
            self._races, self._checked = find_races(self.program), len(self.program)
        return self._races

    @property
    def accesses(self) -> int:
        """How many accesses there were so far."""
        return sum(isinstance(each, Access) for each in self.program)

    def report(self) -> str:
        """Return the races in words; within the block, memory has its names."""
        names = {torch_border.id_of_storage(storage): name for storage, name in named_storages()}
        taken = {each.memory: each.place for each in self.program if isinstance(each, Taken)}

        def name_of(memory: int) -> str:
            storage = self.device.storage_of(memory)
            name = None if storage is None else names.get(torch_border.id_of_storage(storage))
            return name or f"memory taken at {' < '.join(taken.get(memory, ('an unknown place',)))}"

        return race_text(self.races, stream_namer(self.device.stream_names), name_of)
