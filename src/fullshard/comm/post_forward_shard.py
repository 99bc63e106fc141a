"""What a rank keeps of the gathered parameters from forward to backward, to gather over fewer ranks.

    layout over 4 ranks   | 0 | 1 | 2 | 3 |      at rest, and gathered for forward
    layout over 2 of them |   0   |   1   |      kept after forward by ranks 0, 1 and again by 2, 3

The whole parameters are cut once more, by a layout over the block of neighbours, and this rank's piece
is copied aside before their memory is given back. Backward gathers those pieces into the same memory:
the padding of a layout over fewer ranks is never longer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fullshard.comm import collectives
from fullshard.comm.all_gather import GroupAllGather
from fullshard.comm.streams import FSDPCommContext
from fullshard.plan.layout import Layout
from fullshard.storage.buffers import FlatShard, ShardBuffer, shard_of


class PostForwardShard:
    """The part of one group; its memory is taken from the compute stream, which fills it, and given back to it."""

    def __init__(self, block: ProcessGroup, layout: Layout) -> None:
        """Keep parts over the ranks of ``block``, which are divided by ``layout``."""
        self._block = block
        self._layout = layout
        self.held = False
        """Whether there are values to gather from."""
        self._buffer: ShardBuffer | None = None
        self._gathering: GroupAllGather | None = None
        self._sources: list[Tensor] = []
        """Views of the whole parameters, parallel to the buffer's `locals`."""

    @property
    def gathering(self) -> GroupAllGather:
        """How to gather what is held."""
        assert self._gathering is not None, "asked for while a part is held"
        return self._gathering

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that it has now, beside the whole parameters' own."""
        if self._buffer is None or self._gathering is None:
            return 0
        return self._buffer.held_bytes + self._gathering.held_bytes

    def keep(
        self,
        whole: GroupAllGather,
        dtypes: Sequence[torch.dtype],
        custom: collectives.AllGather | None,
        context: FSDPCommContext,
    ) -> None:
        """Copy this rank's piece of the whole parameters, which are in memory; on the compute stream.

        The event that then gives their memory back also ends this copy, and every gather waits for
        such events: [Note: memory and streams], rule 1.
        """
        if self._buffer is None:
            self._buffer = self._prepare(whole, dtypes, custom, context)
        self._buffer.allocate()
        torch._foreach_copy_(self._buffer.locals, self._sources)
        self.held = True

    def _prepare(
        self,
        whole: GroupAllGather,
        dtypes: Sequence[torch.dtype],
        custom: collectives.AllGather | None,
        context: FSDPCommContext,
    ) -> ShardBuffer:
        layout, rank = self._layout, self._block.rank()
        if custom is not None:
            custom = custom.moved_to(self._block)
        with torch.inference_mode(False):
            with context.all_gather:
                self._gathering = GroupAllGather(
                    layout, rank, self._block, dtypes, context.device, custom, into=whole
                )
            params = whole.params
            self._sources = [shard_of(layout, i, rank, param) for i, param in enumerate(params)]
            return ShardBuffer(layout, rank, dtypes, context.device)

    def copy_in(self, own: FlatShard) -> None:
        """Copy what is held to where it is sent from, on the all-gather stream."""
        assert self._buffer is not None, "asked for while a part is held"
        own.copy_from(self._buffer.own)

    def drop(self) -> None:
        """Give the memory back, to the compute stream, which is ordered after its last read."""
        if self.held:
            assert self._buffer is not None, "a part that is held has a buffer"
            self._buffer.release()
            self.held = False

    def forget_memory(self) -> None:
        """The whole parameters will be in other memory, or of other dtypes; nothing is held now."""
        assert not self.held, "dropped before"
        self._buffer = self._gathering = None
        self._sources = []
