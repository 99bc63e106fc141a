"""What goes over the wire: every collective that runs, with its bytes.

with Traffic() as traffic:
    model(batch).backward()
traffic.sizes(GATHER)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GATHER, REDUCE_SCATTER, ALL_REDUCE = "allgather", "reduce_scatter", "allreduce"
EXCHANGE = "alltoall"


class Traffic(TorchDispatchMode):
    """The collectives of this process, in order, each with the bytes of its larger side."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func.name().removeprefix("c10d::").removeprefix("_")
            sides = [sum(tensor.nbytes for tensor in _tensors(arg)) for arg in args[:2]]
            self._seen.append((name, max(sides)))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        """Of all collectives, in order."""
        return [name for name, _ in self._seen]

    @property
    def nbytes(self) -> list[int]:
        """Of all collectives, in order."""
        return [nbytes for _, nbytes in self._seen]

    def sizes(self, kind: str) -> Counter[int]:
        """How many collectives of a kind ran, by their bytes; a coalesced one counts once."""
        return Counter(nbytes for name, nbytes in self._seen if name.startswith(kind))


def _tensors(arg: Any) -> Iterator[Tensor]:
    if isinstance(arg, Tensor):
        yield arg
    elif isinstance(arg, (list, tuple)):
        for item in arg:
            yield from _tensors(item)
