"""Copies of staged messages to full parameters: each is made once, and called in every step.

    pieces   tensors are copied in pairs, in one call
    rows     rows of one dtype are cut along their length into parts
    cells    pieces of 16 bytes go where an index says, whatever number of parameters they make up

`GatherBuffer` has the table of which layout is copied by which. They are partials of torch's functions, so that a call is
no Python frame.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fullshard.layout.segments import ROW_ALIGNMENT

Copy = Callable[[], object]

FEW_PIECES = 256
"""Up to so many contiguous tensors are copied one by one, in one call."""

CELL = 16
"""Bytes that are copied by one index: the widest elements there are, of `CELL_DTYPE`."""
CELL_DTYPE = torch.complex128

INDEXED_UP_TO = 32 * 2**20
"""Bytes of full parameters that are copied by an index, which takes a quarter of their memory."""

Indices = weakref.WeakValueDictionary[object, Tensor]
"""Indices of gather buffers, by all that they depend on: layers of a model are alike, and share one.

They belong to one all-gather stream, which allocates them and alone reads them, so that they may be freed at any time.
"""


def by_pieces(targets: list[Tensor], sources: list[Tensor]) -> Copy | None:
    """Return the copy of ``sources[i]`` to ``targets[i]``; None if there are none."""
    return functools.partial(torch._foreach_copy_, targets, sources) if targets else None


def by_rows(rows: Tensor, parts: list[Tensor]) -> Copy:
    """Return the copy of ``rows``, of shape (ranks, n), to ``parts``, each of shape (ranks, part of n).

    One kernel on accelerators, where copies of parts would take one each.
    """
    sizes = [part.shape[1] for part in parts]
    return functools.partial(torch.split_with_sizes_copy, rows, sizes, dim=1, out=parts)


def by_cells(source: Tensor, target: Tensor, index: Tensor) -> Copy:
    """Return the copy of cell ``index[i]`` of ``source`` to cell i of ``target``."""
    return functools.partial(torch.index_select, source, 0, index, out=target)


def can_be_indexed(nbytes: int, dtype: torch.dtype) -> bool:
    """Whether full parameters of so many bytes may be copied by cells: the index is small, and no cell holds two pieces.

    Pieces and starts of a uniform group's parameters are multiples of `ROW_ALIGNMENT` elements, and so of a cell.
    """
    return nbytes <= INDEXED_UP_TO and not ROW_ALIGNMENT * dtype.itemsize % CELL


def cell_index(
    indices: Indices,
    device: torch.device,
    world: int,
    row_nbytes: int,
    nbytes: int,
    pieces: Sequence[tuple[int, int, int]],
) -> Tensor:
    """Return the index that brings rows of ``row_nbytes`` to full parameters of ``nbytes``; one of ``indices`` if it is there.

    Each piece has its bytes, its start in a row, and the start of its parameter.
    """
    cells = tuple(tuple(value // CELL for value in piece) for piece in pieces)
    key = (device, world, row_nbytes, nbytes, cells)
    index = indices.get(key)
    if index is None and device.type == "meta":
        index = torch.empty(nbytes // CELL, dtype=torch.int32, device=device)
    elif index is None:
        on_host = torch.zeros(nbytes // CELL, dtype=torch.int32)  # in gaps: anything
        ranks = torch.arange(world)[:, None] * (row_nbytes // CELL)
        for size, start, target in cells:
            of_piece = torch.arange(start, start + size) + ranks
            on_host[target : target + world * size] = of_piece.flatten()
        index = on_host.to(device)
    indices[key] = index
    return index
