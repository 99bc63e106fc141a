"""Parts of a tensor that are read one after another into the same memory, so that none is needed for the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fullshard.layout.blocks import Block


class Staging:
    """Memory that is reused for one tensor after another."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor, which is valid until the next call."""
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[:nbytes].view(dtype).view(shape)


def rows_of(block: Block, numel: int) -> Iterator[Block]:
    """Yield a block in parts of about ``numel`` elements, cut along its first dimension."""
    if not block.shape:
        yield block
        return
    rows = max(1, numel // max(1, block.numel // max(block.shape[0], 1)))
    for start in range(0, block.shape[0], rows):
        yield Block(
            (block.start[0] + start, *block.start[1:]),
            (min(rows, block.shape[0] - start), *block.shape[1:]),
        )
