"""Groups of equal layers, folded into one line: `blocks.0-23 (24x)`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fullshard.errors import names_text
from fullshard.tracing.schema import GroupFacts

NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class FoldedGroups:
    """Groups that follow each other and differ only in the numbers of their modules; or a single group."""

    groups: tuple[GroupFacts, ...]

    @property
    def first(self) -> GroupFacts:
        """One of them. The others have the same sizes."""
        return self.groups[0]

    @property
    def name(self) -> str:
        """The modules of all, and how many groups they are."""
        names = [name for group in self.groups for name in group.modules]
        folded = folded_name(names) if len(names) > 1 else None
        if folded is None:
            return self.first.name if len(names) == 1 else names_text(names, most=2)
        times = f" ({len(self.groups)}x)" if len(self.groups) > 1 else ""
        return f"{folded}{times}"


def fold(groups: Sequence[GroupFacts]) -> list[FoldedGroups]:
    """Return the groups in their order, with equal neighbours together."""
    folded: list[FoldedGroups] = []
    for group in groups:
        if folded:
            together = (*folded[-1].groups, group)
            names = [name for each in together for name in each.modules]
            if _sizes(folded[-1].first) == _sizes(group) and folded_name(names) is not None:
                folded[-1] = FoldedGroups(together)
                continue
        folded.append(FoldedGroups((group,)))
    return folded


def _sizes(group: GroupFacts) -> tuple[int, GroupFacts]:
    """Return all of a group but its names."""
    return len(group.modules), replace(group, name="", modules=())


def folded_name(names: Sequence[str]) -> str | None:
    """Return one name for names that count up in one place, such as `blocks.0-23`; None if they do not."""
    if len({NUMBER.sub("#", name) for name in names}) > 1:
        return None
    columns = [*zip(*(map(int, NUMBER.findall(name)) for name in names), strict=True)]
    counting = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    if len(counting) != 1:
        return None
    [place] = counting
    first, last = columns[place][0], columns[place][-1]
    if columns[place] != tuple(range(first, last + 1)):
        return None
    numbers = [f"{first}-{last}" if i == place else str(c[0]) for i, c in enumerate(columns)]
    return NUMBER.sub(lambda _: numbers.pop(0), names[0])
