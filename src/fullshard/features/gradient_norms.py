"""Norms of sharded tensors: one number per rank, and how ranks' numbers become the norm.

Finite orders add up powers. Order 0 counts. Orders inf and -inf take the largest and the smallest absolute value, with
a flag for NaN beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from fullshard.transport import collectives
from fullshard.transport.tags import Tag


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return a dtype in which powers neither overflow nor vanish."""
    return torch.float32 if device.type == "mps" else torch.float64


def _norms(tensors: Iterable[Tensor | None], order: float, *, foreach: bool) -> list[Tensor]:
    """Return the norms of all tensors that have elements, in few tensors; those of narrow ones are in float32."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    norms: list[Tensor] = []
    for (_, dtype), together in by_kind.items():
        wider = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else None
        if foreach:
            found = list(torch._foreach_norm(together, order, dtype=wider))
        else:
            found = [torch.linalg.vector_norm(each, order, dtype=wider) for each in together]
        norms.append(torch.stack(found))
    return norms


class SumOfPowers:
    """How norms of parts become one norm, for all finite orders but 0; other orders derive from it."""

    op: ReduceOp.RedOpType = ReduceOp.SUM

    def __init__(self, order: float) -> None:
        self.order = order

    def own(
        self,
        tensors: Iterable[Tensor | None],
        dtype: torch.dtype,
        device: torch.device,
        *,
        foreach: bool,
    ) -> Tensor:
        """Return what this rank contributes."""
        norms = [norm.to(device, dtype) for norm in _norms(tensors, self.order, foreach=foreach)]
        if not norms:
            return self.of_nothing(dtype, device)
        return self.of_norms(torch.cat(norms))

    def of_nothing(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return what a rank without elements contributes."""
        return torch.zeros(1, dtype=dtype, device=device)

    def of_norms(self, norms: Tensor) -> Tensor:
        """Return what a rank with these norms contributes."""
        return (norms**self.order).sum().view(1)

    def over(self, own: Tensor, group: ProcessGroup, tag: Tag) -> None:
        """Reduce over the ranks of a group, in place."""
        collectives.all_reduce(own, group, self.op, tag)

    def value(self, reduced: Tensor) -> Tensor:
        """Return the number that was reduced."""
        return reduced[0]

    def both(self, a: Tensor, b: Tensor) -> Tensor:
        """Combine the numbers of two spreads."""
        return a + b

    def norm(self, total: Tensor) -> Tensor:
        """Return the norm that a number of all ranks and spreads stands for."""
        result: Tensor = total ** (1.0 / self.order)
        return result


class _Largest(SumOfPowers):
    """The reduction for order inf.

    Collectives may lose a NaN in a maximum, or in one order of ranks only, so that ranks would differ. So a NaN
    travels beside the number, as 1.
    """

    op = ReduceOp.MAX

    def of_nothing(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(2, dtype=dtype, device=device)

    def of_norms(self, norms: Tensor) -> Tensor:
        largest = norms.amax()
        return torch.stack(
            [largest.nan_to_num(0.0, math.inf, 0.0), largest.isnan().to(norms.dtype)]
        )

    def value(self, reduced: Tensor) -> Tensor:
        return torch.where(reduced[1] != 0, math.nan, reduced[0])

    def both(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.maximum(a, b)

    def norm(self, total: Tensor) -> Tensor:
        return total


class _Smallest(_Largest):
    """The reduction for order -inf; a NaN travels as -1."""

    op = ReduceOp.MIN

    def of_nothing(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.tensor([math.inf, 0.0], dtype=dtype, device=device)

    def of_norms(self, norms: Tensor) -> Tensor:
        smallest = norms.amin()
        return torch.stack(
            [smallest.nan_to_num(0.0, math.inf, 0.0), -smallest.isnan().to(norms.dtype)]
        )

    def both(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.minimum(a, b)


class _Count(SumOfPowers):
    """The reduction for order 0: a parameter counts once, whichever rank has its elements that are not zero."""

    op = ReduceOp.MAX

    def own(
        self,
        tensors: Iterable[Tensor | None],
        dtype: torch.dtype,
        device: torch.device,
        *,
        foreach: bool,
    ) -> Tensor:
        flags = [
            torch.zeros((), dtype=dtype, device=device)
            if tensor is None
            else tensor.count_nonzero().clamp(max=1).to(device, dtype)
            for tensor in tensors
        ]
        return torch.stack(flags) if flags else torch.zeros(1, dtype=dtype, device=device)

    def value(self, reduced: Tensor) -> Tensor:
        return reduced.sum()

    def norm(self, total: Tensor) -> Tensor:
        return total


_BY_ORDER: Mapping[float, type[SumOfPowers]] = {
    math.inf: _Largest,
    -math.inf: _Smallest,
    0.0: _Count,
}


def reduction_for(order: float) -> SumOfPowers:
    """Return how to compute a norm of this order."""
    return _BY_ORDER.get(order, SumOfPowers)(order)
