"""DTensor placements: on which meshes a parameter lies, sharded and unsharded.

    parameter before           sharded parameter                    unsharded parameter
    plain tensor               on the data-parallel mesh            plain tensor
    DTensor (tensor parallel)  on data-parallel mesh x its own      as before
    DTensor on the whole mesh  on the same mesh, sharded along its  as before
      (`dp_mesh_dims`)         data-parallel axes

A group shards the local tensor that this rank had before. If another axis has cut it along the same
dimension, a rank's shard is not a contiguous range of the parameter:

    8 rows, 2 tensor-parallel ranks (a, b), each sharded over 2 data-parallel ranks (0, 1)
    rows            0 1 | 2 3 | 4 5 | 6 7
    held by         a,0   a,1   b,0   b,1        data-parallel rank 0 holds rows 0 1 and 4 5

which torch writes as `_StridedShard(0, split_factor=2)` on the data-parallel axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fullshard import torch_border
from fullshard.errors import ConfigurationError
from fullshard.mesh.axes import DataParallelMeshInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamPlacement:
    """The meshes on which a parameter lies, sharded and unsharded, and its placements there."""

    shape: tuple[int, ...]
    """Shape of the full parameter, over all axes of all meshes."""
    mesh: DeviceMesh | None = None
    """None if the sharded parameter is a plain tensor."""
    placements: tuple[Placement, ...] = ()
    """Placements of the sharded parameter on `mesh`."""
    unsharded_mesh: DeviceMesh | None = None
    """None if the unsharded parameter is a plain tensor."""
    unsharded_placements: tuple[Placement, ...] = ()
    summed_axes: frozenset[int] = frozenset()
    """Axes of `unsharded_mesh` over which the group's reduction sums gradients."""

    def unsharded(self, whole: Tensor, *, trainable: bool, as_parameter: bool = True) -> Tensor:
        """Make a leaf for autograd over the gathered local tensor."""
        if self.unsharded_mesh is not None:
            spec = torch_border.dtensor_spec(
                self.unsharded_mesh, self.unsharded_placements, self.shape, whole.dtype
            )
            if as_parameter:
                return torch_border.dtensor_parameter(whole, spec, requires_grad=trainable)
            return torch_border.dtensor(whole, spec).requires_grad_(trainable)
        if as_parameter:
            return nn.Parameter(whole, requires_grad=trainable)
        return whole.detach().requires_grad_(trainable)

    @property
    def parallel(self) -> bool:
        """Whether the parameter was a DTensor before, and is one while it is unsharded."""
        return self.unsharded_mesh is not None

    def as_before(self, whole: Tensor) -> Tensor:
        """Return a value of the unsharded parameter (its data, a state, a gradient) as a DTensor if the parameter is one."""
        if self.unsharded_mesh is None:
            return whole
        spec = torch_border.dtensor_spec(
            self.unsharded_mesh, self.unsharded_placements, self.shape, whole.dtype
        )
        return torch_border.dtensor(whole, spec)

    def rows(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """Return this rank's rows of such a value as a DTensor over all axes; for parameters that were DTensors."""
        assert self.mesh is not None, "the placement of a DTensor"
        local = whole
        own = self.placements[: len(self.placements) - len(self.unsharded_placements)]
        if any(torch_border.sharded_dim(placement) is not None for placement in own):
            chunks = whole.chunk(ranks)
            local = chunks[rank] if rank < len(chunks) else whole[:0]
        spec = torch_border.dtensor_spec(self.mesh, self.placements, self.shape, whole.dtype)
        return torch_border.dtensor(local.clone(memory_format=torch.contiguous_format), spec)

    def is_as_before(self, value: object) -> bool:
        """Whether a value is a DTensor as the unsharded parameter is."""
        return (
            isinstance(value, DTensor)
            and value.device_mesh == self.unsharded_mesh
            and value.placements == self.unsharded_placements
        )

    def local_part(self, value: Tensor) -> Tensor:
        """Return this rank's part of a value of the full shape, as it was before sharding; a local value is returned as it is."""
        if self.unsharded_mesh is None:
            return value
        if isinstance(value, DTensor):
            return torch_border.local_of(value)
        if tuple(value.shape) != self.shape:
            return value
        for axis, placement in enumerate(self.unsharded_placements):
            dim = torch_border.sharded_dim(placement)
            if dim is not None:
                chunks = value.chunk(self.unsharded_mesh.size(axis), dim)
                rank = self.unsharded_mesh.get_local_rank(axis)
                value = chunks[rank] if rank < len(chunks) else value.narrow(dim, 0, 0)
        return value

    def sharded(self, local: Tensor, *, trainable: bool) -> nn.Parameter:
        """Make a DTensor parameter over this rank's shard."""
        assert self.mesh is not None, "the sharded parameter is a DTensor"
        spec = torch_border.dtensor_spec(self.mesh, self.placements, self.shape, local.dtype)
        return torch_border.dtensor_parameter(local, spec, requires_grad=trainable)


def local_tensor(param: Tensor) -> Tensor:
    """Return this rank's part of a parameter: the local tensor of a DTensor, otherwise all of it."""
    return torch_border.local_of(param) if isinstance(param, DTensor) else param.data


class AlreadyShardedError(ConfigurationError):
    """A parameter is a DTensor on the mesh that it was to be sharded over."""


class DTensorPlacer:
    """Chooses placements for the parameters of one `fully_shard` call, which share the meshes it makes."""

    def __init__(self) -> None:
        self._joined: dict[tuple[int, ...], DeviceMesh] = {}

    def place(self, param: nn.Parameter, dim: int, info: DataParallelMeshInfo) -> ParamPlacement:
        """Return the placement of a parameter whose local tensor is sharded along ``dim``.

        Raises:
            ConfigurationError: the parameter's mesh does not go with the data-parallel one; the
                message is about this parameter and does not name it, for the caller to put the name before it.
        """
        if info.spmd_mesh is not None:
            return self._on_whole_mesh(param, dim, info)
        if isinstance(param, DTensor):
            return self._beside_other_axes(param, dim, info)
        return ParamPlacement(
            shape=tuple(param.shape),
            mesh=info.mesh,
            placements=_data_parallel(param.data, dim, info, split_factor=1),
        )

    def _beside_other_axes(
        self, param: DTensor, dim: int, info: DataParallelMeshInfo
    ) -> ParamPlacement:
        spec = torch_border.spec_of(param)
        if spec.mesh == info.mesh:
            raise AlreadyShardedError(f"is {spec.placements} on the data-parallel mesh already")
        split_factor = _splits(spec.mesh, spec.placements, dim, first_axis=0)
        return ParamPlacement(
            shape=tuple(param.shape),
            mesh=self._join((info.mesh, spec.mesh)),
            placements=(
                *_data_parallel(local_tensor(param), dim, info, split_factor),
                *spec.placements,
            ),
            unsharded_mesh=spec.mesh,
            unsharded_placements=spec.placements,
        )

    def _on_whole_mesh(
        self, param: nn.Parameter, dim: int, info: DataParallelMeshInfo
    ) -> ParamPlacement:
        mesh, dims = info.spmd_mesh, info.dp_mesh_dims
        assert mesh is not None and dims is not None, "both come with dp_mesh_dims"
        if not isinstance(param, DTensor) or param.device_mesh != mesh:
            found = f"a DTensor on {param.device_mesh}" if isinstance(param, DTensor) else "plain"
            raise ConfigurationError(f"is {found}, not a DTensor on the mesh {mesh}")
        names, before = mesh.mesh_dim_names, torch_border.spec_of(param).placements
        assert names is not None, "dp_mesh_dims names axes"
        shard_axes = [names.index(name) for name in dims.shard_names]
        data_axes = [*shard_axes, *(names.index(name) for name in dims.replicate_names)]
        if wrong := [names[axis] for axis in data_axes if not before[axis].is_replicate()]:
            raise ConfigurationError(f"is {before}, not Replicate() along {wrong}")
        after = list(before)
        for axis in shard_axes:
            split_factor = _splits(mesh, before, dim, first_axis=axis + 1)
            after[axis] = _sharded(local_tensor(param), dim, split_factor)
        if len(shard_axes) > 1:
            mesh, after = self._with_one_shard_axis(mesh, after, shard_axes, data_axes, info)
        return ParamPlacement(
            shape=tuple(param.shape),
            mesh=mesh,
            placements=tuple(after),
            unsharded_mesh=info.spmd_mesh,
            unsharded_placements=before,
            summed_axes=frozenset(data_axes),
        )

    def _with_one_shard_axis(
        self,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shard_axes: list[int],
        data_axes: list[int],
        info: DataParallelMeshInfo,
    ) -> tuple[DeviceMesh, list[Placement]]:
        """Replace several shard axes by the data-parallel mesh, which has one."""
        names = cast("tuple[str, ...]", mesh.mesh_dim_names)
        meshes, result = list[DeviceMesh](), list[Placement]()
        for axis, name in enumerate(names):
            if axis == min(shard_axes):
                meshes.append(info.mesh)
                result += [Replicate()] * (info.mesh.ndim - 1) + [placements[axis]]
            elif axis not in data_axes:
                meshes.append(mesh[name])
                result.append(placements[axis])
        return self._join(tuple(meshes)), result

    def _join(self, meshes: tuple[DeviceMesh, ...]) -> DeviceMesh:
        key = tuple(hash(mesh) for mesh in meshes)
        if key not in self._joined:
            try:
                self._joined[key] = torch_border.joined_mesh(list(meshes))
            except (RuntimeError, ValueError, AssertionError, TypeError) as error:
                listed = " and ".join(str(mesh) for mesh in meshes)
                raise ConfigurationError(
                    f"lies on a mesh that does not go with the data-parallel one, {listed}: they must "
                    f"be different named axes of one mesh ({error})"
                ) from error
        return self._joined[key]


def _data_parallel(
    local: Tensor, dim: int, info: DataParallelMeshInfo, split_factor: int
) -> tuple[Placement, ...]:
    """Return the placements on the data-parallel mesh: (replicate, shard) if it has both."""
    replicate = [Replicate()] if info.replicate_process_group is not None else []
    shard = [_sharded(local, dim, split_factor)] if info.shard_process_group is not None else []
    return (*replicate, *shard)


def _sharded(local: Tensor, dim: int, split_factor: int) -> Placement:
    if local.ndim == 0:
        return Replicate()  # one element cannot be divided: every rank holds it
    return torch_border.strided_shard(dim, split_factor) if split_factor > 1 else Shard(dim)


def _splits(mesh: DeviceMesh, placements: Sequence[Placement], dim: int, *, first_axis: int) -> int:
    """Count into how many parts the axes from ``first_axis`` on cut dimension ``dim``."""
    return math.prod(
        mesh.size(axis)
        for axis in range(first_axis, mesh.ndim)
        if torch_border.sharded_dim(placements[axis]) == dim
    )


@torch.no_grad()
def is_unsummed(gradient: Tensor) -> bool:
    """Return whether tensor parallelism has left a gradient as partial sums, which are still to be added up."""
    return isinstance(gradient, DTensor) and any(
        placement.is_partial() for placement in gradient.placements
    )


def local_gradient(placement: ParamPlacement, gradient: Tensor) -> Tensor:
    """Return this rank's local gradient of a DTensor parameter, complete except for the data-parallel sum.

    Tensor parallelism may leave a gradient with other placements than the parameter has.
    """
    return torch_border.redistributed_local(
        gradient, placement.unsharded_placements, untouched_axes=placement.summed_axes
    )
