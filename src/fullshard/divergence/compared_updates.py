"""The effect of an optimizer's step on shards, as far as it must be equal on all ranks of a process group.

An update of shards calls no collective. So ranks that step different optimizers, or with different learning rates,
would train one model in two ways, unnoticed. `Update` is a number for each step: where ranks meet next,
they compare it with the count of steps (`meetings`).

    which optimizer     the name of its class
    which parameters    the names of those that the process group shards or replicates, of `fully_shard`. Of the wrapper, ranks
                        may leave out pieces that are empty
    which options       `OPTIONS` of the groups that have such parameters, to four digits: a program may have computed them

Options that are on a device are not compared: the host would have to wait for it.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.divergence.journal import PROGRESS, Update, journal_of, journals
from fullshard.engine.known_groups import groups_of
from fullshard.engine.model_changes import CHANGES
from fullshard.engine.optimizer_checks import params_of
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.errors import UsageError

OPTIONS = ("lr", "weight_decay", "momentum", "betas", "eps")
"""Options that programs set, and schedulers change. Values that optimizers keep beside them may be a rank's own."""
_NAMED = 3
"""A message names so many parameters."""
_UNKNOWN = -1.0
"""In the place of an option that is not there, is no number, or is on a device."""


def refuse_within_guarded_step(optimizer: Optimizer) -> None:
    """Refuse a step within a guarded one, which may still fail.

    Raises:
        UsageError: a process group of the optimizer's parameters is guarded.
    """
    if any(each.guard is not None for each in journals()) and any(
        journal_of(group).guard is not None for group in _updated_params(optimizer)
    ):
        raise UsageError(
            "A guarded step ends before its optimizer's step, which cannot be taken back if another rank fails, but "
            f"{type(optimizer).__name__}.step() was called within one. Call it after the block, if the step has not failed."
        )


def step_taken(optimizer: Optimizer) -> None:
    """Note the step of an optimizer, if it updates sharded or replicated parameters."""
    updated = _updated_params(optimizer)
    if updated:
        PROGRESS.step += 1
        for group, update in _updates(optimizer, updated).items():
            journal_of(group).end_step(update)


class _Updated(NamedTuple):
    """The parameters that an optimizer updates over each process group."""

    params: Mapping[ProcessGroup, _UpdatedParams]
    changes: int
    """`CHANGES.count` when they were looked up; a change may give parameters another group."""
    sizes: tuple[int, ...]
    """Number of parameters in each group of the optimizer then, which changes when parameters join or leave."""


_KNOWN: weakref.WeakKeyDictionary[Optimizer, _Updated] = weakref.WeakKeyDictionary()


def _updated_params(optimizer: Optimizer) -> Mapping[ProcessGroup, _UpdatedParams]:
    """Return the parameters that the optimizer updates over each process group; looked up once."""
    known = _KNOWN.get(optimizer)
    sizes = tuple([len(group["params"]) for group in optimizer.param_groups])
    if known is None or known.changes != CHANGES.count or known.sizes != sizes:
        params = params_of(optimizer)
        found = _params_by_process_group(optimizer, params, groups_of(params))
        known = _KNOWN[optimizer] = _Updated(found, CHANGES.count, sizes)
    return known.params


class _UpdatedParams(NamedTuple):
    """The parameters of one optimizer that a process group shards or replicates."""

    text: str
    number: int
    groups: tuple[int, ...]
    """Groups of the optimizer whose options must be equal on all ranks."""


def _params_by_process_group(
    optimizer: Optimizer, params: Iterable[Tensor], groups: Iterable[FSDPParamGroup]
) -> Mapping[ProcessGroup, _UpdatedParams]:
    """Return the parameters that the optimizer updates over each process group."""
    ids = {id(param) for param in params}
    names: dict[ProcessGroup, dict[str, str]] = {}
    for group in groups:
        axes = group.mesh_info
        # Keyed by their places, too: ranks that ignore different modules have other names for the same.
        found = {
            f"{group.gather_tag.text}: {place}": f"{group.gather_tag.text}: {param.name}"
            for place, param in enumerate(group.params)
            if id(param.sharded_param.param) in ids
            and isinstance(param.sharded_param.param, DTensor)
        }
        for process_group in (axes.shard_process_group, axes.replicate_process_group):
            if process_group is not None:
                names.setdefault(process_group, {}).update(found)
    compared = tuple(
        index
        for index, group in enumerate(optimizer.param_groups)
        if any(isinstance(each, DTensor) for each in group["params"])
    )
    return {
        process_group: _updated(type(optimizer).__name__, each, compared)
        for process_group, each in names.items()
    }


def _updates(
    optimizer: Optimizer, updated: Mapping[ProcessGroup, _UpdatedParams]
) -> dict[ProcessGroup, Update]:
    """Return the update by the optimizer's step over each process group, of which there is one at least, by its options now."""
    compared = [optimizer.param_groups[index] for index in next(iter(updated.values())).groups]
    options = tuple([_plain(group.get(option)) for group in compared for option in OPTIONS])
    return {
        process_group: Update(
            hash((params.number, options)), functools.partial(_description, params.text, options)
        )
        for process_group, params in updated.items()
    }


def _description(text: str, options: Sequence[object]) -> str:
    """Return an update for people, with the options of each group of parameters, and equal ones once."""
    by_group = [
        options[first : first + len(OPTIONS)] for first in range(0, len(options), len(OPTIONS))
    ]
    texts = dict.fromkeys(
        ", ".join(
            f"{name} {value}"
            for name, value in zip(OPTIONS, each, strict=True)
            if value != _UNKNOWN
        )
        for each in by_group
    )
    return f"{text} ({'; '.join(texts)})"


def _updated(optimizer: str, names: Mapping[str, str], groups: tuple[int, ...]) -> _UpdatedParams:
    """``names`` to show are by the names to compare."""
    shown = sorted(names.values())[:_NAMED]
    listed = ", ".join(name.removeprefix("all-gather of ") for name in shown)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    text = f"{optimizer} of {listed}{more}" if names else optimizer
    digest = hashlib.sha256("\n".join([optimizer, *sorted(names)]).encode()).digest()
    return _UpdatedParams(text, int.from_bytes(digest[:7]), groups)


def _plain(value: Any) -> Any:
    """Return an option as numbers, whose hash is the same in every process."""
    if type(value) is float and value == value:  # most are
        return _rounded(value)
    if value is None:
        return _UNKNOWN
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.numel() != 1:
            return _UNKNOWN
        value = value.item()
    # The hash of None, and of a NaN, is one of its place in memory.
    if not isinstance(value, (int, float)) or value != value:
        return _UNKNOWN
    return _rounded(value)


@functools.lru_cache(maxsize=1024)
def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
