"""Meaning of a wrapper's arguments: which ranks, which device, what to ignore, what to wrap below.

    axes      over which ranks to shard and to replicate
    device    where to compute
    ignored   which modules and parameters to leave alone
    policy    which modules below get wrappers of their own

Nothing is changed here but by `wrap_below`, which checks everything before it wraps the first module.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fullshard.errors import ConfigurationError, OptionTypeError, UsageError
from fullshard.mesh.axes import (
    DataParallelAxes,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ProcessGroupAxes,
    check_mesh,
    default_group,
    node_groups,
)
from fullshard.mesh.backends import NOTHING, backend_of, has_imagined_ranks
from fullshard.policies import check_type, switch
from fullshard.wrap import Wrapping, auto_wrap

ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]
"""One to shard over; or one to shard and one to replicate over."""

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
"""Strategies that shard within a node and replicate across nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperOptions:
    """The arguments of one wrapper, checked and completed."""

    axes: DataParallelAxes
    strategy: ShardingStrategy
    device: torch.device
    ignored: Ignored
    precision: MixedPrecision
    offload: CPUOffload
    backward_prefetch: BackwardPrefetch | None
    use_orig_params: bool
    param_init_fn: Callable[[nn.Module], None] | None
    sync_module_states: bool
    forward_prefetch: bool
    limit_all_gathers: bool
    fuse_gradients: bool

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks to shard over; with NO_SHARD, those to replicate over."""
        group = self.axes.shard_process_group or self.axes.replicate_process_group
        assert group is not None, "choose_axes sets at least one"
        return group


def read_options(
    wrapper_cls: type[nn.Module], module: nn.Module, arguments: Mapping[str, Any]
) -> WrapperOptions:
    """Check the arguments of a wrapper's constructor and complete them; warn of those that have no effect."""
    check_type("module", module, nn.Module, home="torch.nn")
    ignored = choose_ignored(wrapper_cls, arguments["ignored_modules"], arguments["ignored_states"])
    if module in ignored.modules:
        warnings.warn(
            f"The wrapped module itself, {type(module).__name__}, is ignored, so nothing in it is sharded and no gradient "
            "is averaged. Pass the modules below it that are to be left alone.",
            stacklevel=3,
        )
    chosen = _checked(arguments, "sharding_strategy", ShardingStrategy, ShardingStrategy.FULL_SHARD)
    offload = _checked(arguments, "cpu_offload", CPUOffload, CPUOffload())
    precision = _checked(arguments, "mixed_precision", MixedPrecision, MixedPrecision())
    backward_prefetch = _checked(arguments, "backward_prefetch", BackwardPrefetch, None)
    switches = {
        name: switch(name, arguments[name])
        for name in (
            "sync_module_states",
            "forward_prefetch",
            "limit_all_gathers",
            "use_orig_params",
            "fuse_gradients",
        )
    }
    param_init_fn = arguments["param_init_fn"]
    if param_init_fn is not None and not callable(param_init_fn):
        raise OptionTypeError(
            f"param_init_fn must be a function of a module, got {param_init_fn!r}."
        )
    axes, strategy = choose_axes(chosen, arguments["process_group"], arguments["device_mesh"])
    if strategy is not chosen:
        warnings.warn(
            f"There is one rank to shard over, so {type(module).__name__} is not sharded: NO_SHARD instead of "
            f"{chosen.name}.",
            stacklevel=3,
        )
    params = (param for param in module.parameters() if param not in ignored.params)
    return WrapperOptions(
        axes=axes,
        strategy=strategy,
        device=choose_device(arguments["device_id"], params, axes),
        ignored=ignored,
        precision=precision,
        offload=offload,
        backward_prefetch=backward_prefetch,
        param_init_fn=param_init_fn,
        **switches,
    )


_Value = TypeVar("_Value")
_Default = TypeVar("_Default")


def _checked(
    arguments: Mapping[str, Any], name: str, expected: type[_Value], default: _Default
) -> _Value | _Default:
    """Return an argument of this type, or the default for None."""
    value = arguments[name]
    if value is None:
        return default
    check_type(name, value, expected)
    return cast(_Value, value)


# --- axes -----------------------------------------------------------------------------------------


def choose_axes(
    strategy: ShardingStrategy, process_group: ProcessGroups | None, mesh: DeviceMesh | None
) -> tuple[DataParallelAxes, ShardingStrategy]:
    """Return the axes to shard and to replicate over, and the strategy: NO_SHARD if there is one rank to shard over."""
    if process_group is not None and mesh is not None:
        raise ConfigurationError(
            "Pass process_group or device_mesh for the ranks, got both. Leave one out."
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
    """Return the axes of a mesh: (shard,), or (replicate, shard) for hybrid strategies."""
    wanted = 2 if strategy in HYBRID else 1
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != wanted:
        found = f"{mesh.ndim} axes" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
        raise ConfigurationError(
            f"device_mesh must be a DeviceMesh with {wanted} ax{'e' if wanted == 2 else 'i'}s for {strategy}, "
            f"got {found}. Pass (replicate, shard) for hybrid strategies, (shard,) for the others."
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
            f"{strategy} takes one process group, got {len(group)}. Pass one, or use HYBRID_SHARD."
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
    """Return the device to compute on: the given one, the parameters', or the accelerator if there is one."""
    present = {param.device for param in params if param.device.type not in ("cpu", "meta")}
    if len(present) > 1:
        raise ConfigurationError(
            f"A wrapped module must be on one device, got {sorted(map(str, present))}. Move it, or pass device_id "
            "with a module on the CPU."
        )
    if device_id is not None:
        device = _device_of(device_id, axes)
        if present - {device}:
            raise ConfigurationError(
                f"device_id is {device}, but the module is on {present.pop()}. Pass that device, or move the module."
            )
        return device
    if present:
        return present.pop()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    group = axes.shard_process_group or axes.replicate_process_group
    assert group is not None, "choose_axes sets at least one"
    if accelerator is None or backend_of(group, accelerator) is NOTHING:
        return torch.device("cpu")  # the group communicates host memory only
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _device_of(device_id: Any, axes: DataParallelAxes) -> torch.device:
    if isinstance(device_id, bool) or not isinstance(device_id, (int, str, torch.device)):
        raise OptionTypeError(
            f"device_id must be an int or a torch.device, got {device_id!r}. Use for example "
            "torch.device('cpu'), or the local rank."
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    try:
        device = torch.device(device_id)
    except RuntimeError:  # an unknown kind of device; or an int without an accelerator
        device = None
    known = {"cpu"} if accelerator is None else {"cpu", accelerator.type}
    group = axes.shard_process_group or axes.replicate_process_group
    if group is not None and has_imagined_ranks(group):
        known.add("meta")  # to plan for ranks that do not exist
    if device is None or device.type not in known:
        raise UsageError(
            f"device_id must be a device of this machine, {' or '.join(sorted(known))}, got {device_id!r}. Leave it "
            "out to compute where the module is, or on the accelerator if there is one."
        )
    if device.type in ("cpu", "meta"):
        return torch.device(
            device.type
        )  # tensors there have no index, whatever index was asked for
    if cast("int | None", device.index) is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return device


# --- ignored --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ignored:
    """The modules and parameters that a wrapper leaves alone."""

    modules: frozenset[nn.Module]
    """The ignored modules, with all modules below them."""
    params: frozenset[nn.Parameter]
    """The ignored parameters, and those of ignored modules."""


def choose_ignored(
    wrapper_cls: type[nn.Module], ignored_modules: object, ignored_states: object
) -> Ignored:
    """Read ``ignored_modules`` and ``ignored_states``; the latter are parameters or modules."""
    if ignored_modules is not None and ignored_states is not None:
        raise ConfigurationError(
            "Pass ignored_modules or ignored_states, got both. Use ignored_states, which takes modules, too."
        )
    modules = _checked_items("ignored_modules", ignored_modules, nn.Module)
    states = _checked_items("ignored_states", ignored_states, (nn.Module, nn.Parameter))
    params = [state for state in states if isinstance(state, nn.Parameter)]
    modules += [state for state in states if isinstance(state, nn.Module)]
    if params and modules:
        raise ConfigurationError(
            "ignored_states must be parameters only or modules only, got both. Pass the parameters of the modules instead."
        )
    wrapped = [type(each.module).__name__ for each in modules if isinstance(each, wrapper_cls)]
    if wrapped:
        raise ConfigurationError(
            f"Wrappers cannot be ignored, got wrappers of {wrapped}. Leave them out: they shard their own parameters."
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
    """Return the items of an argument, or refuse items of other kinds."""
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
    arguments: Mapping[str, Any],
    options: WrapperOptions,
) -> None:
    """Give the modules that a policy chooses wrappers of their own, with the arguments of the root."""
    ignored = options.ignored
    given, mesh = arguments["process_group"], arguments["device_mesh"]
    process_groups = process_groups_below(options.axes, given, mesh)
    # Batch norm, by default, does not work in low precision: it gets a wrapper that computes in full.
    precision: MixedPrecision | None = arguments["mixed_precision"]
    exempt = () if precision is None else tuple(precision._module_classes_to_ignore)
    wrapped = auto_wrap(
        module,
        policy,
        wrapper_cls,
        root_kwargs={**arguments, "process_group": process_groups},
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
    """Refuse parameters that modules of several wrappers share, before the first module is wrapped."""
    names = {wrapping.module: wrapping.name for wrapping in wrappings}
    shared: dict[nn.Parameter, dict[str, str]] = {}
    """Names that each parameter has in wrappers, by parameter and name of wrapper."""
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
            "A parameter must be in one wrapper, but the policy gives these to several:\n  "
            + "\n  ".join(faults)
            + "\nLet the policy wrap a module around all of them instead, or leave them to the root."
        )
