"""The monitor that divergence installs: it tells the step's events to journals, meetings, agreements and the watchdog."""

from __future__ import annotations

from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from fullshard.divergence.agreement import ModelAgreement
from fullshard.divergence.compared_updates import refuse_within_guarded_step, step_taken
from fullshard.divergence.journal import PROGRESS, note_exception
from fullshard.divergence.meetings import Meetings
from fullshard.divergence.watchdog import process
from fullshard.mesh.backends import Backend
from fullshard.transport import monitor
from fullshard.transport.monitor import GroupMonitor, ModelMonitor, Monitor


class DivergenceMonitor(Monitor):
    """Compares this rank's actions with those of the others."""

    def of_group(self, group: ProcessGroup, backend: Backend) -> GroupMonitor:
        """Return the meetings of the ranks of a group."""
        return Meetings(group, backend)

    def of_model(self) -> ModelMonitor:
        """Return the agreement of ranks on one more model."""
        return ModelAgreement()

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """Refuse a step that could not be taken back."""
        refuse_within_guarded_step(optimizer)

    def optimizer_ended(self, optimizer: Optimizer) -> None:
        """Note the step's updates of shards."""
        step_taken(optimizer)

    def exception_left(self, error: BaseException) -> None:
        """Note an exception that leaves a sharded forward or backward."""
        note_exception(error)


_MONITOR = DivergenceMonitor()


def install(*, for_model: bool = False) -> None:
    """Let this process be compared with other ranks. Called wherever the library is first used; later calls cost nothing.

    Nothing runs from now on, but a process that ends before its first forward says so to the others. With ``for_model``, the
    watchdog starts with the next collective.
    """
    PROGRESS.is_to_be_watched |= for_model
    if monitor.monitor() is monitor.IDLE:
        monitor.install(_MONITOR)
    process.announce()
