"""Reports of ranks about the state of their optimizers, and the states that all reports agree on.

A state of a parameter is one of

    elements   a tensor with one value for each of the parameter's elements: divided as the parameter is
    value      anything else: a number, a 0-d tensor, ...; the same on all ranks

Reports hold no data of elements. Whatever cannot be saved is refused here, with the same error on all ranks,
before the first gather.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fullshard.engine.tensor_trees import map_tensors, tensors_in
from fullshard.errors import ConfigurationError, fault_paragraphs
from fullshard.fsdp1.state_dicts.optimizer_agreement import Agreement, Membership, same
from fullshard.fsdp1.state_dicts.optimizer_params import (
    Entry,
    ModelParams,
    unknown_param_paragraphs,
)
from fullshard.mesh.axes import global_rank
from fullshard.transport import collectives
from fullshard.transport.tags import tag

State = Mapping[str, Any]
"""An optimizer's state of one parameter, by names of states."""


@dataclass(frozen=True, slots=True)
class StateReport:
    """A rank's report about one state of one parameter."""

    dtype: torch.dtype | None
    """The dtype of elements; None for a value."""
    value: Any
    """The value; None for elements, unless they could be a value, too."""


@dataclass(slots=True)
class RankReport:
    """A rank's report about its optimizer before any data is gathered."""

    membership: Membership
    states: dict[str, dict[str, StateReport]] = field(default_factory=dict)
    """States by keys of entries and names of states, for parameters that wrappers manage."""
    plain: set[str] = field(default_factory=set)
    """Keys of plain parameters that have state."""
    keeps: bool = True
    """Whether the rank gets the state dict."""
    unknown_params: list[str] = field(default_factory=list)
    """Parameters of the optimizer that the model does not have."""
    malformed: list[str] = field(default_factory=list)
    """Reasons why the given state dict is none."""
    unknown_keys: list[str] = field(default_factory=list)
    """Keys of the given state dict that mean no parameter."""
    undividable: list[str] = field(default_factory=list)
    """States whose shape says neither elements nor a value."""


@dataclass(slots=True)
class AgreedStates:
    """The states of one parameter, from the reports of all ranks."""

    elements: dict[str, torch.dtype] = field(default_factory=dict)
    """Elements to gather, of this dtype, by name of state."""
    values: dict[str, Any] = field(default_factory=dict)
    """Values, the same on all ranks, by name of state."""


def report_of(states: Mapping[Entry, State], membership: Membership) -> RankReport:
    """Return this rank's report about the states of its optimizer."""
    report = RankReport(membership)
    for entry, state in states.items():
        if entry.group is None:
            report.plain.add(entry.key)
            continue
        own = report.states[entry.key] = {}
        for name, value in state.items():
            state_report = _state_report(entry, value)
            if state_report is None:
                report.undividable.append(f"{entry.key}: {name} {_described(value)}")
            else:
                own[name] = state_report
    return report


def _state_report(entry: Entry, value: Any) -> StateReport | None:
    """Return whether a state is elements or a value; None if it can be neither."""
    if not isinstance(value, Tensor):
        if any(tensor.ndim for tensor in tensors_in(value)) and _is_divided(entry):
            return None
        return StateReport(None, map_tensors(on_cpu, value))
    if not value.ndim:
        return StateReport(None, on_cpu(value))
    if value.numel() == entry.param.numel():
        # One number for a piece of one element may be elements or a value: the reports of other ranks tell.
        return StateReport(value.dtype, on_cpu(value) if value.numel() == 1 else None)
    return StateReport(None, on_cpu(value)) if value.numel() == 1 else None


def _is_divided(entry: Entry) -> bool:
    return entry.group is not None and entry.group.layout.world > 1


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a tensor without history in host memory."""
    return tensor.detach().to("cpu")


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"of shape {tuple(value.shape)}"
    return f"is a {type(value).__name__} with tensors in it"


def agreed_states(
    model_params: ModelParams, own: RankReport, process_groups: Sequence[ProcessGroup]
) -> tuple[dict[str, AgreedStates], Agreement]:
    """Return the states to gather by keys of entries, as ranks agree on them; the same on all ranks. Collective."""
    reports = collectives.values_by_rank(own, process_groups, tag("optimizer state dict"))
    _refuse_unreadable([*reports.values()])
    agreement = Agreement(
        {rank: report.membership for rank, report in reports.items()}, model_params, global_rank()
    )
    disagreements = _Disagreements()
    by_key = {}
    for entry in model_params.entries.values():
        agreed = _agreed_on(entry, reports, disagreements)
        if agreed is not None:
            by_key[entry.key] = agreed
    paragraphs = [
        *agreement.faults,
        *disagreements.paragraphs,
        *_lost_states(model_params, reports),
    ]
    if paragraphs:
        raise ConfigurationError("\n".join(paragraphs))
    return by_key, agreement


@dataclass(slots=True)
class _Disagreements:
    """States that ranks do not agree on."""

    missing: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)

    @property
    def paragraphs(self) -> list[str]:
        """Paragraphs of an error, or nothing."""
        return [
            *fault_paragraphs(
                self.missing,
                "Every rank that holds elements of a parameter must have the states that other ranks have of it, but "
                "these are missing:",
                "Let the optimizers of all ranks take the same steps, or load the same checkpoint on all.",
            ),
            *fault_paragraphs(
                self.dtypes,
                "A state of a parameter must have one dtype on all ranks, but these have several (None: no tensor of "
                "elements):",
                "Load the same checkpoint on all ranks, or build the optimizer again.",
            ),
            *fault_paragraphs(
                self.values,
                "A state that is no tensor of its parameter's elements must be the same on all ranks, but these differ:",
                "Let the optimizers of all ranks take the same steps, or load the same checkpoint on all.",
            ),
        ]


def _agreed_on(
    entry: Entry, reports: Mapping[int, RankReport], disagreements: _Disagreements
) -> AgreedStates | None:
    """Return the states of one parameter, or None if no rank has any; note what ranks do not agree on."""
    theirs = {rank: report.states.get(entry.key, {}) for rank, report in reports.items()}
    # A rank without elements may have any state, or none, so it does not count; unless no rank has elements.
    holders = {r for r in theirs if entry.key not in reports[r].membership.empty} or set(theirs)
    names = {name for rank in holders for name in theirs[rank]}
    if not names:
        return None
    agreed = AgreedStates()
    for name in sorted(names):
        found = {
            rank: theirs[rank][name] for rank in theirs if rank in holders and name in theirs[rank]
        }
        disagreements.missing += [
            f"{entry.label}: {name} on rank {rank}" for rank in sorted(holders - found.keys())
        ]
        dtypes = {report.dtype for report in found.values()}
        first, value = next((rank, report.value) for rank, report in found.items())
        if len(dtypes) == 1 and None not in dtypes:
            (agreed.elements[name],) = (dtype for dtype in dtypes if dtype is not None)
        elif any(report.dtype is not None and report.value is None for report in found.values()):
            kinds = {rank: str(report.dtype) for rank, report in found.items()}
            disagreements.dtypes.append(f"{entry.label}: {name}, by rank: {kinds}")
        else:
            agreed.values[name] = value
            disagreements.values += [
                f"{entry.label}: {name} is {value} on rank {first}, {report.value} on rank {rank}"
                for rank, report in found.items()
                if not same(value, report.value)
            ]
    return agreed


def _lost_states(model_params: ModelParams, reports: Mapping[int, RankReport]) -> list[str]:
    """Return a paragraph about states of plain parameters that only ranks have which do not get the state dict.

    Each rank saves its own state of plain parameters.
    """
    kept = {key for report in reports.values() if report.keeps for key in report.plain}
    labels = {entry.key: entry.label for entry in model_params.entries.values()}
    return fault_paragraphs(
        (
            f"{labels.get(key, key)} on rank {rank}"
            for rank, report in reports.items()
            for key in report.plain - kept
        ),
        "For parameters that no wrapper manages, the first rank's state is saved, but it has none of these:",
        "Let the optimizers of all ranks take the same steps, or save the state dicts of all ranks.",
    )


def _refuse_unreadable(reports: Sequence[RankReport]) -> None:
    """Refuse state dicts whose keys or states have no model_params meaning."""
    paragraphs = [
        *dict.fromkeys(fault for report in reports for fault in report.malformed),
        *fault_paragraphs(
            (key for report in reports for key in report.unknown_keys),
            "Keys of the given state dict must be numbers of the optimizer's parameters, or their names in the model, but "
            "these are neither:",
            "Pass what state_dict() of this optimizer returned.",
        ),
        *unknown_param_paragraphs(fault for report in reports for fault in report.unknown_params),
        *fault_paragraphs(
            (fault for report in reports for fault in report.undividable),
            "A state of a sharded parameter must be a tensor with one value per element of this rank's piece, a single "
            "number, or no tensor at all, but these are not:",
            "Keep these parameters out of wrappers (ignored_states), or use another optimizer.",
        ),
    ]
    if paragraphs:
        raise ConfigurationError("\n".join(paragraphs))
