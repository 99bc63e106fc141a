"""A watch on the life of groups: every change of state must be one that the engine's table allows."""

from __future__ import annotations

from typing import Any

from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.sharded_state import TRANSITIONS, ShardedState


class CheckedState:
    """Stands for `FSDPParamGroup.sharded_state`, and refuses changes that `TRANSITIONS` does not have."""

    def __get__(self, group: FSDPParamGroup | None, _: type) -> Any:
        return self if group is None else group.__dict__["sharded_state"]

    def __set__(self, group: FSDPParamGroup, following: ShardedState) -> None:
        before = group.__dict__.get("sharded_state")
        allowed = {ShardedState.SHARDED} if before is None else TRANSITIONS[before]
        assert following in allowed, f"{group.name!r}: {before} is followed by {following}"
        group.__dict__["sharded_state"] = following


def check_every_change_of_state() -> None:
    """Check all groups of this process from now on."""
    FSDPParamGroup.sharded_state = CheckedState()  # type: ignore[assignment]
