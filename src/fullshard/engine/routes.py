"""Routes of one group from shards to full parameters, each made when it is needed and used in every step.

    from_shards    between steps parameters are shards, so forward gathers from them, and mostly backward, too
    post_forward   with a post-forward mesh, backward gathers from what forward has kept
    beside         tensor subclasses and all-gather extensions: in the call of `from_shards`

A route is a codec and a transport: what travels, and how. When to gather is the group's decision (`FSDPParamGroup`), and
`Gather` does it. `forget` lets routes be made again: after a change of dtypes, codec, transport or memory of the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from fullshard.engine.extension_codec import Extension, Messages, WithExtension, WithoutExtension
from fullshard.errors import ConfigurationError
from fullshard.layout.segments import Layout, gathers_in_place
from fullshard.mesh.axes import DataParallelAxes, DataParallelMeshInfo, block_group
from fullshard.mesh.backends import backend_of
from fullshard.policies import MixedPrecisionPolicy
from fullshard.storage.buffers import GatherBuffer, Source, shard_of
from fullshard.storage.codecs import AnyCodec, Cast, Plain, Recoded
from fullshard.storage.copy_out import Indices
from fullshard.storage.param import FSDPParam, has_all_gather_extension
from fullshard.storage.shard_buffer import ShardBuffer, UploadBuffer
from fullshard.storage.shard_formats import ShardFormat
from fullshard.storage.shard_storage import ShardStorage
from fullshard.transport.monitor import monitor
from fullshard.transport.observer import StepObserver
from fullshard.transport.streams import FSDPCommContext, is_capturing
from fullshard.transport.tags import Tag, tag
from fullshard.transport.transports import Coalesced, Transport

_MAKING_GROUPS = tag("making of process groups for shards after forward")

SMALL = 32 * 2**20
"""Bytes of full parameters that are little memory: one more of their buffers is no matter for a step's memory."""


class Route:
    """Codec and transport from one source, and its gathers' staged messages in the transport's memory."""

    __slots__ = ("__weakref__", "beside", "codec", "is_small", "rows", "staged", "transport")

    def __init__(
        self, codec: AnyCodec, transport: Transport | None, beside: Extension | None
    ) -> None:
        """Without a ``transport`` there is no other rank, and to encode is all there is to gather."""
        self.codec, self.transport, self.beside = codec, transport, beside
        in_place = transport is None or transport.in_place
        self.is_small = codec.nbytes <= SMALL and in_place
        self.staged: Tensor | None = None
        """Memory of the transport, from encoding to decoding: kept, so that nothing else gets it meanwhile."""
        self.rows: Tensor | None = None
        """`staged` as bytes of shape (world, bytes of one rank)."""

    def gather_in_one_message(
        self,
        extra: Messages | None,
        tag: Tag,
        observer: StepObserver | None,
        group: object,
        *,
        async_op: bool,
    ) -> Work | None:
        """Encode in memory of a transport that does not gather in place, and gather there; ``group`` is the one observed."""
        codec, transport = self.codec, self.transport
        assert transport is not None, "there are other ranks"
        # One message per call is all such a transport promises, so extra messages are calls of their own. They
        # are small, and the next one may be staged in the same memory, so each is waited for.
        for full, own in zip(*(extra or ((), ())), strict=True):
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
        """Give all memory back, whatever a gather has come to: after a failure, decoding may take more of it."""
        self.release_staged()
        self.codec.release()
        if self.beside is not None:
            self.beside.abandon()

    @property
    def held_bytes(self) -> int:
        """Bytes of memory for it now, a transport's included; parameters beside it have their own."""
        return self.codec.held_bytes + (0 if self.staged is None else self.staged.nbytes)


class PostForwardShard:
    """This rank's shard of the gathered parameters, kept from forward to backward, to gather over fewer ranks.

        layout over 4 ranks   | 0 | 1 | 2 | 3 |      between steps, and gathered for forward
        layout over 2 of them |   0   |   1   |      kept after forward by ranks 0, 1 and again by 2, 3

    The full parameters are cut once more, by a layout over the post-forward mesh, and this rank's shard of that is
    copied aside before their memory is released. Backward gathers those shards into the same memory: the padding of a
    layout over fewer ranks is never longer. Memory of the shard is allocated on the compute stream, which fills it, and
    released to that stream.
    """

    def __init__(self, shard_group: ProcessGroup, layout: Layout) -> None:
        """Keep shards over blocks of ranks of ``shard_group``, each as large as ``layout`` is for."""
        self._shard_group = shard_group
        self.process_group: ProcessGroup | None = None
        """The ranks over which they are divided; None until something has been kept."""
        self._layout = layout
        self.route: Route | None = None
        """Gathers what is kept; None until something has been."""
        self._buffer: ShardBuffer | None = None
        self._sources: list[Tensor] = []
        """Views of the full parameters, parallel to the buffer's `locals`."""

    @property
    def size(self) -> int:
        """Number of ranks over which it is sharded."""
        return self._layout.world

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that it has now, beside the full parameters' own."""
        if self._buffer is None or self.route is None:
            return 0
        return self._buffer.held_bytes + self.route.held_bytes

    def keep(
        self,
        full: GatherBuffer,
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
        full: GatherBuffer,
        dtypes: Sequence[torch.dtype],
        transport: Transport | None,
        context: FSDPCommContext,
    ) -> ShardBuffer:
        layout = self._layout
        # Not earlier: making a process group is collective, and before the first forward ranks have not compared
        # whether all of them ask for one.
        backend = backend_of(self._shard_group, context.device)
        told = monitor().of_group(self._shard_group, backend)
        told.before(_MAKING_GROUPS)
        group = self.process_group = block_group(self._shard_group, layout.world)
        told.made(group, backend)
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
                    into=full,
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


class GatherTraffic(NamedTuple):
    """Bytes of one gather, on this rank."""

    memory: int
    """Bytes of the full parameters in the compute dtypes, with padding; 0 if the shards themselves are used."""
    received: int
    """Bytes from other ranks. Parameters with an all-gather extension are counted once they have been gathered."""


class Routes:
    """The routes of one group's gathers; lives as long as the group."""

    def __init__(
        self,
        params: Sequence[FSDPParam],
        shards: ShardStorage,
        mesh_info: DataParallelAxes,
        device: torch.device,
        shard_format: ShardFormat,
        post_forward_size: int | None,
    ) -> None:
        """Gather parameters from their shards to ``device``; `derive_dtypes` comes before the first gather.

        With ``post_forward_size``, they are kept after forward in shards over so many ranks.
        """
        self._params, self._shards = params, shards
        self._mesh_info, self._device = mesh_info, device
        self._context: FSDPCommContext | None = None
        self.transport: Transport | None = None
        """The transport of messages; None for the process group's own collectives."""
        self.codec: Callable[..., Recoded] | None = None
        """Makes the codec of parameters in buffers, if it is not `Cast`."""
        self.keeps_memory = False
        """Whether gathered memory stays when it is released, so that it has the same address at every gather."""
        self.compute_dtypes: list[torch.dtype] = []
        """Compute dtypes of the parameters that lie in the gather buffer."""
        self.from_shards: Route | None = None
        """None until `build`."""
        self.beside: Extension | None = None
        """None if all parameters lie in the buffers."""
        self.post_forward: PostForwardShard | None = None
        """None if nothing is kept after forward, or the full parameters are."""
        if post_forward_size is not None:
            shard_group = mesh_info.shard_process_group
            assert shard_group is not None, "there is nothing to divide otherwise"
            layout = shard_format.layout(shards.buffered, post_forward_size)
            self.post_forward = PostForwardShard(shard_group, layout)

    @property
    def custom(self) -> Any:
        """The user's comm object or transport to gather with; None for the default."""
        return None if self.transport is None else self.transport.identity

    def connect(self, context: FSDPCommContext) -> None:
        """Join a model's streams."""
        self._context = context
        context.host_reads_results = context.host_reads_results or self.uploads
        codec = None if self.from_shards is None else self.from_shards.codec
        if isinstance(codec, Cast):  # built for other streams
            with context.all_gather:
                codec.change_indices(self._indices)

    @property
    def _indices(self) -> Indices | None:
        """The indices of the all-gather stream; None while a CUDA graph is captured, in which nothing is computed."""
        context = self._context
        if context is None or not context.asynchronous or is_capturing():
            return None
        return context.indices

    def derive_dtypes(self, policy: MixedPrecisionPolicy) -> list[torch.dtype]:
        """Gather in the dtypes that follow from policy and shards; return those of all parameters.

        What was built on other dtypes is forgotten.
        """
        dtypes = {param: param.compute_dtype(policy) for param in self._params}
        self.compute_dtypes = [dtypes[param] for param in self._shards.buffered]
        info, views = self._mesh_info, self._shards.shard_views
        members: list[WithExtension | WithoutExtension] = []
        for param in self._params:
            if param.sharded_param in views:
                continue
            if has_all_gather_extension(param.sharded_param.local):
                assert isinstance(info, DataParallelMeshInfo), "an extension is told of a mesh"
                members.append(WithExtension(param, policy, info.shard_mesh))
            else:
                members.append(WithoutExtension(param, policy, info.shard_mesh_size))
        self.beside = (
            Extension(members, info.shard_peers, info.shard_mesh_size, self._device)
            if members
            else None
        )
        self.forget()
        return [*dtypes.values()]

    def forget(self) -> None:
        """Build everything anew when it is needed next; nothing is gathered or kept now.

        On the stream that has written the shards, if they are others than before. A forward lets gathers wait for the
        current stream before it notices that a user has replaced data, and packs that. So they wait again here, or the
        next gather would read memory that is not written yet.
        """
        if self._context is not None:
            self._context.gathers_wait_for()
        self.from_shards = None
        if self.post_forward is not None:
            self.post_forward.forget_memory()

    def build(self) -> Route:
        """Build the route from the shards, on the current (all-gather) stream."""
        peers = self._mesh_info.shard_peers
        # Made under inference_mode, the unsharded parameters could never be trained.
        with torch.inference_mode(False):
            codec: AnyCodec = (
                Plain(self._shards.buffer)
                if self._shards_are_full and not self.uploads
                else self._codec_on(self._device)
            )
            transport = None
            if peers is not None:
                transport = self.transport or Coalesced(peers, self._device)
            self.from_shards = Route(codec, transport, self.beside)
        return self.from_shards

    def keep(self, context: FSDPCommContext) -> None:
        """Keep the post-forward shard of the full parameters, which are in memory; on the compute stream."""
        assert self.post_forward is not None and self.from_shards is not None, (
            "there is one to keep"
        )
        full = self.from_shards.codec
        assert not isinstance(full, Plain), "several ranks hold the parameters"
        self.post_forward.keep(full, self.compute_dtypes, self.transport, context)

    @property
    def uploads(self) -> bool:
        """Whether the shards are elsewhere than compute happens: in host memory."""
        return self._shards.buffer.device != self._device

    @property
    def _shards_are_full(self) -> bool:
        """Whether this rank holds everything, in the dtypes it computes in, and no codec changes it."""
        dtypes = [param.dtype for param in self._shards.buffered]
        alone = self._mesh_info.shard_mesh_size == 1 and self.codec is None
        return alone and self.compute_dtypes == dtypes

    def _codec_on(self, device: torch.device) -> AnyCodec:
        shards, info, here = self._shards, self._mesh_info, device == self._device
        layout, dtypes = shards.buffered_layout, self.compute_dtypes
        sends = info.shard_peers is not None
        source: Source = (
            UploadBuffer(shards.buffer, device)
            if self.uploads and here
            else shards.buffer.flat_shard
        )
        if self.codec is not None:
            return self.codec(source, layout, info.shard_mesh_rank, dtypes, device)
        stages = sends and self.transport is not None and not self.transport.in_place
        return Cast(
            source,
            layout,
            info.shard_mesh_rank,
            dtypes,
            device,
            packed=stages or (sends and not gathers_in_place(layout, dtypes)),
            indices=self._indices if here and not stages else None,
        )

    def late_extensions(self) -> list[FSDPParam] | None:
        """Return buffered parameters whose shards got an extension after sharding; None if nothing is new.

        The list is empty if only parameters that lie in no buffer got one.

        Raises:
            ConfigurationError: there are some, and a post-forward shard can keep plain tensors only.
        """
        late = [p for p in self._shards.buffered if has_all_gather_extension(p.sharded_param.local)]
        members = () if self.beside is None else self.beside.members
        plain = [each.param for each in members if isinstance(each, WithoutExtension)]
        if not late and not any(has_all_gather_extension(p.sharded_param.local) for p in plain):
            return None
        if self.post_forward is not None:
            raise ConfigurationError(
                "reshard_after_forward as an int keeps plain tensors, but the shards of these got an all-gather extension: "
                f"{[param.name for param in late]}. Use True or False."
            )
        return late

    def traffic(self) -> GatherTraffic:
        """Return the bytes of a gather, on any device and before anything has been gathered.

        Read off a buffer without memory that is made as the real one is.
        """
        memory = received = 0
        # The device that shards are to be on counts: they may still be on the meta device.
        if not self._shards_are_full or self._shards.device != self._device:
            codec = self._codec_on(torch.device("meta"))
            memory, received = codec.nbytes, codec.received_bytes
        if self.beside is not None:
            received += self.beside.received_bytes
        return GatherTraffic(memory, received)
