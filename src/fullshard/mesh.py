"""Reading a DeviceMesh: along which axis a group is sharded, along which it is replicated.

    1-D mesh                    FSDPMeshInfo     every rank holds a different shard
    2-D mesh (replicate, shard) HSDPMeshInfo     each row of the mesh holds one whole set of shards

This file is the only one that asks a mesh or a process group for ranks, sizes and groups.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .errors import ConfigurationError


@dataclass(kw_only=False)
class DataParallelMeshInfo:
    """A mesh and the roles of its axes; lives as long as the groups made from it."""

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None and self.replicate_mesh_dim is None:
            raise ConfigurationError(
                "A data-parallel mesh needs a shard axis, a replicate axis or both; got neither."
            )


@dataclass(kw_only=False)
class FSDPMeshInfo(DataParallelMeshInfo):
    """A mesh with a shard axis."""

    shard_mesh_size: int = field(init=False)
    shard_mesh_rank: int = field(init=False)
    shard_process_group: dist.ProcessGroup = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard_mesh_dim is None:
            raise ConfigurationError("FSDPMeshInfo needs shard_mesh_dim; got None.")
        self.shard_mesh_size = self.mesh.size(self.shard_mesh_dim)
        self.shard_process_group = self.mesh.get_group(self.shard_mesh_dim)
        self.shard_mesh_rank = dist.get_rank(self.shard_process_group)


@dataclass(kw_only=False)
class DDPMeshInfo(DataParallelMeshInfo):
    """A mesh with a replicate axis."""

    replicate_mesh_size: int = field(init=False)
    replicate_mesh_rank: int = field(init=False)
    replicate_process_group: dist.ProcessGroup = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replicate_mesh_dim is None:
            raise ConfigurationError("DDPMeshInfo needs replicate_mesh_dim; got None.")
        self.replicate_mesh_size = self.mesh.size(self.replicate_mesh_dim)
        self.replicate_process_group = self.mesh.get_group(self.replicate_mesh_dim)
        self.replicate_mesh_rank = dist.get_rank(self.replicate_process_group)


@dataclass(kw_only=False)
class HSDPMeshInfo(FSDPMeshInfo, DDPMeshInfo):
    """A mesh with a replicate axis and a shard axis."""


def default_mesh() -> DeviceMesh:
    """A 1-D mesh over all ranks, on the accelerator if this machine has one, else on the CPU."""
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = accelerator.type if accelerator is not None else "cpu"
    return init_device_mesh(device_type, (dist.get_world_size(),))


def mesh_info(mesh: DeviceMesh) -> FSDPMeshInfo:
    """Give the axes of a user's mesh their roles.

    Raises:
        ConfigurationError: the mesh has not one or two axes, lacks axis names, or leaves this
            rank out.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ConfigurationError(
            f"mesh must be a torch.distributed.device_mesh.DeviceMesh, got {type(mesh).__name__}. "
            "Make one with init_device_mesh(device_type, (world_size,))."
        )
    if mesh.ndim not in (1, 2):
        raise ConfigurationError(
            f"fully_shard takes a 1-D mesh (shard) or a 2-D mesh (replicate, shard), got {mesh.ndim} axes: "
            f"{mesh}. Pass the data-parallel part of the mesh, for example mesh['replicate', 'shard']."
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ConfigurationError(
            f"A 2-D mesh must name its axes, got {mesh}. Pass "
            "mesh_dim_names=('replicate', 'shard') to init_device_mesh."
        )
    if mesh.get_coordinate() is None:
        raise ConfigurationError(
            f"Every rank that calls fully_shard must be in the mesh; rank {dist.get_rank()} is not in "
            f"{mesh.mesh.tolist()}. Call fully_shard only on the mesh's ranks, or pass another mesh."
        )
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


_TWINS: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)


def twin_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another process group of the same ranks, made once: its collectives do not queue behind the first one's.

    Collective over the ranks of ``group``.
    """
    if group not in _TWINS:
        ranks = dist.get_process_group_ranks(group)
        twin = dist.new_group(ranks, use_local_synchronization=True)
        assert twin is not None, "this rank is one of the group's"
        _TWINS[group] = twin
    return _TWINS[group]


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device on which this rank's shards live."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(mesh.device_type)
    return torch.device(mesh.device_type, module.current_device())
