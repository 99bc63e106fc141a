"""The transport of comm objects: one message, staged rank after rank in their memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from fullshard.errors import CommunicationError
from fullshard.transport.comm_objects import AllGather, Comm, ReduceScatter
from fullshard.transport.monitor import monitor_of
from fullshard.transport.tags import Tag
from fullshard.transport.transports import Transport
from fullshard.transport.works import as_real


class Staged(Transport):
    """A comm object over one process group."""

    in_place = False

    def __init__(
        self, comm: AllGather | ReduceScatter, group: ProcessGroup, device: torch.device
    ) -> None:
        super().__init__(group, device)
        self.comm, self._monitor = comm, monitor_of(group, device)
        self.recycles, self.capturable = comm.recycles, comm.capturable

    @property
    def identity(self) -> Any:
        """The comm object."""
        return self.comm

    def over(self, group: ProcessGroup) -> Transport:
        """Return the same with the comm object for another group."""
        return Staged(self.comm.moved_to(group), group, self.device)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory of the comm object."""
        return self.comm.allocate((numel,), dtype=dtype, device=self.device)

    def release(self, tensor: Tensor) -> None:
        """Give memory back to the comm object."""
        self.comm.release(tensor)

    def gather(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], tag: Tag, *, async_op: bool
    ) -> Work | None:
        """Gather one staged shard per rank: one message per call is all that a comm object promises."""
        (output,), (own,), comm = outputs, inputs, self.comm
        assert isinstance(comm, AllGather), "it was given for gathers"
        self._monitor.before(tag, [own])
        with self._monitor.calling(tag):
            return _checked(comm, comm(output, own, self.group, async_op=async_op))

    def reduce(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        op: ReduceOp.RedOpType,
        tag: Tag,
        *,
        async_op: bool,
    ) -> Work | None:
        """Reduce one staged input."""
        (output,), (packed,), comm = outputs, inputs, self.comm
        assert isinstance(comm, ReduceScatter), "it was given for reductions"
        self._monitor.before(tag, [packed])
        with self._monitor.calling(tag):
            work = comm(as_real(output), as_real(packed), self.group, op, async_op=async_op)
            return _checked(comm, work)


def _checked(comm: Comm, work: object) -> Work | None:
    if work is not None and not hasattr(work, "wait"):
        raise CommunicationError(
            f"A comm object must return a Work (something with wait()) or None; "
            f"{type(comm).__name__} returned {type(work).__name__}."
        )
    return work  # type: ignore[return-value]
