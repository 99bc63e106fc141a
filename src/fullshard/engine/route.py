"""A route: a codec and a transport, which bring a group from one source to its full parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import Work

from fullshard.divergence.journal import Tag
from fullshard.storage.codecs import Codec
from fullshard.transport.observer import StepObserver
from fullshard.transport.transports import Transport

if TYPE_CHECKING:
    from fullshard.engine.extension_codec import Extension

SMALL = 32 * 2**20
"""Bytes of full parameters that are little memory: one more of their buffers is no matter for a step's memory."""


class Route:
    """Codec and transport from one source, and what its gathers have staged in the transport's memory."""

    __slots__ = ("__weakref__", "beside", "codec", "is_small", "rows", "staged", "transport")

    def __init__(self, codec: Codec, transport: Transport | None, beside: Extension | None) -> None:
        """Without a ``transport`` there is no other rank, and to encode is all there is to gather."""
        self.codec, self.transport, self.beside = codec, transport, beside
        in_place = transport is None or transport.in_place
        self.is_small = codec.nbytes <= SMALL and in_place
        self.staged: Tensor | None = None
        """Memory of the transport, from encoding to decoding: kept, so that nothing else gets it meanwhile."""
        self.rows: Tensor | None = None
        """The same as bytes of shape (world, bytes of one rank)."""

    def gather_in_one_message(
        self,
        extra: tuple[Sequence[Tensor], Sequence[Tensor]],
        tag: Tag,
        observer: StepObserver | None,
        group: object,
        *,
        async_op: bool,
    ) -> Work | None:
        """Encode in memory of a transport that does not gather in place, and gather there; ``group`` is who is observed."""
        codec, transport = self.codec, self.transport
        assert transport is not None, "there are other ranks"
        # One message per call is all such a transport promises, so extra messages are calls of their own. They
        # are small, and the next one may be staged in the same memory, so each is waited for.
        for full, own in zip(*extra, strict=True):
            work = transport.gather([full], [own], tag, async_op=async_op)
            if work is not None:
                work.wait()
        world, numel = transport.group.size(), codec.message_nbytes // codec.dtype.itemsize
        if not numel:
            return None
        self.staged = output = transport.allocate(numel * world, codec.dtype)
        self.rows = rows = output.view(torch.uint8).view(world, -1)
        codec.encode_in(rows)
        own = output.view(world, -1)[transport.group.rank()]
        if observer is not None:
            observer.calls("gather", group, codec.received_bytes)
        work = transport.gather([output], [own], tag, async_op=async_op)
        if observer is not None:
            observer.called("gather", group, (work,))
        return work

    def release_staged(self) -> None:
        """Give memory of the transport back, on the stream that allocated it."""
        if self.transport is not None and self.staged is not None:
            self.transport.release(self.staged)
        self.staged = self.rows = None

    def abandon(self) -> None:
        """Give all memory back after a failure, in the place of decoding, which may take more of it."""
        self.release_staged()
        self.codec.release()
        if self.beside is not None:
            self.beside.abandon()

    @property
    def held_bytes(self) -> int:
        """Bytes of memory for it now, a transport's included; what travels beside it has its own."""
        return self.codec.held_bytes + (0 if self.staged is None else self.staged.nbytes)
