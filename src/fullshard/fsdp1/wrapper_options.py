"""What the arguments of a wrapper mean: which ranks, which device, what to ignore, what to wrap below.

    axes      over which ranks to shard and to replicate
    device    where to compute
    ignored   which modules and parameters to leave alone
    policy    which modules below get wrappers of their own

Nothing is changed here but by `wrap_below`, which checks everything before it wraps the first module.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.api import MixedPrecision, ShardingStrategy
from fullshard.comm import collectives
from fullshard.errors import ConfigurationError, OptionTypeError, UsageError
from fullshard.plan.mesh import (
    DataParallelAxes,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ProcessGroupAxes,
    check_mesh,
    default_group,
    node_groups,
)
from fullshard.wrap import Wrapping, auto_wrap

ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]
"""One to shard over; or one to shard and one to replicate over."""

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
"""Strategies that shard within a node and replicate across nodes."""


# --- axes -----------------------------------------------------------------------------------------


def choose_axes(
    strategy: ShardingStrategy, process_group: ProcessGroups | None, mesh: DeviceMesh | None
) -> tuple[DataParallelAxes, ShardingStrategy]:
    """Over which ranks to shard and to replicate; with one rank, there is nothing to shard."""
    if process_group is not None and mesh is not None:
        raise ConfigurationError(
            "Ranks are given by process_group or by device_mesh, got both. Leave one out."
        )
    axes = (
        _axes_of_mesh(strategy, mesh)
        if mesh is not None
        else _axes_of_groups(strategy, process_group)
    )
    if strategy not in HYBRID and axes.shard_mesh_size == 1:
        strategy = ShardingStrategy.NO_SHARD
    return axes, strategy


def process_groups_below(
    axes: DataParallelAxes, given: ProcessGroups | None, mesh: DeviceMesh | None
) -> ProcessGroups | None:
    """Return the process groups for wrappers below: the outermost wrapper builds those of the nodes once."""
    shard, replicate = axes.shard_process_group, axes.replicate_process_group
    if mesh is None and shard is not None and replicate is not None:
        return shard, replicate
    return given


def _axes_of_mesh(strategy: ShardingStrategy, mesh: DeviceMesh) -> DataParallelAxes:
    wanted = 2 if strategy in HYBRID else 1
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != wanted:
        found = f"{mesh.ndim} axes" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
        raise ConfigurationError(
            f"device_mesh must be a DeviceMesh with {wanted} ax{'e' if wanted == 2 else 'i'}s for {strategy}, "
            f"got {found}. Replicas need an axis of their own: (replicate, shard) for hybrid strategies, "
            "(shard,) for the others."
        )
    check_mesh(mesh)
    if strategy is ShardingStrategy.NO_SHARD:
        return DDPMeshInfo(mesh, replicate_mesh_dim=0)
    if strategy in HYBRID:
        return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return FSDPMeshInfo(mesh, shard_mesh_dim=0)


def _axes_of_groups(
    strategy: ShardingStrategy, process_group: ProcessGroups | None
) -> DataParallelAxes:
    if strategy in HYBRID:
        if process_group is None:
            shard, replicate = node_groups(default_group())
            return ProcessGroupAxes(shard=shard, replicate=replicate)
        if not isinstance(process_group, tuple) or len(process_group) != 2:
            raise ConfigurationError(
                f"{strategy} takes two process groups, (to shard over, to replicate over), got {process_group!r}. "
                "Leave process_group out to shard within each node, or pass a 2-D device_mesh."
            )
        _check_groups(process_group)
        return ProcessGroupAxes(shard=process_group[0], replicate=process_group[1])
    group = default_group() if process_group is None else process_group
    if isinstance(group, tuple):
        raise ConfigurationError(
            f"{strategy} takes one process group, got {len(group)}. Two are for HYBRID_SHARD."
        )
    _check_groups((group,))
    if strategy is ShardingStrategy.NO_SHARD or group.size() == 1:
        return ProcessGroupAxes(replicate=group)
    return ProcessGroupAxes(shard=group)


def _check_groups(groups: Sequence[object]) -> None:
    wrong = [group for group in groups if not isinstance(group, dist.ProcessGroup)]
    if wrong:
        raise OptionTypeError(
            f"process_group must be a ProcessGroup that this rank is in, got {wrong}."
        )


# --- device ---------------------------------------------------------------------------------------


def choose_device(
    device_id: int | torch.device | None, params: Iterable[nn.Parameter], axes: DataParallelAxes
) -> torch.device:
    """Where to compute: as asked, or where the parameters are, or on the accelerator if there is one."""
    present = {param.device for param in params if param.device.type not in ("cpu", "meta")}
    if len(present) > 1:
        raise ConfigurationError(
            f"A wrapped module must be on one device, got {sorted(map(str, present))}. Move it, or pass device_id "
            "with a module on the CPU."
        )
    if device_id is not None:
        device = _device_of(device_id)
        if present - {device}:
            raise ConfigurationError(
                f"device_id is {device}, but the module is on {present.pop()}. Pass that device, or move the module."
            )
        return device
    if present:
        return present.pop()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    group = axes.shard_process_group or axes.replicate_process_group
    assert group is not None, "choose_axes finds at least one"
    if (
        accelerator is None or collectives.backend_of(group, accelerator) == "nothing"
    ):  # for host memory
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _device_of(device_id: Any) -> torch.device:
    if isinstance(device_id, bool) or not isinstance(device_id, (int, str, torch.device)):
        raise OptionTypeError(
            f"device_id must be an int or a torch.device, got {device_id!r}. Use for example "
            "torch.device('cpu'), or the local rank."
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    try:
        device = torch.device(device_id)
    except RuntimeError:  # no such kind; or an int, and there is no accelerator
        device = None
    known = {"cpu"} if accelerator is None else {"cpu", accelerator.type}
    if device is None or device.type not in known:
        raise UsageError(
            f"device_id must be a device of this machine, {' or '.join(sorted(known))}, got {device_id!r}. Leave it "
            "out to compute where the module is, or on the accelerator if there is one."
        )
    if device.type == "cpu":
        return torch.device("cpu")  # what tensors say, whatever index they were made with
    if cast("int | None", device.index) is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return device


# --- ignored --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ignored:
    """What a wrapper leaves alone."""

    modules: frozenset[nn.Module]
    """With all modules below them."""
    params: frozenset[nn.Parameter]
    """Those of the modules, too."""


def choose_ignored(
    wrapper_cls: type[nn.Module], ignored_modules: object, ignored_states: object
) -> Ignored:
    """Read ``ignored_modules`` and ``ignored_states``; the latter are parameters or modules."""
    if ignored_modules is not None and ignored_states is not None:
        raise ConfigurationError(
            "What to ignore is given by ignored_modules or by ignored_states, got both. Use ignored_states, "
            "which takes modules, too."
        )
    modules = _checked_items("ignored_modules", ignored_modules, nn.Module)
    states = _checked_items("ignored_states", ignored_states, (nn.Module, nn.Parameter))
    params = [state for state in states if isinstance(state, nn.Parameter)]
    modules += [state for state in states if isinstance(state, nn.Module)]
    if params and modules:
        raise ConfigurationError(
            "ignored_states must be parameters only or modules only, got both. Pass the parameters of the modules."
        )
    wrapped = [type(each.module).__name__ for each in modules if isinstance(each, wrapper_cls)]
    if wrapped:
        raise ConfigurationError(
            f"Wrapped modules manage themselves and cannot be ignored, got wrappers of {wrapped}. Leave them out."
        )
    below = {
        each
        for ignored in modules
        for each in ignored.modules()
        if not isinstance(each, wrapper_cls)
    }
    inherited = {param for each in below for param in each.parameters(recurse=False)}
    return Ignored(frozenset(below), frozenset(inherited.union(params)))


def _checked_items(name: str, given: object, kinds: type | tuple[type, ...]) -> list[Any]:
    if given is None:
        return []
    items = list(given) if isinstance(given, Iterable) else [given]
    wrong = sorted({type(item).__name__ for item in items if not isinstance(item, kinds)})
    if wrong or isinstance(given, (nn.Module, torch.Tensor)):
        expected = "modules" if kinds is nn.Module else "parameters or of modules"
        raise OptionTypeError(
            f"{name} must be a collection of {expected}, got {wrong or type(given).__name__}."
        )
    return items


# --- policy ---------------------------------------------------------------------------------------


def wrap_below(
    wrapper_cls: type[nn.Module],
    module: nn.Module,
    policy: Any,
    options: Mapping[str, Any],
    ignored: Ignored,
) -> None:
    """Give the modules that a policy chooses wrappers of their own, with these options."""
    precision: MixedPrecision | None = options["mixed_precision"]
    # Batch norm, by default, does not work in low precision: it gets a wrapper that computes in full.
    exempt = () if precision is None else tuple(precision._module_classes_to_ignore)
    wrapped = auto_wrap(
        module,
        policy,
        wrapper_cls,
        root_kwargs=options,
        ignored_modules=ignored.modules,
        ignored_params=ignored.params,
        class_kwargs={cls: {"mixed_precision": None} for cls in exempt},
        check=functools.partial(_check_one_wrapper_per_param, module, ignored=ignored),
    )
    in_full = [each.name for each in wrapped if isinstance(each.module, exempt)]
    if in_full:
        warnings.warn(
            f"These modules have wrappers of their own, without mixed precision: {in_full}. Modules of their classes "
            f"({', '.join(cls.__name__ for cls in exempt)}) do not work in low precision.",
            stacklevel=3,
        )


def _check_one_wrapper_per_param(
    root: nn.Module, wrappings: Sequence[Wrapping], ignored: Ignored
) -> None:
    """Refuse parameters that modules of several wrappers share, before the first of them is made."""
    names = {wrapping.module: wrapping.name for wrapping in wrappings}
    shared: dict[nn.Parameter, dict[str, str]] = {}
    """Per parameter, its name in every wrapper."""
    seen: set[tuple[nn.Module, str]] = set()

    def visit(module: nn.Module, path: str, wrapper: str) -> None:
        wrapper = names.get(module, wrapper)
        if module in ignored.modules or (module, wrapper) in seen:
            return
        seen.add((module, wrapper))
        for name, param in module.named_parameters(recurse=False):
            if param not in ignored.params:
                shared.setdefault(param, {}).setdefault(wrapper, f"{path}{name}")
        for name, child in module.named_children():
            visit(child, f"{path}{name}.", wrapper)

    visit(root, "", "the root")
    faults = [
        ", ".join(f"{name} (in {wrapper})" for wrapper, name in of_wrappers.items())
        for of_wrappers in shared.values()
        if len(of_wrappers) > 1
    ]
    if faults:
        raise ConfigurationError(
            "A parameter belongs to one wrapper, but the policy gives these to several:\n  "
            + "\n  ".join(faults)
            + "\nLet the policy leave these modules to a wrapper around all of them, for example to the root."
        )
