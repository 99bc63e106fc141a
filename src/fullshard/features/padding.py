"""Groups that are padded a lot, and the parameters that cause it.

A parameter is divided into equal numbers of rows along its shard dimension. With hardly more rows than ranks, or fewer, much
of what ranks keep, gather and reduce is padding: stacked experts of shape (8, ...) over 64 ranks take eight times their
memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from fullshard import torch_border
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.state import FSDPState
from fullshard.errors import size_text
from fullshard.layout.balanced_placement import least_padded_dim
from fullshard.layout.segments import Division

if TYPE_CHECKING:
    from fullshard.engine.step import Step

PADDED_FROM = 1 / 4
"""A group is named if padding is more than this part of its parameters."""
WORTH_SAYING = 1 << 20
"""So many bytes of padding, in all groups that are named. To gather less takes no time that can be seen beside a collective's
latency, and no memory that is missed: a bias with three elements on four ranks is no fault."""


class _Padded(NamedTuple):
    """A padded parameter, which several groups may have alike."""

    nbytes: int
    padding: int
    param: str
    shape: tuple[int, ...]
    dim: int
    ranks: int


def padding_text(
    states: Iterable[tuple[FSDPState, str]], *, least: int | None = None
) -> str | None:
    """Return which groups of a model are padded by more than a quarter, why, and what to do; or None.

    ``states`` are those of the model, with their names; ``least`` is how many bytes of padding are worth a word, by
    default `WORTH_SAYING`.
    """
    names: dict[_Padded, list[str]] = {}
    is_best = True
    for state, name in states:
        for group in state.groups:
            found = _padded(group)
            if found is not None and found.padding > PADDED_FROM * found.nbytes:
                names.setdefault(found, []).append(name or "root")
                is_best &= least_padded_dim(found.shape, found.ranks) == found.dim
    padding = sum(each.padding * len(groups) for each, groups in names.items())
    if not names or padding < (WORTH_SAYING if least is None else least):
        return None
    lines = [
        f"{', '.join(groups)}: {size_text(each.nbytes)} take {size_text(each.nbytes + each.padding)}; {each.param} of shape "
        f"{each.shape} has {each.shape[each.dim]} rows along dimension {each.dim} for {each.ranks} ranks"
        for each, groups in names.items()
    ]
    chooses = "" if is_best else "pass shard_placement_fn=fullshard.balanced_placement, or "
    remedy = f"{chooses}shard over fewer ranks, as with a 2-D mesh (replicate, shard)."
    return (
        "Padding takes memory, and is sent, where ranks do not divide the rows of a parameter. These groups are padded by more than "
        "a quarter:\n  " + "\n  ".join(lines) + f"\n{remedy[0].upper()}{remedy[1:]}"
    )


def warn_of_padding(step: Step) -> None:
    """Warn of a model's groups that are padded a lot, all at once; a plan says it itself."""
    if torch_border.device_for(step.context.device).is_planned:
        return
    text = padding_text((state, state.name) for state in step.states)
    if text is not None:
        warnings.warn(text, stacklevel=2)


def _padded(group: FSDPParamGroup) -> _Padded | None:
    """Return the bytes of a group and of its padding, and the parameter that is padded most; None if none has rows."""
    layout, params = group.layout, group.params
    padding = {
        slot.segment: layout.padding(slot.segment) * params[index].dtype.itemsize
        for index, slot in enumerate(layout.slots)
        if slot.division in (Division.ROWS, Division.CHUNKS)
    }
    if not padding:
        return None
    most = layout.segments[max(padding, key=padding.__getitem__)].params[0]
    slot = layout.slots[most]
    return _Padded(
        sum(each.numel * p.dtype.itemsize for each, p in zip(layout.slots, params, strict=True)),
        sum(padding.values()),
        params[most].name,
        slot.shape,
        slot.dim,
        layout.world,
    )
