"""Codecs: shard <-> message <-> full parameter, for parameters of one group.

    Plain     a rank that holds everything, in the dtype it computes in: shards are full parameters; nothing travels
    Cast      shards are cast and copied to this rank's piece of the message, in the compute dtype, in one fused copy.
              Gathered in place, a message is the parameter's memory; else it is staged and copied out
    Recoded   any other message: staged, and decoded into the full parameters. Subclasses say how

0-d parameters are `Cast`, too: each rank sends its copy (`Division.REPLICATED`).
Parameters that bring their own codec (`fsdp_pre_all_gather`) travel beside these: `engine.extension_codec`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fullshard.layout.segments import Layout
from fullshard.storage.buffers import Buffer, GatherBuffer, ShardBuffer, Source
from fullshard.storage.copy_out import Indices

_ALIGNMENT = 16
"""Messages begin at multiples of so many bytes, so that each can be viewed in any dtype."""


class Codec:
    """What one gather brings, from one source; made once and used in every step.

    On the all-gather stream: `encode` or `encode_in`, then a transport's gather of `inputs` into `outputs`, then
    `decode` or `decode_from`. `release` comes when compute has read the parameters. A codec that sends nothing has no
    outputs.
    """

    params: Sequence[Tensor] = ()
    """Per parameter, the data of the unsharded parameter: the same objects at every gather."""
    outputs: Sequence[Tensor] = ()
    """Bytes to gather into; they have memory from `encode` on."""
    inputs: Sequence[Tensor] = ()
    """Parallel to `outputs`, the bytes that this rank sends, which lie in them."""
    received_bytes = 0
    """Bytes that come from other ranks."""
    message_nbytes = 0
    """Bytes of one rank's message in memory of a transport."""
    dtype = torch.uint8
    """Of that memory."""
    full: Buffer | None = None
    """The memory of the full parameters, if it comes and goes."""
    nbytes = 0
    """Bytes of the full parameters, with padding."""
    takes_memory_late = False
    """Whether `decode` takes memory, too."""
    aliases_shards = False
    """Whether full parameters are the shards: their memory stays, and a write to shards is seen at once."""

    encode: Callable[[], object]
    """Takes memory for messages, and brings this rank's shard to its own."""
    decode: Callable[[], object]
    """Makes the full parameters of what has arrived in `outputs`, and gives memory of messages back."""
    release: Callable[[], object]
    """Gives all memory back, whether or not the gather was decoded."""
    encode_in: Callable[[Tensor], object]
    """Brings the shard to its row of a transport's memory: bytes of shape (world, `message_nbytes`)."""
    decode_from: Callable[[Tensor], object]
    """Makes the full parameters of a transport's memory, and does not keep it."""
    allocate_params: Callable[[], object]
    """Takes memory for the full parameters, if `decode` would."""

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that it has now."""
        return 0


def _nothing() -> None:
    """Do nothing: the shards stay."""


class Plain(Codec):
    """Shards are full parameters, as other aliases: nothing is copied, and nothing is released."""

    aliases_shards = True

    def __init__(self, shards: ShardBuffer) -> None:
        # What an optimizer writes to the shards is seen here at once, so these parameters are never outdated.
        self.params = shards.full_params()
        self.encode = self.decode = self.release = _nothing


class Buffered(Codec):
    """A codec whose full parameters lie in a gather buffer."""

    def __init__(
        self, source: Source, buffer: GatherBuffer, dtypes: Sequence[torch.dtype], *, sends: bool
    ) -> None:
        """Encode from ``source``; unless it ``sends``, there is no other rank."""
        self._source, self.buffer, self.full = source, buffer, buffer.full
        self.params, self.outputs, self.inputs = buffer.params, buffer.outputs, buffer.inputs
        self.received_bytes = buffer.received_bytes if sends else 0
        self.message_nbytes, self.nbytes = buffer.message_nbytes, buffer.nbytes
        self.takes_memory_late = buffer.packed
        self.release = buffer.release
        self.allocate_params = buffer.allocate_params
        kinds = set(dtypes)
        self.dtype = kinds.pop() if len(kinds) == 1 else torch.uint8

    @property
    def held_bytes(self) -> int:
        """See `Codec`."""
        return self.buffer.held_bytes


class Cast(Buffered):
    """Shards are cast to the compute dtype, into this rank's piece of what is gathered."""

    def __init__(
        self,
        source: Source,
        layout: Layout,
        rank: int,
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        *,
        packed: bool,
        sends: bool = True,
        into: GatherBuffer | None = None,
        indices: Indices | None = None,
    ) -> None:
        """Allocate on the current stream (the all-gather stream); see `GatherBuffer`."""
        buffer = GatherBuffer(
            layout, rank, dtypes, device, packed=packed, into=into, indices=indices
        )
        super().__init__(source, buffer, dtypes, sends=sends)
        # The cast into the buffer and the collective are on one stream, so no event is needed between them.
        self.encode = functools.partial(buffer.fill, source)
        self.decode = buffer.copy_out
        self.decode_from = buffer.copy_out_of
        self.encode_in = lambda rows: source.copy_into(buffer.shard_in(rows))


class Recoded(Buffered, ABC):
    """Messages that are no parameters: of as many bytes on every rank, decoded when compute is about to need them.

    What a subclass reads and writes is on one stream, so it may use temporaries. It writes to `params`, which autograd does
    not see. Gradients are those of the full parameters, as with any other codec.
    """

    def __init__(
        self,
        source: Source,
        layout: Layout,
        rank: int,
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        *,
        sends: bool = True,
    ) -> None:
        """Allocate on the current stream (the all-gather stream)."""
        self.layout, self.rank = layout, rank
        nbytes = -(-self.row_nbytes(layout) // _ALIGNMENT) * _ALIGNMENT
        buffer = GatherBuffer(layout, rank, dtypes, device, packed=True, message_nbytes=nbytes)
        super().__init__(source, buffer, dtypes, sends=sends)
        self.dtype = torch.uint8

    @abstractmethod
    def row_nbytes(self, layout: Layout) -> int:
        """Return the bytes of one rank's message, the same on every rank; messages are as long, or a little longer."""

    @abstractmethod
    def encode_row(self, shard: Sequence[Tensor], row: Tensor) -> None:
        """Write the message of this rank's pieces, one for each segment of the layout, to the bytes ``row``."""

    @abstractmethod
    def decode_rows(self, rows: Tensor) -> None:
        """Write the full parameters, `params`, from all ranks' messages: the rows of ``rows``."""

    def encode(self) -> None:
        """See `Codec`."""
        self.buffer.allocate()
        self.encode_in(self.buffer.rows)

    def encode_in(self, rows: Tensor) -> None:
        """See `Codec`."""
        self._source.read(lambda shard: self.encode_row(shard.segments, rows[self.rank]))

    def decode(self) -> None:
        """See `Codec`."""
        self.decode_from(self.buffer.rows)

    def decode_from(self, rows: Tensor) -> None:
        """See `Codec`."""
        self.buffer.allocate_params()
        self.decode_rows(rows)
        self.buffer.release_staging()
