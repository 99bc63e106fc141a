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

from fullshard.engine.extension_codec import Extension, WithExtension, WithoutExtension
from fullshard.engine.post_forward_shard import PostForwardShard
from fullshard.engine.route import Route
from fullshard.errors import ConfigurationError
from fullshard.layout.segments import gathers_in_place
from fullshard.mesh.axes import DataParallelAxes, DataParallelMeshInfo
from fullshard.policies import MixedPrecisionPolicy
from fullshard.storage.buffers import UploadBuffer
from fullshard.storage.codecs import Buffered, Cast, Codec, Plain, Recoded
from fullshard.storage.copy_out import Indices
from fullshard.storage.param import FSDPParam, has_all_gather_extension
from fullshard.storage.shard_formats import ShardFormat
from fullshard.storage.shard_storage import ShardStorage
from fullshard.transport.streams import FSDPCommContext, is_capturing
from fullshard.transport.transports import Coalesced, Transport


class GatherTraffic(NamedTuple):
    """Bytes of one gather, on this rank."""

    memory: int
    """Bytes of the full parameters in the compute dtypes, with padding; 0 if the shards themselves are used."""
    received: int
    """From other ranks. Parameters with an all-gather extension are counted once they have been gathered."""


class Routes:
    """How one group is gathered; lives as long as the group."""

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
        """How messages travel, if not by the process group's own collectives."""
        self.codec: Callable[..., Recoded] | None = None
        """Makes the codec of what lies in buffers, if it is not `Cast`."""
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
        """What the user has chosen to gather with: a comm object, or a transport; None for the default."""
        return None if self.transport is None else self.transport.identity

    def connect(self, context: FSDPCommContext) -> None:
        """Join a model's streams."""
        self._context = context
        context.host_reads_results = context.host_reads_results or self.uploads
        codec = None if self.from_shards is None else self.from_shards.codec
        if isinstance(codec, Buffered):  # built for other streams
            with context.all_gather:
                codec.buffer.change_indices(self._indices)

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
            codec: Codec = (
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
        assert isinstance(full, Buffered), "several ranks hold the parameters"
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

    def _codec_on(self, device: torch.device) -> Codec:
        shards, info, here = self._shards, self._mesh_info, device == self._device
        layout, dtypes = shards.buffered_layout, self.compute_dtypes
        sends = info.shard_peers is not None
        source = (
            UploadBuffer(shards.buffer, device)
            if self.uploads and here
            else shards.buffer.flat_shard
        )
        if self.codec is not None:
            return self.codec(source, layout, info.shard_mesh_rank, dtypes, device, sends=sends)
        stages = sends and self.transport is not None and not self.transport.in_place
        return Cast(
            source,
            layout,
            info.shard_mesh_rank,
            dtypes,
            device,
            packed=stages or (sends and not gathers_in_place(layout, dtypes)),
            sends=sends,
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
        """Return what gathering takes, on any device and before anything has been gathered.

        Read off a buffer without memory that is made as the real one is.
        """
        memory = received = 0
        # By the device that shards are to be on: they may still be on the meta device.
        if not self._shards_are_full or self._shards.device != self._device:
            codec = self._codec_on(torch.device("meta"))
            memory, received = codec.nbytes, codec.received_bytes
        if self.beside is not None:
            received += self.beside.received_bytes
        return GatherTraffic(memory, received)
