"""The functional door: `fully_shard`.

It decides which parameters form a group, checks that they can, and hands them to the engine:

    1. checks of the arguments and of the modules
    2. modules and parameters of the group: everything below that no other `fully_shard` call has taken
    3. buffers moved to the mesh's device (of parameters, only this rank's pieces ever get there)
    4. the group (which shards the parameters), the state, the hooks, the class
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar, cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from .errors import ConfigurationError, LifecycleError, UnsupportedError
from .fsdp_module import FSDPModule, sharded_class
from .mesh import FSDPMeshInfo, default_mesh, device_of, mesh_info
from .param import (
    FSDPParam,
    ParamOwner,
    check_can_be_sharded,
    group_of,
    normalized_shard_dim,
)
from .param_group import FSDPParamGroup
from .policies import MixedPrecisionPolicy, OffloadPolicy
from .runtime import FSDPState, attach_state, state_of

ModuleT = TypeVar("ModuleT", bound=nn.Module)
ShardPlacementFn = Callable[[nn.Parameter], Shard | None]


@overload
def fully_shard(
    module: list[ModuleT],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: object = ...,
) -> list[ModuleT]: ...


@overload
def fully_shard(
    module: ModuleT,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: object = ...,
) -> ModuleT: ...


def fully_shard(
    module: ModuleT | list[ModuleT],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (frozen)
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: object = None,
) -> ModuleT | list[ModuleT]:
    """Shard a module's parameters over ranks, in place; gather them only while they are needed.

    Apply it bottom-up: to each layer, then to the whole model. Each call makes one group of the
    parameters below the module that no earlier call has taken; a group is gathered and reduced as
    one.

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)

    Args:
        module: A module, or a list of modules that form one group.
        mesh: 1-D (shard) or 2-D (replicate, shard) with named axes. By default all ranks, 1-D.
        reshard_after_forward: Free the gathered parameters after forward and gather them again for
            backward (True), or keep them (False). None means True, but False for the root. The
            shard size means True; 1 means False.
        shard_placement_fn: Says per parameter along which dimension to shard; None means 0.
        mp_policy: Dtypes of compute, reduction and outputs.
        offload_policy: Where shards rest: on the device, or with `CPUOffloadPolicy` in host memory.
        ignored_params: Parameters to leave alone: not sharded, moved or reduced.
        dp_mesh_dims: Not supported yet.

    Returns:
        The same object, now also an `FSDPModule`.
    """
    modules = _checked_modules(module)
    _check_options(mp_policy, offload_policy, ignored_params, dp_mesh_dims)
    info = mesh_info(mesh if mesh is not None else default_mesh())
    reshard, auto_reshard = _reshard_choice(reshard_after_forward, info)
    ignored = {id(param) for param in ignored_params or ()}

    managed = list(_managed_modules(modules))
    params = _params_to_shard(managed, ignored, shard_placement_fn)
    device = device_of(info.mesh)
    _move_buffers(managed, device)
    name = _provisional_name(modules)
    groups = (
        [FSDPParamGroup(params, info, device, mp_policy, offload_policy, name)] if params else []
    )
    state = FSDPState(
        modules, groups, mp_policy, device, reshard_after_forward=reshard, auto_reshard=auto_reshard
    )
    for each in modules:
        attach_state(each, state)
        each.__class__ = sharded_class(type(each))
        each.register_forward_pre_hook(state.pre_forward, prepend=True, with_kwargs=True)
        # Also when forward raises, so that nobody stays unsharded, or in the middle of a call.
        each.register_forward_hook(state.post_forward, prepend=False, always_call=True)
        each.register_state_dict_pre_hook(_before_state_dict)
        each.register_load_state_dict_pre_hook(_before_state_dict)
        each.register_load_state_dict_post_hook(_after_load_state_dict)
    return module


def fsdp_state(module: nn.Module) -> FSDPState | None:
    """The state `fully_shard` put on a module, or None; also as ``fully_shard.state(module)``."""
    return state_of(module)


fully_shard.state = fsdp_state  # type: ignore[attr-defined]


# --- 1. checks ------------------------------------------------------------------------------------


def _checked_modules(module: object) -> list[nn.Module]:
    modules = module if isinstance(module, (list, tuple)) else [module]
    wrong = [type(each).__name__ for each in modules if not isinstance(each, nn.Module)]
    if wrong or not modules:
        found = f"a list with {wrong}" if isinstance(module, (list, tuple)) else f"{wrong[0]}"
        raise ConfigurationError(
            "fully_shard takes an nn.Module or a non-empty list of them, got "
            f"{found if modules else 'an empty list'}."
        )
    checked = cast("list[nn.Module]", list(modules))
    without_forward = [type(each).__name__ for each in checked if not _has_forward(each)]
    if without_forward:
        raise ConfigurationError(
            "fully_shard gathers parameters around a module's forward, but these have none: "
            f"{without_forward}. Shard the modules they contain, or the module that contains them."
        )
    twice = [type(each).__name__ for each in checked if state_of(each) is not None]
    if twice or len({id(each) for each in checked}) < len(checked):
        raise ConfigurationError(
            f"fully_shard is applied to a module once; it was applied before to: {twice or checked}. Remove "
            "the second call."
        )
    started = [
        f"{type(each).__name__} (through {name or 'itself'})"
        for each in checked
        for name, below in each.named_modules()
        if (state := state_of(below)) is not None and state.runtime is not None
    ]
    if started:
        raise LifecycleError(
            f"fully_shard must be applied before the first forward; these have run already: {started}. Apply "
            "it to the layers, then to the model, and only then run it."
        )
    return checked


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward and not isinstance(
        module, (nn.ModuleList, nn.ModuleDict)
    )


def _check_options(
    mp_policy: object, offload_policy: object, ignored_params: object, dp_mesh_dims: object
) -> None:
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise ConfigurationError(
            f"mp_policy must be a fullshard.MixedPrecisionPolicy, got {type(mp_policy).__name__}."
        )
    if not isinstance(offload_policy, OffloadPolicy):
        raise ConfigurationError(
            f"offload_policy must be a fullshard.OffloadPolicy, got {type(offload_policy).__name__}."
        )
    if dp_mesh_dims is not None:
        raise UnsupportedError(
            "dp_mesh_dims is not supported by this version of fullshard. Pass the data-parallel mesh itself."
        )
    if ignored_params is not None and (
        not isinstance(ignored_params, Iterable)
        or not all(isinstance(param, nn.Parameter) for param in ignored_params)
    ):
        raise ConfigurationError(
            f"ignored_params must be a set of nn.Parameter, got {type(ignored_params).__name__}."
        )


def _reshard_choice(choice: object, info: FSDPMeshInfo) -> tuple[bool, bool]:
    """Whether to reshard after forward, and whether the root may decide otherwise."""
    if choice is None:
        return True, True
    if isinstance(choice, bool):
        return choice, False
    if not isinstance(choice, int):
        raise ConfigurationError(
            f"reshard_after_forward must be True, False, None or an int, got {choice!r}."
        )
    if choice == 1:
        warnings.warn(
            "reshard_after_forward=1 keeps the gathered parameters, as False does; say False.",
            stacklevel=3,
        )
        return False, False
    if choice == info.shard_mesh_size:
        return True, False
    if choice < 1 or info.shard_mesh_size % choice:
        raise ConfigurationError(
            f"reshard_after_forward as an int must divide the shard size {info.shard_mesh_size}, got {choice}."
        )
    raise UnsupportedError(
        f"reshard_after_forward={choice} (resharding to a smaller mesh of the {info.shard_mesh_size} ranks) is "
        "not supported by this version of fullshard. Use True or False."
    )


# --- 2. modules and parameters --------------------------------------------------------------------


def _managed_modules(modules: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose parameters belong to this call: the given ones and those below, up to other states."""
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, name: str, given: bool) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or (not given and state_of(module) is not None):
            return
        seen.add(module)
        yield name, module
        for child_name, child in module.named_children():
            yield from visit(child, f"{name}.{child_name}" if name else child_name, False)

    for module in modules:
        yield from visit(module, "", True)


def _params_to_shard(
    managed: Iterable[tuple[str, nn.Module]],
    ignored: set[int],
    shard_placement_fn: ShardPlacementFn | None,
) -> list[FSDPParam]:
    owners: dict[int, list[ParamOwner]] = {}
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, module in managed:
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(param) not in ignored:
                full_name = f"{prefix}.{name}" if prefix else name
                found.setdefault(id(param), (full_name, param))
                owners.setdefault(id(param), []).append(ParamOwner(module, name))
    _check_unshared(found.values())
    faults = [
        fault for name, param in found.values() if (fault := check_can_be_sharded(name, param))
    ]
    if faults:
        raise ConfigurationError(
            "Parameters to be sharded must be plain tensors, and real floating-point where they are "
            "trainable:\n  "
            + "\n  ".join(faults)
            + "\nFreeze them, or leave them out with ignored_params."
        )
    on_meta = [name for name, param in found.values() if param.is_meta]
    if 0 < len(on_meta) < len(found):
        raise ConfigurationError(
            "The parameters of a group must all be on the meta device, or none; these are, and others are not: "
            f"{on_meta}. Build the whole module under torch.device('meta'), or materialise these first."
        )
    result = []
    for key, (name, param) in found.items():
        placement = shard_placement_fn(param) if shard_placement_fn is not None else None
        dim = normalized_shard_dim(name, param, placement)
        result.append(FSDPParam(name, owners[key], param, dim))
    return result


def _check_unshared(found: Iterable[tuple[str, nn.Parameter]]) -> None:
    taken = [f"{name} (by {group})" for name, param in found if (group := group_of(param))]
    if taken:
        raise ConfigurationError(
            "A parameter belongs to one group, but these have been sharded before:\n  "
            + "\n  ".join(taken)
            + "\nApply fully_shard to children before their parents; put modules that share a parameter into "
            "one call, fully_shard([a, b])."
        )


# --- 3. buffers -----------------------------------------------------------------------------------


def _move_buffers(managed: Iterable[tuple[str, nn.Module]], device: torch.device) -> None:
    """Move buffers to the device; what is on meta stays there."""
    for _, module in managed:
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta and buffer.device != device:
                setattr(module, name, buffer.to(device))


# --- 4. hooks of the module -----------------------------------------------------------------------


def _before_state_dict(module: nn.Module, *_args: object) -> None:
    """State dicts hold, and are loaded into, sharded parameters, whatever was unsharded a moment ago."""
    cast(FSDPModule, module).reshard()


def _after_load_state_dict(module: nn.Module, _incompatible: object) -> None:
    """Loading may have put other parameters on the modules (``assign=True``)."""
    state = state_of(module)
    assert state is not None, "the hook was registered with the state"
    for group in state.groups:
        group.repack()


def _provisional_name(modules: list[nn.Module]) -> str:
    """A name for messages until the first forward, when full names are known."""
    return ", ".join(dict.fromkeys(type(module).__name__ for module in modules))
