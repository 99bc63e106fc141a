"""The memory of this rank's shards of a group, and a copy of it on the device while shards in host memory are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fullshard.layout.segments import Layout, shard_offsets
from fullshard.storage.buffers import Buffer, FlatShard, views_of_params


class ShardBuffer:
    """This rank's pieces of all parameters of a group, in the parameters' own dtypes."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        *,
        pinned: bool = False,
    ) -> None:
        self.device = device
        segment_dtypes = [dtypes[segment.params[0]] for segment in layout.segments]
        numels = [segment.piece_numel for segment in layout.segments]
        placement = shard_offsets(layout, range(len(numels)), segment_dtypes)
        self._buffer = Buffer(placement.nbytes, device, pinned=pinned)
        self._layout, self._rank, self._dtypes = layout, rank, dtypes
        self._starts = placement.starts
        self.nbytes = placement.nbytes
        self.bytes = self._buffer.view(torch.uint8, 0, (placement.nbytes,))
        """All of it."""
        self.pieces = [
            self._buffer.view(dtype, start, (numel,))
            for dtype, start, numel in zip(segment_dtypes, placement.starts, numels, strict=True)
        ]
        """Per segment, this rank's piece with its padding, flat, as a gather sends it."""
        row = None
        if len(set(segment_dtypes)) == 1:
            dtype = segment_dtypes[0]
            row = self._buffer.view(dtype, 0, (placement.nbytes // dtype.itemsize,))
        self.flat_shard = FlatShard(self.pieces, row)
        """`pieces`, as an all-gather reads them."""

        self.locals = []
        """Per parameter, this rank's part: the data of its sharded parameter."""
        for index, slot in enumerate(layout.slots):
            piece = layout.piece(index, rank)
            start = placement.starts[slot.segment] + piece.offset * dtypes[index].itemsize
            self.locals.append(self._buffer.view(dtypes[index], start, piece.shape))
        if device.type != "meta":
            for piece_tensor in self.pieces:
                piece_tensor.zero_()  # padding travels with every gather; let it be the same everywhere

    def full_params(self) -> list[Tensor]:
        """For a rank that holds everything: other aliases of the full parameters, in their shapes."""
        assert self._layout.world == 1, "the others hold the rest"
        return views_of_params(self._buffer, self._layout, self._starts, self._dtypes)

    def empty_copy_on(self, device: torch.device) -> ShardBuffer:
        """Return a buffer for the same shards on another device, allocated on the current stream."""
        return ShardBuffer(self._layout, self._rank, self._dtypes, device)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that it has now."""
        return self._buffer.held_bytes

    def allocate(self) -> None:
        """Take memory again, on the current stream."""
        self._buffer.allocate()

    def release(self) -> None:
        """Give the memory back."""
        self._buffer.release()


class UploadBuffer:
    """Shards in host memory as the source of an all-gather: it reads a copy of them on the device.

    The copy has memory only while it is read. It is allocated on and released to the stream that uploads.
    """

    def __init__(self, shards: ShardBuffer, device: torch.device) -> None:
        """Allocate on the current stream (the all-gather stream)."""
        self._shards = shards
        self._on_device = shards.empty_copy_on(device)
        self._on_device.release()

    def copy_into(self, target: FlatShard) -> None:
        """Upload the shards, then cast and copy them to ``target``; the host does not wait."""
        self.read(lambda shard: shard.copy_into(target))

    def read(self, reader: Callable[[FlatShard], object]) -> None:
        """Upload the shards and call ``reader`` with them; the host does not wait."""
        # All on one stream: its allocator gives the memory only to work that comes after these reads.
        self._on_device.allocate()
        self._on_device.bytes.copy_(self._shards.bytes, non_blocking=True)
        reader(self._on_device.flat_shard)
        self._on_device.release()
