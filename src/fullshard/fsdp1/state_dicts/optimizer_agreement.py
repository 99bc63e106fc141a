"""Agreement of the optimizers of all ranks, before their state is saved or loaded.

Every rank builds an optimizer of its own, over the same parameters. Each reports what its optimizer has
(`Membership`), and all ranks compare all reports:

    order        of parameters and of groups may differ, for example if a group was built from a set
    parameters   must be the same; only a rank that holds no element of one may lack it
    groups       must divide the parameters in the same way, with the same options
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fullshard.errors import fault_paragraphs
from fullshard.fsdp1.state_dicts.optimizer_params import Entry, Listing, ModelParams


@dataclass(frozen=True, slots=True)
class Membership:
    """Parameters that the optimizer of one rank has, by their keys in the model."""

    keys: frozenset[str]
    groups: tuple[frozenset[str], ...] | None
    """None if the state dict has no groups."""
    options: tuple[dict[str, Any], ...]
    """Parallel to `groups`: the options that can be compared."""
    lacking: frozenset[str]
    """Parameters that the optimizer lacks although the rank holds elements of them."""
    empty: frozenset[str]
    """Parameters of which the rank holds no element; its optimizer may lack them and their state."""


def membership_of(
    model_params: ModelParams,
    listing: Listing,
    groups: Sequence[Sequence[Entry]] | None,
    options: Sequence[Mapping[str, Any]] = (),
) -> Membership:
    """Return this rank's report; ``options`` are given only if they must be the same on all ranks."""
    empty = {entry.key for entry in model_params.entries.values() if not entry.holds_elements}
    own = frozenset(entry.key for entry in listing.entries)
    return Membership(
        own,
        None if groups is None else tuple(frozenset(e.key for e in group) for group in groups),
        tuple(_comparable(each) for each in options),
        frozenset({entry.key for entry in model_params.entries.values()} - own - empty),
        frozenset(empty),
    )


def _comparable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options whose values can be sent and compared; those that name parameters are compared elsewhere."""
    return {
        name: value.detach().to("cpu") if isinstance(value, Tensor) else value
        for name, value in options.items()
        if name not in ("params", "param_names") and _can_be_compared(value)
    }


def _can_be_compared(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_can_be_compared, value))
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (bool, int, float, complex, str, bytes, type(None)))


class Agreement:
    """The reports of all ranks, compared; the same on every rank."""

    def __init__(
        self, reports: Mapping[int, Membership], model_params: ModelParams, own_rank: int
    ) -> None:
        """Compare the reports, which are given by rank."""
        self._reports = reports
        self._entries = {entry.key: entry for entry in model_params.entries.values()}
        self.keys = frozenset(key for each in reports.values() for key in each.keys)
        """The keys of all parameters that the optimizer of any rank has."""
        self.faults = self._lacking_params()
        """Paragraphs of an error about what differs between ranks."""
        self.groups: list[list[Entry]] | None = None
        """The groups in the order of the first rank, their parameters in the order of the model."""
        self.own_numbers: list[int] = []
        """Parallel to `groups`: the number of each group in this rank's own optimizer."""
        if not self.faults:
            self.faults = self._missing_groups()
        if not self.faults and reports[own_rank].groups is not None:
            self._compare_groups(own_rank)

    def _label(self, key: str) -> str:
        return self._entries[key].label if key in self._entries else key

    def _lacking_params(self) -> list[str]:
        """Return a paragraph about parameters that some optimizers lack, or nothing."""
        having = {key: [r for r, m in self._reports.items() if key in m.keys] for key in self.keys}
        return fault_paragraphs(
            (
                f"{self._label(key)}: on ranks {having[key]}, but not on rank {rank}"
                for rank, each in self._reports.items()
                for key in self.keys & each.lacking
            ),
            "The optimizers of all ranks must have the same parameters, but some lack these:",
            "Build the optimizer over the same parameters on every rank.",
        )

    def _missing_groups(self) -> list[str]:
        """Return a paragraph about state dicts without groups, or nothing."""
        without = [rank for rank, each in self._reports.items() if each.groups is None]
        if not without or len(without) == len(self._reports):
            return []
        return [
            "Either all state dicts must have 'param_groups' or none; those of ranks "
            f"{without} have none, others have. Pass the same kind of state dict on every rank."
        ]

    def _compare_groups(self, own_rank: int) -> None:
        """Match the groups of all ranks and compare their options; set `groups` and `own_numbers`, or `faults`."""
        first = next(iter(self._reports))
        merged = [set(group) for group in self._reports[first].groups or ()]
        differing: list[str] = []
        for rank, each in self._reports.items():
            groups = each.groups or ()
            numbers = _matching_groups(merged, groups)
            if numbers is None:
                self.faults = self._differing_groups()
                return
            for group, number in zip(merged, numbers, strict=True):
                group |= groups[number]
            if rank == own_rank:
                self.own_numbers = numbers
            for number, options in enumerate(self._reports[first].options):
                theirs = each.options[numbers[number]]
                differing += [
                    f"group {number}: {fault}"
                    for fault in _differences(options, theirs, first, rank)
                ]
        self.groups = [
            [entry for key, entry in self._entries.items() if key in group] for group in merged
        ]
        self.faults = fault_paragraphs(
            differing,
            "The options of an optimizer's groups must be the same on all ranks, but these differ:",
            "Set the same options on every rank.",
        )

    def _differing_groups(self) -> list[str]:
        """Return a paragraph about parameters that ranks have in different groups."""
        numbers: dict[str, dict[int, list[int]]] = {key: {} for key in self._entries}
        for rank, each in self._reports.items():
            for number, group in enumerate(each.groups or ()):
                for key in group & numbers.keys():
                    numbers[key].setdefault(number, []).append(rank)
        lines = [
            f"{self._label(key)}: "
            + ", ".join(f"in group {n} of ranks {ranks}" for n, ranks in sorted(found.items()))
            for key, found in numbers.items()
            if len(found) > 1
        ]
        counts = {rank: len(each.groups or ()) for rank, each in self._reports.items()}
        if len(set(counts.values())) > 1:
            lines.append(f"the number of groups, by rank: {counts}")
        return fault_paragraphs(
            lines,
            "The optimizers of all ranks must have the same groups of parameters, but these differ:",
            "Divide the parameters in the same way on every rank.",
        )


def _matching_groups(
    groups: Sequence[Collection[str]], others: Sequence[Collection[str]]
) -> list[int] | None:
    """Return for each group the number of the same one among ``others``, or None if those divide differently."""
    if len(groups) != len(others):
        return None
    number_of = {key: number for number, keys in enumerate(others) for key in keys}
    found = [{number_of[key] for key in keys if key in number_of} for keys in groups]
    if any(len(each) > 1 for each in found):
        return None
    matches = [next(iter(each), None) for each in found]
    taken = [match for match in matches if match is not None]
    if len(taken) != len(set(taken)):
        return None
    # A group without a common parameter, because one of the two is empty, is matched by its number.
    free = [number for number in range(len(others)) if number not in taken]
    result = []
    for number, match in enumerate(matches):
        if match is None:
            match = number if number in free else free[0]
            free.remove(match)
        result.append(match)
    return result


def _differences(
    one: Mapping[str, Any], other: Mapping[str, Any], rank: int, other_rank: int
) -> list[str]:
    """Return lines about options that two ranks have with different values."""
    return [
        f"{name} is {one.get(name, 'missing')} on rank {rank}, {other.get(name, 'missing')} on rank {other_rank}"
        for name in dict.fromkeys([*one, *other])
        if name not in one or name not in other or not same(one[name], other[name])
    ]


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal; values that cannot be compared count as equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        one, other = one.to("cpu"), other.to("cpu")
        return bool(torch.all((one == other) | ((one != one) & (other != other))))
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    plain = (int, float, complex, str, bytes, type(None))
    if not isinstance(one, plain) or not isinstance(other, plain):
        return True
    return one == other or (one != one and other != other)
