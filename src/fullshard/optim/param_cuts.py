"""Cuts of parameters over ranks, as an optimizer finds them: DTensors, pieces of a wrapper, or whole tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.engine.known_groups import groups_of
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.errors import ConfigurationError, UnsupportedError, fault_paragraphs
from fullshard.layout.param_shardings import dtensor_sharding, flat_sharding
from fullshard.layout.sharding import Sharding, replicated
from fullshard.mesh.axes import global_rank, group_over, ranks_by_replica
from fullshard.mesh.backends import NOTHING, backend_of
from fullshard.storage.flat_parameter import FlatParameter


@dataclass(frozen=True, slots=True, eq=False)
class ParamCut:
    """A parameter and the ranks that hold its parts."""

    param: nn.Parameter
    name: str
    """Full name; empty if it is not known."""
    shape: tuple[int, ...]
    """Shape of the whole parameter, as the model has it."""
    sharding: Sharding
    group: ProcessGroup | None
    """The ranks that hold parts or copies; None if this rank has it whole."""
    offset: int = 0
    """Elements before it in this rank's memory, for a member of a `FlatParameter`."""
    label: str = ""
    """Text for tags that no other parameter of the model has, from the first forward on."""

    @property
    def stack(self) -> int | None:
        """The stored dimension that numbers matrices, of a parameter with three; None for one matrix."""
        if len(self.shape) != 3:
            return None
        return 0 if self.sharding.order is None else self.sharding.order.index(0)

    def in_model_order(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of a matrix from those of the stored one."""
        order = self.sharding.order
        if order is None:
            return shape
        first, second = (dim for dim in order if len(self.shape) == 2 or dim)
        return shape if first < second else (shape[1], shape[0])


def param_cuts(params: Sequence[nn.Parameter]) -> list[ParamCut]:
    """Return how each parameter is cut. All ranks find the same.

    Collective, when a process group of all ranks of a mesh is made.

    Raises:
        UnsupportedError: parameters are parts of a `FlatParameter`, or of a wrapper and tensor-parallel.
    """
    members = _members(params)
    flat = [param for param in params if isinstance(param, FlatParameter)]
    parallel = _flat_and_parallel(members)
    if flat or parallel:
        raise UnsupportedError(
            "An optimizer of matrices needs parameters with their own shapes; "
            + (
                f"{len(flat)} are FlatParameters of wrappers. Wrap with use_orig_params=True, or use fully_shard."
                if flat
                else f"these of wrappers are also tensor-parallel: {parallel}. Use fully_shard."
            )
        )
    return [cut for param in params for cut in _cuts(param, members[id(param)])]


def cuts_of_members(params: Sequence[nn.Parameter]) -> list[list[ParamCut]]:
    """Return how each parameter is cut; for a `FlatParameter`, how each of its members is. All ranks find the same.

    Collective, when a process group of all ranks of a mesh is made.

    Raises:
        UnsupportedError: parameters are parts of a wrapper and tensor-parallel.
    """
    members = _members(params)
    parallel = _flat_and_parallel(members)
    if parallel:
        raise UnsupportedError(
            "An optimizer of blocks must know which elements of the whole parameter a rank has, and these of wrappers are also "
            f"tensor-parallel: {parallel}. Use fully_shard."
        )
    return [_cuts(param, members[id(param)]) for param in params]


def check_backend(group: ProcessGroup, device: torch.device, what: str) -> None:
    """Refuse to communicate shards that their process group cannot. All ranks find the same.

    Args:
        group: The ranks.
        device: Device of the shards.
        what: Beginning of the error, as in "this option gathers shards over the replicas".
    """
    if backend_of(group, device) is NOTHING:
        raise ConfigurationError(
            f"{what}, but they are on {device}, for which the process group has no backend. Initialise it with one, as in "
            "init_process_group('cpu:gloo,cuda:nccl'), or keep shards on the accelerator."
        )


def refuse_sparse_gradients(optimizer: Optimizer) -> None:
    """Raise an error that names the parameters with sparse gradients, if there are any. All ranks find the same."""
    sparse = [
        f"group {number}, parameter {index} of shape {tuple(param.shape)}"
        for number, group in enumerate(optimizer.param_groups)
        for index, param in enumerate(group["params"])
        if param.grad is not None and param.grad.layout is not torch.strided
    ]
    for paragraph in fault_paragraphs(
        sparse,
        f"{type(optimizer).__name__} takes dense gradients; these parameters have sparse ones:",
        "Make the embeddings with sparse=False.",
    ):
        raise UnsupportedError(paragraph)


def labels_of(params: Sequence[nn.Parameter]) -> list[str]:
    """Return the labels of parameters, of a `FlatParameter` those of its members."""
    members = _members(params)
    return [_label(param, member) for param in params for member in members[id(param)] or (None,)]


def _label(param: nn.Parameter, member: _Member | None) -> str:
    if member is None:
        return str(tuple(param.shape))
    group, index = member
    name = group.params[index].name
    if group.name == "root":
        return name
    # Modules of a group may have parameters of the same name.
    return f"{name} ({index}) of {group.name}" if "," in group.name else f"{group.name}.{name}"


def listed(labels: Sequence[str]) -> str:
    """Return a text about a list of parameters, for tags of collectives.

    Optimizers exchange parameters by their place in the list. So a tag must differ if lists do, or ranks would take each
    other's parameters for their own.
    """
    digest = hashlib.sha256("\n".join(labels).encode()).hexdigest()[:6]
    return labels[0] if len(labels) == 1 else f"{labels[0]} to {labels[-1]} (list {digest})"


_Member = tuple[FSDPParamGroup, int]
"""A parameter of the model: its group, and its index there."""


def _members(params: Sequence[nn.Parameter]) -> dict[int, list[_Member]]:
    """Return the members of each parameter, by its id; none if it is in no group."""
    found: dict[int, list[_Member]] = {id(param): [] for param in params}
    for group in groups_of(params):
        for index, member in enumerate(group.params):
            if id(member.sharded_param.param) in found:
                found[id(member.sharded_param.param)].append((group, index))
    return found


def _flat_and_parallel(members: Mapping[int, Sequence[_Member]]) -> list[str]:
    """Return the names of parameters that a wrapper has cut after tensor parallelism has."""
    return [
        group.params[index].name
        for of_one in members.values()
        for group, index in of_one
        if group.params[index].placement.parallel
        and not isinstance(group.params[index].sharded_param.param, DTensor)
    ]


def _cuts(param: nn.Parameter, members: Sequence[_Member]) -> list[ParamCut]:
    return [
        replace(_cut(param, member), label=_label(param, member)) for member in members or (None,)
    ]


def _cut(param: nn.Parameter, member: _Member | None) -> ParamCut:
    name = "" if member is None else member[0].params[member[1]].name
    if isinstance(param, DTensor):
        shape, mesh = tuple(param.shape), param.device_mesh
        sharding = dtensor_sharding(shape, param.placements, mesh)
        return ParamCut(param, name, shape, sharding, _group_over(mesh.mesh.flatten().tolist()))
    if member is None:
        shape = tuple(param.shape)
        return ParamCut(param, name, shape, replicated(shape, [global_rank()]), None)
    (group, index), is_flat = member, isinstance(param, FlatParameter)
    slot = group.layout.slots[index]
    if group.layout.world == 1:
        whole = replicated(slot.shape, [global_rank()])
        return ParamCut(param, name, slot.shape, whole, None, slot.start if is_flat else 0)
    holders = ranks_by_replica(group.mesh_info)
    sharding = flat_sharding(group.layout, index, holders)
    process_group = _group_over([rank for row in holders for rank in row])
    offset = group.layout.piece(index, group.mesh_info.shard_mesh_rank).offset if is_flat else 0
    return ParamCut(param, name, slot.shape, sharding, process_group, offset)


def _group_over(ranks: Sequence[int]) -> ProcessGroup | None:
    return group_over(ranks) if len(ranks) > 1 and dist.is_initialized() else None
