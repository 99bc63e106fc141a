"""`fully_shard` and `replicate`: torch's FSDP2 API on this engine.

They choose the parameters of a group, check them, and hand them to the engine:

    1. check the arguments and the modules
    2. collect all parameters below the modules that no other call has taken
    3. divide them into groups that communicate over the same ranks
    4. move buffers to the mesh's device (of parameters, only this rank's shards are moved)
    5. build the groups, which shard the parameters; attach the state, the hooks and the class
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fullshard import torch_border
from fullshard.divergence import monitor
from fullshard.engine import hooks, process_hooks
from fullshard.engine.options import StateOptions
from fullshard.engine.ownership import (
    BY_ONE_OF_THE_TWO,
    check_can_be_owned,
    check_not_sharded_by_torch,
    check_real_for_wire,
    has_forward,
    ignored_below,
    is_replicated_by_ddp,
    managed_modules,
    move_buffers,
    owned_params,
)
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.state import FSDPState, attach_state, state_of
from fullshard.errors import ConfigurationError, OptionTypeError
from fullshard.features import registration
from fullshard.fsdp2.fsdp_module import (
    FSDPModule,
    ReplicateModule,
    repack_when_complete,
    sharded_class,
)
from fullshard.fsdp2.state_dict_shards import give_own_storages
from fullshard.layout.balanced_placement import sharding_over
from fullshard.layout.placement import (
    AlreadyShardedError,
    DTensorPlacer,
    ParamPlacement,
    local_tensor,
)
from fullshard.mesh.axes import (
    DataParallelMeshInfo,
    FSDPMeshInfo,
    ShardPlacementResult,
    default_mesh,
    device_of,
    replicating_mesh_info,
    sharding_mesh_info,
)
from fullshard.policies import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    check_type,
    switch,
)
from fullshard.storage import mixed_tensors
from fullshard.storage.param import FSDPParam, fits_in_buffers, normalized_shard_dim
from fullshard.storage.shard_formats import RowFormat
from fullshard.storage.sharded_params import ParamModuleInfo
from fullshard.transport import collectives

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
    fuse_gradients: bool = ...,
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
    fuse_gradients: bool = ...,
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
    fuse_gradients: bool = False,
) -> ModuleT | list[ModuleT]:
    """Shard a module's parameters over ranks, in place, and gather them only while they are needed.

    Apply it bottom-up: to each layer, then to the whole model. Each call makes one group of the parameters below the
    module that no earlier call has taken. A group is gathered and reduced as one.

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)

    Args:
        module: A module, or a list of modules that form one group.
        mesh: 1-D (shard) or 2-D (replicate, shard). By default all ranks, 1-D. Parameters may be DTensors on other
            axes of the mesh that this one was cut from (tensor parallelism).
        reshard_after_forward: Free the gathered parameters after forward and gather them again for backward (True),
            or keep them (False). None means True, but False for the root. An int n, a divisor of the shard size,
            keeps a larger shard, so that backward gathers over n neighbouring ranks only, for example those of one node.
        shard_placement_fn: Returns for a parameter the dimension to shard (`Shard(dim)`; None means 0) or, with
            `ShardPlacementResult`, also the mesh. Parameters with different meshes form separate groups.
            `balanced_placement` chooses the dimension with little padding.
        mp_policy: Dtypes of compute, reduction and outputs.
        offload_policy: Where shards are between steps: on the device, or with `CPUOffloadPolicy` in host memory.
        ignored_params: Parameters to leave alone: not sharded, moved or reduced.
        dp_mesh_dims: The names of the data-parallel axes of ``mesh``. The mesh is then the one of all kinds of
            parallelism, and all parameters are DTensors on it.
        fuse_gradients: Let the backward of linear layers write weight gradients straight into the reduce-scatter
            buffer, in the reduce dtype: no gradient in the compute dtype, no cast, no copy; memory for one more reduction.
            `FSDPModule.fused_gradients` says for which weights. Layers that read one tensor add up its gradient, too.

    Returns:
        The same object, now also an `FSDPModule`.
    """
    monitor.install(for_model=True)
    modules = _checked_modules("fully_shard", module)
    _check_options(mp_policy, offload_policy, dp_mesh_dims)
    ignored = _checked_params("ignored_params", ignored_params)
    info = sharding_mesh_info(mesh if mesh is not None else default_mesh(), dp_mesh_dims)
    after_forward = _read_reshard_after_forward(reshard_after_forward, info)
    found = _params_to_shard(modules, ignored, shard_placement_fn, info)
    _check_post_forward_size(found, info, after_forward.post_forward_size)
    _check_wire(found, mp_policy)
    options = StateOptions(
        mp_policy,
        reshard_after_forward=after_forward.reshard,
        auto_reshard=after_forward.auto,
        fuse_gradients=switch("fuse_gradients", fuse_gradients),
    )
    _apply(modules, found, ignored, info, offload_policy, after_forward, options, FSDPModule)
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
    """Keep all of a module's parameters on every rank, and average their gradients: plain data parallelism.

    Groups, precision, offloading and methods are those of `fully_shard`. A model may have replicated and fully sharded
    modules.

    Args:
        module: A module, or a list of modules that form one group.
        mesh: 1-D. By default all ranks.
        mp_policy: Dtypes of compute, reduction and outputs.
        offload_policy: Where parameters are between steps.
        ignored_params: Parameters to leave alone: not moved or reduced.
        dp_mesh_dims: The names of the replicate axes of ``mesh``, on which all parameters are DTensors.

    Returns:
        The same object, now also a `ReplicateModule`.
    """
    monitor.install(for_model=True)
    modules = _checked_modules("replicate", module)
    _check_options(mp_policy, offload_policy, dp_mesh_dims)
    ignored = _checked_params("ignored_params", ignored_params)
    own_mesh = mesh if mesh is not None else default_mesh(dim_names=("replicate",))
    info = replicating_mesh_info(own_mesh, dp_mesh_dims)
    found = _params_to_shard(modules, ignored, None, info)
    _check_wire(found, mp_policy)
    after_forward = _AfterForward(reshard=False)
    options = StateOptions(mp_policy, reshard_after_forward=False, auto_reshard=False)
    _apply(modules, found, ignored, info, offload_policy, after_forward, options, ReplicateModule)
    return module


def fsdp_state(module: nn.Module) -> FSDPState | None:
    """Return the state that a call attached to a module, or None; also called ``fully_shard.state(module)``."""
    return state_of(module)


fully_shard.state = fsdp_state  # type: ignore[attr-defined]
replicate.state = fsdp_state  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _AfterForward:
    """The choice for gathered parameters after forward."""

    reshard: bool
    auto: bool = False
    """Whether the user left the choice open, so that the root may choose otherwise."""
    post_forward_size: int | None = None
    """Number of ranks over which backward gathers, if after forward a larger shard is kept."""


@dataclass(frozen=True, slots=True)
class _ParamToShard:
    """A parameter to shard, its shard dimension and its mesh."""

    name: str
    param: nn.Parameter
    owners: list[ParamModuleInfo]
    dim: int
    mesh_info: DataParallelMeshInfo
    placement: ParamPlacement

    def in_dtype(self, chosen: torch.dtype | None) -> FSDPParam:
        """Return the parameter for its group; ``chosen`` stands in the place of the policy's ``param_dtype``."""
        return FSDPParam(
            self.name, self.owners, self.param, self.placement, self.dim, param_dtype=chosen
        )


def _apply(
    modules: Sequence[nn.Module],
    found: Sequence[_ParamToShard],
    ignored_params: Iterable[nn.Parameter],
    info: DataParallelMeshInfo,
    offload_policy: OffloadPolicy,
    after_forward: _AfterForward,
    options: StateOptions,
    mixin: type[FSDPModule],
) -> None:
    """Shard the parameters and attach the state. All other checks have passed before."""
    param_dtypes = options.mp_policy.overrides((each.name, each.param) for each in found)
    device = device_of(info.mesh)
    move_buffers(managed_modules(modules), device)
    name = _provisional_name(modules)
    members: dict[object, list[_ParamToShard]] = {}
    for each in found:
        members.setdefault(each.mesh_info.communicates_over, []).append(each)
    groups = [
        FSDPParamGroup(
            [each.in_dtype(param_dtypes.get(each.param)) for each in together],
            together[0].mesh_info,
            device,
            options.mp_policy,
            offload_policy,
            name,
            shard_format=RowFormat(),
            post_forward_size=after_forward.post_forward_size
            if after_forward.post_forward_size != together[0].mesh_info.shard_mesh_size
            else None,
        )
        for together in members.values()
    ]
    state = FSDPState(
        modules,
        groups,
        device,
        options,
        ignored=ignored_below(modules, ignored_params),
    )
    process_hooks.install()
    registration.register(options)
    for module in modules:
        attach_state(module, state)
        torch_border.register_composable(
            module, "replicate" if mixin is ReplicateModule else "fully_shard"
        )
        module.__class__ = sharded_class(type(module), mixin)
        module.register_forward_pre_hook(
            MethodType(hooks.pre_forward, state), prepend=True, with_kwargs=True
        )
        # `always_call`: an exception in forward must not leave the module unsharded, or in the middle of a call.
        module.register_forward_hook(
            MethodType(hooks.post_forward, state), prepend=False, always_call=True
        )
        module.register_state_dict_pre_hook(_before_state_dict)
        module.register_state_dict_post_hook(give_own_storages)
        module.register_load_state_dict_pre_hook(_before_load_state_dict)
        module.register_load_state_dict_post_hook(_after_load_state_dict)


# --- checks ---------------------------------------------------------------------------------------


def _checked_modules(function: str, module: object) -> list[nn.Module]:
    """Return the modules that a call is applied to, or refuse them."""
    modules = module if isinstance(module, (list, tuple)) else [module]
    wrong = [type(each).__name__ for each in modules if not isinstance(each, nn.Module)]
    if wrong or not modules:
        found = f"a list with {wrong}" if isinstance(module, (list, tuple)) else f"{wrong[0]}"
        raise OptionTypeError(
            f"{function} takes an nn.Module or a non-empty list of them, got "
            f"{found if modules else 'an empty list'}."
        )
    checked = cast("list[nn.Module]", list(modules))
    without_forward = [type(each).__name__ for each in checked if not has_forward(each)]
    if without_forward:
        raise ConfigurationError(
            f"{function} gathers parameters around a module's forward, but these modules have none: {without_forward}. "
            "Shard the modules that they contain, or the module that contains them."
        )
    by_jit = [type(each).__name__ for each in checked if isinstance(each, torch.jit.ScriptModule)]
    if by_jit:
        raise ConfigurationError(
            f"{function} gives a module another class, which modules of torch.jit cannot have: {by_jit}. Shard the module "
            "that contains them, with their parameters."
        )
    by_ddp = [type(each).__name__ for each in checked if is_replicated_by_ddp(each)]
    if by_ddp:
        raise ConfigurationError(
            f"{function} cannot take modules to which torch.distributed._composable.replicate was applied: {by_ddp}. Apply "
            f"{function} to the modules in it first, or replicate alone."
        )
    twice = [type(each).__name__ for each in checked if state_of(each) is not None]
    if twice or len({id(each) for each in checked}) < len(checked):
        raise ConfigurationError(
            f"{function} can be applied to a module once, but it was applied before to {twice or checked}. Remove the "
            "second call."
        )
    return checked


def _check_options(mp_policy: object, offload_policy: object, dp_mesh_dims: object) -> None:
    """Refuse option values of other classes, among them torch's of the same names."""
    check_type("mp_policy", mp_policy, MixedPrecisionPolicy)
    check_type("offload_policy", offload_policy, OffloadPolicy)
    if dp_mesh_dims is not None:
        check_type("dp_mesh_dims", dp_mesh_dims, DataParallelMeshDims)


def _checked_params(name: str, given: object) -> tuple[nn.Parameter, ...]:
    """Return the parameters of an argument, which may be a generator."""
    if given is None:
        return ()
    params = tuple(given) if isinstance(given, Iterable) and not isinstance(given, Tensor) else None
    if params is None or not all(isinstance(param, nn.Parameter) for param in params):
        raise OptionTypeError(f"{name} must be a set of nn.Parameter, got {type(given).__name__}.")
    return params


def _check_wire(found: Sequence[_ParamToShard], mp_policy: MixedPrecisionPolicy) -> None:
    if mp_policy.wire_dtype is not None:
        check_real_for_wire((each.name, each.param) for each in found)
        for each in found:
            device = device_of(each.mesh_info.mesh)
            collectives.check_exchanges(mp_policy.wire_dtype, each.mesh_info, device)


def _read_reshard_after_forward(choice: object, info: DataParallelMeshInfo) -> _AfterForward:
    """Return the meaning of a value of ``reshard_after_forward`` on this mesh."""
    if choice is None:
        return _AfterForward(reshard=True, auto=True)
    if isinstance(choice, bool):
        return _AfterForward(reshard=choice)
    if not isinstance(choice, int):
        raise ConfigurationError(
            f"reshard_after_forward must be True, False, None or an int, got {choice!r}."
        )
    if choice == 1:
        warnings.warn(
            "reshard_after_forward=1 keeps the gathered parameters, as False does. Pass False.",
            stacklevel=3,
        )
        return _AfterForward(reshard=False)
    if choice == info.shard_mesh_size:
        return _AfterForward(reshard=True)
    return _AfterForward(reshard=True, post_forward_size=choice)


def _check_post_forward_size(
    found: Sequence[_ParamToShard], info: DataParallelMeshInfo, post_forward_size: int | None
) -> None:
    """Refuse a size of the post-forward mesh that does not divide the shard size, and tensors it cannot cut."""
    if post_forward_size is None:
        return
    sizes = {info.shard_mesh_size, *(each.mesh_info.shard_mesh_size for each in found)}
    wrong = sorted(size for size in sizes if post_forward_size < 1 or size % post_forward_size)
    if wrong:
        raise ConfigurationError(
            f"reshard_after_forward as an int must divide the shard size ({', '.join(map(str, wrong))}), got "
            f"{post_forward_size}. Pass a divisor, True or False."
        )
    apart = [e.name for e in found if not fits_in_buffers(local_tensor(e.param))]
    if apart:
        raise ConfigurationError(
            f"reshard_after_forward as an int needs plain tensors, but these are tensor subclasses: {apart}. Pass True or "
            "False."
        )


# --- modules and parameters -----------------------------------------------------------------------


def _params_to_shard(
    modules: Sequence[nn.Module],
    ignored_params: Iterable[nn.Parameter],
    shard_placement_fn: ShardPlacementFn | None,
    info: DataParallelMeshInfo,
) -> list[_ParamToShard]:
    managed = tuple(managed_modules(modules))
    check_not_sharded_by_torch(managed)
    owned = owned_params(managed, ignored_params)
    check_can_be_owned(
        owned,
        "Apply fully_shard to children before their parents. Pass modules that share a parameter to one call, "
        "fully_shard([a, b]).",
    )
    placer, result = DTensorPlacer(), list[_ParamToShard]()
    faults, sharded = list[str](), list[str]()
    for each in owned:
        name, param = each.name, each.param
        answer = None
        if shard_placement_fn is not None:
            with sharding_over(info.shard_mesh_size):
                answer = shard_placement_fn(param)
        own_info = info
        if isinstance(answer, ShardPlacementResult):
            own_info = _checked_mesh_info(name, answer, info)
            answer = answer.placement
        dim = normalized_shard_dim(name, param, answer)
        try:
            placement = placer.place(param, dim, own_info)
        except AlreadyShardedError:
            sharded.append(name)
            continue
        except ConfigurationError as error:
            faults.append(f"{name}: {error}")
            continue
        result.append(_ParamToShard(name, param, each.owners, dim, own_info, placement))
    if sharded:  # by a call for a module around these, so no class of a module shows it
        raise ConfigurationError(
            f"{BY_ONE_OF_THE_TWO}. These parameters are DTensors on the data-parallel mesh already, by torch's fully_shard of "
            f"a module around them, or by distribute_tensor: {', '.join(sharded)}."
        )
    if faults:
        raise ConfigurationError(
            "Parameters that are DTensors must lie on axes of the mesh that are not data-parallel. With dp_mesh_dims all "
            "parameters must lie on the whole mesh, replicated along the data-parallel axes. But:\n  "
            + "\n  ".join(faults)
            + "\nTake all meshes from one init_device_mesh call, and parallelize before sharding."
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


# --- hooks of the module --------------------------------------------------------------------------


def _before_state_dict(module: nn.Module, *_args: object) -> None:
    """Install the sharded parameters: state dicts hold them, and are loaded into them."""
    state = state_of(module)
    assert state is not None, "the hook was registered with the state"
    for group in state.groups:
        group.check_nothing_assigned()
        group.reshard()


def _before_load_state_dict(module: nn.Module, *args: Any) -> None:
    """Install the sharded parameters, and remember where torch puts its errors."""
    _before_state_dict(module)
    state = state_of(module)
    assert state is not None, "the hook was registered with the state"
    state.load_errors = args[-1]


def _after_load_state_dict(module: nn.Module, _incompatible: object) -> None:
    """Pack the parameters again: loading with ``assign=True`` puts other ones on the modules."""
    state = state_of(module)
    assert state is not None, "the hook was registered with the state"
    mixed_tensors.explain_loading(state.load_errors)
    state.load_errors = []
    repack_when_complete(state)


def _provisional_name(modules: Sequence[nn.Module]) -> str:
    """Return a name for messages until the first forward, when full names are known."""
    return ", ".join(dict.fromkeys(type(module).__name__ for module in modules))
