"""Bringing a group's parameters together: from pieces on several ranks to whole parameters on each.

    start    memory is taken, this rank's pieces are cast into it, the collective is issued
    finish   ... has ended; what was staged is distributed
    release  the memory is given back

Between `start` and `finish` lies whatever compute the gather hides behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from fullshard.comm import collectives
from fullshard.comm.spans import CollectiveSpan
from fullshard.plan.layout import Layout, gathers_in_place
from fullshard.storage.buffers import FlatShard, GatherBuffer, ShardBuffer


@dataclass(frozen=True, slots=True)
class Messages:
    """Bytes to gather beside a buffer's own, in the same call."""

    outputs: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)

    def stay_here(self) -> None:
        """Bring them to where they are awaited if there is nobody to gather from."""
        if self.outputs:
            torch._foreach_copy_(self.outputs, self.inputs)

    @property
    def received_bytes(self) -> int:
        """Bytes that come from other ranks."""
        return sum(output.nbytes for output in self.outputs) - sum(
            own.nbytes for own in self.inputs
        )


class GroupAllGather:
    """One way to gather a group: over which ranks, into which memory; used again and again."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        process_group: ProcessGroup | None,
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        custom: collectives.AllGather | None,
        *,
        into: GroupAllGather | None = None,
    ) -> None:
        """Allocate on the current stream (the all-gather stream) and make every view a step needs.

        Args:
            layout: How the parameters are divided over the ranks of the group.
            rank: This rank's place among them.
            process_group: Over which to gather; None if there is nobody else.
            dtypes: In which to gather each parameter.
            device: Where to.
            custom: A comm object to gather with.
            into: Gather into this one's whole parameters, which are in memory now.
        """
        self._group, self._rank, self._world = process_group, rank, layout.world
        self._custom = custom
        self._device = device
        kinds = set(dtypes)
        self._dtype = kinds.pop() if len(kinds) == 1 else torch.uint8
        self.buffer: GatherBuffer = GatherBuffer(
            layout,
            rank,
            dtypes,
            device,
            packed=custom is not None
            or (process_group is not None and not gathers_in_place(layout, dtypes)),
            into=into.buffer if into is not None else None,
        )
        self.params = self.buffer.params
        """Per parameter, the data of its unsharded face."""
        self.takes_memory_late = self.buffer.packed
        """Whether `finish` takes memory, too."""
        self.received_bytes = self.buffer.received_bytes if process_group is not None else 0
        """Bytes that come from other ranks, but for what is gathered beside the buffer's own."""
        self._work: Work | None = None
        self._wire: CollectiveSpan | None = None
        """Of the gather in flight, if it is recorded."""
        self._rows: Tensor | None = None
        """Packed by the comm object: bytes of shape (world, bytes of one rank)."""

    def start(
        self,
        copy_in: Callable[[FlatShard], None],
        extra: Messages | None,
        *,
        async_op: bool,
        wire: CollectiveSpan | None,
    ) -> None:
        """Take memory, let ``copy_in`` write this rank's pieces to it, and issue the collective.

        On the all-gather stream. ``wire`` is told when, if somebody records it.
        """
        buffer, self._wire = self.buffer, wire
        if self._custom is not None:
            self._start_custom(self._custom, copy_in, extra, async_op)
            return
        buffer.allocate()
        copy_in(buffer.own)
        if self._group is not None:
            outputs, inputs = buffer.outputs, buffer.inputs
            if extra is not None:
                outputs, inputs = outputs + extra.outputs, inputs + extra.inputs
            if wire is not None:
                extra_bytes = extra.received_bytes if extra is not None else 0
                wire.begins(self.received_bytes + extra_bytes)
            self._work = collectives.all_gather(outputs, inputs, self._group, async_op=async_op)
            if wire is not None:
                wire.called((self._work,))
        elif extra is not None:
            extra.stay_here()

    def _start_custom(
        self,
        custom: collectives.AllGather,
        copy_in: Callable[[FlatShard], None],
        extra: Messages | None,
        async_op: bool,
    ) -> None:
        """Stage this rank's message in memory of the comm object, and gather with it."""
        assert self._group is not None, "a comm object is given if there is something to gather"
        for whole, own in () if extra is None else zip(extra.outputs, extra.inputs, strict=True):
            work = collectives.packed_all_gather(custom, whole, own, self._group, async_op=async_op)
            if work is not None:
                work.wait()
        numel = self.buffer.packed_nbytes // self._dtype.itemsize
        if not numel:
            return
        output = custom.allocate((numel * self._world,), dtype=self._dtype, device=self._device)
        self._rows = output.view(torch.uint8).view(self._world, -1)
        copy_in(self.buffer.own_in(self._rows))
        own = output.view(self._world, -1)[self._rank]
        if self._wire is not None:
            self._wire.begins(self.received_bytes)
        self._work = collectives.packed_all_gather(
            custom, output, own, self._group, async_op=async_op
        )
        if self._wire is not None:
            self._wire.called((self._work,))

    def finish(self) -> None:
        """Wait for the collective, where the host must, and distribute what was staged.

        On the all-gather stream, which has waited for memory that was given back.
        """
        wire, self._wire = self._wire, None
        if self._work is not None:
            if wire is None:
                self._work.wait()
            else:
                wire.wait((self._work,))
            self._work = None
        if self.buffer.packed:
            self.buffer.allocate_params()
            if wire is not None:
                wire.recorder.note_gathered(wire.group)  # staging and whole parameters, both
        if self._rows is None:
            self.buffer.copy_out()
        else:
            assert self._custom is not None, "it staged the rows"
            self.buffer.copy_out_of(self._rows)
            self._custom.release(self._rows)  # on the stream that allocated it
            self._rows = None

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that it has now, a comm object's included."""
        return self.buffer.held_bytes + (0 if self._rows is None else self._rows.nbytes)

    def release(self) -> None:
        """Give the memory back."""
        self.buffer.release()


class UnshardedInPlace:
    """The same for a rank that holds everything, in the dtypes it computes in: shards are whole parameters.

    Unsharded faces are aliases of the shards, so nothing is copied, and nothing given back.
    """

    takes_memory_late = False
    held_bytes = 0

    def __init__(self, shards: ShardBuffer) -> None:
        self.params = shards.full_params()

    def start(
        self,
        copy_in: Callable[[FlatShard], None],
        extra: Messages | None,
        *,
        async_op: bool,
        wire: CollectiveSpan | None,
    ) -> None:
        """Bring ``extra`` to where it is awaited; the parameters are there."""
        if extra is not None:
            extra.stay_here()

    def finish(self) -> None:
        """There is nothing to wait for."""

    def release(self) -> None:
        """The shards stay."""


def all_gather_full(
    layout: Layout, pieces: Sequence[Tensor | None], process_group: ProcessGroup | None
) -> list[Tensor | None]:
    """What is whole of which every rank has a piece, per segment: parameters, or something shaped like them.

    Segments of which all ranks give None are left out, and so are their parameters. In new memory of
    the current stream, which is ordered after the gather. For layouts without `Division.CHUNKS`.
    """
    segments = [
        None if piece is None else piece.new_empty(piece.numel() * layout.world) for piece in pieces
    ]
    pairs = [
        (segment, piece)
        for segment, piece in zip(segments, pieces, strict=True)
        if segment is not None and piece is not None and piece.numel()
    ]
    if process_group is None:
        for segment, piece in pairs:
            segment.copy_(piece)
    else:
        work = collectives.all_gather(
            [segment.view(torch.uint8) for segment, _ in pairs],
            [piece.view(torch.uint8) for _, piece in pairs],
            process_group,
            async_op=False,
        )
        assert work is None, "not asynchronous"
    return [
        None if segment is None else segment.as_strided(slot.shape, slot.strides, slot.start)
        for slot, segment in ((slot, segments[slot.segment]) for slot in layout.slots)
    ]
