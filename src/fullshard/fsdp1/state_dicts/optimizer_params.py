"""Parameters of the unwrapped model that each parameter of an optimizer stands for.

entry   one parameter as the optimizer has it, with the names it stands for: several for a
        `FlatParameter`, one for any other
plain   a parameter that no wrapper manages: every rank has all of it
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
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.errors import ConfigurationError, LifecycleError, fault_paragraphs
from fullshard.features import full_params
from fullshard.fsdp1.wrapper_base import WrapperBase, wrappers_in
from fullshard.layout.names import clean_name
from fullshard.layout.placement import ParamPlacement
from fullshard.policies import check_type
from fullshard.storage.flat_parameter import FlatShardedParam


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One parameter of an optimizer."""

    param: nn.Parameter
    key: str
    """The name in the model, wrappers included."""
    names: tuple[str, ...]
    """The parameters that it stands for, by their names without wrappers."""
    wrapper: WrapperBase | None = None
    """The wrapper that manages the parameter; None for a plain one."""
    group: FSDPParamGroup | None = None
    indices: tuple[int, ...] = ()
    """Parallel to `names`: the indices of these parameters in the group."""

    @property
    def flat(self) -> bool:
        """Whether the parameter is a `FlatParameter`."""
        return self.group is not None and isinstance(
            self.group.params[0].sharded_param, FlatShardedParam
        )

    @property
    def label(self) -> str:
        """The name in messages."""
        return f"{clean_name(self.key)} ({', '.join(self.names)})" if self.flat else self.names[0]

    @property
    def holds_elements(self) -> bool:
        """Whether this rank holds an element of the parameter: its piece may be empty."""
        if self.group is None:
            return True
        rank = self.group.mesh_info.shard_mesh_rank
        return any(self.group.layout.piece(index, rank).numel for index in self.indices)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full parameter of this name."""
        if self.group is None:
            return tuple(self.param.shape)
        return self.placement_of(name).shape

    def placement_of(self, name: str) -> ParamPlacement:
        """Return the placement of the parameter of this name, which a wrapper must manage."""
        assert self.group is not None, "a plain parameter has no placement"
        return self.group.params[self.indices[self.names.index(name)]].placement


class ModelParams:
    """All parameters of a model, with the wrappers that manage them."""

    def __init__(self, model: nn.Module, method: str, *, alone: bool = False) -> None:
        """Shard the model's parameters, adopt what users assigned, and read all parameters.

        Args:
            model: A model with or without wrappers.
            method: The public method that needs them, for messages.
            alone: Whether only this rank calls; otherwise the call is collective.
        """
        check_type("model", model, nn.Module, home="torch.nn")
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
        """Entries by parameter, in the order of the model."""
        self.by_name = {name: entry for entry in self.entries.values() for name in entry.names}
        self._by_key = {clean_name(entry.key): entry for entry in self.entries.values()}

    def of_key(self, key: str) -> Entry | None:
        """Return the entry of this name, with or without wrappers in it, or None."""
        return self._by_key.get(clean_name(key))

    @property
    def process_groups(self) -> list[ProcessGroup]:
        """The process groups that the wrappers communicate over, each once."""
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
    """Yield the entries of one wrapper, whose name without wrappers is ``prefix``."""
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
        """Parallel to `groups`: the options of each group."""
        self.entries = [entry for group in groups for entry in group]
        self._entries = set(self.entries)

    def __contains__(self, entry: Entry | None) -> bool:
        return entry in self._entries

    @property
    def names(self) -> list[str]:
        """The names of all parameters that the entries stand for."""
        return [name for entry in self.entries for name in entry.names]


def listing_of(
    model_params: ModelParams, optim: Optimizer | None, optim_input: Any = None
) -> tuple[Listing, list[str]]:
    """Return the parameters of an optimizer, and lines about parameters that the model does not have.

    Without an optimizer, the parameters are those of ``optim_input``, which it would be made of; without either,
    those of the model.
    """
    if optim is not None:
        check_type("optim", optim, Optimizer, home="torch.optim")
    if optim is not None and optim_input is not None:
        raise ConfigurationError(
            "Pass optim or optim_input for the order of parameters, got both. Leave optim_input out."
        )
    if optim is not None:
        given: list[Any] = optim.param_groups
    elif optim_input is not None:
        given = list(optim_input)
    else:
        given = list(model_params.entries)
    if given and isinstance(given[0], Tensor):
        given = [{"params": given}]
    groups, options, faults = [], [], []
    for number, group in enumerate(given):
        params: list[Any] = (
            [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        )
        groups.append(
            [model_params.entries[param] for param in params if param in model_params.entries]
        )
        options.append({name: value for name, value in group.items() if name != "params"})
        faults += [
            f"group {number}, parameter {index}: shape {tuple(param.shape)}, {param.dtype}"
            for index, param in enumerate(params)
            if param not in model_params.entries
        ]
    return Listing(groups, options), faults


def unknown_param_paragraphs(faults: Iterable[str]) -> list[str]:
    """Return a paragraph about an optimizer's parameters that the model does not have; nothing without faults."""
    return fault_paragraphs(
        faults,
        "All parameters of the optimizer must be parameters of the model, but these are not:",
        "Pass the model that contains them all, and build the optimizer after wrapping it.",
    )


def refuse_unknown_params(faults: Iterable[str]) -> None:
    """Refuse an optimizer with parameters that the model does not have."""
    for paragraph in unknown_param_paragraphs(faults):
        raise ConfigurationError(paragraph)


def is_first(groups: Iterable[ProcessGroup]) -> bool:
    """Return whether this rank is the first one in all process groups."""
    return all(group.rank() == 0 for group in groups)


def state_dict_faults(state_dict: object) -> list[str]:
    """Return why an object is no optimizer's state dict, or nothing."""
    if isinstance(state_dict, Mapping) and "state" in state_dict:
        return []
    found = (
        f"a dict with keys {list(state_dict)}"
        if isinstance(state_dict, Mapping)
        else type(state_dict).__name__
    )
    return [
        f"An optimizer's state dict must have the key 'state', and usually has 'param_groups', got {found}. Pass what "
        "optim_state_dict returned. If only rank 0 has it, set FullOptimStateDictConfig(rank0_only=True)."
    ]


def warn_deprecated(method: str, replacement: str, optim_input: Any = None) -> None:
    """Warn that a method of the wrapper is deprecated, and that ``optim_input`` is if it is given."""
    warnings.warn(
        f"FullyShardedDataParallel.{method} is deprecated, as in torch. Use {replacement} and choose the kind of state "
        "dict with set_state_dict_type.",
        FutureWarning,
        stacklevel=3,
    )
    if optim_input is not None:
        warnings.warn(
            "optim_input is deprecated, as in torch: the optimizer knows its parameters. Pass optim instead.",
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
    check_type("optim_state_key_type", key_type, OptimStateKeyType)
    faults = state_dict_faults(state_dict)
    if faults:
        raise ConfigurationError(*faults)
    model_params = ModelParams(model, "rekey_optim_state_dict", alone=True)
    listing, faults = listing_of(model_params, optim, optim_input)
    refuse_unknown_params(faults)
    flat = [entry.key for entry in listing.entries if entry.flat]
    if flat:
        raise ConfigurationError(
            "Every id must mean one named parameter, but these FlatParameters of wrappers stand for several: "
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
    """Return the keys of all parameters in the groups of a state dict."""
    return [key for group in groups for key in group["params"]]
