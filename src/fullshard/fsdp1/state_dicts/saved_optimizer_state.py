"""`optim_state_dict`: the state of an optimizer by the names of the unwrapped model's parameters.

    1. report   which states this rank has of which parameters, without their data
    2. agree    on what to gather, from the reports of all ranks (`optimizer_state_reports`)
    3. gather   one gather of all parameters' elements per wrapper and state

`loadable_optimizer_state` is the way back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from fullshard.api import FullOptimStateDictConfig, StateDictSettings, StateDictType
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.tensor_trees import map_tensors
from fullshard.errors import UsageError
from fullshard.features import full_params
from fullshard.fsdp1.state_dicts.optimizer_agreement import (
    Agreement,
    Membership,
    membership_of,
    same,
)
from fullshard.fsdp1.state_dicts.optimizer_params import (
    Entry,
    Listing,
    ModelParams,
    is_first,
    listing_of,
    state_dict_faults,
)
from fullshard.fsdp1.state_dicts.optimizer_state_reports import (
    AgreedStates,
    State,
    agreed_states,
    report_of,
)
from fullshard.fsdp1.state_dicts.settings import settings_of
from fullshard.fsdp1.state_dicts.sharded_tensors import shard_rows
from fullshard.storage.buffers import in_memory_order


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Options of an optimizer's state dict."""

    sharded: bool = False
    """Whether elements become sharded tensors; otherwise they are full on each rank."""
    as_dtensors: bool = True
    """Whether sharded tensors of wrappers with a mesh are DTensors, and not ShardedTensors."""
    on_cpu: bool = True
    first_only: bool = False
    """Whether only the first rank gets the state dict."""


def _options_of(settings: StateDictSettings) -> SaveOptions:
    """Return the options that the settings of the wrappers mean."""
    config = settings.optim_state_dict_config
    return SaveOptions(
        sharded=settings.state_dict_type is not StateDictType.FULL_STATE_DICT,
        as_dtensors=settings.state_dict_type is StateDictType.SHARDED_STATE_DICT,
        on_cpu=config.offload_to_cpu,
        first_only=isinstance(config, FullOptimStateDictConfig) and config.rank0_only,
    )


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    state_dict: dict[str, Any] | None,
    process_group: ProcessGroup | None,
) -> dict[str, Any]:
    """See `FullyShardedDataParallel.optim_state_dict`."""
    model_params = ModelParams(model, "optim_state_dict")
    settings = settings_of(model)
    if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT and any(
        wrapper._device_mesh is not None for wrapper in model_params.wrappers
    ):
        raise UsageError(
            "Optimizers of wrappers with a device_mesh have no LOCAL_STATE_DICT. Use SHARDED_STATE_DICT, which holds "
            "DTensors."
        )
    return build_state_dict(model_params, optim, state_dict, process_group, _options_of(settings))


def build_state_dict(
    model_params: ModelParams,
    optim: Optimizer,
    state_dict: dict[str, Any] | None,
    process_group: ProcessGroup | None,
    options: SaveOptions,
) -> dict[str, Any]:
    """Build the named state dict of an optimizer, from its state or from ``state_dict``, which it made before."""
    process_groups = model_params.process_groups if process_group is None else [process_group]
    listing, unknown_params = listing_of(model_params, optim)
    state_dict = optim.state_dict() if state_dict is None else state_dict
    malformed = state_dict_faults(state_dict)
    if malformed or unknown_params:  # the numbers would mean other parameters
        state_dict = {"state": {}}
    states, others = _by_entry(model_params, listing, state_dict["state"])
    groups: list[dict[str, Any]] | None = state_dict.get("param_groups")
    report = report_of(states, _membership(model_params, listing, groups))
    report.unknown_params, report.malformed = unknown_params, malformed
    report.unknown_keys = _unknown_keys(model_params, listing, state_dict)
    report.keeps = keeps = not options.first_only or is_first(process_groups)
    by_key, agreement = agreed_states(model_params, report, process_groups)
    result = _CollectedStates(options, keeps)
    for entry in states if keeps else ():
        if entry.group is None:
            result.add(
                entry.names[0], {name: result.copied(v) for name, v in states[entry].items()}
            )
    for entries in _by_group(model_params):
        _gather_group(entries, by_key, states, result)
    if not keeps:
        return {}
    return {
        **{key: value for key, value in state_dict.items() if key not in ("state", "param_groups")},
        "state": {
            **{name: result.state[name] for name in _order(model_params, result.state)},
            **others,
        },
        **(
            {}
            if groups is None
            else {"param_groups": _named_groups(model_params, listing, groups, agreement)}
        ),
    }


def _by_entry(
    model_params: ModelParams, listing: Listing, states: Mapping[Any, State]
) -> tuple[dict[Entry, State], dict[Any, Any]]:
    """Return the states by their parameters, and what belongs to no parameter by its key."""
    found: dict[Entry, State] = {}
    others: dict[Any, Any] = {}
    for key, state in states.items():
        entry = _entry_of(model_params, listing, key)
        if entry is None:
            others[key] = state
        else:
            found[entry] = state
    return found, others


def _entry_of(model_params: ModelParams, listing: Listing, key: Any) -> Entry | None:
    """Return the entry of a key in the optimizer's own state dict: a number, or for some optimizers a name."""
    if isinstance(key, int):
        return listing.entries[key] if 0 <= key < len(listing.entries) else None
    entry = model_params.of_key(key) if isinstance(key, str) else None
    return entry if entry in listing else None


def _unknown_keys(
    model_params: ModelParams, listing: Listing, state_dict: Mapping[str, Any]
) -> list[str]:
    """Return keys that must mean parameters and do not; in the state, only numbers must."""
    keys = [key for group in state_dict.get("param_groups", ()) for key in group["params"]]
    keys += [key for key in state_dict["state"] if isinstance(key, int)]
    return [repr(key) for key in keys if _entry_of(model_params, listing, key) is None]


def _membership(
    model_params: ModelParams, listing: Listing, groups: Sequence[Mapping[str, Any]] | None
) -> Membership:
    """Return which parameters this rank's state dict has, and in which groups."""
    if groups is None:
        return membership_of(model_params, listing, None)
    found = [[_entry_of(model_params, listing, key) for key in group["params"]] for group in groups]
    entries = [[entry for entry in group if entry is not None] for group in found]
    return membership_of(model_params, listing, entries, groups)


def _named_groups(
    model_params: ModelParams,
    listing: Listing,
    groups: Sequence[Mapping[str, Any]],
    agreement: Agreement,
) -> list[dict[str, Any]]:
    """Return the groups of a state dict by names, in the same order on all ranks."""
    assert agreement.groups is not None, "all ranks have groups"
    result = []
    for entries, number in zip(agreement.groups, agreement.own_numbers, strict=True):
        options = copy.deepcopy({k: v for k, v in groups[number].items() if k != "params"})
        if "param_names" in options:  # parallel to the optimizer's own parameters
            own = [_entry_of(model_params, listing, key) for key in groups[number]["params"]]
            called = dict(zip(own, options["param_names"], strict=True))
            options["param_names"] = [called.get(entry, entry.key) for entry in entries]
        result.append({**options, "params": [name for entry in entries for name in entry.names]})
    return result


def _order(model_params: ModelParams, state: Mapping[str, Any]) -> list[str]:
    """Return names of parameters in torch's order, which is the same on all ranks.

    It is the order of the model if all wrappers have FlatParameters. Otherwise plain parameters come first, then
    those of each wrapper, sorted by name.
    """
    in_model = [name for name in model_params.by_name if name in state]
    managed = [
        entry
        for entry in map(model_params.by_name.__getitem__, in_model)
        if entry.group is not None
    ]
    if all(entry.flat for entry in managed):
        return in_model
    by_owner: dict[Any, list[str]] = {None: []}
    for name in sorted(in_model):
        by_owner.setdefault(model_params.by_name[name].group, []).append(name)
    return [name for names in by_owner.values() for name in names]


# --- gather ---------------------------------------------------------------------------------------


class _CollectedStates:
    """The states of a new state dict, by names of parameters."""

    def __init__(self, options: SaveOptions, keeps: bool) -> None:
        self._options = options
        self.keeps = keeps
        """Whether this rank gets the state dict."""
        self.state: dict[str, dict[str, Any]] = {}

    def add(self, name: str, state: Mapping[str, Any]) -> None:
        """Add states of a parameter."""
        self.state.setdefault(name, {}).update(state)

    def copied(self, value: Any) -> Any:
        """Return a copy of a value in memory of its own, on the device that the options say."""
        if isinstance(value, Tensor):
            return value.detach().to("cpu" if self._options.on_cpu else value.device, copy=True)
        return map_tensors(self.copied, copy.deepcopy(value))

    def elements(self, entry: Entry, index: int, tensor: Tensor) -> Any:
        """Return the elements of the parameter of this index in its group, full or sharded as the options say."""
        assert entry.group is not None, "plain parameters are not divided"
        placement = entry.group.params[index].placement
        if self._options.sharded and entry.group.mesh_info.shard_process_group is not None:
            if self._options.on_cpu:
                tensor = tensor.to("cpu")
            assert entry.wrapper is not None, "it has a group, so a wrapper manages it"
            as_dtensor = self._options.as_dtensors and entry.wrapper._device_mesh is not None
            return shard_rows(entry.wrapper, tensor, placement, as_dtensor=as_dtensor)
        return placement.as_before(self.copied(tensor))


def _by_group(model_params: ModelParams) -> Iterator[list[Entry]]:
    """Yield the entries of each group, in the same order on all ranks."""
    by_group: dict[FSDPParamGroup, list[Entry]] = {}
    for entry in model_params.entries.values():
        if entry.group is not None:
            by_group.setdefault(entry.group, []).append(entry)
    yield from by_group.values()


def _gather_group(
    entries: Sequence[Entry],
    by_key: Mapping[str, AgreedStates],
    states: Mapping[Entry, State],
    result: _CollectedStates,
) -> None:
    """Add the states of one group's parameters, with one gather per state and dtype. Collective."""
    agreed = [(entry, by_key[entry.key]) for entry in entries if entry.key in by_key]
    gathers = dict.fromkeys(kind for _, each in agreed for kind in each.elements.items())
    for entry, each in agreed:
        if not entry.flat:
            _add_values(entry, each, states, result)
    for name, dtype in sorted(gathers, key=str):
        members = [entry for entry, each in agreed if each.elements.get(name) == dtype]
        full = _full_elements(members, name, dtype, states)
        if result.keeps:
            for entry, index, member in _members(members):
                tensor = full[index]
                assert tensor is not None, "its segment was gathered"
                result.add(member, {name: result.elements(entry, index, tensor)})
    for entry, each in agreed:
        if entry.flat:
            _add_values(entry, each, states, result)


def _members(entries: Sequence[Entry]) -> Iterator[tuple[Entry, int, str]]:
    """Yield each parameter that the entries stand for: its entry, its index in the group, its name."""
    for entry in entries:
        for index, name in zip(entry.indices, entry.names, strict=True):
            yield entry, index, name


def _add_values(
    entry: Entry, agreed: AgreedStates, states: Mapping[Entry, State], result: _CollectedStates
) -> None:
    """Add the values of an entry in torch's order: tensors first for a FlatParameter, last for others."""
    names = sorted(
        agreed.values,
        key=lambda name: (isinstance(agreed.values[name], Tensor) is not entry.flat, name),
    )
    own = states.get(entry, {}) if entry.holds_elements else {}
    for member in entry.names if result.keeps else ():
        for name in names:
            value = agreed.values[name]
            if name in own and same(own[name], value):
                value = own[name]  # on its own device: the agreed value is on the CPU
            result.add(member, {name: result.copied(value)})


def _full_elements(
    entries: Sequence[Entry], name: str, dtype: torch.dtype, states: Mapping[Entry, State]
) -> list[Tensor | None]:
    """Return one state of each of the group's parameters in full; None for parameters of other entries. Collective."""
    group = entries[0].group
    assert group is not None, "plain parameters are not divided"
    pieces: list[Tensor | None] = [None] * len(group.layout.segments)
    for entry in entries:
        segment = group.layout.slots[entry.indices[0]].segment
        local = states.get(entry, {}).get(name)
        piece = pieces[segment]
        if piece is None:
            numel = group.layout.segments[segment].piece_numel
            piece = torch.zeros(numel, dtype=dtype, device=group.shard_device)
            pieces[segment] = piece
        if local is not None and entry.holds_elements:
            _own_range(entry, piece).copy_(_in_buffer_order(entry, local.detach()))
    return full_params.gather(group, pieces)


def _own_range(entry: Entry, piece: Tensor) -> Tensor:
    """Return the view of this rank's piece of a segment that holds an entry's elements."""
    assert entry.group is not None, "plain parameters have no piece"
    if entry.flat:
        return piece
    held = entry.group.layout.piece(entry.indices[0], entry.group.mesh_info.shard_mesh_rank)
    return piece.narrow(0, held.offset, held.numel)


def _in_buffer_order(entry: Entry, local: Tensor) -> Tensor:
    """Return a state of an entry, flat, in the order of the entry's elements in the group's buffer."""
    assert entry.group is not None, "plain parameters are in no buffer"
    if entry.flat or entry.group.layout.world > 1:
        return local.reshape(-1)
    return in_memory_order(
        local.reshape(entry.param.shape), entry.group.layout.slots[entry.indices[0]].strides
    )
