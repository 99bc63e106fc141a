"""The modules of a model that may have a group, and how they are put together.

    walk       from the root down, in the order of registration, to the modules that may have a group (units):
               entries of containers, and other children that are large enough
    untie      leave out units that share a parameter; it goes to the unit that contains them all
    merge      neighbours of one series, until they reach the target together; the rest goes to the unit around it

A group is gathered around the forward of its modules. So a unit must be called, and be called as a whole: no unit lies
inside of a torch module that uses its children's weights (`nn.MultiheadAttention`). A unit that is larger than
``max_bytes`` has units inside again, but none in a list or dict: these may hold experts, and not all experts run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

from torch import nn

from fullshard.engine.ownership import has_forward, managed_modules, owned_params
from fullshard.engine.state import state_of
from fullshard.errors import ConfigurationError
from fullshard.layout.placement import local_tensor
from fullshard.policies import MixedPrecisionPolicy, check_type


@dataclass(frozen=True, kw_only=True)
class GroupingOptions:
    """The arguments of `plan_groups`."""

    mp_policy: MixedPrecisionPolicy
    ignored_params: tuple[nn.Parameter, ...] = field(compare=False)
    keep_with_parent: tuple[nn.Module | type[nn.Module], ...] = field(compare=False)
    min_bytes: int
    max_bytes: int

    def check(self, model: object) -> None:
        """Refuse a model or values that cannot be planned."""
        if not isinstance(model, nn.Module) or not has_forward(model):
            raise ConfigurationError(
                f"plan_groups takes the outermost module, which must have a forward, got {type(model).__name__}. Pass the "
                "module whose forward you call."
            )
        check_type("mp_policy", self.mp_policy, MixedPrecisionPolicy)
        if state_of(model) is not None or self.bytes_below(model) == 0:
            raise ConfigurationError(
                f"plan_groups needs parameters to shard, but {type(model).__name__} has none, or all are ignored or sharded "
                "already. Plan a model before it is sharded."
            )
        sizes = (self.min_bytes, self.max_bytes)
        if not all(isinstance(size, int) for size in sizes) or not 1 <= sizes[0] <= sizes[1]:
            raise ConfigurationError(
                "min_bytes and max_bytes must be numbers of bytes with 1 <= min_bytes <= max_bytes, got "
                f"{self.min_bytes!r} and {self.max_bytes!r}. Leave them out for the defaults."
            )
        below = {*model.modules()} - {model}
        unknown = [
            each.__name__ if isinstance(each, type) else f"a {type(each).__name__}"
            for each in self.keep_with_parent
            if each not in below and not (isinstance(each, type) and issubclass(each, nn.Module))
        ]
        if unknown:
            raise ConfigurationError(
                f"keep_with_parent takes modules that the model contains, or classes of modules, got {unknown}. Leave "
                "them out."
            )

    def keeps(self, module: nn.Module) -> bool:
        """Return whether a module must not have a group of its own."""
        classes = tuple(each for each in self.keep_with_parent if isinstance(each, type))
        return isinstance(module, classes) or any(module is each for each in self.keep_with_parent)

    def bytes_of(self, param: nn.Parameter) -> int:
        """Return the bytes of a parameter while it is gathered."""
        local, dtype = local_tensor(param), self.mp_policy.param_dtype
        if not param.is_floating_point():
            dtype = None
        elif self.mp_policy.param_dtype_override_fn is not None:
            dtype = self.mp_policy.param_dtype_override_fn(param) or dtype
        dtype = dtype or local.dtype
        return local.numel() * dtype.itemsize

    def bytes_below(self, module: nn.Module) -> int:
        """Return the bytes of all parameters of a module and below it that no earlier call has taken."""
        owned = owned_params(managed_modules([module]), self.ignored_params)
        return sum(self.bytes_of(each.param) for each in owned)


# --- walk -----------------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class Unit:
    """A module that may have a group, of its own or with its neighbours; the root always has one."""

    name: str
    module: nn.Module
    num_bytes: int
    inside: Unit | None = None
    """The innermost unit that contains it; None for the root."""
    series: int = 0
    """Units of one series are neighbours and may be merged."""
    divided: bool = True
    """Whether it is so large that it may have units inside."""

    @property
    def depth(self) -> int:
        """The number of units that contain it."""
        return 0 if self.inside is None else 1 + self.inside.depth


class UnitWalk:
    """The units below a module, in the order of registration."""

    def __init__(self, options: GroupingOptions, target: int) -> None:
        self.units: list[Unit] = []
        self._options, self._target = options, target
        self._series = 0
        self._seen: set[nn.Module] = set()

    def look_into(
        self, module: nn.Module, name: str, inside: Unit, *, entries: bool = False
    ) -> None:
        """Visit the children; with ``entries``, they are entries of a container and run one after the other."""
        if _is_opaque(module):
            return
        for child_name, child in module.named_children():
            if child not in self._seen and not self._options.keeps(child):
                self._seen.add(child)
                self._visit(child, _joined(name, child_name), inside, entries)

    def _visit(self, module: nn.Module, name: str, inside: Unit, is_entry: bool) -> None:
        num_bytes = 0 if state_of(module) is not None else self._options.bytes_below(module)
        if num_bytes == 0:
            return
        is_large, in_layer = num_bytes >= self._target, inside.depth > 0
        if is_container(module):
            if not in_layer or isinstance(module, nn.Sequential):
                self.look_into(module, name, inside, entries=_runs_in_turn(module))
        elif not has_forward(module):
            self.look_into(module, name, inside)
        elif is_large and not is_entry and not in_layer and _has_container(module):
            self._series += (
                1  # units before and after this module are no neighbours of those inside
            )
            self.look_into(module, name, inside)
            self._series += 1
        elif is_large or is_entry or _has_children(module):
            # Other modules are small leaves; a parent often uses their weights without calling them.
            self._add(module, name, inside, num_bytes, alone=is_large and not is_entry)

    def _add(
        self, module: nn.Module, name: str, inside: Unit, num_bytes: int, *, alone: bool
    ) -> None:
        divided = num_bytes > self._options.max_bytes
        self._series += alone or divided
        unit = Unit(
            name=name,
            module=module,
            num_bytes=num_bytes,
            inside=inside,
            series=self._series,
            divided=divided,
        )
        self.units.append(unit)
        self._series += alone or divided
        if divided:
            self.look_into(module, name, unit)
            self._series += 1


def is_container(module: nn.Module) -> bool:
    """Return whether a module is a list, dict or sequence of modules."""
    return (
        isinstance(module, (nn.ModuleList, nn.ModuleDict))
        or type(module).forward is nn.Sequential.forward
    )


def _runs_in_turn(container: nn.Module) -> bool:
    """Return whether entries are layers of one kind; a dict may also hold the different parts of a model."""
    classes = [type(entry) for entry in container.children()]
    return not isinstance(container, nn.ModuleDict) or (len(classes) > 1 == len({*classes}))


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _has_container(module: nn.Module) -> bool:
    """Return whether a module contains a container with parameters."""
    return not _is_opaque(module) and any(
        _has_container(child)
        or (is_container(child) and next(child.parameters(), None) is not None)
        for child in module.children()
    )


def _is_opaque(module: nn.Module) -> bool:
    """Return whether a module's class is one of torch's that may use its children's weights without calling them."""
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


# --- untie ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class ReachedParam:
    """A parameter, and the innermost units through which it is reached."""

    name: str
    param: nn.Parameter
    units: list[Unit] = field(default_factory=list)


def reached_params(
    root: Unit, units: Iterable[Unit], options: GroupingOptions
) -> Iterable[ReachedParam]:
    """Return all parameters to shard, with the units on all paths to them: a module may have several parents."""
    unit_of = {unit.module: unit for unit in (root, *units)}
    ignored = {id(param) for param in options.ignored_params}
    found: dict[int, ReachedParam] = {}
    seen: set[tuple[nn.Module, Unit]] = set()

    def visit(module: nn.Module, name: str, unit: Unit) -> None:
        if (module, unit) in seen or state_of(module) is not None:
            return
        seen.add((module, unit))
        for param_name, param in module.named_parameters(recurse=False):
            if id(param) not in ignored:
                reached = found.setdefault(
                    id(param), ReachedParam(_joined(name, param_name), param)
                )
                if unit not in reached.units:
                    reached.units.append(unit)
        for child_name, child in module.named_children():
            of_child = unit_of.get(child)
            if of_child is None or innermost(of_child.inside) is not unit:
                of_child = unit  # the child is no unit, or the unit of another parent and reached from here, too
            visit(child, _joined(name, child_name), of_child)

    def innermost(unit: Unit | None) -> Unit:
        assert unit is not None, "the root contains all units and is never left out"
        return unit if unit_of.get(unit.module) is unit else innermost(unit.inside)

    visit(root.module, "", root)
    return found.values()


def untie(
    root: Unit, units: list[Unit], options: GroupingOptions
) -> tuple[list[Unit], dict[Unit, str]]:
    """Leave out units until every parameter is in one; return the others, and those left out with what they share."""
    left_out: dict[Unit, str] = {}
    while shared := [h for h in reached_params(root, units, options) if len(h.units) > 1]:
        for reached in shared:
            # The innermost are left out first: a unit that contains all of them can stay.
            depth = max(unit.depth for unit in reached.units)
            left_out |= {unit: reached.name for unit in reached.units if unit.depth == depth}
        units = [unit for unit in units if unit not in left_out]
    return units, left_out


# --- merge ----------------------------------------------------------------------------------------


def merge(units: Iterable[Unit], target: int) -> Iterator[list[Unit]]:
    """Yield the units of each series in as many groups as can reach the target, of similar sizes if possible.

    A series that does not reach the target is left out: it stays with the unit that contains it.
    """
    for _, series in groupby(units, key=lambda unit: unit.series):
        neighbours = [*series]
        closed = _first_to_reach(target, neighbours)
        even = _evenly(len(closed), neighbours)
        yield from even if all(_bytes(group) >= target for group in even) else closed


def _first_to_reach(target: int, neighbours: Iterable[Unit]) -> list[list[Unit]]:
    """Return groups that are closed as soon as they reach the target; the last one gets the rest, too."""
    groups: list[list[Unit]] = []
    pending: list[Unit] = []
    for unit in neighbours:
        pending.append(unit)
        if _bytes(pending) >= target:
            groups.append(pending)
            pending = []
    if groups:
        groups[-1] += pending
    return groups


def _evenly(num_groups: int, neighbours: Sequence[Unit]) -> list[list[Unit]]:
    """Return groups of equal numbers of bytes, as far as units allow: each unit goes where its middle lies."""
    ends = [*accumulate(unit.num_bytes for unit in neighbours)]
    part = {
        unit: num_groups * (2 * end - unit.num_bytes) // (2 * ends[-1])
        for unit, end in zip(neighbours, ends, strict=True)
    }
    return [[*group] for _, group in groupby(neighbours, key=part.__getitem__)]


def _bytes(units: Iterable[Unit]) -> int:
    return sum(unit.num_bytes for unit in units)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
