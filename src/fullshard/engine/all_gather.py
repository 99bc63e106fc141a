"""All-gathers of one group: from one shard per rank to the full parameters on every rank.

    start    memory is taken, this rank's shard is cast into it, the collective is issued
    finish   the collective has ended; what was staged is distributed
    release  the memory is released

Between `start` and `finish` lies the compute that hides the collective. A `GroupAllGather` is built once, for one
source: the shards, their upload from host memory, or a post-forward shard. It is then used in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from fullshard import torch_border
from fullshard.layout.segments import Layout, gathers_in_place
from fullshard.storage.buffers import (
    FlatShard,
    GatherBuffer,
    Indices,
    ShardBuffer,
    UploadBuffer,
)
from fullshard.transport import collectives
from fullshard.transport.comm_objects import AllGather
from fullshard.transport.observer import Observed
from fullshard.transport.staged import Staged
from fullshard.transport.tags import Tag
from fullshard.transport.transports import Coalesced, Transport

SMALL = 32 * 2**20
"""Bytes of full parameters that are little memory: see `GroupAllGather.is_small`."""


@dataclass(frozen=True, slots=True)
class Messages:
    """Bytes to gather beside a buffer's own, in the same call."""

    outputs: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)

    def copy_to_outputs(self) -> None:
        """Copy inputs to outputs: all there is to do if there is nobody to gather from."""
        if self.outputs:
            torch._foreach_copy_(self.outputs, self.inputs)

    @property
    def received_bytes(self) -> int:
        """Bytes that come from other ranks."""
        return sum(output.nbytes for output in self.outputs) - sum(
            own.nbytes for own in self.inputs
        )


class AllGatherState(NamedTuple):
    """An all-gather that has been issued and not been finished."""

    work: Work | None = None
    """What the host waits for; None if the stream is ordered after the collective."""
    rows: Tensor | None = None
    """Memory of a comm object that it was staged in: bytes of shape (world, bytes of one rank)."""


_NOTHING_LEFT = AllGatherState()
"""An all-gather that streams order and that nobody observes: it needs no handle."""


class GroupAllGather:
    """One way to gather a group: from which source, over which ranks, into which memory."""

    def __init__(
        self,
        source: FlatShard | UploadBuffer,
        layout: Layout,
        rank: int,
        process_group: ProcessGroup | None,
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        custom: AllGather | None,
        *,
        into: GroupAllGather | None = None,
        indices: Indices | None = None,
    ) -> None:
        """Allocate on the current stream (the all-gather stream) and make every view a step needs.

        Args:
            source: Where this rank's shard is read from.
            layout: How the parameters are divided over the ranks of the group.
            rank: This rank's place among them.
            process_group: Over which to gather; None if there is no other rank.
            dtypes: In which to gather each parameter.
            device: Where to.
            custom: A comm object to gather with.
            into: Gather into this one's full parameters, which are in memory now.
            indices: Of the all-gather stream, to distribute small messages by; None if none can be made.
        """
        self._source = source
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
            indices=indices if custom is None else None,
        )
        self.params = self.buffer.params
        """Per parameter, the data of the unsharded parameter."""
        self.release = self.buffer.release
        """Gives the memory back."""
        self.takes_memory_late = self.buffer.packed
        """Whether `finish` takes memory, too."""
        self.is_small = self.buffer.nbytes <= SMALL and custom is None
        """Whether one more of its buffers is no matter for a step's memory."""
        self.received_bytes = self.buffer.received_bytes if process_group is not None else 0
        """Bytes that come from other ranks, but for what is gathered beside the buffer's own."""
        self._transport: Transport | None = None
        """How its messages travel; None before the first."""
        self._staged: Tensor | None = None
        """Memory of the comm object, while something is in flight in it."""
        self._below_autograd = torch_border.below_autograd()
        """Made once, which takes longer than to enter it. `finish` comes after `start`, so nobody enters it twice."""

    def start(
        self, extra: Messages | None, tag: Tag, *, async_op: bool, observed: Observed | None
    ) -> AllGatherState:
        """Take memory, copy this rank's shard to it, and issue the collective, with ``extra`` beside it.

        On the all-gather stream. ``observed`` has who is told.
        """
        if self._custom is not None:
            return self._start_custom(self._custom, extra, tag, async_op, observed)
        buffer, group = self.buffer, self._group
        outputs, inputs = buffer.outputs, buffer.inputs
        # One call for all: each call costs the host, and a small message the network's latency.
        if extra is not None:
            outputs, inputs = outputs + extra.outputs, inputs + extra.inputs
        with self._below_autograd:
            # The cast into the buffer and the collective are on one stream, so no event is needed between them.
            buffer.fill(self._source)
            if group is None:  # there is one rank, and the cast was all there is to gather
                if extra is not None:
                    extra.copy_to_outputs()
                return _NOTHING_LEFT
            if observed is not None:
                extra_bytes = extra.received_bytes if extra is not None else 0
                nbytes = self.received_bytes + extra_bytes
                observed.observer.calls("gather", observed.group, nbytes)
            transport = self._transport or self._find_transport(group)
            work = transport.gather(outputs, inputs, tag, async_op=async_op)
        if observed is not None:
            observed.observer.called("gather", observed.group, (work,))
        if work is None:
            return _NOTHING_LEFT
        return AllGatherState(work)

    def _find_transport(self, group: ProcessGroup) -> Transport:
        self._transport = (
            Coalesced(group, self._device)
            if self._custom is None
            else Staged(self._custom, group, self._device)
        )
        return self._transport

    def _start_custom(
        self,
        custom: AllGather,
        extra: Messages | None,
        tag: Tag,
        async_op: bool,
        observed: Observed | None,
    ) -> AllGatherState:
        """Stage this rank's message in memory of the comm object, and gather with it."""
        assert self._group is not None, "a comm object is given if there is something to gather"
        transport = self._transport or self._find_transport(self._group)
        # One message per call is all a comm object promises, so extra messages are calls of their own. They
        # are small, and the next one may be staged in the same memory, so each is waited for.
        for full, own in () if extra is None else zip(extra.outputs, extra.inputs, strict=True):
            work = transport.gather([full], [own], tag, async_op=async_op)
            if work is not None:
                work.wait()
        numel = self.buffer.packed_nbytes // self._dtype.itemsize
        if not numel:
            return _NOTHING_LEFT
        output = custom.allocate((numel * self._world,), dtype=self._dtype, device=self._device)
        # Kept here until `finish`, so that nothing else gets this memory while the collective writes it.
        self._staged = rows = output.view(torch.uint8).view(self._world, -1)
        self._source.copy_into(self.buffer.shard_in(rows))
        own = output.view(self._world, -1)[self._rank]
        if observed is not None:
            observed.observer.calls("gather", observed.group, self.received_bytes)
        work = transport.gather([output], [own], tag, async_op=async_op)
        if observed is not None:
            observed.observer.called("gather", observed.group, (work,))
        return AllGatherState(work, rows)

    def finish(self, state: AllGatherState, observed: Observed | None) -> None:
        """Wait for the collective, where the host must, and distribute what was staged.

        On the all-gather stream, which has waited for released memory.
        """
        # NCCL's collectives order their stream, and return no work. Gloo's are done by a thread, for which the host
        # waits here: as late as possible, when compute needs the parameters.
        if state.work is not None:
            if observed is not None:
                observed.observer.waits("gather", observed.group)
            state.work.wait()
            if observed is not None:
                observed.observer.waited("gather", observed.group)
        if observed is not None and self.buffer.packed:
            # This is the moment with the most memory: staging and full parameters, both.
            self.buffer.allocate_params()
            observed.observer.memory_of_gathers(observed.group)
        if state.rows is None:
            with self._below_autograd:
                self.buffer.copy_out()
        else:
            assert self._custom is not None, "it staged the rows"
            self.buffer.copy_out_of(state.rows)
            self._release_staged()

    def _release_staged(self) -> None:
        """Give memory of a comm object back, on the stream that allocated it."""
        if self._custom is not None and self._staged is not None:
            self._custom.release(self._staged)
            self._staged = None

    def abandon(self, state: AllGatherState | None) -> None:
        """Give all memory back after a failure, in the place of `finish`, which may take more of it.

        On the all-gather stream. ``state`` is None if no collective was issued.
        """
        if state is not None and state.work is not None:
            state.work.wait()
        self._release_staged()
        self.release()

    @property
    def addresses(self) -> range:
        """Addresses of the full parameters, if they are in memory."""
        return self.buffer.full.addresses

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that it has now, a comm object's included."""
        return self.buffer.held_bytes + (0 if self._staged is None else self._staged.nbytes)


class UnshardedInPlace:
    """The same for a rank that holds everything, in the dtypes it computes in: shards are full parameters.

    Unsharded parameters are aliases of the shards, so nothing is copied, and nothing is released.
    """

    takes_memory_late = is_small = False
    held_bytes = 0
    addresses = range(0)
    """None: its memory is not lost."""

    def __init__(self, shards: ShardBuffer) -> None:
        # What an optimizer writes to the shards is seen here at once, so these parameters are never outdated.
        self.params = shards.full_params()

    def start(
        self, extra: Messages | None, tag: Tag, *, async_op: bool, observed: Observed | None
    ) -> AllGatherState:
        """Bring ``extra`` to its outputs; the parameters are in memory."""
        if extra is not None:
            extra.copy_to_outputs()
        return _NOTHING_LEFT

    def finish(self, state: AllGatherState, observed: Observed | None) -> None:
        """Do nothing: there is nothing to wait for."""

    def abandon(self, state: AllGatherState | None) -> None:
        """Do nothing: the shards stay."""

    def release(self) -> None:
        """Do nothing: the shards stay."""


def all_gather_full(
    layout: Layout, pieces: Sequence[Tensor | None], process_group: ProcessGroup | None, tag: Tag
) -> list[Tensor | None]:
    """Gather the ranks' pieces of each segment, and return per parameter what they make up.

    The pieces are those of parameters, or of something shaped like them. Where all ranks give None, the parameters
    of that segment are None. The result is in new memory of the current stream, which is ordered after the gather.
    For layouts without `Division.CHUNKS`.
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
            tag,
            async_op=False,
        )
        assert work is None, "not asynchronous"
    return [
        None if segment is None else segment.as_strided(slot.shape, slot.strides, slot.start)
        for slot, segment in ((slot, segments[slot.segment]) for slot in layout.slots)
    ]
