"""What ranks that save together agree on, when each has read its own part off the model.

Mostly all have read the same, and a digest shows it. They have not where

    use_orig_params            a rank's optimizer knows nothing of parameters it has no elements of
    other parallelism          parameters lie on meshes of their own: the ranks of each hold a replica
    pipeline stages            ranks have different modules

Then each rank tells of what it is the first to hold elements of, and all of it together is what is saved. So
everything is told about once, or once per mesh: however many ranks there are, no more travels than the manifest has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import CheckpointError
from ..wrapper.optimizer_params import listed
from . import trees
from .blocks import whole
from .holdings import Held
from .manifest import StoredTensor
from .source import MODEL
from .spread import Spread

Tree = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What is to be saved, without data."""

    tensors: Mapping[str, StoredTensor]
    """By key; their spreads name all holders."""
    tied: Mapping[str, str] = field(default_factory=dict)
    optimizer: Tree | None = None

    def digest(self) -> str:
        """Equal on ranks that know the same."""
        lists: dict[Any, int] = {}
        tensors = {
            key: (
                str(stored.dtype),
                repr(replace(stored.spread, holders=())),
                lists.setdefault(stored.spread.holders, len(lists)),
            )
            for key, stored in self.tensors.items()
        }
        tree = trees.encode(self.optimizer, "optimizer", [])
        text = json.dumps([tensors, list(lists), dict(self.tied), tree], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def told_by(self, rank: int) -> Outline:
        """The part that ``rank`` tells of, which has this outline."""
        first = {key: _first_holder(stored.spread) for key, stored in self.tensors.items()}

        def tells(name: str) -> bool:
            return first[MODEL + name] == rank

        optimizer: Tree | None = None
        if self.optimizer is not None:
            state = {name: own for name, own in self.optimizer["state"].items() if tells(name)}
            names = [
                list(filter(tells, group["params"])) for group in self.optimizer["param_groups"]
            ]
            groups = [
                {**group, "params": own} if own else {"params": []}
                for group, own in zip(self.optimizer["param_groups"], names, strict=True)
            ]
            optimizer = {"state": state, "param_groups": groups}
        return Outline(
            tensors={key: each for key, each in self.tensors.items() if first[key] == rank},
            tied={name: stored for name, stored in self.tied.items() if tells(stored)},
            optimizer=optimizer,
        )


def outline_of(
    tensors: Iterable[Held], tied: Mapping[str, str], optimizer: Tree | None = None
) -> Outline:
    """The outline of what this rank holds."""
    return Outline(
        tensors={held.key: StoredTensor(held.dtype, held.spread) for held in tensors},
        tied=tied,
        optimizer=optimizer,
    )


def agreed(own: Outline, told: Sequence[Outline]) -> Outline:
    """The outline of all, from what every rank tells of its own; the same on each of them.

    Raises:
        CheckpointError: ranks tell different things of the same, or nobody tells of something that this one has.
    """
    conflicts: list[str] = []
    tensors: dict[str, StoredTensor] = {}
    for key, stored in (item for outline in told for item in outline.tensors.items()):
        tensors[key] = _joined(tensors.get(key, stored), stored, key, conflicts)
    tied: dict[str, str] = {}
    for name, stored_name in (item for outline in told for item in outline.tied.items()):
        _put(tied, name, stored_name, name, conflicts)
    optimizer = None
    if own.optimizer is not None:
        optimizer = merged_trees([each.optimizer for each in told if each.optimizer], conflicts)
    paragraphs = [
        *listed(
            conflicts,
            "Ranks must agree on what they save; they have different things under these names:",
            "Make the same model and optimizer on all ranks, or give different things different names.",
        ),
        *listed(
            own.tensors.keys() - tensors.keys(),
            "Something is saved by the first rank of those that hold it; that rank has not got these:",
            "Save on the ranks that share the model only (process_group), or shard it.",
        ),
    ]
    if paragraphs:
        raise CheckpointError("\n".join(paragraphs))
    return Outline(tensors=tensors, tied=tied, optimizer=optimizer)


def merged_trees(told: Sequence[Tree], conflicts: list[str]) -> Tree:
    """Optimizers' trees as one; what is not the same in two of them is added to ``conflicts``, by parameter and key."""
    state: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for tree in told:
        for name, own in tree["state"].items():
            known = state.setdefault(name, {})
            for key, value in own.items():
                _put(known, key, value, f"{name}: {key}", conflicts)
        for number, group in enumerate(tree["param_groups"]):
            if number == len(groups):
                groups.append({"params": []})
            names = groups[number]["params"]
            names += [name for name in group["params"] if name not in names]
            for option, value in group.items():
                if option != "params":
                    _put(groups[number], option, value, f"group {number}: {option}", conflicts)
    return {"state": state, "param_groups": groups}


def _put(table: dict[str, Any], key: str, value: Any, label: str, conflicts: list[str]) -> None:
    known = table.setdefault(key, value)
    if known is not value and trees.encode(known, "", []) != trees.encode(value, "", []):
        conflicts.append(label)


def _joined(
    known: StoredTensor, other: StoredTensor, key: str, conflicts: list[str]
) -> StoredTensor:
    """A tensor with the holders of both."""
    bare = [(each.dtype, replace(each.spread, holders=())) for each in (known, other)]
    if bare[0] != bare[1]:
        conflicts.append(f"{key}: {known.dtype} {known.shape}, {other.dtype} {other.shape}")
    holders = dict.fromkeys((*known.spread.holders, *other.spread.holders))
    return replace(known, spread=replace(known.spread, holders=tuple(holders)))


def _first_holder(spread: Spread) -> int | None:
    """The rank that has the first elements; of a tensor without any, that has its first cell."""
    parts = spread.overlapping(whole(spread.shape))
    cell = next((part.cell for part in parts), 0)
    ranks = spread.holders[0] if spread.holders else ()
    return ranks[cell] if cell < len(ranks) else None
