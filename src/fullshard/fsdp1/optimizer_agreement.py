"""What the optimizers of all ranks must have in common before their state is saved or loaded.

Every rank makes an optimizer of its own, out of the same parameters. Each says what its optimizer has
(`Membership`), and all compare what all have said:

    order        of parameters and of groups may differ: a group built from a set, say
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
from fullshard.fsdp1.optimizer_params import Entry, Listing, ModelParams


@dataclass(frozen=True, slots=True)
class Membership:
    """Which parameters the optimizer of one rank has, by their keys in the model."""

    keys: frozenset[str]
    groups: tuple[frozenset[str], ...] | None
    """None where nothing is said about groups."""
    options: tuple[dict[str, Any], ...]
    """Parallel to `groups`: those that can be compared."""
    lacking: frozenset[str]
    """Parameters that are not the optimizer's, though the rank holds elements of them."""
    empty: frozenset[str]
    """Parameters of which the rank holds no element: its optimizer may lack them, and their state."""


def membership_of(
    known: ModelParams,
    listing: Listing,
    groups: Sequence[Sequence[Entry]] | None,
    options: Sequence[Mapping[str, Any]] = (),
) -> Membership:
    """What this rank says; ``options`` only if they are to be compared."""
    empty = {entry.key for entry in known.entries.values() if not entry.holds_elements}
    own = frozenset(entry.key for entry in listing.entries)
    return Membership(
        own,
        None if groups is None else tuple(frozenset(e.key for e in group) for group in groups),
        tuple(_comparable(each) for each in options),
        frozenset({entry.key for entry in known.entries.values()} - own - empty),
        frozenset(empty),
    )


def _comparable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options whose values can be sent and compared; those that name parameters are compared otherwise."""
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
    """What all ranks have said together, the same on all of them."""

    def __init__(
        self, everyone: Mapping[int, Membership], known: ModelParams, own_rank: int
    ) -> None:
        """Compare what everyone has said, by rank."""
        self._everyone = everyone
        self._entries = {entry.key: entry for entry in known.entries.values()}
        self.keys = frozenset(key for each in everyone.values() for key in each.keys)
        """Of all parameters that the optimizer of any rank has."""
        self.faults = self._lacking_params()
        """Paragraphs about what differs between ranks."""
        self.groups: list[list[Entry]] | None = None
        """The groups in the order of the first rank, their parameters in the order of the model."""
        self.places: list[int] = []
        """Parallel to `groups`: the number of each in this rank's own optimizer."""
        if not self.faults:
            self.faults = self._missing_groups()
        if not self.faults and everyone[own_rank].groups is not None:
            self._compare_groups(own_rank)

    def _label(self, key: str) -> str:
        return self._entries[key].label if key in self._entries else key

    def _lacking_params(self) -> list[str]:
        having = {key: [r for r, m in self._everyone.items() if key in m.keys] for key in self.keys}
        return fault_paragraphs(
            (
                f"{self._label(key)}: not on rank {rank}, but on {having[key]}"
                for rank, each in self._everyone.items()
                for key in self.keys & each.lacking
            ),
            "The optimizers of all ranks must have the same parameters, but some lack these:",
            "Make the optimizer of the same parameters on every rank.",
        )

    def _missing_groups(self) -> list[str]:
        silent = [rank for rank, each in self._everyone.items() if each.groups is None]
        if not silent or len(silent) == len(self._everyone):
            return []
        return [
            f"The state dicts of all ranks must have 'param_groups', or none; those of ranks {silent} have "
            "none. Pass the same kind of state dict on every rank."
        ]

    def _compare_groups(self, own_rank: int) -> None:
        first = next(iter(self._everyone))
        merged = [set(group) for group in self._everyone[first].groups or ()]
        differing: list[str] = []
        for rank, each in self._everyone.items():
            groups = each.groups or ()
            places = _places(merged, groups)
            if places is None:
                self.faults = self._differing_groups()
                return
            for group, place in zip(merged, places, strict=True):
                group |= groups[place]
            if rank == own_rank:
                self.places = places
            for number, options in enumerate(self._everyone[first].options):
                theirs = each.options[places[number]]
                differing += [
                    f"group {number}: {fault}"
                    for fault in _differences(options, theirs, first, rank)
                ]
        self.groups = [
            [entry for key, entry in self._entries.items() if key in group] for group in merged
        ]
        self.faults = fault_paragraphs(
            differing,
            "The options of an optimizer's groups must be the same on all ranks, but:",
            "Set them alike on every rank.",
        )

    def _differing_groups(self) -> list[str]:
        numbers: dict[str, dict[int, list[int]]] = {key: {} for key in self._entries}
        for rank, each in self._everyone.items():
            for number, group in enumerate(each.groups or ()):
                for key in group & numbers.keys():
                    numbers[key].setdefault(number, []).append(rank)
        lines = [
            f"{self._label(key)}: "
            + ", ".join(f"in group {n} of ranks {ranks}" for n, ranks in sorted(found.items()))
            for key, found in numbers.items()
            if len(found) > 1
        ]
        counts = {rank: len(each.groups or ()) for rank, each in self._everyone.items()}
        if len(set(counts.values())) > 1:
            lines.append(f"the number of groups, by rank: {counts}")
        return fault_paragraphs(
            lines,
            "The optimizers of all ranks must have the same groups of parameters, but:",
            "Divide the parameters in the same way on every rank.",
        )


def _places(
    groups: Sequence[Collection[str]], others: Sequence[Collection[str]]
) -> list[int] | None:
    """For each group the number of the same one among ``others``, or None if those are divided differently."""
    if len(groups) != len(others):
        return None
    homes = {key: number for number, keys in enumerate(others) for key in keys}
    found = [{homes[key] for key in keys if key in homes} for keys in groups]
    if any(len(each) > 1 for each in found):
        return None
    places = [next(iter(each), None) for each in found]
    known = [place for place in places if place is not None]
    if len(known) != len(set(known)):
        return None
    # Groups that have no parameter in common, because one is empty, are told by their places.
    free = [number for number in range(len(others)) if number not in known]
    result = []
    for number, place in enumerate(places):
        if place is None:
            place = number if number in free else free[0]
            free.remove(place)
        result.append(place)
    return result


def _differences(
    one: Mapping[str, Any], other: Mapping[str, Any], rank: int, other_rank: int
) -> list[str]:
    return [
        f"{name} is {one.get(name, 'missing')} on rank {rank}, {other.get(name, 'missing')} on rank {other_rank}"
        for name in dict.fromkeys([*one, *other])
        if name not in one or name not in other or not same(one[name], other[name])
    ]


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, as far as they can be compared."""
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
