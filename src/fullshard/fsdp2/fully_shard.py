"""The functional doors: `fully_shard` and `replicate`.

They decide which parameters form a group, check that they can, and hand them to the engine:

    1. checks of the arguments and of the modules
    2. modules and parameters: everything below that no other call has taken
    3. groups: parameters that communicate over the same ranks
    4. buffers moved to the mesh's device (of parameters, only this rank's pieces ever get there)
    5. the groups (which shard the parameters), the state, the hooks, the class
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast, overload

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fullshard.comm import collectives
from fullshard.engine import module_hooks
from fullshard.engine.options import StateOptions
from fullshard.engine.ownership import (
    check_all_on_meta_or_none,
    check_can_be_owned,
    check_real_for_wire,
    has_forward,
    ignored_below,
    managed_modules,
    move_buffers,
    owned_params,
)
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.state import FSDPState, attach_state, state_of
from fullshard.errors import ConfigurationError, OptionTypeError
from fullshard.fsdp2.fsdp_module import (
    FSDPModule,
    ReplicateModule,
    repack_when_complete,
    sharded_class,
)
from fullshard.plan.mesh import (
    DataParallelMeshInfo,
    FSDPMeshInfo,
    ShardPlacementResult,
    default_mesh,
    device_of,
    replicating_mesh_info,
    sharding_mesh_info,
)
from fullshard.plan.placement import DTensorPlacer, ParamPlacement, local_tensor
from fullshard.plan.policies import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from fullshard.storage.param import FSDPParam, fits_in_buffers, normalized_shard_dim
from fullshard.storage.shard_formats import RowFormat
from fullshard.storage.sharded_params import ParamModuleInfo

ModuleT = TypeVar("ModuleT", bound=nn.Module)
ShardPlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


@overload
def fully_shard(
    module: list[ModuleT],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
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
    ignored_params: Iterable[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> ModuleT: ...


def fully_shard(
    module: ModuleT | list[ModuleT],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (frozen)
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
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
        mesh: 1-D (shard) or 2-D (replicate, shard). By default all ranks, 1-D.
            Parameters may be DTensors on other axes of the mesh this one was cut from (tensor
            parallelism).
        reshard_after_forward: Free the gathered parameters after forward and gather them again for
            backward (True), or keep them (False). None means True, but False for the root. A
            divisor of the shard size keeps a part of them, such that backward gathers over so many
            neighbouring ranks only; the ranks of one node, say.
        shard_placement_fn: Says per parameter along which dimension to shard (`Shard(dim)`; None
            means 0) and, with `ShardPlacementResult`, over which mesh; parameters with different
            meshes form groups of their own.
        mp_policy: Dtypes of compute, reduction and outputs.
        offload_policy: Where shards rest: on the device, or with `CPUOffloadPolicy` in host memory.
        ignored_params: Parameters to leave alone: not sharded, moved or reduced.
        dp_mesh_dims: Names the data-parallel axes of ``mesh``, which then is the mesh of all kinds
            of parallelism, and all parameters are DTensors on it.

    Returns:
        The same object, now also an `FSDPModule`.
    """
    modules = _checked_modules("fully_shard", module)
    _check_options(mp_policy, offload_policy, dp_mesh_dims)
    ignored = _checked_params("ignored_params", ignored_params)
    info = sharding_mesh_info(mesh if mesh is not None else default_mesh(), dp_mesh_dims)
    keeping = _keeping_after_forward(reshard_after_forward, info)
    found = _params_to_shard(modules, ignored, shard_placement_fn, info)
    _check_parts(found, info, keeping.post_forward_size)
    _check_wire(found, mp_policy)
    _apply(modules, found, ignored, info, mp_policy, offload_policy, keeping, FSDPModule)
    return module


@overload
def replicate(
    module: list[ModuleT],
    *,
    mesh: DeviceMesh | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> list[ModuleT]: ...


@overload
def replicate(
    module: ModuleT,
    *,
    mesh: DeviceMesh | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> ModuleT: ...


def replicate(
    module: ModuleT | list[ModuleT],
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (frozen)
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> ModuleT | list[ModuleT]:
    """Keep a module's parameters whole on every rank, and average their gradients: plain data parallelism.

    On the engine of `fully_shard`, with its groups, precision, offloading and methods. A model may
    have replicated and fully sharded modules.

    Args:
        module: A module, or a list of modules that form one group.
        mesh: 1-D. By default all ranks.
        mp_policy: Dtypes of compute, reduction and outputs.
        offload_policy: Where parameters rest.
        ignored_params: Parameters to leave alone: not moved or reduced.
        dp_mesh_dims: Names the replicate axes of ``mesh``, on which all parameters are DTensors.

    Returns:
        The same object, now also a `ReplicateModule`.
    """
    modules = _checked_modules("replicate", module)
    _check_options(mp_policy, offload_policy, dp_mesh_dims)
    ignored = _checked_params("ignored_params", ignored_params)
    own_mesh = mesh if mesh is not None else default_mesh(dim_names=("replicate",))
    info = replicating_mesh_info(own_mesh, dp_mesh_dims)
    found = _params_to_shard(modules, ignored, None, info)
    _check_wire(found, mp_policy)
    keeping = _Keeping(reshard=False)
    _apply(modules, found, ignored, info, mp_policy, offload_policy, keeping, ReplicateModule)
    return module


def fsdp_state(module: nn.Module) -> FSDPState | None:
    """The state a call put on a module, or None; also as ``fully_shard.state(module)``."""
    return state_of(module)


fully_shard.state = fsdp_state  # type: ignore[attr-defined]
replicate.state = fsdp_state  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Keeping:
    """What happens to gathered parameters after forward."""

    reshard: bool
    auto: bool = False
    """Whether the user left it open, so that the root may decide otherwise."""
    post_forward_size: int | None = None
    """Over how many ranks a part of them is kept."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A parameter to be sharded, and how."""

    name: str
    param: nn.Parameter
    owners: list[ParamModuleInfo]
    dim: int
    mesh_info: DataParallelMeshInfo
    placement: ParamPlacement


def _apply(
    modules: Sequence[nn.Module],
    found: Sequence[_Found],
    ignored_params: Iterable[nn.Parameter],
    info: DataParallelMeshInfo,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    keeping: _Keeping,
    mixin: type[FSDPModule],
) -> None:
    """Shard what was found and attach the state: nothing can be refused from here on."""
    device = device_of(info.mesh)
    move_buffers(managed_modules(modules), device)
    name = _provisional_name(modules)
    members: dict[object, list[_Found]] = {}
    for each in found:
        members.setdefault(each.mesh_info.communicates_over, []).append(each)
    groups = [
        FSDPParamGroup(
            [FSDPParam(e.name, e.owners, e.param, e.placement, e.dim) for e in together],
            together[0].mesh_info,
            device,
            mp_policy,
            offload_policy,
            name,
            shard_format=RowFormat(),
            post_forward_size=keeping.post_forward_size
            if keeping.post_forward_size != together[0].mesh_info.shard_mesh_size
            else None,
        )
        for together in members.values()
    ]
    state = FSDPState(
        modules,
        groups,
        device,
        StateOptions(mp_policy, reshard_after_forward=keeping.reshard, auto_reshard=keeping.auto),
        ignored=ignored_below(modules, ignored_params),
    )
    for module in modules:
        attach_state(module, state)
        module.__class__ = sharded_class(type(module), mixin)
        module.register_forward_pre_hook(
            functools.partial(module_hooks.pre_forward, state), prepend=True, with_kwargs=True
        )
        # Also when forward raises, so that nobody stays unsharded, or in the middle of a call.
        module.register_forward_hook(
            functools.partial(module_hooks.post_forward, state), prepend=False, always_call=True
        )
        module.register_state_dict_pre_hook(_before_state_dict)
        module.register_load_state_dict_pre_hook(_before_state_dict)
        module.register_load_state_dict_post_hook(_after_load_state_dict)


# --- 1. checks ------------------------------------------------------------------------------------


def _checked_modules(door: str, module: object) -> list[nn.Module]:
    modules = module if isinstance(module, (list, tuple)) else [module]
    wrong = [type(each).__name__ for each in modules if not isinstance(each, nn.Module)]
    if wrong or not modules:
        found = f"a list with {wrong}" if isinstance(module, (list, tuple)) else f"{wrong[0]}"
        raise OptionTypeError(
            f"{door} takes an nn.Module or a non-empty list of them, got "
            f"{found if modules else 'an empty list'}."
        )
    checked = cast("list[nn.Module]", list(modules))
    without_forward = [type(each).__name__ for each in checked if not has_forward(each)]
    if without_forward:
        raise ConfigurationError(
            f"{door} gathers parameters around a module's forward, but these have none: "
            f"{without_forward}. Shard the modules they contain, or the module that contains them."
        )
    twice = [type(each).__name__ for each in checked if state_of(each) is not None]
    if twice or len({id(each) for each in checked}) < len(checked):
        raise ConfigurationError(
            f"{door} is applied to a module once; it was applied before to: {twice or checked}. Remove "
            "the second call."
        )
    return checked


def _check_options(mp_policy: object, offload_policy: object, dp_mesh_dims: object) -> None:
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise OptionTypeError(
            f"mp_policy must be a fullshard.MixedPrecisionPolicy, got {_class_of(mp_policy)}."
        )
    if not isinstance(offload_policy, OffloadPolicy):
        raise OptionTypeError(
            f"offload_policy must be a fullshard.OffloadPolicy, got {_class_of(offload_policy)}."
        )
    if dp_mesh_dims is not None and not isinstance(dp_mesh_dims, DataParallelMeshDims):
        raise OptionTypeError(
            f"dp_mesh_dims must be a fullshard.DataParallelMeshDims, got {_class_of(dp_mesh_dims)}."
        )


def _checked_params(name: str, given: object) -> tuple[nn.Parameter, ...]:
    """The parameters of an argument, read once: it may be a generator."""
    if given is None:
        return ()
    params = tuple(given) if isinstance(given, Iterable) and not isinstance(given, Tensor) else None
    if params is None or not all(isinstance(param, nn.Parameter) for param in params):
        raise OptionTypeError(f"{name} must be a set of nn.Parameter, got {type(given).__name__}.")
    return params


def _check_wire(found: Sequence[_Found], mp_policy: MixedPrecisionPolicy) -> None:
    if mp_policy.wire_dtype is not None:
        check_real_for_wire((each.name, each.param) for each in found)
        for each in found:
            device = device_of(each.mesh_info.mesh)
            collectives.check_exchanges(mp_policy.wire_dtype, each.mesh_info, device)


def _class_of(value: object) -> str:
    """Full name of a value's class: torch has classes of the same names."""
    cls = type(value)
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )


def _keeping_after_forward(choice: object, info: DataParallelMeshInfo) -> _Keeping:
    if choice is None:
        return _Keeping(reshard=True, auto=True)
    if isinstance(choice, bool):
        return _Keeping(reshard=choice)
    if not isinstance(choice, int):
        raise ConfigurationError(
            f"reshard_after_forward must be True, False, None or an int, got {choice!r}."
        )
    if choice == 1:
        warnings.warn(
            "reshard_after_forward=1 keeps the gathered parameters, as False does; say False.",
            stacklevel=3,
        )
        return _Keeping(reshard=False)
    if choice == info.shard_mesh_size:
        return _Keeping(reshard=True)
    return _Keeping(reshard=True, post_forward_size=choice)


def _check_parts(
    found: Sequence[_Found], info: DataParallelMeshInfo, post_forward_size: int | None
) -> None:
    """Check that parameters can be kept after forward over so many ranks."""
    if post_forward_size is None:
        return
    sizes = {info.shard_mesh_size, *(each.mesh_info.shard_mesh_size for each in found)}
    wrong = sorted(size for size in sizes if post_forward_size < 1 or size % post_forward_size)
    if wrong:
        raise ConfigurationError(
            "reshard_after_forward as an int must divide the shard size, "
            f"{', '.join(map(str, wrong))} here; got {post_forward_size}."
        )
    apart = [e.name for e in found if not fits_in_buffers(local_tensor(e.param))]
    if apart:
        raise ConfigurationError(
            f"reshard_after_forward as an int keeps plain tensors, but these are tensor subclasses: {apart}. Use True or "
            "False."
        )


# --- 2. modules and parameters --------------------------------------------------------------------


def _params_to_shard(
    modules: Sequence[nn.Module],
    ignored_params: Iterable[nn.Parameter],
    shard_placement_fn: ShardPlacementFn | None,
    info: DataParallelMeshInfo,
) -> list[_Found]:
    owned = owned_params(managed_modules(modules), ignored_params)
    check_can_be_owned(
        owned,
        "Apply fully_shard to children before their parents; put modules that share a parameter into one "
        "call, fully_shard([a, b]).",
    )
    placer, result, faults = DTensorPlacer(), list[_Found](), list[str]()
    check_all_on_meta_or_none(owned)
    for each in owned:
        name, param = each.name, each.param
        answer = shard_placement_fn(param) if shard_placement_fn is not None else None
        own_info = info
        if isinstance(answer, ShardPlacementResult):
            own_info = _checked_mesh_info(name, answer, info)
            answer = answer.placement
        dim = normalized_shard_dim(name, param, answer)
        try:
            placement = placer.place(param, dim, own_info)
        except ConfigurationError as error:
            faults.append(f"{name}: {error}")
            continue
        result.append(_Found(name, param, each.owners, dim, own_info, placement))
    if faults:
        raise ConfigurationError(
            "Parameters that are DTensors must lie on other axes of the mesh than data parallelism does, and "
            "with dp_mesh_dims all on the whole mesh, replicated along the data-parallel axes:\n  "
            + "\n  ".join(faults)
            + "\nTake all meshes from one init_device_mesh call; parallelize before sharding."
        )
    return result


def _checked_mesh_info(
    name: str, answer: ShardPlacementResult, default: DataParallelMeshInfo
) -> FSDPMeshInfo:
    info = answer.mesh_info
    if not isinstance(info, FSDPMeshInfo) or info.mesh.device_type != default.mesh.device_type:
        raise ConfigurationError(
            "The mesh_info of a ShardPlacementResult must be a fullshard.mesh.FSDPMeshInfo on "
            f"{default.mesh.device_type}, got {info!r} for {name}."
        )
    return info


# --- 3. hooks of the module -----------------------------------------------------------------------


def _before_state_dict(module: nn.Module, *_args: object) -> None:
    """State dicts hold, and are loaded into, sharded parameters, whatever was unsharded a moment ago."""
    state = state_of(module)
    assert state is not None, "the hook was registered with the state"
    for group in state.groups:
        group.check_nothing_assigned()
        group.reshard()


def _after_load_state_dict(module: nn.Module, _incompatible: object) -> None:
    """Loading may have put other parameters on the modules (``assign=True``)."""
    state = state_of(module)
    assert state is not None, "the hook was registered with the state"
    repack_when_complete(state)


def _provisional_name(modules: Sequence[nn.Module]) -> str:
    """A name for messages until the first forward, when full names are known."""
    return ", ".join(dict.fromkeys(type(module).__name__ for module in modules))
