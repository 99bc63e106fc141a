"""Why a planned group has these modules: the last column of a printed plan."""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.errors import names_text, size_text
from fullshard.features.group_units import GroupingOptions, Unit

TARGETS_PER_MODEL = 8
"""A group should have at most 1/8 of the model. Two neighbours are in memory at a time, so a quarter of a small model;
and an eighth of all communication has no compute beside it."""


class GroupReasons:
    """Why each group of a plan is as it is, in a few words."""

    def __init__(
        self,
        options: GroupingOptions,
        target: int,
        grouped: set[Unit],
        left_out: dict[Unit, str],
    ) -> None:
        self._limit = size_text(options.max_bytes)
        self._target = size_text(target)
        if target < options.min_bytes:
            self._target += f" (1/{TARGETS_PER_MODEL} of the model)"
        self._with_parts = {unit.inside for unit in grouped}
        self._ties: dict[Unit, dict[str, list[str]]] = {}
        for unit, shared in left_out.items():
            around = unit
            while around not in grouped:
                assert around.inside is not None, "the root always has a group"
                around = around.inside
            self._ties.setdefault(around, {}).setdefault(shared, []).append(unit.name)

    def of(self, group: Sequence[Unit]) -> str:
        """Return the reason of one group."""
        if len(group) > 1:
            return f"merged to reach {self._target}"
        (unit,) = group
        if unit.inside is None:
            reason = "what is left"
        elif not unit.divided and unit.inside.depth > 0:
            reason = f"part of a module larger than {self._limit}"
        elif not unit.divided:
            reason = f"on its own, at least {self._target}"
        elif unit in self._with_parts:
            reason = f"larger than {self._limit}: what is left of it"
        else:
            reason = f"larger than {self._limit}, but nothing in it is safe to split off"
        ties = [
            f"{names_text(names, most=4)}: {shared} is shared"
            for shared, names in self._ties.get(unit, {}).items()
        ]
        return "; ".join([reason, *ties])
