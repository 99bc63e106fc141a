"""Which modules form a group: planned from a model's structure and sizes, explained, then applied.

    plan = plan_groups(model, mp_policy=policy)
    print(plan)
    plan.apply(mesh=mesh)

Small groups are slow: a collective takes its latency however little it moves, and each group costs
host time. Large ones need memory, and the first gather has no compute to hide behind. So there is a
size that a group should have, the **target**: ``min_bytes``, but not more than an eighth of the
model.

    walk       from the root down, in the order of registration, to the modules that may have a
               group (units): entries of containers, and other children that are large enough
    untie      modules that share a parameter go back to what contains them all
    merge      neighbours of one run, until they have the target together; what stays below it goes
               back to what contains it

A group is gathered around the forward of its modules, so a unit must be called, and called whole:
no unit lies inside of a torch module that uses its children's weights (`nn.MultiheadAttention`).
Inside of a unit that is larger than ``max_bytes`` there are units again, but none in a list or
dict: there experts live, and not all of them run.

Everything depends on shapes, names and classes, so all ranks make the same plan, and any number of
ranks the same. Nothing is allocated and nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.engine.ownership import has_forward, managed_modules, owned_params
from fullshard.engine.state import state_of
from fullshard.errors import ConfigurationError, LifecycleError
from fullshard.fsdp2.fully_shard import ShardPlacementFn, fully_shard
from fullshard.plan.placement import local_tensor
from fullshard.plan.policies import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from fullshard.wrap import CustomPolicy

MIN_BYTES = 32 * 2**20
"""Collectives of less than some 30 MB are slow for what they move: latency is a good part of their time. Counted as
NCCL's tests count a gather, the pieces of all ranks together."""

MAX_BYTES = 2 * 2**30
"""Two of these are in memory at a time: a twentieth of an 80 GB device."""

TARGETS_PER_MODEL = 8
"""Two neighbours are in memory at a time, then a quarter of a small model; an eighth of all communication has no
compute beside it."""


@dataclass(frozen=True, kw_only=True)
class PlannedGroup:
    """Modules whose parameters will be gathered and reduced together."""

    modules: tuple[str, ...]
    """Full names; the root's is empty."""
    num_params: int
    """Parameters (tensors, not elements) that are in no other group."""
    num_elements: int
    """Elements of them."""
    num_bytes: int
    """Bytes in memory while they are gathered, in the dtype they are computed in and without padding."""
    reason: str
    """Why these modules, and no others, form a group."""

    def encloses(self, other: PlannedGroup) -> bool:
        """Whether the other's modules run within this one's."""
        inside = tuple(f"{name}." if name else "" for name in self.modules)
        return other is not self and other.modules[0].startswith(inside)


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """How the parameters of a model are divided into groups; `print` it for the reasons."""

    groups: tuple[PlannedGroup, ...]
    """In the order in which forward should come to them; the root's first."""
    options: GroupingOptions = field(repr=False)
    """What the plan was asked for."""
    model: nn.Module = field(repr=False, compare=False)
    """What was planned, and `apply` shards."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all groups together."""
        return sum(group.num_bytes for group in self.groups)

    @property
    def peak_bytes(self) -> int:
        """The most that is gathered at a time: two neighbours and what encloses them, the root always."""
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
        shard_placement_fn: ShardPlacementFn | None = None,
        offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (frozen)
        dp_mesh_dims: DataParallelMeshDims | None = None,
    ) -> nn.Module:
        """Call `fully_shard` on every group, the root's last; arguments are those of `fully_shard`.

        The precision and the ignored parameters are those of the plan.

        Returns:
            The model, now also an `FSDPModule`.
        """
        if _planned(self.model, self.options) != self.groups:
            raise LifecycleError(
                "A plan is applied once, to the model as it was planned, but modules or parameters of "
                f"{type(self.model).__name__} have changed or are sharded by now. Call plan_groups again, "
                "and apply that plan at once."
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
        """An ``auto_wrap_policy`` for `FullyShardedDataParallel`, made for this model.

        A wrapper has one module, so modules of a merged group get a wrapper each.
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
    """Divide a model into groups of sensible size: small layers merged, large modules apart.

        plan = plan_groups(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        print(plan)
        plan.apply(mesh=mesh)

    Groups are made of the entries of the model's containers (`nn.ModuleList`, `nn.Sequential`,
    `nn.ModuleDict` with entries of one class), neighbours merged until they have enough bytes
    together, and of other modules that are large. What is small, or shares a parameter with others,
    stays with the root. Modules that are sharded already are left as they are.

    This is read from the model's structure. It assumes that modules are called, not only their
    weights used, and that the entries of a list run one after the other; name those of which this
    is not true in ``keep_with_parent``.

    Args:
        model: The outermost module; may be on the meta device.
        mp_policy: As for `fully_shard`; its ``param_dtype`` decides how many bytes are gathered.
        ignored_params: As for `fully_shard`.
        keep_with_parent: Modules, or classes of modules, that get no groups, nor does anything
            inside them: their parameters belong to the group of what contains them.
        min_bytes: Neighbours are merged until they have this together, or an eighth of the model if
            that is less; 32 MiB by default. Bytes are those of the whole, gathered parameters.
        max_bytes: A module with more than this is divided further, where that is safe; 2 GiB by
            default.
    """
    options = GroupingOptions(
        mp_policy=mp_policy,
        ignored_params=tuple(ignored_params),
        keep_with_parent=tuple(keep_with_parent),
        min_bytes=min_bytes,
        max_bytes=max_bytes,
    )
    options.check(model)
    return GroupPlan(groups=_planned(model, options), options=options, model=model)


@dataclass(frozen=True, kw_only=True)
class GroupingOptions:
    """What was asked for."""

    mp_policy: MixedPrecisionPolicy
    ignored_params: tuple[nn.Parameter, ...] = field(compare=False)
    keep_with_parent: tuple[nn.Module | type[nn.Module], ...] = field(compare=False)
    min_bytes: int
    max_bytes: int

    def check(self, model: object) -> None:
        """Refuse what cannot be planned."""
        if not isinstance(model, nn.Module) or not has_forward(model):
            raise ConfigurationError(
                "plan_groups takes the outermost module, which must have a forward; got "
                f"{type(model).__name__}."
            )
        if not isinstance(self.mp_policy, MixedPrecisionPolicy):
            raise ConfigurationError(
                f"mp_policy must be a fullshard.MixedPrecisionPolicy, got {self.mp_policy!r}."
            )
        if state_of(model) is not None or self.bytes_below(model) == 0:
            raise ConfigurationError(
                f"{type(model).__name__} has no parameters to shard: there are none, or all are ignored or sharded "
                "already. Plan a model before it is sharded."
            )
        sizes = (self.min_bytes, self.max_bytes)
        if not all(isinstance(size, int) for size in sizes) or not 1 <= sizes[0] <= sizes[1]:
            raise ConfigurationError(
                "min_bytes and max_bytes must be numbers of bytes with 1 <= min_bytes <= max_bytes, got "
                f"{self.min_bytes!r} and {self.max_bytes!r}."
            )
        below = {*model.modules()} - {model}
        strange = [
            each.__name__ if isinstance(each, type) else f"a {type(each).__name__}"
            for each in self.keep_with_parent
            if each not in below and not (isinstance(each, type) and issubclass(each, nn.Module))
        ]
        if strange:
            raise ConfigurationError(
                "keep_with_parent takes modules that the model contains, or classes of modules, got "
                f"{strange}."
            )

    def keeps(self, module: nn.Module) -> bool:
        """Whether a module must not have a group of its own."""
        classes = tuple(each for each in self.keep_with_parent if isinstance(each, type))
        return isinstance(module, classes) or any(module is each for each in self.keep_with_parent)

    def bytes_of(self, param: nn.Parameter) -> int:
        """Bytes of a parameter while it is gathered."""
        local, dtype = local_tensor(param), self.mp_policy.param_dtype
        if dtype is None or not param.is_floating_point():
            dtype = local.dtype
        return local.numel() * dtype.itemsize

    def bytes_below(self, module: nn.Module) -> int:
        """Bytes of all parameters of a module and below it that no earlier call has taken."""
        owned = owned_params(managed_modules([module]), self.ignored_params)
        return sum(self.bytes_of(each.param) for each in owned)


# --- 1. walk --------------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class _Unit:
    """A module that may have a group, of its own or with its neighbours; the root has one in any case."""

    name: str
    module: nn.Module
    num_bytes: int
    inside: _Unit | None = None
    """The innermost unit that contains it; None for the root."""
    run: int = 0
    """Units of one run are neighbours, and may be merged."""
    divided: bool = True
    """Whether it is so large that there may be units inside of it."""

    @property
    def depth(self) -> int:
        """How many units contain it."""
        return 0 if self.inside is None else 1 + self.inside.depth


class _Walk:
    """Finds the units below a module, in the order of registration."""

    def __init__(self, options: GroupingOptions, target: int) -> None:
        self.units: list[_Unit] = []
        self._options, self._target = options, target
        self._run = 0
        self._seen: set[nn.Module] = set()

    def look_into(
        self, module: nn.Module, name: str, inside: _Unit, *, entries: bool = False
    ) -> None:
        """Visit the children; ``entries`` says that whoever has this container calls them in turn."""
        if _is_opaque(module):
            return
        for child_name, child in module.named_children():
            if child not in self._seen and not self._options.keeps(child):
                self._seen.add(child)
                self._visit(child, _joined(name, child_name), inside, entries)

    def _visit(self, module: nn.Module, name: str, inside: _Unit, is_entry: bool) -> None:
        num_bytes = 0 if state_of(module) is not None else self._options.bytes_below(module)
        if num_bytes == 0:
            return
        is_large, in_layer = num_bytes >= self._target, inside.depth > 0
        if _is_container(module):
            if not in_layer or isinstance(module, nn.Sequential):
                self.look_into(module, name, inside, entries=_runs_in_turn(module))
        elif not has_forward(module):
            self.look_into(module, name, inside)
        elif is_large and not is_entry and not in_layer and _has_container(module):
            self._run += 1  # what comes before and what comes after are no neighbours
            self.look_into(module, name, inside)
            self._run += 1
        elif is_large or is_entry or _has_children(module):
            # Others are small leaves, whose weights a parent often uses itself.
            self._add(module, name, inside, num_bytes, alone=is_large and not is_entry)

    def _add(
        self, module: nn.Module, name: str, inside: _Unit, num_bytes: int, *, alone: bool
    ) -> None:
        divided = num_bytes > self._options.max_bytes
        self._run += alone or divided
        unit = _Unit(
            name=name,
            module=module,
            num_bytes=num_bytes,
            inside=inside,
            run=self._run,
            divided=divided,
        )
        self.units.append(unit)
        self._run += alone or divided
        if divided:
            self.look_into(module, name, unit)
            self._run += 1


def _is_container(module: nn.Module) -> bool:
    return (
        isinstance(module, (nn.ModuleList, nn.ModuleDict))
        or type(module).forward is nn.Sequential.forward
    )


def _runs_in_turn(container: nn.Module) -> bool:
    """Whether entries are layers of one kind; a dict may as well hold the different parts of a model."""
    classes = [type(entry) for entry in container.children()]
    return not isinstance(container, nn.ModuleDict) or (len(classes) > 1 == len({*classes}))


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _has_container(module: nn.Module) -> bool:
    """Whether there is a container to be found in a module, with parameters."""
    return not _is_opaque(module) and any(
        _has_container(child)
        or (_is_container(child) and next(child.parameters(), None) is not None)
        for child in module.children()
    )


def _is_opaque(module: nn.Module) -> bool:
    """Whether a module has a class of torch's that may use its children's weights without calling them."""
    return any(
        cls.__module__.partition(".")[0] == "torch" and cls not in _TRANSPARENT
        for cls in type(module).__mro__
    )


_TRANSPARENT = {
    nn.Module,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Sequential,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
}
"""Classes of torch that call all their children."""


# --- 2. untie -------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Held:
    """A parameter, and the innermost units through which it is reached."""

    name: str
    param: nn.Parameter
    units: list[_Unit] = field(default_factory=list)


def _held_params(root: _Unit, units: Iterable[_Unit], options: GroupingOptions) -> Iterable[_Held]:
    """All parameters that are to be sharded, on all paths: a module may have several parents."""
    unit_of = {unit.module: unit for unit in (root, *units)}
    ignored = {id(param) for param in options.ignored_params}
    found: dict[int, _Held] = {}
    seen: set[tuple[nn.Module, _Unit]] = set()

    def visit(module: nn.Module, name: str, unit: _Unit) -> None:
        if (module, unit) in seen or state_of(module) is not None:
            return
        seen.add((module, unit))
        for param_name, param in module.named_parameters(recurse=False):
            if id(param) not in ignored:
                held = found.setdefault(id(param), _Held(_joined(name, param_name), param))
                if unit not in held.units:
                    held.units.append(unit)
        for child_name, child in module.named_children():
            of_child = unit_of.get(child)
            if of_child is None or innermost(of_child.inside) is not unit:
                of_child = unit  # no unit, or one of another place, which has its parameters, too
            visit(child, _joined(name, child_name), of_child)

    def innermost(unit: _Unit | None) -> _Unit:
        assert unit is not None, "the root contains all, and is never left out"
        return unit if unit_of.get(unit.module) is unit else innermost(unit.inside)

    visit(root.module, "", root)
    return found.values()


def _untie(
    root: _Unit, units: list[_Unit], options: GroupingOptions
) -> tuple[list[_Unit], dict[_Unit, str]]:
    """Leave out units until every parameter is in one; those left out come with the name of what they share."""
    left_out: dict[_Unit, str] = {}
    while shared := [h for h in _held_params(root, units, options) if len(h.units) > 1]:
        for held in shared:
            # The innermost first: what contains all of them may be a unit, too, and can stay.
            depth = max(unit.depth for unit in held.units)
            left_out |= {unit: held.name for unit in held.units if unit.depth == depth}
        units = [unit for unit in units if unit not in left_out]
    return units, left_out


# --- 3. merge -------------------------------------------------------------------------------------


def _merge(units: Iterable[_Unit], target: int) -> Iterator[list[_Unit]]:
    """Units of each run in as many groups as can have the target each, of similar size if that is possible.

    A run that has less than the target is not in the result: it stays with what contains it.
    """
    for _, run in groupby(units, key=lambda unit: unit.run):
        neighbours = [*run]
        closed = _first_to_reach(target, neighbours)
        even = _evenly(len(closed), neighbours)
        yield from even if all(_bytes(group) >= target for group in even) else closed


def _first_to_reach(target: int, neighbours: Iterable[_Unit]) -> list[list[_Unit]]:
    """Groups that are closed as soon as they have the target; the last one has the remaining, too."""
    groups: list[list[_Unit]] = []
    pending: list[_Unit] = []
    for unit in neighbours:
        pending.append(unit)
        if _bytes(pending) >= target:
            groups.append(pending)
            pending = []
    if groups:
        groups[-1] += pending
    return groups


def _evenly(num_groups: int, neighbours: Sequence[_Unit]) -> list[list[_Unit]]:
    """Cut at equal numbers of bytes, as well as units allow: each goes where its middle lies."""
    ends = [*accumulate(unit.num_bytes for unit in neighbours)]
    part = {
        unit: num_groups * (2 * end - unit.num_bytes) // (2 * ends[-1])
        for unit, end in zip(neighbours, ends, strict=True)
    }
    return [[*group] for _, group in groupby(neighbours, key=part.__getitem__)]


def _bytes(units: Iterable[_Unit]) -> int:
    return sum(unit.num_bytes for unit in units)


# --- the plan -------------------------------------------------------------------------------------


def _planned(model: nn.Module, options: GroupingOptions) -> tuple[PlannedGroup, ...]:
    root = _Unit(name="", module=model, num_bytes=options.bytes_below(model))
    target = min(options.min_bytes, -(-root.num_bytes // TARGETS_PER_MODEL))
    walk = _Walk(options, target)
    walk.look_into(model, "", root, entries=_is_container(model))
    units, left_out = _untie(root, walk.units, options)
    together = [[root], *_merge(units, target)]
    members: dict[_Unit, list[nn.Parameter]] = {unit: [] for group in together for unit in group}
    for held in _held_params(root, members, options):
        (unit,) = held.units
        members[unit].append(held.param)
    reasons = _Reasons(options, target, {*members}, left_out)
    return tuple(
        PlannedGroup(
            modules=tuple(unit.name for unit in group),
            num_params=len(params),
            num_elements=sum(local_tensor(param).numel() for param in params),
            num_bytes=sum(map(options.bytes_of, params)),
            reason=reasons.of(group),
        )
        for group in together
        # The root runs it all, so it is sharded even if nothing is left for it.
        if (params := [p for unit in group for p in members[unit]]) or group == [root]
    )


# --- the explanation ------------------------------------------------------------------------------


class _Reasons:
    """Says in a few words why a group is as it is."""

    def __init__(
        self,
        options: GroupingOptions,
        target: int,
        grouped: set[_Unit],
        left_out: dict[_Unit, str],
    ) -> None:
        self._limit = _size(options.max_bytes)
        self._target = _size(target)
        if target < options.min_bytes:
            self._target += f" (1/{TARGETS_PER_MODEL} of the model)"
        self._with_parts = {unit.inside for unit in grouped}
        self._ties: dict[_Unit, dict[str, list[str]]] = {}
        for unit, shared in left_out.items():
            place = unit
            while place not in grouped:
                assert place.inside is not None, "the root always has a group"
                place = place.inside
            self._ties.setdefault(place, {}).setdefault(shared, []).append(unit.name)

    def of(self, group: Sequence[_Unit]) -> str:
        """The reason of one group."""
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
            f"{_few(names)}: {shared} is shared"
            for shared, names in self._ties.get(unit, {}).items()
        ]
        return "; ".join([reason, *ties])


def _explanation(plan: GroupPlan) -> str:
    rows = [("groups", "modules", "elements", "gathered", "", "why"), *_rows(plan)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    num_groups, least = len(plan.groups), plan.options.min_bytes
    num_small = sum(group.num_bytes < least for group in plan.groups)
    lines = [
        f"{type(plan.model).__name__} has {_size(plan.num_bytes)} of parameters in {num_groups} group"
        f"{'s' * (num_groups != 1)}; at most {_size(plan.peak_bytes)} are gathered at a time.",
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
        f"Smaller than {_size(least)}, so that latency counts: {num_small} of {num_groups}.",
    ]
    if any(len(group.modules) > 1 for group in plan.groups):
        lines.append(
            "Merged modules stay gathered from the first to the last of them; if one does not run, to the end of "
            "forward."
        )
    return "\n".join(lines)


def _rows(plan: GroupPlan) -> Iterator[tuple[str, ...]]:
    """Lines of the table; neighbours that are alike share one."""
    for _, alike in groupby(plan.groups, key=lambda g: (len(g.modules), g.num_elements, g.reason)):
        groups = [*alike]
        names = [name or "(root)" for group in groups for name in group.modules]
        yield (
            f"{len(groups)} x",
            f"{len(groups[0].modules)}",
            f"{groups[0].num_elements:,}",
            _size(groups[0].num_bytes),
            names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}",
            groups[0].reason,
        )


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _few(names: Sequence[str], most: int = 4) -> str:
    """Names in one line, the first ones if there are many."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _size(num_bytes: int) -> str:
    """A number of bytes for people: three digits and a unit."""
    value, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{num_bytes} bytes" if unit == "bytes" else f"{value:.3g} {unit}"
