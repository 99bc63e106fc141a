"""Which parameters of the unwrapped model each parameter of an optimizer stands for, and what ranks agree on.

entry   one parameter as the optimizer has it, with the names it stands for: several for a
        `FlatParameter`, one for any other
plain   a parameter that no wrapper manages: every rank has it whole
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from fullshard.api import OptimStateKeyType
from fullshard.engine import full_params
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.errors import ConfigurationError, LifecycleError, OptionTypeError, fault_paragraphs
from fullshard.fsdp1.wrapper_base import WrapperBase, wrappers_in
from fullshard.names import clean_name
from fullshard.plan.placement import ParamPlacement
from fullshard.storage.flat_parameter import FlatShardedParam


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One parameter of an optimizer."""

    param: nn.Parameter
    key: str
    """Its name in the model, wrappers included."""
    names: tuple[str, ...]
    """What it stands for, by names without wrappers."""
    wrapper: WrapperBase | None = None
    """Who manages it; nobody manages a plain parameter."""
    group: FSDPParamGroup | None = None
    indices: tuple[int, ...] = ()
    """Parallel to `names`: which parameters of the group these are."""

    @property
    def flat(self) -> bool:
        """Whether it is a `FlatParameter`."""
        return self.group is not None and isinstance(
            self.group.params[0].sharded_param, FlatShardedParam
        )

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{clean_name(self.key)} ({', '.join(self.names)})" if self.flat else self.names[0]

    @property
    def holds_elements(self) -> bool:
        """Whether this rank has a part of what it stands for: pieces may be empty."""
        if self.group is None:
            return True
        rank = self.group.mesh_info.shard_mesh_rank
        return any(self.group.layout.piece(index, rank).numel for index in self.indices)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Of the whole parameter of this name."""
        if self.group is None:
            return tuple(self.param.shape)
        return self.placement_of(name).shape

    def placement_of(self, name: str) -> ParamPlacement:
        """How the parameter of this name lies on meshes; of managed ones only."""
        assert self.group is not None, "a wrapper places it"
        return self.group.params[self.indices[self.names.index(name)]].placement


class ModelParams:
    """All parameters of a model, by themselves and by their names."""

    def __init__(self, model: nn.Module, method: str, *, alone: bool = False) -> None:
        """Read them off the model, which rests afterwards; ``method`` is for messages.

        Collective, unless this rank is ``alone``.
        """
        if not isinstance(model, nn.Module):
            raise OptionTypeError(f"model must be an nn.Module, got {type(model).__name__}.")
        self.wrappers = wrappers_in(model)
        wrappers = set[nn.Module](self.wrappers)
        for wrapper in self.wrappers:
            wrapper._require_idle(method)
            if wrapper._fsdp_state.summoned:
                raise LifecycleError(
                    f"{method} was called within summon_full_params. Call it outside."
                )
        groups = [group for wrapper in self.wrappers for group in wrapper._fsdp_state.groups]
        if alone:
            for group in groups:
                group.refresh_shards()
        else:
            full_params.refresh_shards_together(groups)
        keys = {param: name for name, param in model.named_parameters()}
        managed = {
            entry.param: entry
            for prefix, module in model.named_modules()
            if module in wrappers
            for entry in _managed_entries(clean_name(prefix), module, keys)
        }
        self.entries = {
            param: managed.get(param) or Entry(param, key, (clean_name(key),))
            for param, key in keys.items()
        }
        """In the order of the model."""
        self.by_name = {name: entry for entry in self.entries.values() for name in entry.names}
        self._by_key = {clean_name(entry.key): entry for entry in self.entries.values()}

    def of_key(self, key: str) -> Entry | None:
        """The entry of this name in the model, with or without wrappers in it, or None."""
        return self._by_key.get(clean_name(key))

    @property
    def process_groups(self) -> list[ProcessGroup]:
        """All groups that the wrappers communicate over, each once."""
        found = [
            process_group
            for wrapper in self.wrappers
            for group in wrapper._fsdp_state.groups
            for process_group in (
                group.mesh_info.shard_process_group,
                group.mesh_info.replicate_process_group,
            )
        ]
        return [each for each in dict.fromkeys(found) if each is not None]


def _managed_entries(
    prefix: str, wrapper: Any, keys: Mapping[nn.Parameter, str]
) -> Iterator[Entry]:
    for group in wrapper._fsdp_state.groups:
        names = [f"{prefix}.{param.name}" if prefix else param.name for param in group.params]
        for sharded_param in group.sharded_params:
            members = tuple(
                i for i, param in enumerate(group.params) if param.sharded_param is sharded_param
            )
            own = tuple(names[index] for index in members)
            yield Entry(
                sharded_param.param, keys[sharded_param.param], own, wrapper, group, members
            )


class Listing:
    """The parameters of an optimizer, group by group, in its order."""

    def __init__(
        self, groups: Sequence[Sequence[Entry]], options: Sequence[dict[str, Any]]
    ) -> None:
        self.groups = groups
        self.options = options
        """Parallel to `groups`: what else the optimizer says of each, or nothing."""
        self.entries = [entry for group in groups for entry in group]
        self._entries = set(self.entries)

    def __contains__(self, entry: Entry | None) -> bool:
        return entry in self._entries

    @property
    def names(self) -> list[str]:
        """Of all parameters that it stands for."""
        return [name for entry in self.entries for name in entry.names]


def listing_of(
    known: ModelParams, optim: Optimizer | None, optim_input: Any = None
) -> tuple[Listing, list[str]]:
    """The parameters of an optimizer, or of what it would be made of; and those the model does not have.

    Without either, those of the model.
    """
    if optim is not None and not isinstance(optim, Optimizer):
        raise OptionTypeError(f"optim must be an Optimizer, got {type(optim).__name__}.")
    if optim is not None and optim_input is not None:
        raise ConfigurationError(
            "The order of parameters is given by optim or by optim_input, got both. Leave optim_input out."
        )
    if optim is not None:
        given: list[Any] = optim.param_groups
    elif optim_input is not None:
        given = list(optim_input)
    else:
        given = list(known.entries)
    if given and isinstance(given[0], Tensor):
        given = [{"params": given}]
    groups, options, faults = [], [], []
    for number, group in enumerate(given):
        params: list[Any] = (
            [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        )
        groups.append([known.entries[param] for param in params if param in known.entries])
        options.append({name: value for name, value in group.items() if name != "params"})
        faults += [
            f"group {number}, parameter {index}: shape {tuple(param.shape)}, {param.dtype}"
            for index, param in enumerate(params)
            if param not in known.entries
        ]
    return Listing(groups, options), faults


def strangers_paragraph(faults: Iterable[str]) -> list[str]:
    """Of an error: an optimizer has parameters that the model does not have; or nothing."""
    return fault_paragraphs(
        faults,
        "All parameters of the optimizer must be parameters of the model, but these are not:",
        "Pass the model that contains them all, and make the optimizer after wrapping it.",
    )


def raise_strangers(faults: Iterable[str]) -> None:
    """Refuse an optimizer with parameters that the model does not have."""
    for paragraph in strangers_paragraph(faults):
        raise ConfigurationError(paragraph)


def is_first(groups: Iterable[ProcessGroup]) -> bool:
    """Whether this rank is the first along all axes."""
    return all(group.rank() == 0 for group in groups)


def missing_parts(state_dict: object) -> list[str]:
    """Why something is no optimizer's state dict, or nothing."""
    if isinstance(state_dict, Mapping) and "state" in state_dict:
        return []
    found = (
        f"a dict with keys {list(state_dict)}"
        if isinstance(state_dict, Mapping)
        else type(state_dict).__name__
    )
    return [
        f"An optimizer's state dict has the key 'state', and mostly 'param_groups', got {found}. Pass what "
        "optim_state_dict returned; for one that only rank 0 has, set "
        "FullOptimStateDictConfig(rank0_only=True)."
    ]


def warn_of_age(method: str, replacement: str, optim_input: Any = None) -> None:
    """Say that a method of the wrapper is there for older programs only."""
    warnings.warn(
        f"FullyShardedDataParallel.{method} is deprecated, as torch's is; use {replacement}, which makes and takes what "
        "set_state_dict_type says.",
        FutureWarning,
        stacklevel=3,
    )
    if optim_input is not None:
        warnings.warn(
            "optim_input is deprecated, as torch's is: the optimizer knows its parameters. Pass optim instead.",
            FutureWarning,
            stacklevel=3,
        )


def rekeyed(
    state_dict: dict[str, Any],
    key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: Any,
    optim: Optimizer | None,
) -> dict[str, Any]:
    """See `FullyShardedDataParallel.rekey_optim_state_dict`."""
    if not isinstance(key_type, OptimStateKeyType):
        raise OptionTypeError(
            f"optim_state_key_type must be an OptimStateKeyType of fullshard, got {key_type!r}."
        )
    faults = missing_parts(state_dict)
    if faults:
        raise ConfigurationError(*faults)
    known = ModelParams(model, "rekey_optim_state_dict", alone=True)
    listing, faults = listing_of(known, optim, optim_input)
    raise_strangers(faults)
    flat = [entry.key for entry in listing.entries if entry.flat]
    if flat:
        raise ConfigurationError(
            "Ids and names must mean the same parameters, but the FlatParameters of wrappers stand for several: "
            f"{flat}. Pass the model without wrappers, or wrapped with use_orig_params=True."
        )
    ids = {entry.names[0]: number for number, entry in enumerate(listing.entries)}
    wanted = list(ids.values()) if key_type is OptimStateKeyType.PARAM_ID else list(ids)
    table: dict[Any, Any] = dict(
        zip(ids, wanted, strict=True)
        if key_type is OptimStateKeyType.PARAM_ID
        else zip(ids.values(), wanted, strict=True)
    )
    table.update((key, key) for key in wanted)
    groups = state_dict.get("param_groups", ())
    used = dict.fromkeys([*state_dict["state"], *_params_in(groups)])
    unknown = [key for key in used if key not in table]
    if unknown:
        raise ConfigurationError(
            f"Every key of the state dict must be a parameter of the optimizer; these are not: {unknown}. "
            "Pass the model and the optimizer that the state dict is for."
        )
    result = {
        **state_dict,
        "state": {table[key]: value for key, value in state_dict["state"].items()},
    }
    if "param_groups" in state_dict:
        result["param_groups"] = [
            {**group, "params": sorted(table[key] for key in group["params"])} for group in groups
        ]
    return result


def _params_in(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    return [key for group in groups for key in group["params"]]
