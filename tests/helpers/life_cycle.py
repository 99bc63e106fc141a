"""A watch on the life of groups and states: every change must be one that the engine's tables allow."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from fullshard.engine import sharded_state, training_state
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.state import FSDPState


class CheckedAttribute:
    """Stands for an attribute with states, and refuses changes that its table of transitions does not have.

    It has no ``__get__``, so that who reads the attribute finds it in the object at once.
    """

    def __init__(
        self, name: str, transitions: Mapping[Any, frozenset[Any]], *, may_stay: bool = False
    ) -> None:
        self._name = name
        self._transitions = transitions
        self._first = next(iter(transitions))
        self._may_stay = may_stay

    def __set__(self, owner: Any, following: enum.Enum) -> None:
        before = owner.__dict__.get(self._name)
        allowed = {self._first} if before is None else self._transitions[before]
        stays = self._may_stay and following is before
        assert stays or following in allowed, f"{owner.name!r}: {before} is followed by {following}"
        owner.__dict__[self._name] = following


def check_every_change_of_state() -> None:
    """Check all groups and states of this process from now on."""
    FSDPParamGroup.sharded_state = CheckedAttribute(  # type: ignore[assignment]
        "sharded_state", sharded_state.TRANSITIONS
    )
    FSDPState.training_state = CheckedAttribute(  # type: ignore[assignment]
        "training_state", training_state.TRANSITIONS, may_stay=True
    )
