"""Transports: ways of the messages of a group's gathers and reductions between the ranks of one process group.

    Coalesced   segments where they lie, in one call of the process group
    Exchanged   ... reductions as an all-to-all, whose contributions the receiver sums
    Staged      one message, rank after rank, in memory of a comm object (`staged`)

A transport calls collectives and takes no decision about streams: its caller has made the stream of the collective current.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import DistBackendError, ProcessGroup, ReduceOp, Work

from fullshard import torch_border
from fullshard.mesh.backends import backend_of
from fullshard.transport.monitor import monitor_of
from fullshard.transport.tags import Tag
from fullshard.transport.works import JoinedGather, as_real


class Transport(ABC):
    """One way of messages between the ranks of a process group; used for as long as the group's settings stay."""

    in_place = True
    """Whether segments may be gathered into, and reduced from, where they lie. If not, all lie in one message, rank after
    rank, in memory of `allocate`."""
    sums_at_receiver = False
    """Whether `reduce` brings the contributions of all ranks, as large as what is sent, for the receiver to sum."""
    recycles = False
    """Whether memory of `allocate` is handed out again after `release`, so that results must not stay in it."""
    capturable = True
    """Whether its calls may be captured in a CUDA graph: the host must not wait, and memory must come from torch's allocator."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device

    @property
    def identity(self) -> Any:
        """The object that tells it from others of the user's choice, and names it by its class."""
        return self

    def over(self, group: ProcessGroup) -> Transport:
        """Return the same way between the ranks of another group."""
        return type(self)(group, self.device)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory for a message, on the stream that fills it."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def release(self, tensor: Tensor) -> None:  # noqa: B027 (memory that is dropped is given back)
        """Take back memory that `allocate` returned; the stream it was allocated on is ordered after its last use."""

    @abstractmethod
    def gather(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], tag: Tag, *, async_op: bool
    ) -> Work | None:
        """Gather ``inputs[i]`` of all ranks into ``outputs[i]``.

        With ``async_op`` False the current stream is ordered after the gather; the host waits for a backend that has no
        streams.
        """

    @abstractmethod
    def reduce(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        op: ReduceOp.RedOpType,
        tag: Tag,
        *,
        async_op: bool,
    ) -> Work | None:
        """Reduce ``inputs[i]`` over ranks and leave this rank's shard, or all contributions to it, in ``outputs[i]``."""


class Coalesced(Transport):
    """The process group's own collectives, over all segments in one call.

    [Note: names of gloo's work]
    Never a coalesced gather on gloo. torch's ProcessGroupGloo has two threads, and each notes the
    name of the work it has completed in one std::string, outside of the lock (torch 2.13, `runLoop`,
    lastCompletedWorkName). Names of up to 15 characters lie in the string itself. ALLGATHER_COALESCED
    does not: one thread frees it while the other writes ALLREDUCE there, and a later malloc aborts, or
    hands out the same memory twice. Two collectives in flight on a group are enough. ALLGATHER,
    ALLREDUCE and ALLTOALL_BASE, as which gloo carries all that we call, are short.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        # Looked up once: that takes the host longer than all else around a call.
        self._backend, self._monitor = backend_of(group, device), monitor_of(group, device)

    def gather(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], tag: Tag, *, async_op: bool
    ) -> Work | None:
        """See `Transport`; all are bytes."""
        if not outputs:
            return None
        group, backend = self.group, self._backend
        joined = None
        if not backend.has_coalesced_gathers and len(outputs) > 1:
            joined = JoinedGather(outputs, inputs, group)  # takes memory, so before the ranks meet
        self._monitor.before(tag, inputs)
        options = _GATHER_OPTIONS[async_op]
        try:
            if joined is not None:
                joined.start(group, self._monitor, options)
                work = cast(Work, joined)
            elif len(outputs) == 1:
                work = torch_border.all_gather_single(group)(outputs[0], inputs[0], options)
            else:
                work = torch_border.all_gather_coalesced(group)(outputs, inputs, options)
        except DistBackendError as error:
            self._monitor.refused(tag, error)
            raise
        return self._awaited(work, is_told=joined is not None, async_op=async_op)

    def reduce(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        op: ReduceOp.RedOpType,
        tag: Tag,
        *,
        async_op: bool,
    ) -> Work | None:
        """See `Transport`."""
        if not outputs:
            return None
        group = self.group
        options = _reduce_options(op, async_op=async_op)
        if outputs[0].is_complex():  # as are all others, then
            outputs, inputs = [*map(as_real, outputs)], [*map(as_real, inputs)]
        self._monitor.before(tag, inputs)
        try:
            work = torch_border.reduce_scatter_coalesced(group)(outputs, inputs, options)
        except DistBackendError as error:
            self._monitor.refused(tag, error)
            raise
        return self._awaited(work, async_op=async_op)

    def _awaited(self, work: Work, *, is_told: bool = False, async_op: bool) -> Work | None:
        """Return the work for the caller to wait for, of which the monitor is told; None if nothing is left to wait for."""
        if not self._backend.is_on_stream:
            work = work if is_told else self._monitor.waited(work)
            if not async_op:
                work.wait()
        return work if async_op else None


class Exchanged(Coalesced):
    """Reductions as an all-to-all, one call for each message, since no backend coalesces them."""

    sums_at_receiver = True

    def reduce(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        op: ReduceOp.RedOpType,
        tag: Tag,
        *,
        async_op: bool,
    ) -> Work | None:
        """Send block r of ``inputs[i]`` to rank r; ``outputs[i]`` gets what all ranks sent, in their order."""
        options = _exchange_options(async_op=async_op)
        pairs = [pair for pair in zip(outputs, inputs, strict=True) if pair[0].numel()]
        if not pairs:
            return None
        self._monitor.before(tag, inputs)
        with self._monitor.calling(tag):
            calls = [
                torch_border.all_to_all_single(self.group, output, tensor, options)
                for output, tensor in pairs
            ]
        works = [work for call in calls if (work := self._awaited(call, async_op=async_op))]
        return cast(Work, Works(works)) if len(works) > 1 else next(iter(works), None)


class Works:
    """Several works, for which the host waits as for one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def get_future(self) -> object:
        """Return a future that is completed when all works are done."""
        return torch.futures.collect_all([work.get_future() for work in self._works])

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()


# Options are the same for every call, so each is made once.
_GATHER_OPTIONS = {flag: torch_border.all_gather_options(async_op=flag) for flag in (False, True)}
_reduce_options = functools.cache(torch_border.reduce_scatter_options)
_exchange_options = functools.cache(torch_border.all_to_all_options)
