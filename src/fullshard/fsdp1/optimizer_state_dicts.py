"""State dicts of optimizers, by the names of the unwrapped model.

    1. facts    which states this rank has of which parameters, without their data
    2. plan     what all ranks' facts say together; whatever cannot be saved is refused here, on all
    3. data     per wrapper and state, one gather of all parameters' elements

A state of a parameter is one of

    elements   a tensor with one value for each of the parameter's elements: divided as the parameter is
    value      anything else: a number, a 0-d tensor, ...; the same on all ranks

The way back is in `optimizer_loading`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from fullshard.api import FullOptimStateDictConfig, StateDictSettings, StateDictType
from fullshard.comm import collectives
from fullshard.engine import full_params
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.tensor_trees import map_tensors, tensors_in
from fullshard.errors import ConfigurationError, UsageError, fault_paragraphs
from fullshard.fsdp1.optimizer_agreement import Agreement, Membership, membership_of, same
from fullshard.fsdp1.optimizer_params import (
    Entry,
    Listing,
    ModelParams,
    is_first,
    listing_of,
    missing_parts,
    strangers_paragraph,
)
from fullshard.fsdp1.state_dicts import settings_of, sharded_rows
from fullshard.plan.mesh import global_rank
from fullshard.storage.buffers import in_memory_order

State = Mapping[str, Any]
"""What an optimizer keeps of one parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a state dict is made."""

    sharded: bool = False
    """Elements are spread over ranks, not whole on each."""
    as_dtensors: bool = True
    """Those of wrappers with a mesh are DTensors then, and not ShardedTensors."""
    on_cpu: bool = True
    first_only: bool = False
    """Only the first rank gets it."""


def style_of(settings: StateDictSettings) -> Style:
    """As the settings of the wrappers say."""
    config = settings.optim_state_dict_config
    return Style(
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
    known = ModelParams(model, "optim_state_dict")
    settings = settings_of(model)
    if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT and any(
        wrapper._device_mesh is not None for wrapper in known.wrappers
    ):
        raise UsageError(
            "Wrappers with a device_mesh have no LOCAL_STATE_DICT of their optimizer. Use SHARDED_STATE_DICT, which "
            "holds DTensors."
        )
    return saved(known, optim, state_dict, process_group, style_of(settings))


def saved(
    known: ModelParams,
    optim: Optimizer,
    state_dict: dict[str, Any] | None,
    process_group: ProcessGroup | None,
    style: Style,
) -> dict[str, Any]:
    """The state dict of an optimizer, or what ``state_dict``, its own, says instead."""
    process_groups = known.process_groups if process_group is None else [process_group]
    listing, strangers = listing_of(known, optim)
    state_dict = optim.state_dict() if state_dict is None else state_dict
    malformed = missing_parts(state_dict)
    if malformed or strangers:  # numbers would mean other parameters
        state_dict = {"state": {}}
    states, others = _by_entry(known, listing, state_dict["state"])
    groups: list[dict[str, Any]] | None = state_dict.get("param_groups")
    facts = _facts(states, _membership(known, listing, groups))
    facts.strangers, facts.malformed = strangers, malformed
    facts.unknown = _unknown_keys(known, listing, state_dict)
    facts.keeps = keeps = not style.first_only or is_first(process_groups)
    plan, agreement = _plan(known, facts, process_groups)
    result = _Result(style, keeps)
    for entry in states if keeps else ():
        if entry.group is None:
            result.add(entry.names[0], {name: result.moved(v) for name, v in states[entry].items()})
    for entries in _groups(known):
        _gather_group(entries, plan, states, result)
    if not keeps:
        return {}
    return {
        **{key: value for key, value in state_dict.items() if key not in ("state", "param_groups")},
        "state": {**{name: result.state[name] for name in _order(known, result.state)}, **others},
        **(
            {}
            if groups is None
            else {"param_groups": _named_groups(known, listing, groups, agreement)}
        ),
    }


def _by_entry(
    known: ModelParams, listing: Listing, states: Mapping[Any, State]
) -> tuple[dict[Entry, State], dict[Any, Any]]:
    """States by the parameters they are of, and entries of the state that are of no parameter."""
    found: dict[Entry, State] = {}
    others: dict[Any, Any] = {}
    for key, state in states.items():
        entry = _entry_of(known, listing, key)
        if entry is None:
            others[key] = state
        else:
            found[entry] = state
    return found, others


def _entry_of(known: ModelParams, listing: Listing, key: Any) -> Entry | None:
    """Of a key in a state dict of the optimizer's own: a number, or for some optimizers a name."""
    if isinstance(key, int):
        return listing.entries[key] if 0 <= key < len(listing.entries) else None
    entry = known.of_key(key) if isinstance(key, str) else None
    return entry if entry in listing else None


def _unknown_keys(known: ModelParams, listing: Listing, state_dict: Mapping[str, Any]) -> list[str]:
    """Keys that should be of parameters and are not; other than numbers may be of anything in the state."""
    keys = [key for group in state_dict.get("param_groups", ()) for key in group["params"]]
    keys += [key for key in state_dict["state"] if isinstance(key, int)]
    return [repr(key) for key in keys if _entry_of(known, listing, key) is None]


def _membership(
    known: ModelParams, listing: Listing, groups: Sequence[Mapping[str, Any]] | None
) -> Membership:
    if groups is None:
        return membership_of(known, listing, None)
    found = [[_entry_of(known, listing, key) for key in group["params"]] for group in groups]
    entries = [[entry for entry in group if entry is not None] for group in found]
    return membership_of(known, listing, entries, groups)


def _named_groups(
    known: ModelParams,
    listing: Listing,
    groups: Sequence[Mapping[str, Any]],
    agreement: Agreement,
) -> list[dict[str, Any]]:
    """The groups of a state dict by names, in the same order on all ranks."""
    assert agreement.groups is not None, "all ranks have groups"
    result = []
    for entries, place in zip(agreement.groups, agreement.places, strict=True):
        options = copy.deepcopy({k: v for k, v in groups[place].items() if k != "params"})
        if "param_names" in options:  # parallel to the optimizer's own parameters
            own = [_entry_of(known, listing, key) for key in groups[place]["params"]]
            called = dict(zip(own, options["param_names"], strict=True))
            options["param_names"] = [called.get(entry, entry.key) for entry in entries]
        result.append({**options, "params": [name for entry in entries for name in entry.names]})
    return result


def _order(known: ModelParams, state: Mapping[str, Any]) -> list[str]:
    """Names of parameters in torch's order, which is the same on all ranks.

    That of the model if all wrappers have FlatParameters. Otherwise by name, plain parameters first
    and those of a wrapper together.
    """
    in_model = [name for name in known.by_name if name in state]
    managed = [
        entry for entry in map(known.by_name.__getitem__, in_model) if entry.group is not None
    ]
    if all(entry.flat for entry in managed):
        return in_model
    by_owner: dict[Any, list[str]] = {None: []}
    for name in sorted(in_model):
        by_owner.setdefault(known.by_name[name].group, []).append(name)
    return [name for names in by_owner.values() for name in names]


# --- facts and plan -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Fact:
    """What a rank says of one state of one parameter."""

    dtype: torch.dtype | None
    """Of elements; None for a value."""
    value: Any
    """None for elements, unless they could be a value, too."""


@dataclass(slots=True)
class _Facts:
    """What a rank says."""

    membership: Membership
    states: dict[str, dict[str, _Fact]] = field(default_factory=dict)
    """By keys of entries and names of states; of sharded parameters only."""
    plain: set[str] = field(default_factory=set)
    """Keys of other parameters that have state."""
    keeps: bool = True
    """Whether the rank gets the state dict."""
    strangers: list[str] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    shapeless: list[str] = field(default_factory=list)
    """States that are divided in no known way."""


@dataclass(slots=True)
class _Planned:
    """What all ranks say of one parameter."""

    elements: dict[str, torch.dtype] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def _facts(states: Mapping[Entry, State], membership: Membership) -> _Facts:
    facts = _Facts(membership)
    for entry, state in states.items():
        if entry.group is None:
            facts.plain.add(entry.key)
            continue
        own = facts.states[entry.key] = {}
        for name, value in state.items():
            fact = _fact(entry, value)
            if fact is None:
                facts.shapeless.append(f"{entry.key}: {name} {_described(value)}")
            else:
                own[name] = fact
    return facts


def _fact(entry: Entry, value: Any) -> _Fact | None:
    if not isinstance(value, Tensor):
        if any(tensor.ndim for tensor in tensors_in(value)) and _is_divided(entry):
            return None
        return _Fact(None, map_tensors(on_cpu, value))
    if not value.ndim:
        return _Fact(None, on_cpu(value))
    if value.numel() == entry.param.numel():
        # A single number for a piece of a single element may be either: other ranks know.
        return _Fact(value.dtype, on_cpu(value) if value.numel() == 1 else None)
    return _Fact(None, on_cpu(value)) if value.numel() == 1 else None


def _is_divided(entry: Entry) -> bool:
    return entry.group is not None and entry.group.layout.world > 1


def on_cpu(tensor: Tensor) -> Tensor:
    """A tensor without history in host memory."""
    return tensor.detach().to("cpu")


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"of shape {tuple(value.shape)}"
    return f"is a {type(value).__name__} with tensors in it"


def _plan(
    known: ModelParams, own: _Facts, process_groups: Sequence[ProcessGroup]
) -> tuple[dict[str, _Planned], Agreement]:
    """What to gather, from the facts of all ranks, alike on all; by keys of entries. Collective."""
    everyone = collectives.values_by_rank(own, process_groups)
    _raise_unreadable([*everyone.values()])
    agreement = Agreement(
        {rank: facts.membership for rank, facts in everyone.items()}, known, global_rank()
    )
    differing = _Differing()
    plan = {}
    for entry in known.entries.values():
        planned = _planned(entry, everyone, differing)
        if planned is not None:
            plan[entry.key] = planned
    paragraphs = [*agreement.faults, *differing.paragraphs, *_unkept(known, everyone)]
    if paragraphs:
        raise ConfigurationError("\n".join(paragraphs))
    return plan, agreement


@dataclass(slots=True)
class _Differing:
    """States that ranks do not agree on."""

    missing: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)

    @property
    def paragraphs(self) -> list[str]:
        """Of an error, or nothing."""
        return [
            *fault_paragraphs(
                self.missing,
                "Every rank that holds elements of a parameter must have the state that others have of it; these are "
                "missing:",
                "Let the optimizers of all ranks take the same steps, or load the same checkpoint on all.",
            ),
            *fault_paragraphs(
                self.dtypes,
                "State of a parameter must be in one dtype on all ranks, but these are in several (None: no tensor of "
                "elements):",
                "Load the same checkpoint on all ranks, or make the optimizer anew.",
            ),
            *fault_paragraphs(
                self.values,
                "State that is no tensor of its parameter's elements must be the same on all ranks, but:",
                "Let the optimizers of all ranks take the same steps, or load the same checkpoint on all.",
            ),
        ]


def _planned(
    entry: Entry, everyone: Mapping[int, _Facts], differing: _Differing
) -> _Planned | None:
    """What ranks have of one parameter, if any has something; what they do not agree on is noted."""
    theirs = {rank: facts.states.get(entry.key, {}) for rank, facts in everyone.items()}
    # A rank without elements may have any state, or none; if all are without, any is right.
    holders = {r for r in theirs if entry.key not in everyone[r].membership.empty} or set(theirs)
    names = {name for rank in holders for name in theirs[rank]}
    if not names:
        return None
    planned = _Planned()
    for name in sorted(names):
        found = {
            rank: theirs[rank][name] for rank in theirs if rank in holders and name in theirs[rank]
        }
        differing.missing += [
            f"{entry.label}: {name} on rank {rank}" for rank in sorted(holders - found.keys())
        ]
        dtypes = {fact.dtype for fact in found.values()}
        first, value = next((rank, fact.value) for rank, fact in found.items())
        if len(dtypes) == 1 and None not in dtypes:
            (planned.elements[name],) = (dtype for dtype in dtypes if dtype is not None)
        elif any(fact.dtype is not None and fact.value is None for fact in found.values()):
            kinds = {rank: str(fact.dtype) for rank, fact in found.items()}
            differing.dtypes.append(f"{entry.label}: {name}, by rank: {kinds}")
        else:
            planned.values[name] = value
            differing.values += [
                f"{entry.label}: {name} is {value} on rank {first}, {fact.value} on rank {rank}"
                for rank, fact in found.items()
                if not same(value, fact.value)
            ]
    return planned


def _unkept(known: ModelParams, everyone: Mapping[int, _Facts]) -> list[str]:
    """State of plain parameters, of which each rank keeps its own, that only ranks have which keep nothing."""
    kept = {key for facts in everyone.values() if facts.keeps for key in facts.plain}
    labels = {entry.key: entry.label for entry in known.entries.values()}
    return fault_paragraphs(
        (
            f"{labels.get(key, key)} on rank {rank}"
            for rank, facts in everyone.items()
            for key in facts.plain - kept
        ),
        "Of parameters that no wrapper manages, the first rank's state is saved; it has none of these:",
        "Let the optimizers of all ranks take the same steps, or save the state dicts of all ranks.",
    )


def _raise_unreadable(everyone: Sequence[_Facts]) -> None:
    """Refuse state dicts of which it is not known what they mean."""
    paragraphs = [
        *dict.fromkeys(fault for facts in everyone for fault in facts.malformed),
        *fault_paragraphs(
            (key for facts in everyone for key in facts.unknown),
            "Keys of the given state dict must be numbers of the optimizer's parameters, or their names in the model; "
            "these are not:",
            "Pass what state_dict() of this very optimizer returned.",
        ),
        *strangers_paragraph(stranger for facts in everyone for stranger in facts.strangers),
        *fault_paragraphs(
            (shapeless for facts in everyone for shapeless in facts.shapeless),
            "State of sharded parameters must be a tensor with one value per element of the parameter (its piece on "
            "this rank), a single number, or no tensor at all:",
            "Leave these parameters to no wrapper (ignored_states), or use another optimizer.",
        ),
    ]
    if paragraphs:
        raise ConfigurationError("\n".join(paragraphs))


# --- data -----------------------------------------------------------------------------------------


class _Result:
    """Collects states by names of parameters."""

    def __init__(self, style: Style, keeps: bool) -> None:
        self.style = style
        self.keeps = keeps
        self.state: dict[str, dict[str, Any]] = {}

    def add(self, name: str, state: Mapping[str, Any]) -> None:
        """Add states of a parameter."""
        self.state.setdefault(name, {}).update(state)

    def moved(self, value: Any) -> Any:
        """A copy of a value in memory of its own, where the style wants it."""
        if isinstance(value, Tensor):
            return value.detach().to("cpu" if self.style.on_cpu else value.device, copy=True)
        return map_tensors(self.moved, copy.deepcopy(value))

    def elements(self, entry: Entry, index: int, whole: Tensor) -> Any:
        """Elements of one parameter, of this index in its group, as the style wants them."""
        assert entry.group is not None, "plain parameters are whole everywhere"
        placement = entry.group.params[index].placement
        if self.style.sharded and entry.group.mesh_info.shard_process_group is not None:
            if self.style.on_cpu:
                whole = whole.to("cpu")
            assert entry.wrapper is not None, "it has a group"
            as_dtensor = self.style.as_dtensors and entry.wrapper._device_mesh is not None
            return sharded_rows(entry.wrapper, whole, placement, as_dtensor=as_dtensor)
        return placement.as_before(self.moved(whole))


def _groups(known: ModelParams) -> Iterator[list[Entry]]:
    """Entries by the group they are in, in the same order on all ranks."""
    by_group: dict[FSDPParamGroup, list[Entry]] = {}
    for entry in known.entries.values():
        if entry.group is not None:
            by_group.setdefault(entry.group, []).append(entry)
    yield from by_group.values()


def _gather_group(
    entries: Sequence[Entry],
    plan: Mapping[str, _Planned],
    states: Mapping[Entry, State],
    result: _Result,
) -> None:
    """Add the states of one group's parameters: one gather for each state, and for each dtype of it."""
    planned = [(entry, plan[entry.key]) for entry in entries if entry.key in plan]
    gathers = dict.fromkeys(kind for _, each in planned for kind in each.elements.items())
    for entry, each in planned:
        if not entry.flat:
            _add_values(entry, each, states, result)
    for name, dtype in sorted(gathers, key=str):
        members = [entry for entry, each in planned if each.elements.get(name) == dtype]
        wholes = _whole_elements(members, name, dtype, states)
        if result.keeps:
            for entry, index, member in _members(members):
                whole = wholes[index]
                assert whole is not None, "its segment was gathered"
                result.add(member, {name: result.elements(entry, index, whole)})
    for entry, each in planned:
        if entry.flat:
            _add_values(entry, each, states, result)


def _members(entries: Sequence[Entry]) -> Iterator[tuple[Entry, int, str]]:
    for entry in entries:
        for index, name in zip(entry.indices, entry.names, strict=True):
            yield entry, index, name


def _add_values(
    entry: Entry, planned: _Planned, states: Mapping[Entry, State], result: _Result
) -> None:
    """Add what is no elements: tensors before the rest for a FlatParameter, after it otherwise, as torch does."""
    names = sorted(
        planned.values,
        key=lambda name: (isinstance(planned.values[name], Tensor) is not entry.flat, name),
    )
    own = states.get(entry, {}) if entry.holds_elements else {}
    for member in entry.names if result.keeps else ():
        for name in names:
            value = planned.values[name]
            if name in own and same(own[name], value):  # which may be on another device
                value = own[name]
            result.add(member, {name: result.moved(value)})


def _whole_elements(
    entries: Sequence[Entry], name: str, dtype: torch.dtype, states: Mapping[Entry, State]
) -> list[Tensor | None]:
    """Per parameter of the group, one of its states whole; None of others. Collective."""
    group = entries[0].group
    assert group is not None, "plain parameters are whole everywhere"
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
    """Where an entry's elements are in this rank's piece of its segment."""
    assert entry.group is not None, "plain parameters have no piece"
    if entry.flat:
        return piece
    held = entry.group.layout.piece(entry.indices[0], entry.group.mesh_info.shard_mesh_rank)
    return piece.narrow(0, held.offset, held.numel)


def _in_buffer_order(entry: Entry, local: Tensor) -> Tensor:
    """What an optimizer keeps of an entry, flat, in the order of its elements in the group's buffer."""
    assert entry.group is not None, "plain parameters are in no buffer"
    if entry.flat or entry.group.layout.world > 1:
        return local.reshape(-1)
    return in_memory_order(
        local.reshape(entry.param.shape), entry.group.layout.slots[entry.indices[0]].strides
    )
