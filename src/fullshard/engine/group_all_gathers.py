"""Every way in which one group is gathered, and the dtypes it is gathered in.

    from_shards    between steps parameters are shards, so forward gathers from them, and mostly backward, too
    post_forward   with a post-forward mesh, backward gathers from what forward has kept
    unbuffered     tensor subclasses and all-gather extensions, gathered beside either

The ways are built when they are needed and used in every step. `forget` lets them be built again: after a change of
dtypes, of comm objects or of the memory of the shards. When to gather is the group's decision (`FSDPParamGroup`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fullshard.engine.all_gather import GroupAllGather, UnshardedInPlace
from fullshard.engine.all_gather_extensions import (
    ExtensionAllGather,
    SubclassAllGather,
    UnbufferedAllGather,
    UnbufferedAllGathers,
)
from fullshard.engine.post_forward_shard import PostForwardShard
from fullshard.errors import ConfigurationError
from fullshard.mesh.axes import DataParallelAxes, DataParallelMeshInfo
from fullshard.policies import MixedPrecisionPolicy
from fullshard.storage.buffers import Indices, UploadBuffer
from fullshard.storage.param import FSDPParam, has_all_gather_extension
from fullshard.storage.shard_formats import ShardFormat
from fullshard.storage.shard_storage import ShardStorage
from fullshard.transport import comm_objects
from fullshard.transport.streams import FSDPCommContext, is_capturing


class GatherTraffic(NamedTuple):
    """Bytes of one gather, on this rank."""

    memory: int
    """Bytes of the full parameters in the compute dtypes, with padding; 0 if the shards themselves are used."""
    received: int
    """From other ranks. Parameters with an all-gather extension are counted once they have been gathered."""


class GroupAllGathers:
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
        self.custom: comm_objects.AllGather | None = None
        """A comm object to gather with."""
        self.keeps_memory = False
        """Whether gathered memory stays when it is released, so that it has the same address at every gather."""
        self.compute_dtypes: list[torch.dtype] = []
        """Compute dtypes of the parameters that lie in the gather buffer."""
        self.from_shards: GroupAllGather | UnshardedInPlace | None = None
        """None until `build`."""
        self.unbuffered: UnbufferedAllGathers | None = None
        """None if all parameters lie in the buffers."""
        self.post_forward: PostForwardShard | None = None
        """None if nothing is kept after forward, or the full parameters are."""
        if post_forward_size is not None:
            shard_group = mesh_info.shard_process_group
            assert shard_group is not None, "there is nothing to divide otherwise"
            layout = shard_format.layout(shards.buffered, post_forward_size)
            self.post_forward = PostForwardShard(shard_group, layout)

    def connect(self, context: FSDPCommContext) -> None:
        """Join a model's streams."""
        self._context = context
        context.host_reads_results = context.host_reads_results or self.uploads
        if isinstance(self.from_shards, GroupAllGather):  # built for other streams
            with context.all_gather:
                self.from_shards.buffer.change_indices(self._indices)

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
        members = [
            self._unbuffered_member(param, policy)
            for param in self._params
            if param.sharded_param not in self._shards.shard_views
        ]
        mesh_info = self._mesh_info
        self.unbuffered = None
        if members:
            self.unbuffered = UnbufferedAllGathers(
                members, mesh_info.shard_peers, mesh_info.shard_mesh_size, self._device
            )
        self.forget()
        return [*dtypes.values()]

    def _unbuffered_member(
        self, param: FSDPParam, policy: MixedPrecisionPolicy
    ) -> UnbufferedAllGather:
        mesh_info = self._mesh_info
        if not has_all_gather_extension(param.sharded_param.local):
            return SubclassAllGather(param, policy, mesh_info.shard_mesh_size)
        assert isinstance(mesh_info, DataParallelMeshInfo), "an extension is told of a mesh"
        return ExtensionAllGather(param, policy, mesh_info.shard_mesh)

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

    def build(self) -> GroupAllGather | UnshardedInPlace:
        """Build the way from the shards, on the current (all-gather) stream."""
        # Made under inference_mode, the unsharded parameters could never be trained.
        with torch.inference_mode(False):
            self.from_shards = (
                UnshardedInPlace(self._shards.buffer)
                if self._shards_are_full and not self.uploads
                else self._all_gather_on(self._device)
            )
        return self.from_shards

    def release(self, all_gather: GroupAllGather | UnshardedInPlace) -> None:
        """Give back the memory that a gather has taken, unless it is kept."""
        if not self.keeps_memory:
            all_gather.release()
            if self.unbuffered is not None:
                self.unbuffered.release()

    @property
    def uploads(self) -> bool:
        """Whether the shards are elsewhere than compute happens: in host memory."""
        return self._shards.buffer.device != self._device

    @property
    def _shards_are_full(self) -> bool:
        """Whether this rank holds everything, in the dtypes it computes in."""
        dtypes = [param.dtype for param in self._shards.buffered]
        return self._mesh_info.shard_mesh_size == 1 and self.compute_dtypes == dtypes

    def _all_gather_on(self, device: torch.device) -> GroupAllGather:
        shards, mesh_info = self._shards, self._mesh_info
        uploads = self.uploads and device == self._device
        return GroupAllGather(
            UploadBuffer(shards.buffer, device) if uploads else shards.buffer.flat_shard,
            shards.buffered_layout,
            mesh_info.shard_mesh_rank,
            mesh_info.shard_peers,
            self.compute_dtypes,
            device,
            self.custom if mesh_info.shard_peers is not None else None,
            indices=self._indices if device == self._device else None,
        )

    def late_extensions(self) -> list[FSDPParam] | None:
        """Return buffered parameters whose shards got an extension after sharding; None if nothing is new.

        The list is empty if only parameters that lie in no buffer got one.

        Raises:
            ConfigurationError: there are some, and a post-forward shard can keep plain tensors only.
        """
        late = [p for p in self._shards.buffered if has_all_gather_extension(p.sharded_param.local)]
        members = () if self.unbuffered is None else self.unbuffered.members
        plain = [each.param for each in members if isinstance(each, SubclassAllGather)]
        if not late and not any(has_all_gather_extension(p.sharded_param.local) for p in plain):
            return None
        if self.post_forward is not None:
            raise ConfigurationError(
                "reshard_after_forward as an int keeps plain tensors, but the shards of these got an all-gather extension: "
                f"{[param.name for param in late]}. Use True or False."
            )
        return late

    # --- what is said about them ------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Bytes of memory for gathering that there are now: full parameters, staging, a post-forward shard.

        Memory that is allocated and released within one call does not count: shards on their way up from host memory.
        """
        ways = (self.from_shards, self.post_forward, self.unbuffered)
        return sum(way.held_bytes for way in ways if way is not None)

    def traffic(self) -> GatherTraffic:
        """Return what gathering takes, on any device and before anything has been gathered.

        Read off a buffer without memory that is made as the real one is.
        """
        memory = received = 0
        # By the device that shards are to be on: they may still be on the meta device.
        if not self._shards_are_full or self._shards.device != self._device:
            all_gather = self._all_gather_on(torch.device("meta"))
            memory, received = all_gather.buffer.nbytes, all_gather.received_bytes
        if self.unbuffered is not None:
            received += self.unbuffered.received_bytes
        return GatherTraffic(memory, received)
