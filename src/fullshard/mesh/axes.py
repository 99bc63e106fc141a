"""Meshes and process groups: along which axis a group is sharded, along which it is replicated.

    1-D mesh                    FSDPMeshInfo     every rank holds a different shard
    2-D mesh (replicate, shard) HSDPMeshInfo     each row of the mesh holds all shards once
    1-D mesh, replicated        DDPMeshInfo      every rank holds everything

If a mesh has axes for other kinds of parallelism, too, `DataParallelMeshDims` names those of data
parallelism. Several axes with one role act as one.

This file is the only one that asks a mesh or a process group for ranks, sizes and groups.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from fullshard import torch_border
from fullshard.errors import ConfigurationError, OptionTypeError
from fullshard.policies import DataParallelMeshDims


class DataParallelAxes:
    """Over which ranks parameters are sharded, and over which they are replicated.

    A missing axis has size 1, rank 0 and no process group.
    """

    shard_mesh_size: int
    shard_mesh_rank: int
    shard_process_group: dist.ProcessGroup | None
    replicate_mesh_size: int
    replicate_mesh_rank: int
    replicate_process_group: dist.ProcessGroup | None

    @property
    def shard_peers(self) -> dist.ProcessGroup | None:
        """The process group of the shard axis, if it has other ranks to communicate with."""
        return self.shard_process_group if self.shard_mesh_size > 1 else None

    @property
    def communicates_over(self) -> Hashable:
        """A key that is equal for axes whose parameters can be in one message."""
        return self.shard_process_group, self.replicate_process_group


class ProcessGroupAxes(DataParallelAxes):
    """Axes that are process groups, without a mesh."""

    def __init__(
        self, *, shard: dist.ProcessGroup | None = None, replicate: dist.ProcessGroup | None = None
    ) -> None:
        self.shard_mesh_size, self.shard_mesh_rank = _size_and_rank(shard)
        self.replicate_mesh_size, self.replicate_mesh_rank = _size_and_rank(replicate)
        self.shard_process_group, self.replicate_process_group = shard, replicate


def _size_and_rank(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return the size of a process group and this rank's number in it."""
    return (1, 0) if group is None else (group.size(), dist.get_rank(group))


@dataclass(kw_only=False)
class DataParallelMeshInfo(DataParallelAxes):
    """A mesh and the roles of its axes."""

    mesh: DeviceMesh
    """The data-parallel mesh: the shard axis, the replicate axis, or (replicate, shard)."""
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    spmd_mesh: DeviceMesh | None = field(default=None, repr=False)
    """The mesh that `dp_mesh_dims` name axes of."""

    shard_mesh_size: int = field(init=False)
    shard_mesh_rank: int = field(init=False)
    shard_process_group: dist.ProcessGroup | None = field(init=False)
    replicate_mesh_size: int = field(init=False)
    replicate_mesh_rank: int = field(init=False)
    replicate_process_group: dist.ProcessGroup | None = field(init=False)

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None and self.replicate_mesh_dim is None:
            raise ConfigurationError(
                "A data-parallel mesh needs a shard axis, a replicate axis or both; got neither."
            )
        self.shard_mesh_size, self.shard_mesh_rank, self.shard_process_group = _axis(
            self.mesh, self.shard_mesh_dim
        )
        if self.shard_mesh_dim is not None:
            _check_order(self.mesh, self.shard_mesh_dim, self.shard_process_group)
        self.replicate_mesh_size, self.replicate_mesh_rank, self.replicate_process_group = _axis(
            self.mesh, self.replicate_mesh_dim
        )

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The shard axis alone; the whole mesh if it has one axis."""
        if self.mesh.ndim == 1:
            return self.mesh
        names, dim = self.mesh.mesh_dim_names, self.shard_mesh_dim
        assert dim is not None, "asked for where something is sharded"
        if names is not None:
            return self.mesh[names[dim]]
        assert self.shard_process_group is not None, "an axis of a mesh has one"
        return DeviceMesh.from_group(self.shard_process_group, self.mesh.device_type)


def _axis(mesh: DeviceMesh, dim: int | None) -> tuple[int, int, dist.ProcessGroup | None]:
    """Return the size of an axis, this rank's number along it, and its process group."""
    if dim is None:
        return 1, 0, None
    group = mesh.get_group(dim)
    return mesh.size(dim), dist.get_rank(group), group


def _check_order(mesh: DeviceMesh, dim: int, group: dist.ProcessGroup | None) -> None:
    """Refuse a shard axis along which the mesh numbers ranks otherwise than their process group.

    A rank's number in the process group says which shard it gathers and reduces. Its place in the mesh says which rows
    a DTensor has, and which ranks are its replicas. So the two must be the same: torch sorts the ranks of a group.
    """
    rows = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
    own = _ranks_in(group)
    wrong = [row for row in rows if row != (own if set(row) == set(own) else sorted(row))]
    if wrong:
        raise ConfigurationError(
            "A mesh must have the ranks of its shard axis in ascending order, as their process group has: otherwise replicas "
            f"would average different shards, and checkpoints would have rows at wrong places. Not in this order: {wrong}. "
            "Sort the ranks along this axis before the mesh is made."
        )


@dataclass(kw_only=False)
class FSDPMeshInfo(DataParallelMeshInfo):
    """A mesh with a shard axis."""

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None:
            raise ConfigurationError("FSDPMeshInfo needs shard_mesh_dim; got None.")
        super().__post_init__()


@dataclass(kw_only=False)
class DDPMeshInfo(DataParallelMeshInfo):
    """A mesh with a replicate axis."""

    def __post_init__(self) -> None:
        if self.replicate_mesh_dim is None:
            raise ConfigurationError("DDPMeshInfo needs replicate_mesh_dim; got None.")
        super().__post_init__()


@dataclass(kw_only=False)
class HSDPMeshInfo(FSDPMeshInfo, DDPMeshInfo):
    """A mesh with a replicate axis and a shard axis."""


@dataclass
class ShardPlacementResult:
    """The result of a `shard_placement_fn`: the dimension along which to shard, and the mesh."""

    placement: Shard | None
    mesh_info: FSDPMeshInfo


def global_rank() -> int:
    """Return this process's rank; 0 if no process group was initialised."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 if no process group was initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def ranks_by_replica(axes: DataParallelAxes) -> tuple[tuple[int, ...], ...]:
    """Return the global ranks that hold the shards, in order: one tuple per replica, the same on every rank.

    Raises:
        ConfigurationError: the axes are process groups that do not form a grid of evenly spaced ranks. A rank could
            not know the others' groups without asking them.
    """
    if isinstance(axes, DataParallelMeshInfo):
        rows = axes.mesh.mesh.reshape(-1, axes.shard_mesh_size)
        return tuple(tuple(row) for row in rows.tolist())
    own, shards, replicas = (
        global_rank(),
        _ranks_in(axes.shard_process_group),
        _ranks_in(axes.replicate_process_group),
    )
    found = tuple(tuple(rank + replica - own for rank in shards) for replica in replicas)
    listed = [rank for row in found for rank in row]
    if len(set(listed)) < len(listed) or not set(listed) <= set(range(dist.get_world_size())):
        raise ConfigurationError(
            "Process groups to shard over and to replicate over must be rows and columns of a grid of evenly spaced "
            f"ranks, got {shards} and {replicas} on rank {own}. Pass a 2-D device_mesh instead."
        )
    return found


def _ranks_in(group: dist.ProcessGroup | None) -> list[int]:
    return [global_rank()] if group is None else dist.get_process_group_ranks(group)


def default_mesh(*, dim_names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Make a 1-D mesh over all ranks, on the accelerator if this machine has one, else on the CPU."""
    world = default_group().size()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = accelerator.type if accelerator is not None else "cpu"
    return init_device_mesh(device_type, (world,), mesh_dim_names=dim_names)


def sharding_mesh_info(
    mesh: DeviceMesh, dp_mesh_dims: DataParallelMeshDims | None = None
) -> DataParallelMeshInfo:
    """Give the axes of the mesh given to `fully_shard` their roles.

    Raises:
        ConfigurationError: the mesh has not one or two axes (or, with ``dp_mesh_dims``, not those
            named), or leaves this rank out.
    """
    check_mesh(mesh)
    if dp_mesh_dims is not None:
        return _info_of_named_axes(mesh, dp_mesh_dims)
    if mesh.ndim not in (1, 2):
        raise ConfigurationError(
            f"fully_shard takes a 1-D mesh (shard) or a 2-D mesh (replicate, shard), got {mesh.ndim} axes: "
            f"{mesh}. Pass the data-parallel part of the mesh, for example mesh['replicate', 'shard']; or, if "
            "all parameters are DTensors on the whole mesh, name that part with dp_mesh_dims."
        )
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def replicating_mesh_info(
    mesh: DeviceMesh, dims: DataParallelMeshDims | None
) -> DataParallelMeshInfo:
    """Give the axes of the mesh given to `replicate` their roles."""
    check_mesh(mesh)
    if dims is not None:
        if dims.shard_names:
            raise ConfigurationError(
                f"replicate shards nothing, but dp_mesh_dims names shard axes {dims.shard_names}. Leave "
                "them out, or use fully_shard."
            )
        return _info_of_named_axes(mesh, dims)
    if mesh.ndim != 1:
        raise ConfigurationError(
            f"replicate takes a 1-D mesh, got {mesh.ndim} axes: {mesh}. Pass its replicate axis, for "
            "example mesh['replicate']."
        )
    return DDPMeshInfo(mesh, replicate_mesh_dim=0)


def check_mesh(mesh: object) -> None:
    """Raise an error unless ``mesh`` is a mesh that has this rank."""
    if not isinstance(mesh, DeviceMesh):
        raise OptionTypeError(
            f"mesh must be a torch.distributed.device_mesh.DeviceMesh, got {type(mesh).__name__}. "
            "Make one with init_device_mesh(device_type, (world_size,))."
        )
    if mesh.get_coordinate() is None:
        raise ConfigurationError(
            f"Every rank that shards a module must be in the mesh; rank {dist.get_rank()} is not in "
            f"{mesh.mesh.tolist()}. Shard only on the mesh's ranks, or pass another mesh."
        )


def _info_of_named_axes(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataParallelMeshInfo:
    names = (*dims.shard_names, *dims.replicate_names)
    known = mesh.mesh_dim_names or ()
    if unknown := [name for name in names if name not in known]:
        raise ConfigurationError(
            f"dp_mesh_dims must name axes of the mesh, which are {known}; not among them: {unknown}."
        )
    if len(set(names)) < len(names):
        raise ConfigurationError(f"dp_mesh_dims must name each axis once, got {dims}.")
    shard = _joined_axes(mesh, dims.shard_names) if dims.shard_names else None
    replicate = _joined_axes(mesh, dims.replicate_names) if dims.replicate_names else None
    if shard is None:
        assert replicate is not None, "DataParallelMeshDims names at least one"
        return DDPMeshInfo(replicate, replicate_mesh_dim=0, dp_mesh_dims=dims, spmd_mesh=mesh)
    if replicate is None:
        return FSDPMeshInfo(shard, shard_mesh_dim=0, dp_mesh_dims=dims, spmd_mesh=mesh)
    return HSDPMeshInfo(
        torch_border.joined_mesh([replicate, shard]),
        shard_mesh_dim=1,
        replicate_mesh_dim=0,
        dp_mesh_dims=dims,
        spmd_mesh=mesh,
    )


def _joined_axes(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Make one axis of the named ones."""
    if len(names) == 1:
        return mesh[names[0]]
    flat = torch_border.flat_mesh(mesh[names], "_".join(names))
    cap_timeout(flat.get_group(), mesh.get_group(names[0]))
    return flat


def cap_timeout(group: dist.ProcessGroup, other: dist.ProcessGroup) -> None:
    """Let ``group`` wait no longer than ``other``: torch gives the groups of meshes its default timeout."""
    own, timeout = torch_border.timeout_of(group), torch_border.timeout_of(other)
    if own is not None and timeout is not None and own > timeout:
        torch_border.set_timeout(group, timeout)


_COMPANIONS: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[str, int], dist.ProcessGroup]
] = weakref.WeakKeyDictionary()
_OVER: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
"""Groups that `group_over` has made, by default process group and ranks."""


def twin_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a second process group of the same ranks, made once. Its collectives do not queue behind the first one's.

    Collective over the ranks of ``group``.
    """
    return _companion(group, "twin", group.size())


def host_group(group: dist.ProcessGroup, purpose: str) -> dist.ProcessGroup:
    """Return a gloo group of the same ranks, made once for each purpose.

    Its collectives wait for no device, and do not queue behind those of other purposes. Collective over the ranks of
    ``group``.
    """
    return _companion(group, f"host, {purpose}", group.size())


def default_group() -> dist.ProcessGroup:
    """Return the group of all ranks; initialise it if there is none yet."""
    if not dist.is_initialized():
        dist.init_process_group()
    group = dist.group.WORLD
    assert group is not None, "just made"
    return group


def node_groups(group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the group of this rank's node, and the group of the ranks with its local number on all nodes; made once.

    A node has ``LOCAL_WORLD_SIZE`` ranks, as torchrun says, or else one for every accelerator.
    Collective over the ranks of ``group``.
    """
    size = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or torch.accelerator.device_count()
    if not size or group.size() % size:
        raise ConfigurationError(
            f"To shard within nodes, all nodes must have the same number of ranks; there are {group.size()} ranks, and "
            f"{size or 'an unknown number'} on this node (LOCAL_WORLD_SIZE, or the number of accelerators). Set "
            "LOCAL_WORLD_SIZE, or pass a 2-D device_mesh or the two process groups."
        )
    return block_group(group, size), _companion(group, "stride", size)


def block_group(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """Return the process group of this rank's block of ``size`` consecutive ranks of ``group``, made once.

    Collective over the ranks of the block.
    """
    return _companion(group, "block", size)


def group_over(ranks: Collection[int]) -> dist.ProcessGroup:
    """Return a process group of these global ranks, in ascending order: the default one, or one that is made once.

    Collective over these ranks when it is made.
    """
    world, wanted = dist.group.WORLD, sorted(ranks)
    assert world is not None, "there are ranks"
    if dist.get_process_group_ranks(world) == wanted:
        return world
    made = _OVER.setdefault(world, {})
    key = tuple(wanted)
    if key not in made:
        group = dist.new_group(
            wanted, timeout=torch_border.timeout_of(world), use_local_synchronization=True
        )
        assert group is not None, "this rank is one of them"
        made[key] = group
    return made[key]


def _companion(group: dist.ProcessGroup, role: str, size: int) -> dist.ProcessGroup:
    made = _COMPANIONS.setdefault(group, {})
    if (role, size) not in made:
        rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
        if role == "stride":
            ranks = ranks[rank % size :: size]
        else:
            ranks = ranks[rank // size * size :][:size]
        companion = dist.new_group(
            ranks,
            backend="gloo" if role.startswith("host") else None,
            timeout=torch_border.timeout_of(group),  # torch's own choice is half an hour with gloo
            use_local_synchronization=True,
        )
        assert companion is not None, "this rank is one of the group's"
        made[role, size] = companion
    return made[role, size]


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device of this rank's shards."""
    return torch_border.device_for(torch.device(mesh.device_type)).current()
