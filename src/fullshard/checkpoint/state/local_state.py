"""This rank's part of a model, and its shardings, for both APIs. It is read off the model without communication.

    fully_shard, replicate              DTensors                 the sharding of their placements
    wrapper, any strategy               flat-sharded params      the sharding of the group's layout
    ignored, buffers, unsharded         plain tensors            whole on every rank; one rank's copy is saved

Names are those of the model without wrappers. A tensor with several names is listed once, under the first.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fullshard import torch_border
from fullshard.checkpoint import json_values
from fullshard.checkpoint.source import MODEL
from fullshard.checkpoint.tensor_memory import contiguous_values, stores_each_element
from fullshard.engine.ownership import params_by_owner
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.state import FSDPState
from fullshard.errors import CheckpointError, UnsupportedError, fault_paragraphs
from fullshard.features.at_rest import bring_to_rest
from fullshard.layout.blocks import Block
from fullshard.layout.names import clean_name
from fullshard.layout.param_shardings import (
    dtensor_sharding,
    flat_sharding,
    parts_of_cell,
)
from fullshard.layout.sharding import Sharding, replicated
from fullshard.mesh.axes import global_rank, ranks_by_replica
from fullshard.storage.flat_parameter import FlatParameter, FlatShardedParam
from fullshard.storage.sharded_params import PlainShardedParam


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """One tensor of the model or the optimizer, and what this rank has of it."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the whole tensor, as the model has it."""
    sharding: Sharding
    local: Tensor | None
    """This rank's cell, in its shape; None if it has none. It is the model's memory, except for `LocalModelState.copied`.

    A rank also has a tensor that is whole on every rank if another rank's copy is saved.
    """

    def parts(self) -> Iterator[tuple[Block, Tensor]]:
        """Yield the blocks of the model's tensor that make up this rank's cell, each with its view of `local`."""
        if self.local is None or not self.local.numel():
            return
        cell = self.sharding.cell_of(global_rank()) or 0
        yield from parts_of_cell(self.sharding, cell, self.local)


@dataclass(frozen=True, slots=True, eq=False)
class LocalParam:
    """The sharding of a parameter, and of optimizer state that has an element for each of its elements."""

    name: str
    shape: tuple[int, ...]
    sharding: Sharding
    window: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None
    """This rank's cell in the flat memory, for a member of a `FlatParameter`: first element, shape, strides."""

    @property
    def is_whole(self) -> bool:
        """Whether each holder has all of it, in its own shape."""
        return self.window is None and not self.sharding.flat and self.sharding.cells == 1

    def part_of(self, local: Tensor) -> Tensor:
        """Return this rank's cell of the optimizer's parameter, or of a state of the same shape, from its local tensor."""
        if self.window is None:
            return local
        first, shape, strides = self.window
        return local.as_strided(shape, strides, int(local.storage_offset()) + first)


class LocalModelState:
    """All tensors of a model between steps. Valid until the model is trained, moved, sharded or loaded into."""

    def __init__(self, model: nn.Module, method: str, *, first: int = 0) -> None:
        """Reshard the model, and read its tensors.

        Args:
            model: Sharded by either API, by both, or by none.
            method: The caller's name, for messages.
            first: If nothing in the model is sharded, the rank whose copy is saved of tensors that every rank has whole.
                Otherwise it is the first of the ranks that share the model.

        Raises:
            LifecycleError: within forward, backward or `summon_full_params`.
            CheckpointError: some tensors cannot be saved or loaded; all are named.
        """
        self.rank = global_rank()
        self.tensors: list[LocalTensor] = []
        self.tied: dict[str, str] = {}
        """Further names of tensors, with the first name. Neither has the prefix of keys."""
        self.params: dict[nn.Parameter, list[LocalParam]] = {}
        """Members of each parameter that an optimizer may have: several for a `FlatParameter`, else one."""
        self.copied: dict[str, Tensor] = {}
        """Whole tensors of which `LocalTensor.local` is a copy, by key: buffers that have another dtype while the model
        computes, and tensors whose elements share memory (expanded ones, for instance). See `tensor_memory`."""
        self.extra_states: dict[str, nn.Module] = {}
        """Modules with `get_extra_state`, by key: `LocalTensor.local` is a copy of the state, or its JSON text."""
        self._shardings: dict[Hashable, Sharding] = {}
        self._holders: dict[Hashable, tuple[tuple[int, ...], ...]] = {}
        self._names: dict[Hashable, str] = {}
        self._faults = _Faults()
        states = bring_to_rest(model, method)
        self._members = _members(states)
        plain = [
            found
            for prefix, module in _named_modules(model)
            for found in self._add_sharded_params(prefix, module)
        ]
        sharing = {tensor.sharding.holders for tensor in self.tensors}
        self.first = min(
            (min(ranks) for lists in sharing for ranks in lists if ranks), default=first
        )
        for name, param in plain:
            sharding = self._add_plain(name, param)
            self.params[param] = [LocalParam(name, tuple(param.shape), sharding)]
        dtypes = _buffer_dtypes(states)
        for prefix, module in _named_modules(model):
            for name, buffer in torch_border.persistent_buffers(module).items():
                self._add_buffer(f"{prefix}{name}", buffer, dtypes.get((module, name)))
            self._add_extra_state(prefix, module)
        self._faults.raise_for(method)

    @property
    def updated_together(self) -> list[list[str]]:
        """Names of the members of each parameter that an optimizer may have."""
        return [[member.name for member in members] for members in self.params.values()]

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the parameters that are not trained."""
        return frozenset(
            member.name
            for param, members in self.params.items()
            if not param.requires_grad
            for member in members
        )

    # --- parameters -------------------------------------------------------------------------------

    def _add_sharded_params(
        self, prefix: str, module: nn.Module
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Add a module's own sharded parameters; yield its plain ones."""
        table, members = torch_border.parameter_table(module), self._members.get(module, {})
        for attribute in dict.fromkeys((*table, *members)):
            name = f"{prefix}{attribute}"
            if attribute in members:
                group, index = members[attribute]
                if self._is_new(name, (group, index)):
                    self._add_member(name, group, index)
                continue
            param = table[attribute]
            if param is None or isinstance(param, FlatParameter) or not self._is_new(name, param):
                continue
            if isinstance(param, DTensor):
                sharding = self._add_dtensor(name, param)
                self.params[param] = [LocalParam(name, tuple(param.shape), sharding)]
            else:
                yield name, param

    def _is_new(self, name: str, tensor: Hashable) -> bool:
        """Return whether a tensor is met for the first time; otherwise remember its other name."""
        if tensor not in self._names:
            self._names[tensor] = name
            return True
        if self._names[tensor] != name:
            self.tied[name] = self._names[tensor]
        return False

    def _add_member(self, name: str, group: FSDPParamGroup, index: int) -> None:
        """Add a parameter of a wrapper."""
        layout, slot, sharded_param = (
            group.layout,
            group.layout.slots[index],
            group.params[index].sharded_param,
        )
        holders = self._holders_of(group)
        window: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None
        if layout.world == 1:
            sharding = replicated(slot.shape, [ranks[0] for ranks in holders])
            if isinstance(sharded_param, FlatShardedParam):
                window = (slot.start, slot.shape, slot.strides)
        else:
            sharding = flat_sharding(layout, index, holders)
            if isinstance(sharded_param, FlatShardedParam):
                piece = layout.piece(index, group.mesh_info.shard_mesh_rank)
                window = (piece.offset, piece.shape, (1,))
        param = LocalParam(name, slot.shape, sharding, window)
        self._add(name, slot.shape, sharding, param.part_of(sharded_param.local))
        self.params.setdefault(sharded_param.param, []).append(param)

    def _holders_of(self, group: FSDPParamGroup) -> tuple[tuple[int, ...], ...]:
        axes = group.mesh_info.communicates_over
        if axes not in self._holders:
            self._holders[axes] = ranks_by_replica(group.mesh_info)
        return self._holders[axes]

    # --- other tensors ----------------------------------------------------------------------------

    def sharding_of(self, tensor: DTensor) -> Sharding:
        """Return the sharding of a DTensor, which is computed once for all of one kind."""
        shape, mesh, placements = tuple(tensor.shape), tensor.device_mesh, tensor.placements
        kind: tuple[tuple[int, ...], DeviceMesh, tuple[Placement, ...]] = (shape, mesh, placements)
        if kind not in self._shardings:
            self._shardings[kind] = dtensor_sharding(shape, placements, mesh)
        return self._shardings[kind]

    def _add_dtensor(self, name: str, tensor: DTensor) -> Sharding:
        sharding = self.sharding_of(tensor)
        self._faults.check_placements(name, tensor)
        self._add(name, tensor.shape, sharding, local_of(tensor))
        return sharding

    def _add_buffer(self, name: str, buffer: Tensor, dtype: torch.dtype | None) -> None:
        if not self._is_new(name, buffer):
            return
        if isinstance(buffer, DTensor):
            self._add_dtensor(name, buffer)
            return
        if dtype is not None and dtype != buffer.dtype:
            self.copied[MODEL + name] = buffer
            buffer = buffer.to(dtype)
        self._add_plain(name, buffer)

    def _add_extra_state(self, prefix: str, module: nn.Module) -> None:
        name = f"{prefix}{torch_border.EXTRA_STATE}"
        if type(module).get_extra_state is nn.Module.get_extra_state:
            return
        if not self._is_new(name, (module, torch_border.EXTRA_STATE)):
            return
        value = module.get_extra_state()
        if not isinstance(value, Tensor):
            faults: list[str] = []
            text = json.dumps(json_values.encode(value, name, faults))
            self._faults.foreign += faults
            value = torch.tensor(list(text.encode()), dtype=torch.uint8)
        self.extra_states[MODEL + name] = module
        self._add_plain(name, value)

    def _add_plain(self, name: str, tensor: Tensor) -> Sharding:
        sharding = replicated(tensor.shape, (self.first,))
        is_usual = type(tensor.data) is Tensor and tensor.layout is torch.strided
        if is_usual and not tensor.is_meta and not stores_each_element(tensor):
            self.copied.setdefault(MODEL + name, tensor)
            tensor = contiguous_values(tensor)
        self._add(name, tensor.shape, sharding, tensor, cell=0)
        return sharding

    def _add(
        self,
        name: str,
        shape: tuple[int, ...],
        sharding: Sharding,
        local: Tensor,
        cell: int | None = None,
    ) -> None:
        """Add a tensor of which ``local`` is the cell ``cell``, or this rank's cell."""
        cell = sharding.cell_of(self.rank) if cell is None else cell
        expected = None if cell is None else sharding.extent(cell).shape
        local = local.detach()
        self._faults.check_name(name)
        self._faults.check_local(name, local, expected)
        own = None if cell is None else local
        self.tensors.append(LocalTensor(MODEL + name, local.dtype, tuple(shape), sharding, own))


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: the local part of a DTensor, or all of it."""
    if isinstance(tensor, DTensor):
        tensor = torch_border.arrived(torch_border.local_of(tensor))
    return tensor.detach()


def _members(
    states: list[FSDPState],
) -> dict[nn.Module, dict[str, tuple[FSDPParamGroup, int]]]:
    """Return the flat-sharded parameters by owner; a `FlatParameter` may be in their place now."""
    groups = [
        group
        for state in states
        for group in state.groups
        if any(isinstance(param.sharded_param, PlainShardedParam) for param in group.params)
    ]
    parallel = [
        param.name for group in groups for param in group.params if param.placement.parallel
    ]
    if parallel:
        raise UnsupportedError(
            "fullshard.checkpoint cannot save flat-sharded parameters that are also tensor-parallel; these of wrappers are: "
            f"{parallel}. Save and load the wrapper's SHARDED_STATE_DICT with torch.distributed.checkpoint, or use "
            "fully_shard."
        )
    return params_by_owner(groups)


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules under all their names, without wrappers and with a dot at the end."""
    for name, module in model.named_modules(remove_duplicate=False):
        parts = [
            part for part in clean_name(name).split(".") if part not in ("", torch_border.COMPILED)
        ]
        yield "".join(f"{part}." for part in parts), module


def _buffer_dtypes(states: list[FSDPState]) -> dict[tuple[nn.Module, str], torch.dtype]:
    """Return the dtypes that buffers had before they were cast for compute, by owner and name."""
    return {
        owner: dtype for state in states for owner, dtype in state.original_buffer_dtypes.items()
    }


class _Faults:
    """Tensors that cannot be saved or loaded into, and why."""

    def __init__(self) -> None:
        self._meta: list[str] = []
        self._partial: list[str] = []
        self._subclasses: list[str] = []
        self._misshapen: list[str] = []
        self._names: set[str] = set()
        self._taken: list[str] = []
        self.foreign: list[str] = []
        """Values that `get_extra_state` has returned."""

    def check_name(self, name: str) -> None:
        if name in self._names:
            self._taken.append(name)
        self._names.add(name)

    def check_placements(self, name: str, tensor: DTensor) -> None:
        if any(placement.is_partial() for placement in tensor.placements):
            self._partial.append(f"{name}: {tensor.placements}")

    def check_local(self, name: str, local: Tensor, expected: tuple[int, ...] | None) -> None:
        if type(local) is not Tensor or local.layout is not torch.strided:
            self._subclasses.append(f"{name}: {type(local).__name__}, {local.layout}")
        elif local.is_meta:
            self._meta.append(name)
        elif expected is not None and tuple(local.shape) != expected:
            self._misshapen.append(f"{name}: {tuple(local.shape)}, not {expected}")
        elif not stores_each_element(local):
            self._subclasses.append(f"{name}: a part whose elements share memory, or are a view")

    def raise_for(self, method: str) -> None:
        paragraphs = [
            *fault_paragraphs(
                self._taken,
                f"{method} knows tensors by their names without wrappers; several tensors share each of these names:",
                "Rename one of the modules.",
            ),
            *fault_paragraphs(
                self._meta,
                f"{method} needs tensors that have data; these are on the meta device:",
                "Materialise the model first: model.to_empty(device=...).",
            ),
            *fault_paragraphs(
                self._partial,
                f"{method} needs tensors whose values are known; these have Partial placements:",
                "Redistribute them to Replicate() or Shard(dim).",
            ),
            *fault_paragraphs(
                self._subclasses,
                f"{method} takes ordinary strided tensors on each rank; these have another class or layout:",
                "Convert them to plain tensors, or register them as buffers with persistent=False.",
            ),
            *fault_paragraphs(
                self._misshapen,
                f"{method} computes what a rank holds from a DTensor's placements; these have another local shape:",
                "Make them with torch.distributed.tensor.distribute_tensor.",
            ),
            *fault_paragraphs(
                self.foreign,
                f"{method} takes tensors and values that JSON can hold from get_extra_state; these are something else:",
                "Return dicts, lists, numbers, strings or a tensor.",
            ),
        ]
        if paragraphs:
            raise CheckpointError("\n".join(paragraphs))
