"""Sources of the tensors of an optimizer's state dict when it is loaded.

    FullTensors      every rank has full tensors: no communication
    ShardedTensors   every rank has shards, DTensors or ShardedTensors: gathered
    TensorsOfRank0   only rank 0 has full tensors: broadcast

An outline, the state dict without its data, is checked on all ranks before the first tensor is fetched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fullshard.engine.tensor_trees import map_tensors
from fullshard.errors import fault_paragraphs
from fullshard.fsdp1.state_dicts.optimizer_params import ModelParams, is_first, state_dict_faults
from fullshard.fsdp1.state_dicts.optimizer_state_reports import on_cpu
from fullshard.fsdp1.state_dicts.sharded_tensors import is_sharded, unshard_rows
from fullshard.transport import collectives
from fullshard.transport.tags import tag


@dataclass(frozen=True, slots=True)
class TensorOutline:
    """The shape and dtype of a tensor, in its place in an outline."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sharded: bool
    """Whether every rank has a shard of it, so that fetching it is collective."""


@dataclass(frozen=True, slots=True)
class Outline:
    """A state dict without the data of its tensors; 0-d tensors that are values stay."""

    states: dict[str, dict[str, Any]]
    """States by names of parameters."""
    foreign: dict[Any, Any]
    """Entries of the state that belong to no parameter."""
    groups: list[dict[str, Any]] | None
    """None if the state dict has no groups; the optimizer keeps its own then."""
    others: dict[str, Any]
    """The entries of the state dict beside state and groups."""

    @property
    def tensors(self) -> dict[tuple[str, str], TensorOutline]:
        """All tensors, by names of parameters and of states."""
        return {
            (name, each): value
            for name, state in self.states.items()
            for each, value in state.items()
            if isinstance(value, TensorOutline)
        }


def _outline_of(
    state_dict: Mapping[str, Any], foreign_keys: Collection[Any], scalars: Collection[str]
) -> Outline:
    """Return the outline of a state dict.

    ``foreign_keys`` of its state belong to no parameter. ``scalars`` are names of 0-d parameters, whose elements are 0-d
    tensors. A 0-d tensor may also be a value, such as a number of steps; the states of other parameters tell which.
    """
    states: dict[str, dict[str, Any]] = {}
    foreign = {}
    for key, state in state_dict["state"].items():
        if isinstance(state, Mapping) and key not in foreign_keys:
            states[key] = {name: _outlined(value) for name, value in state.items()}
        else:
            foreign[key] = map_tensors(on_cpu, state)
    of_elements = {
        name
        for state in states.values()
        for name, value in state.items()
        if isinstance(value, TensorOutline)
    }
    for key in states.keys() & scalars:
        for name, value in states[key].items():
            if name in of_elements and isinstance(value, Tensor):
                states[key][name] = TensorOutline((), value.dtype, sharded=False)
    others = {key: v for key, v in state_dict.items() if key not in ("state", "param_groups")}
    groups = state_dict.get("param_groups")
    return Outline(states, foreign, groups and [dict(each) for each in groups], others)


def _outlined(value: Any) -> Any:
    if is_sharded(value) or (isinstance(value, Tensor) and value.ndim):
        return TensorOutline(tuple(value.shape), value.dtype, is_sharded(value))
    return map_tensors(on_cpu, value)


class StateSource:
    """A state dict that is loaded: its outline, and where its tensors come from."""

    def __init__(
        self,
        state_dict: Mapping[str, Any] | None,
        foreign: Collection[Any],
        model_params: ModelParams,
    ) -> None:
        """Read the state dict; ``foreign`` keys of its state belong to no parameter."""
        self.outline: Outline | None = None
        self.faults = state_dict_faults(state_dict)
        """Reasons why the state dict has no outline."""
        self.tensors: dict[tuple[str, str], Any] = {}
        """The tensors that this rank has, by names of parameters and of states."""
        if state_dict is None or self.faults:
            return
        scalars = [
            name
            for name, entry in model_params.by_name.items()
            if entry.group is not None and entry.shape_of(name) == ()
        ]
        self.outline = _outline_of(state_dict, foreign, scalars)
        self.tensors = {
            (name, each): state_dict["state"][name][each] for name, each in self.outline.tensors
        }

    def fetch(
        self,
        wanted: Sequence[tuple[str, str]],
        outlines: Sequence[TensorOutline],
        device: torch.device,
    ) -> Iterator[Tensor]:
        """Yield full tensors of one dtype, by names of parameters and of states."""
        raise NotImplementedError


class FullTensors(StateSource):
    """A state dict of full tensors that every rank has: fetching needs no communication."""

    def fetch(
        self,
        wanted: Sequence[tuple[str, str]],
        outlines: Sequence[TensorOutline],
        device: torch.device,
    ) -> Iterator[Tensor]:
        """See `StateSource`."""
        return (self.tensors[key].detach() for key in wanted)


class ShardedTensors(StateSource):
    """A state dict of DTensors and ShardedTensors: fetching gathers them."""

    def fetch(
        self,
        wanted: Sequence[tuple[str, str]],
        outlines: Sequence[TensorOutline],
        device: torch.device,
    ) -> Iterator[Tensor]:
        """See `StateSource`. Collective."""
        return (unshard_rows(self.tensors[key], device).detach() for key in wanted)


class TensorsOfRank0(StateSource):
    """A state dict of full tensors that only rank 0 has: fetching broadcasts them."""

    def __init__(
        self,
        state_dict: Mapping[str, Any] | None,
        foreign: Collection[Any],
        model_params: ModelParams,
        process_groups: Sequence[ProcessGroup],
    ) -> None:
        """Read the state dict on rank 0, and send its outline or its faults to all ranks. Collective."""
        self._process_groups = process_groups
        self._has_tensors = is_first(process_groups)
        if self._has_tensors:
            super().__init__(state_dict, foreign, model_params)
            for (name, each), value in self.tensors.items():
                entry = model_params.by_name.get(name)
                if entry is not None and entry.group is not None:
                    # With tensor parallelism there is one first rank per data-parallel group; together they have the state.
                    if entry.placement_of(name).is_as_before(value):
                        self.tensors[name, each] = unshard_rows(value, entry.group.device)
            self.faults += fault_paragraphs(
                (f"{name}: {each}" for (name, each), v in self.tensors.items() if is_sharded(v)),
                "A state dict that rank 0 sends to other ranks must have full tensors, but these are sharded:",
                "Choose SHARDED_STATE_DICT with set_state_dict_type to load it.",
            )
        own = (self.outline, self.faults) if self._has_tensors else None
        sent = collectives.values_by_rank(own, process_groups, tag("optim_state_dict_to_load"))
        self.outline, self.faults = next(each for each in sent.values() if each is not None)

    def fetch(
        self,
        wanted: Sequence[tuple[str, str]],
        outlines: Sequence[TensorOutline],
        device: torch.device,
    ) -> Iterator[Tensor]:
        """See `StateSource`. Collective: all tensors travel in one message."""
        numels = [torch.Size(each.shape).numel() for each in outlines]
        message = torch.empty(sum(numels), dtype=outlines[0].dtype, device=device)
        parts = message.split(numels)
        if self._has_tensors:
            for key, part in zip(wanted, parts, strict=True):
                part.copy_(self.tensors[key].detach().reshape(-1))
        for process_group in self._process_groups:
            collectives.broadcast(
                message.view(torch.uint8), process_group, tag("optim_state_dict_to_load")
            )
        return (part.view(each.shape) for part, each in zip(parts, outlines, strict=True))
