"""How one group's gradients are reduced: values that users set, and the rule by which a sum becomes a mean."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from fullshard.transport.comm_objects import ReduceScatter


@dataclass(frozen=True, slots=True)
class ActiveRanks:
    """Which of the ranks that reduce a group's gradients have data; see `fullshard.join`."""

    this_rank: bool
    """Whether this rank has. If not, its gradients are zeros."""
    number: int
    """How many have; at least one."""
    of: int
    """How many reduce these gradients."""

    @property
    def fraction(self) -> float:
        """The part of the ranks that have data: a mean over all ranks, divided by it, is a mean over the active ones."""
        return self.number / self.of


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceSettings:
    """How one group's gradients are combined across ranks; replaced whole when a user changes one."""

    process_group: ProcessGroup | None
    """The group of the reduce-scatter; None if nothing is sharded over several ranks."""
    divide_by: float | None = None
    """Total divisor; None means the number of data-parallel ranks."""
    force_sum: bool = False
    """Whether collectives only sum, so that division is a step of its own."""
    all_reduce: bool = True
    """Whether reduce-scatter outputs are summed over replicas now, or kept as partial sums for a later reduction."""
    zero_unused: bool = False
    """Whether trainable parameters without a gradient take part as zeros."""
    custom: ReduceScatter | None = None
    """A comm object that carries the reduce-scatter."""
    replacement: Callable[[Tensor, Tensor | None], None] | None = None
    """A user's function that does the whole reduction. It gets the unsharded gradients of a segment, rank after rank,
    and the output for this rank's shard. If nothing is sharded, it gets gradients to change in place, and None."""
    hook: Callable[[Tensor], None] | None = None
    """A user's function that gets the reduced gradients of a bucket before they are accumulated."""
    hook_stream: Any = None
    """The stream in which `hook` runs; None for the stream of the reduction."""
    active: ActiveRanks | None = None
    """The ranks whose gradients count; None for all ranks."""
    pinned: bool = False
    """Whether gradients that go to host memory go to page-locked memory."""

    @property
    def active_fraction(self) -> float:
        """What a reduced gradient is divided by besides; 1 if the user has chosen what sums are divided by."""
        return 1.0 if self.active is None or self.divide_by is not None else self.active.fraction


@dataclass(frozen=True, slots=True)
class DivideRule:
    """How a sum over ranks becomes a mean without leaving the range of its dtype."""

    before: float
    """Divisor before the sum; 1 for none."""
    after: float
    """Divisor after the sum; 1 for none."""
    op: ReduceOp.RedOpType
    """What the collectives compute."""


UNDIVIDED = DivideRule(1, 1, ReduceOp.SUM)
"""The rule where a user's function does the whole reduction."""


@functools.cache
def divide_rule(
    dtype: torch.dtype, num_ranks: int, divide_by: float | None = None, force_sum: bool = False
) -> DivideRule:
    """Return the rule for gradients reduced in ``dtype`` over ``num_ranks`` data-parallel ranks.

    The divisor is ``divide_by``, or the number of ranks. With ``force_sum`` collectives only sum.

    Dtypes with the range of float32 let the collective average. float16 would overflow in the sum
    or underflow in the quotient, so about the square root of the number of ranks is divided out
    before the sum, and the rest after it.
    """
    divisor = num_ranks if divide_by is None else divide_by
    real = dtype.to_real()
    wide = real.itemsize > 2 or real is torch.bfloat16
    if wide and num_ranks > 1 and divisor == num_ranks and not force_sum:
        return DivideRule(1, 1, ReduceOp.AVG)
    before = 1 if wide else 2 ** (num_ranks.bit_length() // 2)  # a power of two: exact
    return DivideRule(before, divisor / before, ReduceOp.SUM)
