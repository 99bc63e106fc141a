"""Codecs: shard <-> message <-> full parameter, for parameters of one group.

    Plain     a rank that holds everything, in the dtype it computes in: shards are full parameters; nothing travels
    Cast      shards are cast and copied to this rank's piece of the message, in the compute dtype, in one fused copy.
              Gathered in place, a message is the parameter's memory; else it is staged and copied out
    Recoded   any other message: staged, and decoded into the full parameters. Subclasses say how

0-d parameters are `Cast`, too: each rank sends its copy (`Division.REPLICATED`). Parameters that bring their own codec
(`fsdp_pre_all_gather`) travel beside these: `engine.extension_codec`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fullshard.layout.segments import Layout
from fullshard.storage.buffers import Buffer, GatherBuffer, Source
from fullshard.storage.copy_out import Indices
from fullshard.storage.shard_buffer import ShardBuffer

_ALIGNMENT = 16
"""Messages begin at multiples of so many bytes, so that each can be viewed in any dtype."""


class Codec:
    """Encoder and decoder of one gather's messages, from one source; made once and used in every step.

    Its memory is a `GatherBuffer`'s.

    On the all-gather stream: `encode` or `encode_in`, then a transport's gather of `inputs` into `outputs`, then
    `decode` or `decode_from`. `release` comes when compute has read the parameters.
    """

    aliases_shards = False
    """Whether full parameters are the shards: their memory stays, and a write to shards is seen at once."""

    encode: Callable[[], object]
    """Takes memory for messages, and brings this rank's shard to its own."""
    encode_in: Callable[[Tensor], object]
    """Brings the shard to its row of a transport's memory: bytes of shape (world, `message_nbytes`)."""
    decode: Callable[[], object]
    """Makes the full parameters of the messages in `outputs`, and gives memory of messages back."""
    decode_from: Callable[[Tensor], object]
    """Makes the full parameters of a transport's memory, and does not keep it."""


class Plain(Codec):
    """Shards are full parameters, as other aliases: nothing is copied, and nothing is released."""

    aliases_shards = True
    packed = False
    nbytes = held_bytes = received_bytes = message_nbytes = 0
    dtype = torch.uint8
    full: Buffer | None = None

    def __init__(self, shards: ShardBuffer) -> None:
        # An optimizer's writes to the shards are seen here at once, so these parameters are never outdated.
        self.params = shards.full_params()
        self.outputs: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self.encode = self.decode = self.release = self.allocate_params = _nothing


def _nothing() -> None:
    """Do nothing: the shards stay."""


class Cast(GatherBuffer, Codec):
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
        into: GatherBuffer | None = None,
        indices: Indices | None = None,
    ) -> None:
        """Allocate on the current stream (the all-gather stream); see `GatherBuffer`."""
        super().__init__(layout, rank, dtypes, device, packed=packed, into=into, indices=indices)
        self.source = source

    # The buffer's own methods, so that a step has no frame of the codec.
    encode = GatherBuffer.fill
    decode, decode_from = GatherBuffer.copy_out, GatherBuffer.copy_out_of

    def encode_in(self, rows: Tensor) -> None:
        """See `Codec`."""
        self.source.copy_into(self.shard_in(rows))


class Recoded(GatherBuffer, Codec, ABC):
    """Messages that are no parameters: of as many bytes on every rank, decoded when compute is about to need them.

    A subclass reads and writes on one stream, so it may use temporaries. It writes to `params`, which autograd does
    not see. Gradients are those of the full parameters, as with any other codec.
    """

    def __init__(
        self,
        source: Source,
        layout: Layout,
        rank: int,
        dtypes: Sequence[torch.dtype],
        device: torch.device,
    ) -> None:
        """Allocate on the current stream (the all-gather stream)."""
        self.layout, self.source = layout, source
        nbytes = -(-self.row_nbytes(layout) // _ALIGNMENT) * _ALIGNMENT
        super().__init__(layout, rank, dtypes, device, packed=True, message_nbytes=nbytes)

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
        self.allocate()
        self.encode_in(self.rows)

    def encode_in(self, rows: Tensor) -> None:
        """See `Codec`."""
        self.source.read(lambda shard: self.encode_row(shard.segments, rows[self._rank]))

    def decode(self) -> None:
        """See `Codec`."""
        self.decode_from(self.rows)

    def decode_from(self, rows: Tensor) -> None:
        """See `Codec`."""
        self.allocate_params()
        self.decode_rows(rows)
        self._staging.release()


AnyCodec = Plain | Cast | Recoded
