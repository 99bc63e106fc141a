"""Agreement of ranks that save together, after each has read its own state off the model.

Mostly all ranks have the same outline, and a digest shows it. Ranks may also know different things:

    use_orig_params            a rank's optimizer has no state of parameters that the rank has no elements of
    other parallelism          parameters lie on meshes of their own: the ranks of each hold a replica
    pipeline stages            ranks have different modules

Then each rank reports the tensors whose first elements it holds, and the merged reports are what is saved. Everything is
reported once, or once per mesh. So however many ranks there are, no more is sent than the manifest has.

Every rank then compares what it has with what was reported, in both directions. What a rank holds elements of must be on
both sides, and be the same. So an error is raised before anything is written if one rank has no optimizer, lacks the
state of a parameter, or has other options or step counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from fullshard.checkpoint import json_values
from fullshard.checkpoint.manifest import StoredTensor
from fullshard.checkpoint.source import AVERAGES, CLASS, MODEL, TensorRef
from fullshard.checkpoint.state.local_state import LocalTensor
from fullshard.errors import CheckpointError, fault_paragraphs, ranks_text
from fullshard.layout.blocks import whole
from fullshard.layout.sharding import Sharding

Tree = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The content of a save, without data."""

    tensors: Mapping[str, StoredTensor]
    """Tensors by key; their shardings name all holders."""
    tied: Mapping[str, str] = field(default_factory=dict)
    optimizer: Tree | None = None
    held: frozenset[str] = frozenset()
    """Names of the model's tensors that this rank has elements of, and of all members of a `FlatParameter` that it has elements
    of. Not reported to other ranks."""

    def digest(self) -> str:
        """Return a text that is equal on ranks with equal outlines."""
        lists: dict[Any, int] = {}
        tensors = {
            key: (
                str(stored.dtype),
                repr(replace(stored.sharding, holders=())),
                lists.setdefault(stored.sharding.holders, len(lists)),
            )
            for key, stored in self.tensors.items()
        }
        tree = json_values.encode(self.optimizer, "optimizer", [])
        text = json.dumps([tensors, list(lists), dict(self.tied), tree], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def part_reported_by(self, rank: int) -> Outline:
        """Return the part of this outline that ``rank`` reports if the outline is its own."""
        first = {key: _first_holder(stored.sharding) for key, stored in self.tensors.items()}

        def reports(name: str) -> bool:
            return first[MODEL + name] == rank

        optimizer: Tree | None = None
        if self.optimizer is not None:
            state = {name: own for name, own in self.optimizer["state"].items() if reports(name)}
            names = [
                list(filter(reports, group["params"])) for group in self.optimizer["param_groups"]
            ]
            groups = [
                {**group, "params": own} if own else {"params": []}
                for group, own in zip(self.optimizer["param_groups"], names, strict=True)
            ]
            optimizer = {**self.optimizer, "state": state, "param_groups": groups}
        return Outline(
            tensors={key: each for key, each in self.tensors.items() if first[key] == rank},
            tied={name: stored for name, stored in self.tied.items() if reports(stored)},
            optimizer=optimizer,
        )


def outline_of(
    tensors: Iterable[LocalTensor],
    tied: Mapping[str, str],
    optimizer: Tree | None = None,
    updated_together: Iterable[Sequence[str]] = (),
) -> Outline:
    """Return the outline of what this rank holds.

    Args:
        tensors: Tensors of model and optimizer.
        tied: See `LocalModelState.tied`.
        optimizer: See `source.Source.optimizer`.
        updated_together: Names of parameters that the optimizer has as one `FlatParameter`: a rank that holds elements of
            one of them has state of all.
    """
    tensors = list(tensors)
    held = {
        each.key.removeprefix(MODEL)
        for each in tensors
        if each.key.startswith(MODEL) and each.local is not None and each.local.numel()
    }
    for names in updated_together:
        if not held.isdisjoint(names):
            held.update(names)
    return Outline(
        tensors={each.key: StoredTensor(each.dtype, each.sharding) for each in tensors},
        tied=tied,
        optimizer=optimizer,
        held=frozenset(held),
    )


# --- what all ranks have together ------------------------------------------------------------------------


def agreed(own: Outline, reported: Mapping[int, Outline], rank: int) -> Outline:
    """Return the outline of all ranks, from the reports of all ranks. It is the same on each of them.

    Args:
        own: This rank's content.
        reported: Reports of the ranks.
        rank: This rank.

    Raises:
        CheckpointError: this rank has something else than was reported, more, or less; or ranks have optimizers of different
            classes. The caller must raise it on all ranks.
    """
    check_optimizer_classes(
        {rank: _kind(outline.optimizer) for rank, outline in reported.items()}, "save"
    )
    merged = _Merged(reported)
    faults = [*_tensor_differences(own, merged, rank), *_tied_differences(own, merged)]
    if own.optimizer is not None:
        faults += _optimizer_differences(own, own.optimizer, merged)
    for paragraph in fault_paragraphs(
        faults,
        "Ranks that save together must have the same model and optimizer, as far as they share parameters. Nothing was "
        "saved, because these differ on this rank:",
        "Build the same model and optimizer on all ranks. Step the optimizer on all ranks alike. Give a parameter a gradient "
        "on all ranks or on none. Ranks that share nothing must save by themselves (process_group), or shard what they have.",
    ):
        raise CheckpointError(paragraph)
    return merged.outline


def check_optimizer_classes(kinds: Mapping[int, str | None], task: Literal["save", "load"]) -> None:
    """Raise unless all ranks have passed an optimizer of one class, or none has passed one.

    Args:
        kinds: Name of the class by rank, or None.
        task: The ranks' common task.
    """
    ranks_by_kind: dict[str, list[int]] = {}
    for rank, kind in kinds.items():
        ranks_by_kind.setdefault(kind or "no optimizer", []).append(rank)
    if len(ranks_by_kind) > 1:
        done = {"save": "saved", "load": "loaded"}[task]
        lines = sorted(f"{kind}: {ranks_text(ranks)}" for kind, ranks in ranks_by_kind.items())
        raise CheckpointError(
            f"Ranks that {task} together must all pass an optimizer of one class, or none. Nothing was {done}, because "
            "they passed\n  "
            + "\n  ".join(lines)
            + "\nPass the optimizer on all ranks. A rank without parameters to "
            "optimize passes an optimizer with an empty group."
        )


def _kind(optimizer: Tree | None) -> str | None:
    return None if optimizer is None else next(iter(optimizer.get(CLASS, ())), "an optimizer")


class _Merged:
    """The reports of all ranks as one outline, and the first rank that reported each part."""

    def __init__(self, reported: Mapping[int, Outline]) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.tied: dict[str, str] = {}
        self.state: dict[str, Tree] = {}
        self.groups: list[dict[str, Any]] = []
        self._optimizer: Tree | None = None
        self.reporter: dict[Any, int] = {}
        """The first rank that reported a tensor, by its key, or a group, by its number."""
        for rank, outline in reported.items():
            for key, stored in outline.tensors.items():
                self.reporter.setdefault(key, rank)
                self.tensors[key] = _with_holders_of(self.tensors.get(key, stored), stored)
            self.tied = {**outline.tied, **self.tied}
            if outline.optimizer is not None:
                self._optimizer = outline.optimizer
                self.state = {**outline.optimizer["state"], **self.state}
                self._add_groups(rank, outline.optimizer["param_groups"])

    def _add_groups(self, rank: int, groups: Sequence[Tree]) -> None:
        known = {name for group in self.groups for name in group["params"]}
        for number, group in enumerate(groups):
            if number == len(self.groups):
                self.groups.append({"params": []})
            if not group["params"]:
                continue  # nothing was reported of this group
            merged = self.groups[number]
            if number not in self.reporter:
                self.reporter[number] = rank
                merged |= {option: value for option, value in group.items() if option != "params"}
            merged["params"] += [name for name in group["params"] if name not in known]

    @property
    def outline(self) -> Outline:
        optimizer: Tree | None = None
        if self._optimizer is not None:
            optimizer = {
                **self._optimizer,
                "state": self.state,
                "param_groups": self.groups,
            }
        return Outline(tensors=self.tensors, tied=self.tied, optimizer=optimizer)

    @property
    def averages(self) -> Tree:
        """The numbers that belong to averages; empty if no rank has averages."""
        return {} if self._optimizer is None else self._optimizer.get(AVERAGES, {})

    def rank_of(self, name: str) -> str:
        """Return, for messages, the rank that reported a tensor of the model."""
        reporter = self.reporter.get(MODEL + name)
        return "others" if reporter is None else f"rank {reporter}"


def _with_holders_of(known: StoredTensor, other: StoredTensor) -> StoredTensor:
    """Return a tensor with the holders of both; unchanged if the other differs in more than its holders."""
    if _without_holders(known) != _without_holders(other):
        return known
    holders = dict.fromkeys((*known.sharding.holders, *other.sharding.holders))
    return replace(known, sharding=replace(known.sharding, holders=tuple(holders)))


def _without_holders(stored: StoredTensor) -> StoredTensor:
    return replace(stored, sharding=replace(stored.sharding, holders=()))


# --- how this rank differs -------------------------------------------------------------------------------


def _tensor_differences(own: Outline, merged: _Merged, rank: int) -> Iterator[str]:
    for key, stored in own.tensors.items():
        if key in merged.tensors:
            known, where = merged.tensors[key], f"rank {merged.reporter[key]}"
            if (stored.dtype, stored.shape) != (known.dtype, known.shape):
                yield (
                    f"{key}: {stored.dtype} {stored.shape} here, {known.dtype} {known.shape} on {where}"
                )
            elif _without_holders(stored) != _without_holders(known):
                yield f"{key}: sharded in another way than on {where}"
        elif key.startswith(MODEL):
            first = _first_holder(stored.sharding)
            yield f"{key}: here, not on rank {first}, which must save its first elements"
    for key, known in merged.tensors.items():
        cell = known.sharding.cell_of(rank) if key not in own.tensors else None
        if cell is not None and key.startswith(MODEL) and known.sharding.extent(cell).numel:
            yield f"{key}: on rank {merged.reporter[key]}, sharded over ranks with this one among them; not here"


def _tied_differences(own: Outline, merged: _Merged) -> Iterator[str]:
    for name, stored in own.tied.items():
        if merged.tied.get(name, stored) != stored:
            yield f"{name}: another name of {stored} here, of {merged.tied[name]} elsewhere"


def _optimizer_differences(own: Outline, optimizer: Tree, merged: _Merged) -> Iterator[str]:
    own_averages, averages = optimizer.get(AVERAGES, {}), merged.averages
    yield from _differences(own_averages, averages, "the averages (ema)", "other ranks")
    groups = optimizer["param_groups"]
    own_numbers, numbers = _numbers(groups), _numbers(merged.groups)
    for name in own_numbers | numbers:
        # A rank's optimizer need not have parameters that the rank has no elements of.
        if own_numbers.get(name) != numbers.get(name) and (name in own_numbers or name in own.held):
            here, there = (_group_text(each.get(name)) for each in (own_numbers, numbers))
            yield f"{name}: {here} here, {there} on {merged.rank_of(name)}"
    for number, group in enumerate(groups):
        if number in merged.reporter and group["params"]:
            options = {key: value for key, value in group.items() if key != "params"}
            theirs = {key: value for key, value in merged.groups[number].items() if key != "params"}
            where = f"rank {merged.reporter[number]}"
            yield from _differences(options, theirs, f"group {number}", where)
    for name in own.held:
        known, state = merged.state.get(name, {}), optimizer["state"].get(name, {})
        if known or state:
            yield from _differences(state, known, f"state of {name}", merged.rank_of(name))


def _numbers(groups: Sequence[Tree]) -> dict[str, int]:
    return {name: number for number, group in enumerate(groups) for name in group["params"]}


def _group_text(number: int | None) -> str:
    return "in no group" if number is None else f"in group {number}"


def _differences(ours: Tree, theirs: Tree, what: str, where: str) -> Iterator[str]:
    """Yield a line for each entry in which this rank and another one differ."""
    if more := sorted(map(str, ours.keys() - theirs.keys())):
        yield f"{what}: {', '.join(more)} here, not on {where}"
    if less := sorted(map(str, theirs.keys() - ours.keys())):
        yield f"{what}: {', '.join(less)} on {where}, not here"
    for key in ours:
        if key in theirs and not json_values.are_same(ours[key], theirs[key]):
            yield f"{what}: {key} is {_text(ours[key])} here, {_text(theirs[key])} on {where}"


def _text(value: Any) -> str:
    if isinstance(value, TensorRef):
        return "a tensor"
    text = json.dumps(_plain(json_values.encode(value, "", [])))
    return text if len(text) <= 60 else f"{text[:60]}..."


def _plain(encoded: Any) -> Any:
    """Return a number without its dtype."""
    return encoded.get("value", encoded) if isinstance(encoded, dict) else encoded


def _first_holder(sharding: Sharding) -> int | None:
    """Return the rank that has the first elements; of an empty tensor, the rank that has the first cell."""
    parts = sharding.overlapping(whole(sharding.shape))
    cell = next((part.cell for part in parts), 0)
    ranks = sharding.holders[0] if sharding.holders else ()
    return ranks[cell] if cell < len(ranks) else None


# --- what this rank writes ---------------------------------------------------------------------------------


def parts_to_write(
    tensors: Mapping[str, StoredTensor], own: Iterable[LocalTensor], rank: int
) -> list[tuple[str, Tensor]]:
    """Return the cells that this rank must write, by key, after checking that it has them as the manifest will say.

    Cells cover a tensor, and each has one writer. So if every rank has what it must write, no element is missing from the
    checkpoint, whatever the ranks have agreed on.

    Raises:
        CheckpointError: this rank does not have a cell, or has it in another shape or dtype.
    """
    held = {each.key: each for each in own}
    parts, faults = [], []
    for key, stored in tensors.items():
        cell = stored.sharding.cell_of(rank)
        extent = None if cell is None else stored.sharding.extent(cell)
        if extent is None or not extent.numel:
            continue
        local = held[key].local if key in held else None
        if local is None:
            faults.append(f"{key}: nothing, instead of {stored.dtype} {extent.shape}")
        elif (local.dtype, tuple(local.shape)) != (stored.dtype, extent.shape):
            faults.append(
                f"{key}: {local.dtype} {tuple(local.shape)}, instead of {stored.dtype} {extent.shape}"
            )
        else:
            parts.append((key, local))
    for paragraph in fault_paragraphs(
        faults,
        "A rank must have the parts of tensors that it writes. Nothing was saved, because this rank has something else in "
        "place of these:",
        "Build the same model and optimizer on all ranks.",
    ):
        raise CheckpointError(paragraph)
    return parts
