"""`fullshard.debug("streams")` without a GPU: the program runs on a virtual device, as rank 0 of ranks that do not exist."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch.distributed as dist

from fullshard.checks.checked_block import CheckedBlock
from fullshard.checks.step_trace import StepTrace
from fullshard.checks.stream_order import Entry
from fullshard.errors import UsageError
from fullshard.virtual.device import VirtualDevice
from fullshard.virtual.groups import virtual_process_group
from fullshard.virtual.without_values import without_values


class StreamCheck(CheckedBlock):
    """A checked block in which tensors of the meta device are those of a virtual device."""

    def __init__(self, world_size: int, *, offloads: bool = False, raises: bool = True) -> None:
        """Make a check.

        Args:
            world_size: Ranks.
            offloads: Whether tensors of the CPU are memory without values, which the device copies from and to.
            raises: Whether races are raised at the end of the block.
        """
        super().__init__(raises=raises)
        self._world_size = world_size
        self._trace = StepTrace()
        self._trace.device = self.device = VirtualDevice([self._trace], offloads=offloads)
        self.device.is_building = False

    @property
    def program(self) -> list[Entry]:
        """The accesses, marks and waits that the host has issued so far."""
        return self._trace.entries

    @property
    def stream_names(self) -> Sequence[str]:
        """The names of streams, by number."""
        return self.device.stream_names

    def enter(self, stack: ExitStack) -> None:
        """Be rank 0 of a virtual world, on a virtual device."""
        if dist.is_initialized():
            raise UsageError(
                "On a machine without a GPU, fullshard.debug('streams') needs ranks that do not exist, but there is a default "
                "process group. Leave init_process_group out: the block starts the ranks, and the program is rank 0 of them."
            )
        stack.enter_context(virtual_process_group(self._world_size, self.device))
        stack.enter_context(self.device.active())
        stack.enter_context(without_values())

    def memory_by_storage(self) -> dict[int, int]:
        """Return for each memory, the storage that has it or had it."""
        return self.device.living_storages()
