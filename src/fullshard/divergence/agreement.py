"""Ranks compare their models before the first collective, and again when something has changed that must be equal.

Collectives meet by order alone: if ranks have different models, or the same with different options, their collectives
hang, abort, or mix the weights of one layer with those of another. So a digest of `model_description` goes through the
store of the default process group (`store_agreement`) at the beginning of the first forward. All ranks go on, or all
raise the same `DivergenceError` before a collective is issued, and the model can be used after what differs has been
mended.

A description is made again only when `CHANGES` has grown, and compared only if it differs from what the ranks have
agreed on. A rank that changes an option alone therefore waits here while the others go on. Where ranks meet before
their collectives, on gloo, all of them get an error at once; elsewhere the watchdog sees it.

Ranks that are threads compare through the store that they share. A process group without other ranks, or of the backend
`fake`, has nothing to compare.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import json
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from fullshard import torch_border
from fullshard.divergence import watchdog
from fullshard.divergence.active_dropout import warn_of_active_dropout
from fullshard.divergence.initial_weights import Weights, take_initial_weights, weights_text
from fullshard.divergence.journal import PROGRESS, Waiting, journal_of
from fullshard.divergence.meetings import Meetings
from fullshard.divergence.model_description import GENERAL, describe, process_groups
from fullshard.divergence.model_differences import changes, message_about
from fullshard.divergence.store_agreement import StoreAgreement
from fullshard.divergence.verdict import VERDICT
from fullshard.engine.model_changes import CHANGES
from fullshard.engine.state import FSDPState
from fullshard.errors import DivergenceError
from fullshard.mesh.backends import backend_of
from fullshard.transport.monitor import ModelMonitor
from fullshard.transport.tags import tag

_TIMEOUT_S = 1800.0
"""The timeout for process groups that have none."""
_PLACE = "place in the order of fully_shard, of models with the same modules,"
_FAULT = "fault"
"""The key of a message that a rank brings instead of a description: it differs from others already."""
_MODEL, _WEIGHTS = "model", "initial weights"
"""The keys of a description, and of digests of initial weights. The latter also begins a message that is about them only."""


class ModelAgreement(ModelMonitor):
    """The agreement of the ranks on one model; lives as long as its `RootModel`."""

    def __init__(self) -> None:
        self._agreed: dict[tuple[int, ...], str] = {}
        """The description that ranks have in common, by these ranks."""
        self._places: dict[tuple[int, ...], str] = {}
        """The model's place among those with the same modules, in the order of sharding, by ranks."""

    def agree(
        self, root: FSDPState, states: Sequence[FSDPState], occasion: str = "forward"
    ) -> None:
        """Compare with the other ranks what has not been compared yet. No collective.

        Raises:
            DivergenceError: ranks differ, or a rank does not come.
        """
        watchdog.start()
        is_new = self.changes_seen < 0
        self._renew(root, states, occasion)
        # Before its first forward, a model has no collectives under a name of its own.
        if is_new and root.step is not None:
            _tell_apart(states)

    def runs_without_gradients(self, model: nn.Module) -> None:
        """Warn if the model drops something: each rank would drop something else."""
        warn_of_active_dropout(model)

    def _renew(self, root: FSDPState, states: Sequence[FSDPState], occasion: str) -> None:
        seen = CHANGES.count
        described = describe(root.modules[0], states, occasion)
        for ranks, description in described.items():
            if GENERAL in description:
                place = {_PLACE: self._place(ranks, states)}
                description[GENERAL] = description[GENERAL] | place
        descriptions = {ranks: json.dumps(each) for ranks, each in described.items()}
        # In the same order on all ranks, so no two wait for each other. A difference that one set of ranks finds is
        # made known to those that come later.
        changed = [ranks for ranks, text in descriptions.items() if self._agreed.get(ranks) != text]
        if changed:
            guarded = any(journal_of(group).guard is not None for group in process_groups(states))
            if self._agreed or guarded:
                self._meet(descriptions[changed[0]], changed[0], states)
            weights = {} if self._agreed else take_initial_weights(root.modules[0], states)
            _compare({ranks: descriptions[ranks] for ranks in changed}, weights, root, states)
        if not self._agreed:
            for ranks in descriptions:
                bisect.insort(_used(ranks, states), _first_number(states))
        self._agreed = descriptions
        self.changes_seen = seen

    def _place(self, ranks: tuple[int, ...], states: Sequence[FSDPState]) -> str:
        """Return the model's place among those with the same modules that ranks have used: "2 of 2".

        Ranks that first use two such models in different orders could not be told apart otherwise: their descriptions
        are equal. They have sharded them in the same order.
        """
        if ranks not in self._places or not self._agreed:
            used = _used(ranks, states)
            place = bisect.bisect(used, _first_number(states)) + 1
            self._places[ranks] = f"{place} of {len(used) + 1}"
        return self._places[ranks]

    def _meet(self, new: str, ranks: tuple[int, ...], states: Sequence[FSDPState]) -> None:
        """Let ranks that have not changed anything find out that this one has, where ranks meet at all.

        In a guarded step, ranks also learn here of another one's failure: it will not come to the comparison.
        """
        text = "agreement on the model"
        if self._agreed:
            before = json.loads(self._agreed.get(ranks, "{}"))
            text += f", in which {changes(before, json.loads(new))}"
        for group, device in process_groups(states).items():
            Meetings(group, backend_of(group, device)).before(tag(text))


def _tell_apart(states: Sequence[FSDPState]) -> None:
    """Let collectives be named after their model: others on the same process groups may have the same modules.

    Ranks that run two such models in different orders would gather one model of the shards of both. All ranks of a
    process group take part in the agreement on each of its models, so they number them alike.
    """
    models: dict[ProcessGroup | None, str] = {None: ""}
    for process_group in process_groups(states):
        journal = journal_of(process_group)
        journal.models += 1
        models[process_group] = f" (model {journal.models})" if journal.models > 1 else ""
    for group in (group for state in states for group in state.groups):
        model = models.get(group.mesh_info.shard_peers, "")
        group.gather_tag = tag(group.gather_tag.text + model)
        group.reduction.tell_apart(model, models.get(group.mesh_info.replicate_process_group, ""))


_USED: weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[object, ...], list[int]]] = (
    weakref.WeakKeyDictionary()
)
"""The first serial numbers of models that ranks have agreed on, in order: by default process group, and by ranks and
names of modules."""


def _used(ranks: tuple[int, ...], states: Sequence[FSDPState]) -> list[int]:
    world = dist.group.WORLD
    assert world is not None, "these ranks have a process group"
    return _USED.setdefault(world, {}).setdefault(
        (ranks, *[state.name_in_common for state in states]), []
    )


def _first_number(states: Sequence[FSDPState]) -> int:
    return min(group.serial_number for state in states for group in state.groups)


def _compare(
    descriptions: Mapping[tuple[int, ...], str],
    weights: Mapping[tuple[int, ...], Weights],
    root: FSDPState,
    states: Sequence[FSDPState],
) -> None:
    """Compare descriptions and initial weights, each over the ranks that it is for, in this order."""
    timeouts = [torch_border.timeout_of(group) for group in process_groups(states)]
    timeout_s = min((each.total_seconds() for each in timeouts if each), default=_TIMEOUT_S)
    store = torch_border.own_store_client()
    fault, warned = None, dict[str, None]()
    name = root.name or type(root.modules[0]).__name__
    PROGRESS.waiting = Waiting(None, f"agreement on the model ({name})", time.monotonic())
    try:
        watchdog.introduce()
        for ranks, own in descriptions.items():
            known = {_MODEL: own, _WEIGHTS: weights.get(ranks, {})}
            text = json.dumps(known if fault is None else {_FAULT: fault})
            comparison = StoreAgreement(
                store,
                ranks,
                dist.get_rank(),
                timeout_s=timeout_s,
                between_looks=VERDICT.raise_if_diverged,
            )
            message = comparison.compare(_digest(text), functools.partial(str, text), _compose)
            if message is not None and message.startswith(_WEIGHTS):
                warned[message.removeprefix(_WEIGHTS)] = None
            else:
                fault = fault or message
        watchdog.find_peers()
    finally:
        PROGRESS.waiting = None
    if fault is not None:
        raise DivergenceError(fault)
    for each in filter(None, warned):
        warnings.warn(each, stacklevel=2)


def _compose(reports: Sequence[tuple[list[int], str]]) -> str:
    """Return the message about descriptions of several ranks, or the one that a rank has brought instead of a description."""
    decoded: list[tuple[list[int], Any]] = [(ranks, json.loads(text)) for ranks, text in reports]
    faults = dict.fromkeys(each[_FAULT] for _, each in decoded if _FAULT in each)
    if faults:
        return "\n".join(faults)
    if len({each[_MODEL] for _, each in decoded}) == 1:
        return _WEIGHTS + weights_text([each[_WEIGHTS] for _, each in decoded])
    return message_about([(ranks, json.loads(each[_MODEL])) for ranks, each in decoded])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
