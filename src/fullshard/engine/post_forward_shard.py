"""What a rank keeps of the gathered parameters from forward to backward, to gather over fewer ranks.

    layout over 4 ranks   | 0 | 1 | 2 | 3 |      between steps, and gathered for forward
    layout over 2 of them |   0   |   1   |      kept after forward by ranks 0, 1 and again by 2, 3

The full parameters are cut once more, by a layout over the post-forward mesh, and this rank's shard of that is copied
aside before their memory is released. Backward gathers those shards into the same memory: the padding of a layout over
fewer ranks is never longer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fullshard.divergence.journal import journal_of, tag
from fullshard.divergence.meetings import meet
from fullshard.engine.route import Route
from fullshard.layout.segments import Layout, gathers_in_place
from fullshard.mesh.axes import block_group
from fullshard.mesh.backends import backend_of
from fullshard.storage.buffers import ShardBuffer, shard_of
from fullshard.storage.codecs import Buffered, Cast
from fullshard.transport.streams import FSDPCommContext
from fullshard.transport.transports import Coalesced, Transport

_MAKING_GROUPS = tag("making of process groups for shards after forward")


class PostForwardShard:
    """The post-forward shard of one group, and how to gather from it.

    Its memory is allocated on the compute stream, which fills it, and released to that stream.
    """

    def __init__(self, shard_group: ProcessGroup, layout: Layout) -> None:
        """Keep shards over blocks of ranks of ``shard_group``, each as large as ``layout`` is for."""
        self._shard_group = shard_group
        self.process_group: ProcessGroup | None = None
        """The ranks over which the shards are divided; None until something has been kept."""
        self._layout = layout
        self.route: Route | None = None
        """Gathers what is kept; None until something has been."""
        self._buffer: ShardBuffer | None = None
        self._sources: list[Tensor] = []
        """Views of the full parameters, parallel to the buffer's `locals`."""

    @property
    def size(self) -> int:
        """Over how many ranks it is sharded."""
        return self._layout.world

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that it has now, beside the full parameters' own."""
        if self._buffer is None or self.route is None:
            return 0
        return self._buffer.held_bytes + self.route.held_bytes

    def keep(
        self,
        full: Buffered,
        dtypes: Sequence[torch.dtype],
        transport: Transport | None,
        context: FSDPCommContext,
    ) -> None:
        """Copy this rank's shard of the full parameters, which are in memory; on the compute stream.

        The event that then gives their memory back also ends this copy, and every gather waits for
        such events: [Note: memory and streams], rule 1.
        """
        if self._buffer is None:
            self._buffer = self._prepare(full, dtypes, transport, context)
        # The compute stream copies, not the all-gather stream: it is the last to read the full parameters, so one
        # event of it ends both.
        self._buffer.allocate()
        torch._foreach_copy_(self._buffer.locals, self._sources)

    def _prepare(
        self,
        full: Buffered,
        dtypes: Sequence[torch.dtype],
        transport: Transport | None,
        context: FSDPCommContext,
    ) -> ShardBuffer:
        layout = self._layout
        # Not earlier: making a process group is collective, and before the first forward ranks have not compared
        # whether all of them ask for one.
        backend = backend_of(self._shard_group, context.device)
        meet(self._shard_group, _MAKING_GROUPS, backend)
        group = self.process_group = block_group(self._shard_group, layout.world)
        guard = journal_of(self._shard_group).guard
        if guard is not None:
            guard.add(group, backend)
        rank = group.rank()
        # Made for the process group of all shards, if it was chosen; memory of its own is the other group's, too.
        transport = Coalesced(group, context.device) if transport is None else transport.over(group)
        # Tensors made under inference_mode could not be saved for a later backward.
        with torch.inference_mode(False):
            buffer = ShardBuffer(layout, rank, dtypes, context.device)
            with context.all_gather:
                codec = Cast(
                    buffer.flat_shard,
                    layout,
                    rank,
                    dtypes,
                    context.device,
                    packed=not transport.in_place or not gathers_in_place(layout, dtypes),
                    # The same memory: what autograd saved in forward are views of it.
                    into=full.buffer,
                )
            self.route = Route(codec, transport, None)
            self._sources = [
                shard_of(layout, i, rank, param) for i, param in enumerate(full.params)
            ]
            return buffer

    def release(self) -> None:
        """Give the memory back to the compute stream, which is ordered after the last read of it."""
        assert self._buffer is not None, "asked for after `keep`"
        self._buffer.release()

    def forget_memory(self) -> None:
        """Build everything anew at the next `keep`: full parameters will be in other memory, or of other dtypes.

        Before: nothing is kept now.
        """
        self._buffer = self.route = None
        self._sources = []
