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
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from .. import whole_params
from ..buffers import in_memory_order
from ..errors import ConfigurationError
from ..param_group import FSDPParamGroup
from ..tree import map_tensors, tensors_in
from ..wrapper_options import (
    FullOptimStateDictConfig,
    StateDictSettings,
    StateDictType,
)
from .optimizer_params import (
    Entry,
    Listing,
    ModelParams,
    is_first,
    listed,
    listing_of,
    missing_parts,
    strangers_paragraph,
    values_of_all,
)
from .state_dicts import settings_of, sharded_rows

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
        raise ConfigurationError(
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
        state_dict = {"state": {}, "param_groups": []}
    states, others = _by_entry(known, listing, state_dict["state"])
    facts = _facts(states)
    facts.strangers, facts.malformed = strangers, malformed
    facts.unknown = _unknown_keys(known, listing, state_dict)
    plan = _plan(known, facts, process_groups)
    keeps = not style.first_only or is_first(process_groups)
    result = _Result(style, keeps)
    for entry in states if keeps else ():
        if entry.group is None:
            result.add(entry.names[0], {name: result.moved(v) for name, v in states[entry].items()})
    for group in _groups(known):
        _gather_group(group, plan, states, result)
    if not keeps:
        return {}
    return {
        **{key: value for key, value in state_dict.items() if key not in ("state", "param_groups")},
        "state": {
            **{name: result.state[name] for name in _order(known, listing, result.state)},
            **others,
        },
        "param_groups": _named_groups(known, listing, state_dict["param_groups"]),
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
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    keys += [key for key in state_dict["state"] if isinstance(key, int)]
    return [repr(key) for key in keys if _entry_of(known, listing, key) is None]


def _named_groups(
    known: ModelParams, listing: Listing, groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    named = []
    for group in groups:
        entries = [_entry_of(known, listing, key) for key in group["params"]]
        names = [name for entry in entries if entry is not None for name in entry.names]
        named.append({**copy.deepcopy(dict(group)), "params": names})
    return named


def _order(known: ModelParams, listing: Listing, state: Mapping[str, Any]) -> list[str]:
    """Names of parameters in torch's order.

    The optimizer's if all wrappers have FlatParameters. Otherwise by name, plain parameters first
    and those of a wrapper together.
    """
    in_listing = [name for name in listing.names if name in state]
    managed = [entry for entry in listing.entries if entry.group is not None]
    if all(entry.flat for entry in managed):
        return in_listing
    by_owner: dict[Any, list[str]] = {None: []}
    for name in sorted(in_listing):
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
    holds_elements: bool
    """Whether the rank has a part of the parameter: otherwise its optimizer may never have touched the state."""


@dataclass(slots=True)
class _Facts:
    """What a rank says."""

    states: dict[str, dict[str, _Fact]] = field(default_factory=dict)
    """By keys of entries and names of states; of sharded parameters only."""
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


def _facts(states: Mapping[Entry, State]) -> _Facts:
    facts = _Facts()
    for entry, state in states.items():
        if entry.group is None:
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
    holds = entry.holds_elements
    if not isinstance(value, Tensor):
        if any(tensor.ndim for tensor in tensors_in(value)) and _is_divided(entry):
            return None
        return _Fact(None, map_tensors(on_cpu, value), holds)
    if not value.ndim:
        return _Fact(None, on_cpu(value), holds)
    if value.numel() == entry.param.numel():
        # A single number for a piece of a single element may be either: other ranks know.
        return _Fact(value.dtype, on_cpu(value) if value.numel() == 1 else None, holds)
    return _Fact(None, on_cpu(value), holds) if value.numel() == 1 else None


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
) -> dict[str, _Planned]:
    """What to gather, from the facts of all ranks, alike on all; by keys of entries. Collective."""
    everyone = values_of_all(own, process_groups)
    mixed: list[str] = []
    differing: list[str] = []
    plan = {}
    for entry in known.entries.values():
        theirs = [facts.states[entry.key] for facts in everyone if entry.key in facts.states]
        names = dict.fromkeys(name for state in theirs for name in state)
        if not names:
            continue
        planned = plan[entry.key] = _Planned()
        for name in sorted(names):
            found = [state[name] for state in theirs if name in state]
            holders = [fact for fact in found if fact.holds_elements] or found
            dtypes = {fact.dtype for fact in holders}
            if len(dtypes) == 1 and None not in dtypes:
                (planned.elements[name],) = (dtype for dtype in dtypes if dtype is not None)
            elif any(fact.dtype is not None and fact.value is None for fact in holders):
                mixed.append(f"{entry.key}: {name} is {sorted(map(str, dtypes))}")
            else:
                first = holders[0].value
                planned.values[name] = first
                if not all(same(first, fact.value) for fact in holders):
                    differing.append(f"{entry.key}: {name}")
    _raise_faults(everyone, mixed)
    if differing:
        warnings.warn(
            "State that is no tensor of its parameter's elements should be the same on all ranks; the first rank's "
            f"is saved of these, which differ: {differing}",
            stacklevel=5,
        )
    return plan


def _raise_faults(everyone: Sequence[_Facts], mixed: Sequence[str]) -> None:
    paragraphs = [
        *dict.fromkeys(fault for facts in everyone for fault in facts.malformed),
        *listed(
            (key for facts in everyone for key in facts.unknown),
            "Keys of the given state dict must be numbers of the optimizer's parameters, or their names in the model; "
            "these are not:",
            "Pass what state_dict() of this very optimizer returned.",
        ),
        *strangers_paragraph(stranger for facts in everyone for stranger in facts.strangers),
        *listed(
            (shapeless for facts in everyone for shapeless in facts.shapeless),
            "State of sharded parameters must be a tensor with one value per element of the parameter (its piece on "
            "this rank), a single number, or no tensor at all:",
            "Leave these parameters to no wrapper (ignored_states), or use another optimizer.",
        ),
        *listed(
            mixed,
            "State of a parameter must be in one dtype on all ranks, but these are in several (None: no tensor of "
            "elements):",
            "Load the same checkpoint on all ranks, or make the optimizer anew.",
        ),
    ]
    if paragraphs:
        raise ConfigurationError("\n".join(paragraphs))


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, as far as they can be compared."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one.to("cpu"), other.to("cpu"))
    plain = (int, float, complex, str, bytes, type(None))
    return not isinstance(one, plain) or not isinstance(other, plain) or one == other


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

    def elements(self, entry: Entry, whole: Tensor) -> Any:
        """Elements of one parameter as the style wants them."""
        assert entry.group is not None, "plain parameters are whole everywhere"
        if self.style.sharded and entry.group.mesh_info.shard_process_group is not None:
            if self.style.on_cpu:
                whole = whole.to("cpu")
            assert entry.wrapper is not None, "it has a group"
            as_dtensor = self.style.as_dtensors and entry.wrapper._device_mesh is not None
            return sharded_rows(entry.wrapper, whole, as_dtensor=as_dtensor)
        return self.moved(whole)


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
                result.add(member, {name: result.elements(entry, whole)})
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
    return whole_params.gather(group, pieces)


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
