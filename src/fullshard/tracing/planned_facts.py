"""The groups that `plan_groups` would make of a model that is sharded already.

A plan needs a model that is not sharded, and only its structure, shapes and classes. So an outline of the model is
planned: modules of the same classes, with full parameters on the meta device. Ties stay ties: a parameter is one object
in the outline, however many modules have it. Nothing of the model is touched, and no `__init__` runs.
"""

from __future__ import annotations

import torch
from torch import nn

from fullshard.engine.ownership import params_by_owner
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.state import named_states
from fullshard.features.group_units import GroupingOptions
from fullshard.features.planned_groups import MAX_BYTES, MIN_BYTES, planned_groups
from fullshard.layout.names import is_wrapper
from fullshard.policies import MixedPrecisionPolicy
from fullshard.tracing.group_facts import outermost_states
from fullshard.tracing.schema import PlannedFacts


def planned_facts(model: nn.Module) -> tuple[PlannedFacts, ...]:
    """Return the groups of the plan, the outermost first; none if ``model`` has several sharded models in it."""
    roots = outermost_states(model)
    if len(roots) != 1:
        return ()
    ((path, root),) = roots.items()
    groups = [group for state in named_states(root.modules[0]) for group in state.groups]
    outline = Outline(groups).of(root.modules[0])
    # The outline's parameters have the compute dtype, so the policy of the plan has none.
    options = GroupingOptions(
        mp_policy=MixedPrecisionPolicy(),
        ignored_params=(),
        keep_with_parent=(),
        min_bytes=MIN_BYTES,
        max_bytes=MAX_BYTES,
    )
    return tuple(
        PlannedFacts(
            modules=tuple(f"{path}.{name}".strip(".") for name in planned.modules),
            gathered_bytes=planned.num_bytes,
        )
        for planned in planned_groups(outline, options)
    )


class Outline:
    """Modules and parameters of sharded modules, as they were before: wrappers are left out."""

    def __init__(self, groups: list[FSDPParamGroup]) -> None:
        self._owned = params_by_owner(groups)
        self._modules: dict[nn.Module, nn.Module] = {}
        self._params: dict[tuple[FSDPParamGroup, int], nn.Parameter] = {}

    def of(self, module: nn.Module) -> nn.Module:
        """Return the outline of a module."""
        children = dict(module.named_children())
        inside = next((child for name, child in children.items() if is_wrapper(name)), None)
        if inside is not None:
            return self.of(inside)
        if module not in self._modules:
            # Classes may do anything when they are made or assigned to; an outline only needs two tables.
            outline: nn.Module = object.__new__(_class_before(module))
            self._modules[module] = outline
            outline.__dict__["_parameters"] = {
                name: self._param(*place) for name, place in self._owned.get(module, {}).items()
            }
            outline.__dict__["_modules"] = {
                name: self.of(child) for name, child in children.items()
            }
        return self._modules[module]

    def _param(self, group: FSDPParamGroup, index: int) -> nn.Parameter:
        if (group, index) not in self._params:
            param = group.params[index]
            dtype = param.compute_dtype(group.mp_policy)
            full = torch.empty(param.shape, dtype=dtype, device="meta")
            self._params[group, index] = nn.Parameter(full, requires_grad=False)
        return self._params[group, index]


def _class_before(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before `fully_shard` gave it another."""
    return getattr(type(module), "_original_class", type(module))
