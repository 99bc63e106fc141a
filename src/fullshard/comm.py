"""Calling collectives.

Two ways to gather and to reduce, over the same layout:

    in place   one coalesced call over the segments, no staging: the default
    packed     one input and one output tensor, staged rank after rank: for comm objects users supply

`AllGather` and `ReduceScatter` are what a user's comm object implements; the `Default...` forms
call the process group and exist so that the packed path can be had, and tested, without writing
one.
"""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from . import torch_border
from .errors import CommunicationError

T = TypeVar("T")


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
        return work if async_op else _ordered(work, group)


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
        return work if async_op else _ordered(work, group)


def all_gather(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: ProcessGroup, *, async_op: bool
) -> Work | None:
    """Gather ``inputs[i]`` of all ranks into ``outputs[i]``, in one call.

    With ``async_op`` False the current stream is ordered after the gather; the host waits for a
    backend that has no streams.
    """
    if not outputs:
        return None
    options = _gather_options(async_op=async_op)
    work = torch_border.all_gather_coalesced(group, outputs, inputs, options)
    return work if async_op else _ordered(work, group)


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
    return work if async_op else _ordered(work, group)


def all_reduce(tensor: Tensor, group: ProcessGroup, op: ReduceOp.RedOpType) -> None:
    """Reduce ``tensor`` over the group in place; the current stream is ordered after it."""
    dist.all_reduce(tensor, op=op, group=group)


def values_of_all_ranks(value: T, group: ProcessGroup) -> list[T]:
    """A small picklable value of every rank, by rank; the host waits for it."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group)
    return values


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


def _ordered(work: Work, group: ProcessGroup) -> Work | None:
    """Order the current stream after ``work``; there is nothing left to wait for."""
    if not _runs_on_current_stream(group):
        work.wait()
    return None


_ON_CURRENT_STREAM: weakref.WeakKeyDictionary[ProcessGroup, bool] = weakref.WeakKeyDictionary()


def _runs_on_current_stream(group: ProcessGroup) -> bool:
    """Whether a collective that is not asynchronous has been issued to the current stream, as NCCL's is."""
    if group not in _ON_CURRENT_STREAM:
        _ON_CURRENT_STREAM[group] = dist.get_backend(group) in ("nccl", "fake")
    return _ON_CURRENT_STREAM[group]


# Options are the same for every call, so each is made once.
_gather_options = functools.cache(torch_border.all_gather_options)
_reduce_options = functools.cache(torch_border.reduce_scatter_options)
