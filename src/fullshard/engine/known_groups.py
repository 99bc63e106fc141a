"""The groups of this process, found by a parameter, a version or a state of theirs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from fullshard.engine.sharded_state import ShardedState

if TYPE_CHECKING:
    from fullshard.engine.param_group import FSDPParamGroup

_GROUPS: weakref.WeakValueDictionary[int, FSDPParamGroup] = weakref.WeakValueDictionary()
"""Groups by the ids of their sharded parameters; the id of one that is gone may have been given to another tensor."""
_ALIVE: weakref.WeakValueDictionary[int, FSDPParamGroup] = weakref.WeakValueDictionary()
"""All groups, by their serial numbers."""
_GUARDED: weakref.WeakValueDictionary[int, FSDPParamGroup] = weakref.WeakValueDictionary()
"""Groups by the versions that their unsharded parameters have while these have no memory."""


def add(group: FSDPParamGroup) -> None:
    """Know a group from now on, for as long as it lives."""
    _ALIVE[group.serial_number] = group


def register(group: FSDPParamGroup, sharded: Sequence[Tensor]) -> None:
    """Let `groups_of` find a group by these sharded parameters, which may be others than before."""
    _GROUPS.update((id(param), group) for param in sharded)


def note_guarded(group: FSDPParamGroup, absent_version: int) -> None:
    """Let `group_without_memory` find a group by this version; see `VersionGuard`."""
    _GUARDED[absent_version] = group


def group_without_memory(version: int) -> FSDPParamGroup | None:
    """Return the group whose unsharded parameters are at ``version`` because they have no memory; see `VersionGuard`."""
    return _GUARDED.get(version)


def groups_of(params: Iterable[Tensor]) -> list[FSDPParamGroup]:
    """Return the groups of the parameters; a stale id may add another group."""
    found = (_GROUPS.get(id(param)) for param in params)
    return list(dict.fromkeys(group for group in found if group is not None))


def living_groups() -> list[FSDPParamGroup]:
    """Return all groups of this process."""
    return [group for reference in _ALIVE.valuerefs() if (group := reference()) is not None]


def unsharded_groups() -> list[FSDPParamGroup]:
    """Return all groups of this process whose unsharded parameters are on the modules; between steps usually none."""
    return [each for each in living_groups() if each.sharded_state is ShardedState.UNSHARDED]
