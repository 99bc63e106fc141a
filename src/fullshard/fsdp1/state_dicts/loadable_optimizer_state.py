"""`optim_state_dict_to_load`: from a state dict by names to what the optimizer of this rank loads.

1. outline   read the state dict without its data (`optimizer_state_source`)
2. check     account for every name, shape and group, on all ranks together; or raise the same error on all
3. shard     fetch full tensors per wrapper and state, and keep this rank's part
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
from fullshard.errors import ConfigurationError, fault_paragraphs
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
    listing_of,
    refuse_unknown_params,
)
from fullshard.fsdp1.state_dicts.optimizer_state_source import (
    FullTensors,
    Outline,
    ShardedTensors,
    StateSource,
    TensorOutline,
    TensorsOfRank0,
)
from fullshard.fsdp1.state_dicts.settings import settings_of
from fullshard.fsdp1.state_dicts.sharded_tensors import is_sharded
from fullshard.mesh.axes import global_rank
from fullshard.storage.buffers import shard_of
from fullshard.transport import collectives
from fullshard.transport.tags import tag


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    state_dict: dict[str, Any],
    process_group: ProcessGroup | None,
    *,
    by_name: bool,
) -> dict[str, Any]:
    """See `FullyShardedDataParallel.optim_state_dict_to_load`."""
    model_params = ModelParams(model, "optim_state_dict_to_load")
    settings = settings_of(model)
    config = settings.optim_state_dict_config
    return build_loadable(
        model_params,
        optim,
        None,
        state_dict,
        process_group,
        from_rank0=isinstance(config, FullOptimStateDictConfig) and config.rank0_only,
        sharded=settings.state_dict_type is not StateDictType.FULL_STATE_DICT,
        by_name=by_name,
        all_params=True,
    )


def build_loadable(
    model_params: ModelParams,
    optim: Optimizer | None,
    optim_input: Any,
    state_dict: Mapping[str, Any] | None,
    process_group: ProcessGroup | None,
    *,
    from_rank0: bool = False,
    sharded: bool = False,
    by_name: bool = False,
    all_params: bool = False,
) -> dict[str, Any]:
    """Build the state dict that the optimizer loads on this rank.

    With ``from_rank0``, rank 0 sends its state dict to the others, whose own are not read. With ``sharded``, the
    state dict has sharded tensors. With ``by_name``, the optimizer knows its parameters by names. With ``all_params``,
    groups have all of the optimizer's parameters; otherwise, as with torch, the caller adds those that the groups of the
    state dict lack.
    """
    listing, unknown_params = listing_of(model_params, optim, optim_input)
    process_groups = model_params.process_groups if process_group is None else [process_group]
    foreign = [] if optim is None else [key for key in optim.state if not isinstance(key, Tensor)]
    if from_rank0:
        source: StateSource = TensorsOfRank0(state_dict, foreign, model_params, process_groups)
    else:
        source = ShardedTensors(state_dict, foreign, model_params)
        if not sharded and not any(map(is_sharded, source.tensors.values())):
            source = FullTensors(state_dict, foreign, model_params)
    keys = _agree_on_keys(source, model_params, listing, unknown_params, process_groups)
    outline = source.outline
    assert outline is not None, "all ranks have raised its faults"
    states = _shard_states(outline, model_params, listing, keys, source)
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
        groups = listing.groups
        if outline.groups is not None and not all_params:
            saved = {name for group in outline.groups for name in group["params"]}
            groups = [[e for e in entries if not saved.isdisjoint(e.names)] for entries in groups]
        result["param_groups"] = [
            {**options, "params": [numbers[entry] for entry in entries]}
            for entries, options in zip(
                groups, _matched(outline.groups or [], listing)[0], strict=True
            )
        ]
    return result


def _agree_on_keys(
    source: StateSource,
    model_params: ModelParams,
    listing: Listing,
    unknown_params: Sequence[str],
    process_groups: Sequence[ProcessGroup],
) -> frozenset[str]:
    """Return the keys of all parameters to load, or raise on all ranks what is wrong on any. Collective."""
    outline, faults = source.outline, list(source.faults)
    if outline is not None:
        faults += _faults(outline, model_params, listing)
    own = _RankReport(
        membership_of(model_params, listing, listing.groups),
        faults,
        unknown_params,
        {} if outline is None else outline.tensors,
    )
    reports = collectives.values_by_rank(own, process_groups, tag("optim_state_dict_to_load"))
    refuse_unknown_params(fault for report in reports.values() for fault in report.unknown_params)
    agreement = Agreement(
        {rank: report.membership for rank, report in reports.items()}, model_params, global_rank()
    )
    paragraphs = [*_by_rank({rank: report.faults for rank, report in reports.items()})]
    if not paragraphs:
        managed = {name for name, entry in model_params.by_name.items() if entry.group is not None}
        paragraphs = _differences({r: report.tensors for r, report in reports.items()}, managed)
    paragraphs += agreement.faults
    if paragraphs:
        raise ConfigurationError("\n".join(paragraphs))
    return agreement.keys


@dataclass(frozen=True, slots=True)
class _RankReport:
    """A rank's report before the first tensor is fetched."""

    membership: Membership
    faults: list[str]
    unknown_params: Sequence[str]
    tensors: dict[tuple[str, str], TensorOutline]


def _by_rank(faults: Mapping[int, Sequence[str]]) -> Iterator[str]:
    """Yield each fault once, with its ranks unless all ranks have it."""
    for fault in dict.fromkeys(fault for theirs in faults.values() for fault in theirs):
        ranks = [rank for rank, theirs in faults.items() if fault in theirs]
        yield fault if len(ranks) == len(faults) else f"On ranks {ranks}: {fault}"


# --- check ----------------------------------------------------------------------------------------


def _faults(outline: Outline, model_params: ModelParams, listing: Listing) -> list[str]:
    """Return everything that is wrong with a state dict, in paragraphs of an error."""
    # An optimizer may lack a parameter of which its rank holds nothing; other ranks check that name.
    empty = [n for e in model_params.entries.values() if not e.holds_elements for n in e.names]
    names = {*listing.names, *empty}
    in_groups = [name for group in outline.groups or () for name in group["params"]]
    unknown = [name for name in (*outline.states, *in_groups) if name not in names]
    return [
        *fault_paragraphs(
            (f"{n} (not of this optimizer)" for n in unknown if n in model_params.by_name),
            "A state dict must contain only parameters of the optimizer, but these are only in the model:",
            "Load it with the optimizer that it was saved from, or remove them from 'state' and 'param_groups'.",
        ),
        *fault_paragraphs(
            (str(name) for name in unknown if name not in model_params.by_name),
            "Keys of an optimizer's state dict must be names of the model's parameters without wrappers, but these are "
            "not:",
            "Load it for the model that it was saved from, or remove them from 'state' and 'param_groups'. "
            "rekey_optim_state_dict turns ids into names.",
        ),
        *fault_paragraphs(
            (fault for entry in listing.entries for fault in _entry_faults(entry, outline)),
            "A state must be a tensor of its parameter's shape, a single number or no tensor. Parameters in one "
            "FlatParameter must have the same states, of the same dtypes and with the same numbers. But:",
            "Load it for the model that it was saved from. A FlatParameter has one state for all of its parameters; "
            "with use_orig_params=True each has its own.",
        ),
        *([] if outline.groups is None else _matched(outline.groups, listing)[1]),
    ]


def _entry_faults(entry: Entry, outline: Outline) -> Iterator[str]:
    """Yield the faults of the states of one parameter of the optimizer."""
    if entry.group is None:
        return
    states = {name: outline.states[name] for name in entry.names if name in outline.states}
    for name, state in states.items():
        shape = entry.shape_of(name)
        for each, value in state.items():
            if isinstance(value, TensorOutline) and value.shape != shape and not _is_number(value):
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


def _is_number(value: TensorOutline) -> bool:
    return torch.Size(value.shape).numel() == 1


def _agree(one: Any, other: Any) -> bool:
    """Return whether the states of two parameters can be one state of both."""
    if isinstance(one, TensorOutline) and isinstance(other, TensorOutline):
        return one.dtype == other.dtype
    return type(one) is type(other) and same(one, other)


def _differences(
    by_rank: Mapping[int, Mapping[tuple[str, str], TensorOutline]], managed: Collection[str]
) -> list[str]:
    """Return a paragraph about tensors that differ between ranks, or nothing.

    Ranks may have different states of plain parameters, unless fetching them is collective.
    """
    keys = dict.fromkeys(key for tensors in by_rank.values() for key in tensors)
    lines = []
    for name, each in keys:
        found = {rank: tensors.get((name, each)) for rank, tensors in by_rank.items()}
        sharded = [rank for rank, tensor in found.items() if tensor is not None and tensor.sharded]
        if len(set(found.values())) > 1 and (name in managed or sharded):
            lacking = [rank for rank, tensor in found.items() if tensor is None]
            parts = f", only ranks {sharded} have sharded tensors" if sharded else ""
            lines.append(f"{name}: {each}" + (f", not on ranks {lacking}" if lacking else parts))
    return fault_paragraphs(
        lines,
        "All ranks must load the same tensors, but some lack these or have others:",
        "Pass every rank's own part of the same checkpoint.",
    )


def _matched(
    saved: Sequence[Mapping[str, Any]], listing: Listing
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the options of each of the optimizer's groups, and paragraphs of an error.

    Options are the saved ones. A group without any saved parameter keeps its own options.
    """
    saved_in = {name: number for number, group in enumerate(saved) for name in group["params"]}
    empty = [number for number, group in enumerate(saved) if not group["params"]]
    matched, taken, faults = [], list[int](), []
    for number, entries in enumerate(listing.groups):
        names = [name for entry in entries for name in entry.names if name in saved_in]
        found = list(dict.fromkeys(saved_in[name] for name in names))
        if not entries:
            found, empty = empty[:1], empty[1:]
        if len(found) > 1:
            parts = {group: [n for n in names if saved_in[n] == group] for group in found}
            faults.append(f"group {number} of the optimizer is in groups {parts}")
            continue
        taken += found
        own = listing.options[number]
        options = {
            name: value
            for name, value in (saved[found[0]] if found else own).items()
            if name not in ("params", "param_names")
        }
        if "param_names" in own:  # they name wrappers, so they belong to this optimizer
            options["param_names"] = list(own["param_names"])
        matched.append(copy.deepcopy(options))
    faults += [
        f"group {number} of the state dict is in {taken.count(number)} groups of the optimizer"
        for number in range(len(saved))
        if taken.count(number) > 1
    ]
    return matched, fault_paragraphs(
        faults,
        "Groups of the state dict and of the optimizer must have the same parameters, but these differ:",
        "Build the optimizer with the groups of the one that was saved, and change its options afterwards.",
    )


# --- shard ----------------------------------------------------------------------------------------


def _shard_states(
    outline: Outline,
    model_params: ModelParams,
    listing: Listing,
    keys: Collection[str],
    source: StateSource,
) -> dict[Entry, dict[str, Any]]:
    """Return this rank's part of all states, in memory of their own; parameters with an empty piece have none.

    Fetching may be collective. So the tensors and their order do not depend on this rank's optimizer: all of
    ``keys`` are fetched, in the order of the model.
    """
    parts: dict[Entry, dict[str, Any]] = {}
    by_owner: dict[Any, list[Entry]] = {}
    for entry in model_params.entries.values():
        if entry.key not in keys or not any(name in outline.states for name in entry.names):
            continue
        parts[entry] = {}
        if isinstance(entry.param, DTensor):  # another parallelism divides it, and its state, too
            (name,) = entry.names
            kept = {n: source.tensors.get((name, n)) for n in outline.states[name]}
            parts[entry] = {n: v.detach().clone() for n, v in kept.items() if v is not None}
        else:
            by_owner.setdefault(entry.group, []).append(entry)
    for entries in by_owner.values():
        managed = model_params.wrappers[:1] if entries[0].wrapper is None else [entries[0].wrapper]
        device = managed[0].compute_device if managed else entries[0].param.device
        for each, members in _batches(outline, entries):
            wanted = [(name, each) for _, name in members]
            shapes = [outline.states[name][each] for _, name in members]
            full = source.fetch(wanted, shapes, device)
            for (entry, name), tensor in zip(members, full, strict=True):
                if _is_of_elements(outline, entry, each):
                    _keep_part(parts[entry], each, entry, name, tensor)
                else:
                    parts[entry][each] = tensor.to(entry.param.device, copy=True)
    return {
        entry: {
            each: part[each] if each in part else copy.deepcopy(value)
            for each, value in outline.states[entry.names[0]].items()
        }
        for entry, part in parts.items()
        if entry in listing
        and (entry.holds_elements or entry.flat)  # a FlatParameter has padding at least
    }


def _batches(
    outline: Outline, entries: Sequence[Entry]
) -> Iterator[tuple[str, list[tuple[Entry, str]]]]:
    """Yield tensors to fetch together: those of one state and dtype, in the same order on all ranks."""
    batches: dict[tuple[str, torch.dtype], list[tuple[Entry, str]]] = {}
    for entry in entries:
        for name in entry.names:
            for each, value in sorted(outline.states.get(name, {}).items()):
                if isinstance(value, TensorOutline):
                    batches.setdefault((each, value.dtype), []).append((entry, name))
    for (each, _), members in batches.items():
        yield each, members


def _is_of_elements(outline: Outline, entry: Entry, each: str) -> bool:
    """Return whether a state is divided as its parameter is; single numbers and states of plain parameters are not."""
    return entry.group is not None and all(
        outline.states[name][each].shape == entry.shape_of(name) for name in entry.names
    )


def _keep_part(part: dict[str, Any], each: str, entry: Entry, name: str, tensor: Tensor) -> None:
    """Copy this rank's part of a full state into the state of its entry."""
    group, param = entry.group, entry.param
    assert group is not None, "plain parameters are not divided"
    index = entry.indices[entry.names.index(name)]
    rank = group.mesh_info.shard_mesh_rank
    if each not in part:  # strides of the parameter; zero where a FlatParameter has padding
        part[each] = torch.zeros_like(param, dtype=tensor.dtype, requires_grad=False)
    flat = part[each].as_strided((param.numel(),), (1,))
    if entry.flat:
        held = group.layout.piece(index, rank)
        flat = flat.narrow(0, held.offset, held.numel)
    local = entry.placement_of(name).local_part(tensor)
    flat.copy_(shard_of(group.layout, index, rank, local))
