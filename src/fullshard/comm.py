"""Calling collectives.

Two ways to gather and to reduce, over the same layout:

    in place   one coalesced call over the segments, no staging: the default
    packed     one input and one output tensor, staged rank after rank: for comm objects users supply

`AllGather` and `ReduceScatter` are what a user's comm object implements; the `Default...` forms call the process
group and exist so that the packed path can be had, and tested, without writing one.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from . import torch_border
from .errors import CommunicationError


class Comm(ABC):  # noqa: B024 (what it shares is concrete)
    """A user's own communication, with its own staging memory."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a staged input or output; override for registered or symmetric memory."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(Comm):
    """An all-gather of one input into one output."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> Work | None:
        """Gather ``input_tensor`` of all ranks into ``output_tensor``, rank after rank."""


class ReduceScatter(Comm):
    """A reduce-scatter of one input into one output."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce ``input_tensor`` over ranks with ``op``; leave this rank's piece in ``output_tensor``."""


class DefaultAllGather(AllGather):
    """The process group's own all-gather."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> Work | None:
        """Gather through the process group."""
        options = _gather_options(async_op=async_op)
        work = torch_border.all_gather_single(group, output_tensor, input_tensor, options)
        return _work_or_wait(work, async_op)


class DefaultReduceScatter(ReduceScatter):
    """The process group's own reduce-scatter."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce and scatter through the process group."""
        options = torch_border.reduce_scatter_options(op, async_op=async_op)
        work = torch_border.reduce_scatter_single(group, output_tensor, input_tensor, options)
        return _work_or_wait(work, async_op)


def all_gather(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: ProcessGroup, *, async_op: bool
) -> Work | None:
    """Gather ``inputs[i]`` of all ranks into ``outputs[i]``, in one call.

    With ``async_op`` False the current stream is ordered after the gather; the host waits for a backend
    that has no streams.
    """
    if not outputs:
        return None
    options = _gather_options(async_op=async_op)
    work = torch_border.all_gather_coalesced(group, outputs, inputs, options)
    return _work_or_wait(work, async_op)


def reduce_scatter(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    group: ProcessGroup,
    op: ReduceOp.RedOpType,
    *,
    async_op: bool,
) -> Work | None:
    """Reduce ``inputs[i]`` over ranks and leave this rank's piece in ``outputs[i]``, in one call."""
    if not outputs:
        return None
    options = _reduce_options(op, async_op=async_op)
    work = torch_border.reduce_scatter_coalesced(group, outputs, inputs, options)
    return _work_or_wait(work, async_op)


def all_reduce(tensor: Tensor, group: ProcessGroup, op: ReduceOp.RedOpType) -> None:
    """Reduce ``tensor`` over the group in place; the current stream is ordered after it."""
    dist.all_reduce(tensor, op=op, group=group)


def packed_all_gather(
    comm: AllGather, output: Tensor, own: Tensor, group: ProcessGroup, *, async_op: bool
) -> Work | None:
    """Gather one staged piece per rank with a user's comm object."""
    return _checked(comm, comm(output, own, group, async_op=async_op))


def packed_reduce_scatter(
    comm: ReduceScatter,
    output: Tensor,
    packed: Tensor,
    group: ProcessGroup,
    op: ReduceOp.RedOpType,
    *,
    async_op: bool,
) -> Work | None:
    """Reduce one staged input with a user's comm object."""
    return _checked(comm, comm(output, packed, group, op, async_op=async_op))


def _checked(comm: Comm, work: object) -> Work | None:
    if work is not None and not hasattr(work, "wait"):
        raise CommunicationError(
            f"A comm object must return a Work (something with wait()) or None; "
            f"{type(comm).__name__} returned {type(work).__name__}."
        )
    return work  # type: ignore[return-value]


def _work_or_wait(work: Work, async_op: bool) -> Work | None:
    if async_op:
        return work
    # NCCL has run on the current stream and this costs an event; other backends block here, as they must.
    work.wait()
    return None


# Options are the same for every call, so each is made once.
_gather_options = functools.cache(torch_border.all_gather_options)
_reduce_options = functools.cache(torch_border.reduce_scatter_options)
