"""One parameter and its two faces.

    sharded face     a DTensor parameter over this rank's piece: what the user, the optimizer and state dicts see
    unsharded face   a plain parameter over the gather buffer: what forward and backward compute with

Both are `nn.Parameter` objects made once; going from one state to the other means putting the other
object on the modules that own the parameter. This file is the only one that puts parameters on
modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from . import torch_border
from .errors import ConfigurationError
from .placement import FacePlacement, local_tensor, sharded_face, unsharded_face

_GROUP_MARK = "_fullshard_group"
"""Attribute of a parameter that belongs to a group, on its sharded face and on the original it replaced."""


@dataclass(frozen=True, slots=True)
class ParamOwner:
    """A module that has the parameter, and under which name; tied parameters have several."""

    module: nn.Module
    name: str

    @property
    def plain(self) -> bool:
        """Whether assigning the parameter has no side effect of the module's own (RNNs keep lists, say)."""
        return type(self.module).__setattr__ is nn.Module.__setattr__

    def current(self) -> Tensor | None:
        """The parameter now on the module."""
        return torch_border.parameter_table(self.module)[self.name]

    def install(self, param: nn.Parameter) -> None:
        """Put ``param`` on the module."""
        setattr(self.module, self.name, param)


class FSDPParam:
    """One parameter of a group; lives as long as the group."""

    def __init__(
        self,
        name: str,
        owners: Sequence[ParamOwner],
        original: nn.Parameter,
        shard_dim: int,
        placement: FacePlacement,
    ) -> None:
        self.name = name
        self.owners = tuple(owners)
        self.placement = placement
        self.shape = tuple(local_tensor(original).shape)
        """Of the whole local tensor: of all that this rank had before."""
        self.shard_dim = shard_dim
        self.original: nn.Parameter | None = original
        """The parameter as the user made it, until it is sharded."""
        self.dtype = original.dtype
        """Of the shard; the group's policy says in which dtype it computes."""
        self.sharded_param: nn.Parameter
        self.unsharded_param: nn.Parameter | None = None
        self.trainable = original.requires_grad
        self.watched = False
        """Whether somebody is told when the unsharded face's gradient has been accumulated."""

    def make_sharded_face(self, local: Tensor, group_name: str) -> None:
        """Replace the original by a DTensor parameter over ``local`` on all owners."""
        original = self.original
        assert original is not None, "a parameter is sharded once"
        face = sharded_face(self.placement, local, trainable=original.requires_grad)
        if type(local) is Tensor:
            # Attributes users hang on parameters move along; a subclass keeps its data in there.
            face.__dict__.update(original.__dict__)
        self.original = None
        self.sharded_param = face
        _mark(original, group_name)
        _mark(face, group_name)
        self.install(face)

    def make_unsharded_face(self, whole: Tensor) -> None:
        """Make a parameter over the gathered local tensor.

        On the compute stream: autograd remembers the stream on which it first sees a leaf.
        """
        self.unsharded_param = unsharded_face(self.placement, whole, trainable=self.trainable)
        self.watched = False

    def install(self, face: nn.Parameter) -> None:
        """Put a face on all owners."""
        for owner in self.owners:
            owner.install(face)

    def adopt(self, face: Tensor, group_name: str) -> None:
        """Take a parameter that was put in the sharded one's place: moved, cast, assigned."""
        self.sharded_param = cast(nn.Parameter, face)
        self.dtype = face.dtype
        _mark(face, group_name)
        self.install(self.sharded_param)

    def set_trainable(self, trainable: bool) -> None:
        """Let the unsharded face follow the sharded one's `requires_grad`."""
        self.trainable = trainable
        if self.unsharded_param is not None:
            self.unsharded_param.requires_grad_(trainable)

    def replacement_fault(self, face: Tensor | None) -> str | None:
        """Why ``face`` cannot be this parameter's sharded face, or None if it can."""
        if not isinstance(face, DTensor):
            return f"{self.name}: expected a DTensor, got {type(face).__name__}"
        shape = self.placement.shape
        if tuple(face.shape) != shape:
            return f"{self.name}: expected shape {shape}, got {tuple(face.shape)}"
        expected = torch_border.spec_of(cast(DTensor, self.sharded_param))
        if face.placements != expected.placements or face.device_mesh != expected.mesh:
            return (
                f"{self.name}: expected placements {expected.placements} on {expected.mesh}, "
                f"got {face.placements} on {face.device_mesh}"
            )
        return None

    @property
    def local(self) -> Tensor:
        """This rank's piece."""
        return torch_border.local_of(self.sharded_param)


class FaceSwitch:
    """Puts one face of all parameters of a group on their modules; made anew when a face is.

    Twice per step for every parameter, so it writes where `nn.Module` keeps parameters, except on
    modules that do more on assignment.
    """

    def __init__(self, params: Sequence[FSDPParam]) -> None:
        self._tables = []
        self._assigned = []
        for param in params:
            unsharded = param.unsharded_param
            assert unsharded is not None, "a switch is between two faces"
            for owner in param.owners:
                if owner.plain:
                    table = torch_border.parameter_table(owner.module)
                    self._tables.append((table, owner.name, param.sharded_param, unsharded))
                else:
                    self._assigned.append((owner, param.sharded_param, unsharded))

    def to_sharded(self) -> None:
        """Put the sharded faces on the modules."""
        for table, name, sharded, _ in self._tables:
            table[name] = sharded
        for owner, sharded, _ in self._assigned:
            owner.install(sharded)

    def to_unsharded(self) -> None:
        """Put the unsharded faces on the modules."""
        for table, name, _, unsharded in self._tables:
            table[name] = unsharded
        for owner, _, unsharded in self._assigned:
            owner.install(unsharded)


def group_of(param: Tensor) -> str | None:
    """Name of the group a parameter belongs to, or None."""
    return cast("str | None", getattr(param, _GROUP_MARK, None))


def check_can_be_sharded(name: str, param: nn.Parameter) -> str | None:
    """Why a parameter cannot be sharded, or None if it can."""
    local = local_tensor(param)
    if type(local) is not Tensor and not hasattr(local, "fsdp_pre_all_gather"):
        # Its data is not what a buffer holds, and it does not say how to gather it.
        return f"{name}: is a {type(local).__name__}, a tensor subclass without fsdp_pre_all_gather"
    if hasattr(local, "fsdp_pre_all_gather") != hasattr(local, "fsdp_post_all_gather"):
        return (
            f"{name}: is a {type(local).__name__}, which has only one of fsdp_pre_all_gather and "
            "fsdp_post_all_gather"
        )
    if param.requires_grad and not param.dtype.is_floating_point:
        return f"{name}: is trainable but of dtype {param.dtype}"
    if param.layout is not torch.strided:
        return f"{name}: has layout {param.layout}"
    return None


def normalized_shard_dim(name: str, param: nn.Parameter, placement: object) -> int:
    """The dimension a `shard_placement_fn` asks for, checked and made non-negative."""
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise ConfigurationError(
            "shard_placement_fn must return None, Shard(dim) or ShardPlacementResult(Shard(dim), mesh_info), "
            f"of fullshard.mesh, got {placement!r} for {name}."
        )
    dim = placement.dim + param.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < max(param.ndim, 1):
        raise ConfigurationError(
            f"shard_placement_fn returned {placement!r} for {name} of shape {tuple(param.shape)}: "
            f"it has {param.ndim} dimensions."
        )
    return dim


def _mark(param: Tensor, group_name: str) -> None:
    setattr(param, _GROUP_MARK, group_name)
