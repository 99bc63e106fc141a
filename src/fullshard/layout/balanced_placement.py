"""Along which dimension a parameter is sharded with little padding.

A dimension is divided into equal numbers of rows, so it is padded to a multiple of the ranks. Stacked experts show what
that means: `Shard(0)` of (8, 4096, 1024) over 64 ranks gives 8 ranks an expert each, and 56 ranks the same memory for
nothing. Along dimension 1 every rank has 64 rows of each expert.

Dimension 0 has an advantage: its pieces are contiguous, so large ones are gathered in place. Along another one each gather
and each reduction copies the parameter once more on its device, which takes up to a quarter of the time that its bytes
take on fast links. So dimension 0 is kept as long as it is padded by an eighth at most.

Everything depends on shapes and the number of ranks, so all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fullshard import torch_border
from fullshard.layout.placement import local_tensor
from fullshard.layout.segments import chunk_size
from fullshard.mesh.axes import world_size

EVEN_ENOUGH = Fraction(1, 8)
"""Dimension 0 is kept if padding is at most this part of the parameter."""

_NUM_RANKS: ContextVar[int | None] = ContextVar("ranks of the mesh that is sharded over")


def balanced_placement(param: nn.Parameter, num_ranks: int | None = None) -> Shard | None:
    """Choose the dimension to shard by its padding; pass it as ``shard_placement_fn`` of `fully_shard`.

        fully_shard(layer, shard_placement_fn=fullshard.balanced_placement)

    It is dimension 0 if that is padded by an eighth of the parameter at most, and otherwise the one that is padded least.
    Parameters are padded where ranks do not divide their rows: stacked experts of shape (8, ...) over 64 ranks take eight
    times their memory with `Shard(0)`.

    Args:
        param: A parameter that is not sharded yet.
        num_ranks: Over how many ranks it will be sharded; by default those of the mesh given to `fully_shard`, and
            outside of that all ranks.

    Returns:
        The placement, or None for a parameter that only dimension 0 is for (0-d parameters, tensor subclasses).
    """
    if param.ndim == 0 or type(local_tensor(param)) is not Tensor:
        return None
    if num_ranks is None:
        num_ranks = _NUM_RANKS.get(None) or world_size()
    return Shard(least_padded_dim(_largest_local_shape(param), num_ranks))


@contextmanager
def sharding_over(num_ranks: int) -> Iterator[None]:
    """Let `balanced_placement` count with so many ranks within the block."""
    before = _NUM_RANKS.set(num_ranks)
    try:
        yield
    finally:
        _NUM_RANKS.reset(before)


def least_padded_dim(shape: Sequence[int], ranks: int) -> int:
    """Return dimension 0 if it is even enough, and otherwise the first one with the least padding.

    >>> least_padded_dim((8, 4096, 1024), 64), least_padded_dim((50257, 768), 64)
    (1, 0)
    """
    padding = [Fraction(chunk_size(size, ranks) * ranks - size, size or 1) for size in shape]
    return 0 if padding[0] <= EVEN_ENOUGH else padding.index(min(padding))


def _largest_local_shape(param: nn.Parameter) -> list[int]:
    """Return the shape of the largest part that a rank has of a parameter: all ranks must choose the same dimension."""
    shape = list(param.shape)
    if isinstance(param, DTensor):
        for axis, placement in enumerate(param.placements):
            dim = torch_border.sharded_dim(placement)
            if dim is not None:
                shape[dim] = chunk_size(shape[dim], param.device_mesh.size(axis))
    return shape
