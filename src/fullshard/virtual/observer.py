"""Reports of a device to its observers: a virtual device reports all work that it is given, in the order of the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a plan that is read needs no torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from fullshard.torch_border import Operator

COMPUTE = 0
"""The stream on which the model computes."""
HOST = -1
"""Stand-in for a stream: the host waits, or the memory is the host's."""


@dataclass(frozen=True, slots=True)
class Call:
    """An operation that was issued."""

    operator: Operator
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any
    known: object = None
    """Key for results that are worked out once: equal for calls of the same operator with arguments of the same kind."""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective that was issued."""

    kind: str
    """all_gather, reduce_scatter, all_reduce, all_to_all, broadcast or barrier."""
    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor]
    """The same as the outputs where the collective works in place."""
    group: ProcessGroup
    is_asynchronous: bool
    """Whether it has a stream of its own, which its work waits for; otherwise it is on the stream that issued it."""

    @property
    def whole(self) -> Sequence[Tensor]:
        """The whole tensors: those after a gather, and those before any other collective."""
        return self.outputs if self.kind == "all_gather" else self.inputs


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy between host memory and the device."""

    sources: Sequence[Tensor]
    targets: Sequence[Tensor]
    is_pinned: bool
    """Whether the host memory is page-locked. The device then copies by itself."""
    waits: bool
    """Whether the host goes on only when the copy is done."""


class DeviceObserver:
    """A listener to a device. Here, every method does nothing: an observer has those that it needs."""

    def operated(self, stream: int, call: Call) -> None:
        """Note an operation on the device."""

    def computed(self, call: Call, meta: Call) -> None:
        """Note an operation of the host on its own memory; ``meta`` is the same call with tensors of the meta device."""

    def fused(
        self, stream: int, name: str, read: Sequence[Tensor], written: Sequence[Tensor]
    ) -> None:
        """Note a kernel that passes over tensors once, as compiled functions do."""

    def transferred(self, stream: int, transfer: Transfer) -> None:
        """Note a copy between host and device."""

    def communicated(self, stream: int, call: CollectiveCall, event: int) -> None:
        """Note a collective that a stream has issued; its work waits for the event."""

    def read_value(self, stream: int, tensor: Tensor) -> None:
        """Note that the host is about to wait for a stream, and then reads a tensor."""

    def marked(self, stream: int, event: int) -> None:
        """Note that an event marks the end of a stream."""

    def waited(self, stream: int, event: int) -> None:
        """Note that a stream, or the `HOST`, waits for the last mark of an event."""

    def allocated(self, memory: int, nbytes: int, stream: int) -> None:
        """Note memory that was taken from a stream's pool; from host memory if the stream is `HOST`."""

    def freed(self, memory: int) -> None:
        """Note memory that goes back to the pool of the stream that took it."""
