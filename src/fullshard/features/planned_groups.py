"""The groups that a model's structure and sizes suggest: what `plan_groups` applies, and what a trace compares with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fullshard.features.group_reasons import TARGETS_PER_MODEL, GroupReasons
from fullshard.features.group_units import (
    GroupingOptions,
    Unit,
    UnitWalk,
    is_container,
    merge,
    reached_params,
    untie,
)
from fullshard.layout.placement import local_tensor

MIN_BYTES = 32 * 2**20
"""Latency is a large part of the time of collectives below some 30 MB. Bytes are counted as in NCCL's tests of gathers:
the pieces of all ranks together."""

MAX_BYTES = 2 * 2**30
"""Two groups are in memory at a time: together a twentieth of an 80 GB device."""


@dataclass(frozen=True, kw_only=True)
class PlannedGroup:
    """Modules whose parameters will be gathered and reduced together."""

    modules: tuple[str, ...]
    """Full names; the root's is empty."""
    num_params: int
    """The number of parameters (tensors, not elements) that are in no other group."""
    num_elements: int
    """The number of their elements."""
    num_bytes: int
    """Their bytes in memory while they are gathered, in the compute dtype and without padding."""
    reason: str
    """Why these modules form a group."""

    def encloses(self, other: PlannedGroup) -> bool:
        """Return whether the other group's modules run within this one's."""
        inside = tuple(f"{name}." if name else "" for name in self.modules)
        return other is not self and other.modules[0].startswith(inside)


def planned_groups(model: nn.Module, options: GroupingOptions) -> tuple[PlannedGroup, ...]:
    """Return the groups of a model, the root's first."""
    root = Unit(name="", module=model, num_bytes=options.bytes_below(model))
    target = min(options.min_bytes, -(-root.num_bytes // TARGETS_PER_MODEL))
    walk = UnitWalk(options, target)
    walk.look_into(model, "", root, entries=is_container(model))
    units, left_out = untie(root, walk.units, options)
    together = [[root], *merge(units, target)]
    members: dict[Unit, list[nn.Parameter]] = {unit: [] for group in together for unit in group}
    for reached in reached_params(root, members, options):
        (unit,) = reached.units
        members[unit].append(reached.param)
    reasons = GroupReasons(options, target, {*members}, left_out)
    return tuple(
        PlannedGroup(
            modules=tuple(unit.name for unit in group),
            num_params=len(params),
            num_elements=sum(local_tensor(param).numel() for param in params),
            num_bytes=sum(map(options.bytes_of, params)),
            reason=reasons.of(group),
        )
        for group in together
        # The root has a group even if no parameters are left for it: its hooks begin and end a step.
        if (params := [p for unit in group for p in members[unit]]) or group == [root]
    )
