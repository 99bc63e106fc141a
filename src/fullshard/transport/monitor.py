"""The seam between the step and the comparison of ranks: a monitor that is told, and may raise.

    Monitor        of the process: the optimizer's steps, exceptions, and the two below
    GroupMonitor   of the collectives that a backend carries for one process group
    ModelMonitor   of one model
    POSITION       where the step is; the engine writes it, and a monitor reads it at any time

Those here do nothing. `divergence` installs its own when the library is first used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DistBackendError, ProcessGroup, Work
from torch.optim import Optimizer

from fullshard.mesh.backends import Backend, backend_of
from fullshard.transport.tags import Tag


class Position:
    """The place of this process in its step. Ranks that are threads share it."""

    def __init__(self) -> None:
        self.phase = "outside"
        """One of forward, backward, optimizer, outside."""
        self.module = ""
        """The sharded module that was entered last."""
        self.raised: str | None = None
        """Type and message of an exception that has left a sharded forward or backward; None after a new forward."""
        self.raised_in = ""
        """The place where it was raised: "forward of layers.3"."""

    def text(self) -> str:
        """Return the place in the step for a message: "backward of layers.3"."""
        if self.phase in ("forward", "backward") and self.module:
            return f"{self.phase} of {self.module}"
        return "outside of forward and backward" if self.phase == "outside" else self.phase


POSITION = Position()


class GroupMonitor:
    """The listener to the collectives of one process group; kept where they are called in every step."""

    def before(
        self, tag: Tag, inputs: Sequence[Tensor] = (), text: str | None = None
    ) -> Sequence[str] | None:
        """A collective is called next; all its memory has been taken.

        With ``text``, return the text of each rank, by its place in the group, if hosts can tell each other without a
        collective; otherwise return None. May raise, on all ranks alike.

        Args:
            tag: Its purpose.
            inputs: The tensors that it reads, if they must have the same size on all ranks. Gloo aborts the process when sizes differ.
            text: This rank's message to the others. No device is waited for, and equal texts cost no more than a meeting.
        """
        return None

    def waited(self, work: Work) -> Work:
        """Return a work for which the host waits, in the place of the one of the collective that was called last."""
        return work

    def waiting(self, tag: Tag) -> AbstractContextManager[None]:
        """The host waits for a collective within."""
        return contextlib.nullcontext()

    def refused(self, tag: Tag, error: DistBackendError) -> None:
        """The backend refuses a collective; may raise the reason."""

    @contextlib.contextmanager
    def calling(self, tag: Tag) -> Iterator[None]:
        """A collective is called within, and may be refused."""
        try:
            yield
        except DistBackendError as error:
            self.refused(tag, error)
            raise

    def made(self, group: ProcessGroup, backend: Backend) -> None:
        """Some of the ranks have made one more process group within the step."""


class ModelMonitor:
    """The listener to one model; it is told the outermost `FSDPState`, and all of them."""

    changes_seen = -1
    """`CHANGES.count` when the ranks last agreed. As long as it is the same, there is nothing to agree on."""

    def agree(self, root: Any, states: Sequence[Any], occasion: str = "forward") -> None:
        """The model has changed, and its collectives are issued next, for ``occasion``. May raise, on all ranks alike."""

    def runs_without_gradients(self, model: nn.Module) -> None:
        """The model runs in training mode and without gradients; told once."""


class Monitor:
    """The listener to this process."""

    def of_group(self, group: ProcessGroup, backend: Backend) -> GroupMonitor:
        """Return the monitor of the collectives that a backend carries for a group."""
        return GroupMonitor()

    def of_model(self) -> ModelMonitor:
        """Return the monitor of one more model."""
        return ModelMonitor()

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step, which may be none of the model's. May raise."""

    def optimizer_ended(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped, outside of backward."""

    def exception_left(self, error: BaseException) -> None:
        """An exception leaves a sharded forward or backward."""


IDLE = Monitor()
"""Does nothing: the monitor of a process that has not used the library."""
_installed = IDLE


def monitor() -> Monitor:
    """Return the monitor of this process."""
    return _installed


def install(new: Monitor) -> None:
    """Let this process have a monitor from now on."""
    global _installed
    _installed = new


def monitor_of(group: ProcessGroup, device: torch.device) -> GroupMonitor:
    """Return the monitor of a group's collectives on a device."""
    return _installed.of_group(group, backend_of(group, device))
