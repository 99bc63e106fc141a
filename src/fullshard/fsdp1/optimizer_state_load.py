"""From an optimizer's state dict by names to what the optimizer of this rank loads.

    1. outline   the state dict without data: shapes and dtypes in the place of tensors
    2. check     every name, shape and group is accounted for, and ranks agree; or all raise the same error
    3. data      per wrapper and state, whole tensors are fetched and each rank keeps its part

Where whole tensors come from is all that differs between the kinds of state dicts:

    on this rank     whole tensors: cut, without communication
    over ranks       ShardedTensors and DTensors: gathered
    on rank 0        sent to everybody
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.api import FullOptimStateDictConfig, StateDictType
from fullshard.comm import collectives
from fullshard.engine.tensor_trees import map_tensors
from fullshard.errors import ConfigurationError, fault_paragraphs
from fullshard.fsdp1.optimizer_agreement import Agreement, Membership, membership_of, same
from fullshard.fsdp1.optimizer_params import (
    Entry,
    Listing,
    ModelParams,
    is_first,
    listing_of,
    missing_parts,
    raise_strangers,
)
from fullshard.fsdp1.optimizer_state_dicts import on_cpu
from fullshard.fsdp1.state_dicts import is_spread, settings_of, whole_of_rows
from fullshard.plan.mesh import global_rank
from fullshard.storage.buffers import shard_of


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    state_dict: dict[str, Any],
    process_group: ProcessGroup | None,
    *,
    by_name: bool,
) -> dict[str, Any]:
    """See `FullyShardedDataParallel.optim_state_dict_to_load`."""
    known = ModelParams(model, "optim_state_dict_to_load")
    settings = settings_of(model)
    config = settings.optim_state_dict_config
    return loadable(
        known,
        optim,
        None,
        state_dict,
        process_group,
        from_first=isinstance(config, FullOptimStateDictConfig) and config.rank0_only,
        over_ranks=settings.state_dict_type is not StateDictType.FULL_STATE_DICT,
        by_name=by_name,
    )


def loadable(
    known: ModelParams,
    optim: Optimizer | None,
    optim_input: Any,
    state_dict: Mapping[str, Any] | None,
    process_group: ProcessGroup | None,
    *,
    from_first: bool = False,
    over_ranks: bool = False,
    by_name: bool = False,
) -> dict[str, Any]:
    """What the optimizer loads on this rank.

    With ``from_first``, the state dict of the first rank is sent to the others, whose own are not
    read. With ``over_ranks``, its tensors are spread over ranks.
    """
    listing, strangers = listing_of(known, optim, optim_input)
    process_groups = known.process_groups if process_group is None else [process_group]
    foreign = [] if optim is None else [key for key in optim.state if not isinstance(key, Tensor)]
    if from_first:
        source: _Source = _FromFirst(state_dict, foreign, process_groups, known)
    else:
        source = _OverRanks(state_dict, foreign)
        if not over_ranks and not any(map(is_spread, source.tensors.values())):
            source = _OnThisRank(state_dict, foreign)
    keys = _agree_on_keys(source, known, listing, strangers, process_groups)
    outline = source.outline
    assert outline is not None, "its faults were raised"
    states = _cut(outline, known, listing, keys, source)
    numbers: dict[Entry, Any] = {
        entry: entry.key if by_name else number for number, entry in enumerate(listing.entries)
    }
    result = {
        **outline.others,
        "state": {
            **{numbers[entry]: state for entry, state in states.items()},
            **{key: copy.deepcopy(value) for key, value in outline.foreign.items()},
        },
    }
    if outline.groups is not None or optim is not None:
        result["param_groups"] = [
            {**options, "params": [numbers[entry] for entry in entries]}
            for entries, options in zip(
                listing.groups, _matched(outline.groups or [], listing)[0], strict=True
            )
        ]
    return result


def _agree_on_keys(
    source: _Source,
    known: ModelParams,
    listing: Listing,
    strangers: Sequence[str],
    process_groups: Sequence[ProcessGroup],
) -> frozenset[str]:
    """Raise on all ranks what is wrong on any; or return the keys of all parameters to be loaded. Collective."""
    outline, faults = source.outline, list(source.faults)
    if outline is not None:
        faults += _faults(outline, known, listing)
    own = _Said(
        membership_of(known, listing, listing.groups),
        faults,
        strangers,
        {} if outline is None else outline.shapes,
    )
    everyone = collectives.values_by_rank(own, process_groups)
    raise_strangers(stranger for said in everyone.values() for stranger in said.strangers)
    agreement = Agreement(
        {rank: said.membership for rank, said in everyone.items()}, known, global_rank()
    )
    paragraphs = [*_by_rank({rank: said.faults for rank, said in everyone.items()})]
    if not paragraphs:
        managed = {name for name, entry in known.by_name.items() if entry.group is not None}
        paragraphs = _differences({r: said.shapes for r, said in everyone.items()}, managed)
    paragraphs += agreement.faults
    if paragraphs:
        raise ConfigurationError("\n".join(paragraphs))
    return agreement.keys


@dataclass(frozen=True, slots=True)
class _Said:
    """What a rank says before anything is loaded."""

    membership: Membership
    faults: list[str]
    strangers: Sequence[str]
    shapes: dict[tuple[str, str], _Shape]


def _by_rank(faults: Mapping[int, Sequence[str]]) -> Iterator[str]:
    """What is wrong on ranks, with those on which it is, unless it is the same on all."""
    for fault in dict.fromkeys(fault for theirs in faults.values() for fault in theirs):
        ranks = [rank for rank, theirs in faults.items() if fault in theirs]
        yield fault if len(ranks) == len(faults) else f"On ranks {ranks}: {fault}"


# --- outline --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shape:
    """Stands for a tensor in an outline."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    spread: bool
    """Whether ranks have parts of it, so that fetching it is collective."""


@dataclass(frozen=True, slots=True)
class _Outline:
    """A state dict without the data of its tensors; 0-d ones are values, and stay."""

    states: dict[str, dict[str, Any]]
    """By names of parameters."""
    foreign: dict[Any, Any]
    """Entries of the state that are no parameter's."""
    groups: list[dict[str, Any]] | None
    """None if it says nothing about groups: the optimizer keeps its own."""
    others: dict[str, Any]
    """What the state dict has beside state and groups."""

    @property
    def shapes(self) -> dict[tuple[str, str], _Shape]:
        """Of all tensors, by names of parameters and of states."""
        return {
            (name, each): value
            for name, state in self.states.items()
            for each, value in state.items()
            if isinstance(value, _Shape)
        }


def _outline_of(state_dict: Mapping[str, Any], foreign_keys: Collection[Any]) -> _Outline:
    states, foreign = {}, {}
    for key, state in state_dict["state"].items():
        if isinstance(state, Mapping) and key not in foreign_keys:
            states[key] = {name: _outlined(value) for name, value in state.items()}
        else:
            foreign[key] = map_tensors(on_cpu, state)
    others = {key: v for key, v in state_dict.items() if key not in ("state", "param_groups")}
    groups = state_dict.get("param_groups")
    return _Outline(states, foreign, groups and [dict(each) for each in groups], others)


def _outlined(value: Any) -> Any:
    if is_spread(value) or (isinstance(value, Tensor) and value.ndim):
        return _Shape(tuple(value.shape), value.dtype, is_spread(value))
    return map_tensors(on_cpu, value)


class _Source:
    """Where the tensors of a state dict are."""

    def __init__(self, state_dict: Mapping[str, Any] | None, foreign: Collection[Any]) -> None:
        """Read the state dict; ``foreign`` keys of its state are known to be no parameter's."""
        self.outline: _Outline | None = None
        self.faults = missing_parts(state_dict)
        """Why there is no outline."""
        self.tensors: dict[tuple[str, str], Any] = {}
        """By names of parameters and of states."""
        if state_dict is None or self.faults:
            return
        self.outline = _outline_of(state_dict, foreign)
        self.tensors = {
            (name, each): state_dict["state"][name][each] for name, each in self.outline.shapes
        }

    def fetch(
        self, wanted: Sequence[tuple[str, str]], shapes: Sequence[_Shape], device: torch.device
    ) -> Iterator[Tensor]:
        """Whole tensors of one dtype, by name of parameter and of state."""
        raise NotImplementedError


class _OnThisRank(_Source):
    def fetch(
        self, wanted: Sequence[tuple[str, str]], shapes: Sequence[_Shape], device: torch.device
    ) -> Iterator[Tensor]:
        """See `_Source`."""
        return (self.tensors[key].detach() for key in wanted)


class _OverRanks(_OnThisRank):
    def fetch(
        self, wanted: Sequence[tuple[str, str]], shapes: Sequence[_Shape], device: torch.device
    ) -> Iterator[Tensor]:
        """See `_Source`. Collective."""
        return (whole_of_rows(self.tensors[key], device).detach() for key in wanted)


class _FromFirst(_Source):
    def __init__(
        self,
        state_dict: Mapping[str, Any] | None,
        foreign: Collection[Any],
        process_groups: Sequence[ProcessGroup],
        known: ModelParams,
    ) -> None:
        """Send the outline to everybody, or why there is none. Collective."""
        self._process_groups = process_groups
        self._has_tensors = is_first(process_groups)
        if self._has_tensors:
            super().__init__(state_dict, foreign)
            for (name, each), value in self.tensors.items():
                entry = known.by_name.get(name)
                if entry is not None and entry.group is not None:
                    # Tensor parallelism has first ranks of its own, which have a state together.
                    if entry.placement_of(name).is_as_before(value):
                        self.tensors[name, each] = whole_of_rows(value, entry.group.device)
            self.faults += fault_paragraphs(
                (f"{name}: {each}" for (name, each), v in self.tensors.items() if is_spread(v)),
                "A state dict that rank 0 sends to the others must have whole tensors, but these are spread over "
                "ranks:",
                "Choose SHARDED_STATE_DICT with set_state_dict_type to load it.",
            )
        own = (self.outline, self.faults) if self._has_tensors else None
        sent = collectives.values_by_rank(own, process_groups)
        self.outline, self.faults = next(each for each in sent.values() if each is not None)

    def fetch(
        self, wanted: Sequence[tuple[str, str]], shapes: Sequence[_Shape], device: torch.device
    ) -> Iterator[Tensor]:
        """See `_Source`. Collective: all in one message."""
        numels = [torch.Size(each.shape).numel() for each in shapes]
        message = torch.empty(sum(numels), dtype=shapes[0].dtype, device=device)
        parts = message.split(numels)
        if self._has_tensors:
            for key, part in zip(wanted, parts, strict=True):
                part.copy_(self.tensors[key].detach().reshape(-1))
        for process_group in self._process_groups:
            collectives.broadcast(message.view(torch.uint8), process_group)
        return (part.view(each.shape) for part, each in zip(parts, shapes, strict=True))


# --- check ----------------------------------------------------------------------------------------


def _faults(outline: _Outline, known: ModelParams, listing: Listing) -> list[str]:
    """Everything that is wrong with a state dict, in paragraphs."""
    # An optimizer may lack what its rank holds nothing of; whether others' have it, they know.
    empty = [n for e in known.entries.values() if not e.holds_elements for n in e.names]
    names = {*listing.names, *empty}
    in_groups = [name for group in outline.groups or () for name in group["params"]]
    unknown = [name for name in (*outline.states, *in_groups) if name not in names]
    return [
        *fault_paragraphs(
            (f"{n} (not of this optimizer)" for n in unknown if n in known.by_name),
            "State is loaded for parameters of the optimizer, but these are in the model only:",
            "Load it with the optimizer that it was saved from, or remove them from 'state' and 'param_groups'.",
        ),
        *fault_paragraphs(
            (str(name) for name in unknown if name not in known.by_name),
            "Keys of an optimizer's state dict must be names of the model's parameters, without wrappers; these are "
            "not:",
            "Load it for the model that it was saved from, or remove them from 'state' and 'param_groups'. "
            "rekey_optim_state_dict turns ids into names.",
        ),
        *fault_paragraphs(
            (fault for entry in listing.entries for fault in _entry_faults(entry, outline)),
            "State must be a tensor of its parameter's shape, a single number or no tensor, and that of parameters "
            "in one FlatParameter must be of the same kinds, dtypes and numbers:",
            "Load it for the model that it was saved from; a FlatParameter has one state for all of its "
            "parameters, use_orig_params=True one for each.",
        ),
        *([] if outline.groups is None else _matched(outline.groups, listing)[1]),
    ]


def _entry_faults(entry: Entry, outline: _Outline) -> Iterator[str]:
    if entry.group is None:
        return
    states = {name: outline.states[name] for name in entry.names if name in outline.states}
    for name, state in states.items():
        shape = entry.shape_of(name)
        for each, value in state.items():
            if isinstance(value, _Shape) and value.shape != shape and not _is_number(value):
                yield f"{name}: {each} has shape {value.shape}, the parameter has {shape}"
    if not entry.flat or not states:
        return
    first, its_state = next(iter(states.items()))
    for name in entry.names:
        state = states.get(name, {})
        for each in dict.fromkeys([*its_state, *state]):
            if each not in state or each not in its_state:
                yield f"{name if each not in state else first}: {each} is missing, others have it"
            elif not _agree(its_state[each], state[each]):
                yield f"{name}: {each} is {state[each]}, that of {first} is {its_state[each]}"


def _is_number(value: _Shape) -> bool:
    return torch.Size(value.shape).numel() == 1


def _agree(one: Any, other: Any) -> bool:
    """Whether states of two parameters can be one state of both."""
    if isinstance(one, _Shape) and isinstance(other, _Shape):
        return one.dtype == other.dtype
    return type(one) is type(other) and same(one, other)


def _differences(
    everyones: Mapping[int, Mapping[tuple[str, str], _Shape]], managed: Collection[str]
) -> list[str]:
    """What ranks are about to load that is not the same on all.

    Of plain parameters each rank may have its own, unless it is fetched from all.
    """
    keys = dict.fromkeys(key for shapes in everyones.values() for key in shapes)
    lines = []
    for name, each in keys:
        found = {rank: shapes.get((name, each)) for rank, shapes in everyones.items()}
        spread = [rank for rank, shape in found.items() if shape is not None and shape.spread]
        if len(set(found.values())) > 1 and (name in managed or spread):
            lacking = [rank for rank, shape in found.items() if shape is None]
            parts = f", only ranks {spread} have sharded tensors" if spread else ""
            lines.append(f"{name}: {each}" + (f", not on ranks {lacking}" if lacking else parts))
    return fault_paragraphs(
        lines,
        "All ranks must load the same tensors, but some lack these or have others:",
        "Pass every rank's own part of the same checkpoint.",
    )


def _matched(
    saved: Sequence[Mapping[str, Any]], listing: Listing
) -> tuple[list[dict[str, Any]], list[str]]:
    """The options of each of the optimizer's groups, and faults.

    They are the saved ones; its own, where nothing is saved of any parameter in it.
    """
    homes = {name: number for number, group in enumerate(saved) for name in group["params"]}
    empty = [number for number, group in enumerate(saved) if not group["params"]]
    matched, taken, faults = [], list[int](), []
    for number, entries in enumerate(listing.groups):
        names = [name for entry in entries for name in entry.names if name in homes]
        found = list(dict.fromkeys(homes[name] for name in names))
        if not entries:
            found, empty = empty[:1], empty[1:]
        if len(found) > 1:
            parts = {home: [n for n in names if homes[n] == home] for home in found}
            faults.append(f"group {number} of the optimizer is in groups {parts}")
            continue
        taken += found
        own = listing.options[number]
        options = {
            name: value
            for name, value in (saved[found[0]] if found else own).items()
            if name not in ("params", "param_names")
        }
        if "param_names" in own:  # they are of wrappers, and so of this optimizer
            options["param_names"] = list(own["param_names"])
        matched.append(copy.deepcopy(options))
    faults += [
        f"group {home} of the state dict is in {taken.count(home)} groups of the optimizer"
        for home in range(len(saved))
        if taken.count(home) > 1
    ]
    return matched, fault_paragraphs(
        faults,
        "Groups of the state dict and of the optimizer must be of the same parameters, but:",
        "Make the optimizer with the groups of the one that was saved, and change its options afterwards.",
    )


# --- data -----------------------------------------------------------------------------------------


def _cut(
    outline: _Outline,
    known: ModelParams,
    listing: Listing,
    keys: Collection[str],
    source: _Source,
) -> dict[Entry, dict[str, Any]]:
    """This rank's part of all states, in memory of their own; nothing of parameters whose piece is empty.

    What is fetched, and in which order, must not depend on this rank's optimizer, since fetching may be
    collective: all of ``keys``, in the order of the model.
    """
    parts: dict[Entry, dict[str, Any]] = {}
    by_owner: dict[Any, list[Entry]] = {}
    for entry in known.entries.values():
        if entry.key not in keys or not any(name in outline.states for name in entry.names):
            continue
        parts[entry] = {}
        if isinstance(entry.param, DTensor):  # of another parallelism, and so is its state
            (name,) = entry.names
            kept = {n: source.tensors.get((name, n)) for n in outline.states[name]}
            parts[entry] = {n: v.detach().clone() for n, v in kept.items() if v is not None}
        else:
            by_owner.setdefault(entry.group, []).append(entry)
    for entries in by_owner.values():
        managed = known.wrappers[:1] if entries[0].wrapper is None else [entries[0].wrapper]
        device = managed[0].compute_device if managed else entries[0].param.device
        for each, members in _batches(outline, entries):
            wanted = [(name, each) for _, name in members]
            shapes = [outline.states[name][each] for _, name in members]
            wholes = source.fetch(wanted, shapes, device)
            for (entry, name), whole in zip(members, wholes, strict=True):
                if _is_of_elements(outline, entry, each):
                    _keep_part(parts[entry], each, entry, name, whole)
                else:
                    parts[entry][each] = whole.to(entry.param.device, copy=True)
    return {
        entry: {
            each: part[each] if each in part else copy.deepcopy(value)
            for each, value in outline.states[entry.names[0]].items()
        }
        for entry, part in parts.items()
        if entry in listing and (entry.holds_elements or entry.flat)  # which has padding, at least
    }


def _batches(
    outline: _Outline, entries: Sequence[Entry]
) -> Iterator[tuple[str, list[tuple[Entry, str]]]]:
    """What to fetch together: tensors of one state and dtype, in the same order on all ranks."""
    batches: dict[tuple[str, torch.dtype], list[tuple[Entry, str]]] = {}
    for entry in entries:
        for name in entry.names:
            for each, value in sorted(outline.states.get(name, {}).items()):
                if isinstance(value, _Shape):
                    batches.setdefault((each, value.dtype), []).append((entry, name))
    for (each, _), members in batches.items():
        yield each, members


def _is_of_elements(outline: _Outline, entry: Entry, each: str) -> bool:
    """Whether a state is divided as its parameter is; a single number, and all of a plain one, is not."""
    return entry.group is not None and all(
        outline.states[name][each].shape == entry.shape_of(name) for name in entry.names
    )


def _keep_part(part: dict[str, Any], each: str, entry: Entry, name: str, whole: Tensor) -> None:
    """Keep what this rank's optimizer has of a whole state."""
    group, param = entry.group, entry.param
    assert group is not None, "plain parameters are not divided"
    index = entry.indices[entry.names.index(name)]
    rank = group.mesh_info.shard_mesh_rank
    if each not in part:  # laid out as the parameter is, zero where a FlatParameter has padding
        part[each] = torch.zeros_like(param, dtype=whole.dtype, requires_grad=False)
    flat = part[each].as_strided((param.numel(),), (1,))
    if entry.flat:
        held = group.layout.piece(index, rank)
        flat = flat.narrow(0, held.offset, held.numel)
    local = entry.placement_of(name).local_part(whole)
    flat.copy_(shard_of(group.layout, index, rank, local))
