"""Groups of modules: planned from a model's structure and sizes, explained, then applied.

    plan = plan_groups(model, mp_policy=policy)
    print(plan)
    plan.apply(mesh=mesh)

Small groups are slow: a collective has its latency however little it moves, and each group costs host time. Large groups
need memory, and the first gather has no compute to run beside. So a group should have a certain size, the **target**:
``min_bytes``, but at most an eighth of the model. `features/group_units.py` finds the modules and puts them together.

Everything depends on shapes, names and classes. So all ranks make the same plan, for any number of ranks. Nothing is
allocated and nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.errors import LifecycleError, size_text
from fullshard.features.group_units import GroupingOptions
from fullshard.features.planned_groups import MAX_BYTES, MIN_BYTES, PlannedGroup, planned_groups
from fullshard.fsdp2.fully_shard import ShardPlacementFn, fully_shard
from fullshard.layout.balanced_placement import balanced_placement
from fullshard.policies import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from fullshard.wrap import CustomPolicy


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """A division of a model's parameters into groups; `print` it for the reasons."""

    groups: tuple[PlannedGroup, ...]
    """The groups in the expected order of forward, the root's first."""
    options: GroupingOptions = field(repr=False)
    """The arguments of `plan_groups`."""
    model: nn.Module = field(repr=False, compare=False)
    """The model, which `apply` shards."""

    @property
    def num_bytes(self) -> int:
        """The bytes of all groups together."""
        return sum(group.num_bytes for group in self.groups)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are gathered at a time: two neighbours and the groups that enclose them."""
        return max(self._bytes_with_neighbour(index) for index in range(len(self.groups)))

    def _bytes_with_neighbour(self, index: int) -> int:
        group = self.groups[index]
        outside = (g for g in reversed(self.groups[:index]) if not g.encloses(group))
        pair = (group, next(outside, group))
        return sum(g.num_bytes for g in self.groups if g in pair or any(map(g.encloses, pair)))

    def apply(
        self,
        *,
        mesh: DeviceMesh | None = None,
        reshard_after_forward: bool | int | None = None,
        shard_placement_fn: ShardPlacementFn | None = balanced_placement,
        offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (frozen)
        dp_mesh_dims: DataParallelMeshDims | None = None,
    ) -> nn.Module:
        """Call `fully_shard` on every group, the root's last.

        Arguments are those of `fully_shard`, but `balanced_placement` is the default. Precision and ignored parameters
        are those of the plan.

        Returns:
            The model, now also an `FSDPModule`.
        """
        if planned_groups(self.model, self.options) != self.groups:
            raise LifecycleError(
                "A plan can be applied once, to the model as it was planned, but modules or parameters of "
                f"{type(self.model).__name__} have changed or are sharded now. Call plan_groups again, and apply the new "
                "plan at once."
            )
        for group in reversed(self.groups):
            modules = [self.model.get_submodule(name) for name in group.modules]
            fully_shard(
                modules,
                mesh=mesh,
                reshard_after_forward=reshard_after_forward,
                shard_placement_fn=shard_placement_fn,
                mp_policy=self.options.mp_policy,
                offload_policy=offload_policy,
                ignored_params=set(self.options.ignored_params),
                dp_mesh_dims=dp_mesh_dims,
            )
        return self.model

    def wrap_policy(self) -> CustomPolicy:
        """Return an ``auto_wrap_policy`` of `FullyShardedDataParallel` for this model.

        A wrapper has one module, so each module of a merged group gets a wrapper of its own.
        """
        names = {name for group in self.groups for name in group.modules if name}
        chosen = {self.model.get_submodule(name) for name in names}
        return CustomPolicy(chosen.__contains__)

    def __str__(self) -> str:
        return _explanation(self)


def plan_groups(
    model: nn.Module,
    *,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    ignored_params: Iterable[nn.Parameter] = (),
    keep_with_parent: Iterable[nn.Module | type[nn.Module]] = (),
    min_bytes: int = MIN_BYTES,
    max_bytes: int = MAX_BYTES,
) -> GroupPlan:
    """Plan groups of suitable sizes for a model: merge small layers, separate large modules.

        plan = plan_groups(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        print(plan)
        plan.apply(mesh=mesh)

    Groups consist of entries of the model's containers (`nn.ModuleList`, `nn.Sequential`, `nn.ModuleDict` with entries of
    one class) and of other large modules. Neighbouring entries are merged until they have enough bytes together. Small
    modules, and modules that share a parameter with others, stay with the root. Sharded modules are left as they are.

    The plan is read from the model's structure. It assumes that modules are called, and that the entries of a list run one
    after the other. Pass modules for which this is not true as ``keep_with_parent``.

    Args:
        model: The outermost module; may be on the meta device.
        mp_policy: See `fully_shard`; its ``param_dtype`` decides how many bytes are gathered.
        ignored_params: See `fully_shard`.
        keep_with_parent: Modules, or classes of modules, that get no groups of their own, nor does anything inside
            them. Their parameters belong to the group of the module around them.
        min_bytes: Neighbours are merged until they have so many bytes together, or an eighth of the model if that is
            less; 32 MiB by default. Bytes are those of unsharded parameters.
        max_bytes: A module with more bytes is divided further where that is safe; 2 GiB by default.
    """
    options = GroupingOptions(
        mp_policy=mp_policy,
        ignored_params=tuple(ignored_params),
        keep_with_parent=tuple(keep_with_parent),
        min_bytes=min_bytes,
        max_bytes=max_bytes,
    )
    options.check(model)
    return GroupPlan(groups=planned_groups(model, options), options=options, model=model)


def _explanation(plan: GroupPlan) -> str:
    """Return a table of the groups with their sizes and reasons."""
    rows = [("groups", "modules", "elements", "gathered", "", "why"), *_rows(plan)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    num_groups, least = len(plan.groups), plan.options.min_bytes
    num_small = sum(group.num_bytes < least for group in plan.groups)
    lines = [
        f"{type(plan.model).__name__} has {size_text(plan.num_bytes)} of parameters in {num_groups} group"
        f"{'s' * (num_groups != 1)}; at most {size_text(plan.peak_bytes)} are gathered at a time.",
        "",
    ]
    for row in rows:
        cells = [
            cell.rjust(width) if column < 4 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines += [
        "",
        f"Smaller than {size_text(least)}, so that latency counts: {num_small} of {num_groups}.",
    ]
    if any(len(group.modules) > 1 for group in plan.groups):
        lines.append(
            "Merged modules stay gathered from the first to the last of them; if one does not run, to the end of "
            "forward."
        )
    return "\n".join(lines)


def _rows(plan: GroupPlan) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table; equal neighbours share one."""
    for _, alike in groupby(plan.groups, key=lambda g: (len(g.modules), g.num_elements, g.reason)):
        groups = [*alike]
        names = [name or "(root)" for group in groups for name in group.modules]
        yield (
            f"{len(groups)} x",
            f"{len(groups[0].modules)}",
            f"{groups[0].num_elements:,}",
            size_text(groups[0].num_bytes),
            names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}",
            groups[0].reason,
        )
