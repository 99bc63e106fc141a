"""What an optimizer's step does to shards, as far as it must be equal on all ranks of a process group.

An update of shards calls no collective. So ranks that step different optimizers, or with different learning rates,
would train one model in two ways, and nobody would notice. `Update` is a number for each step: where ranks meet next,
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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.divergence.journal import Update
from fullshard.engine.param_group import FSDPParamGroup

OPTIONS = ("lr", "weight_decay", "momentum", "betas", "eps")
"""Options that programs set, and schedulers change. What optimizers keep beside them may be a rank's own."""
_NAMED = 3
"""A message names so many parameters."""
_UNKNOWN = -1.0
"""In the place of an option that is not there, is no number, or is on a device."""


class UpdatedParams(NamedTuple):
    """The parameters of one optimizer that a process group shards or replicates."""

    text: str
    number: int
    groups: tuple[int, ...]
    """Which groups of the optimizer have options that must be equal on all ranks."""


def params_by_process_group(
    optimizer: Optimizer, params: Iterable[Tensor], groups: Iterable[FSDPParamGroup]
) -> Mapping[ProcessGroup, UpdatedParams]:
    """Return what the optimizer updates over each process group."""
    ids = {id(param) for param in params}
    names: dict[ProcessGroup, dict[str, str]] = {}
    for group in groups:
        axes = group.mesh_info
        # By their places, too: ranks that ignore different modules have other names for the same.
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


def updates_of(
    optimizer: Optimizer, updated: Mapping[ProcessGroup, UpdatedParams]
) -> dict[ProcessGroup, Update]:
    """Return what the optimizer's step did over each process group, of which there is one at least, by its options now."""
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


def _updated(optimizer: str, names: Mapping[str, str], groups: tuple[int, ...]) -> UpdatedParams:
    """``names`` are by what is compared."""
    shown = sorted(names.values())[:_NAMED]
    listed = ", ".join(name.removeprefix("all-gather of ") for name in shown)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    text = f"{optimizer} of {listed}{more}" if names else optimizer
    digest = hashlib.sha256("\n".join([optimizer, *sorted(names)]).encode()).digest()
    return UpdatedParams(text, int.from_bytes(digest[:7]), groups)


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
