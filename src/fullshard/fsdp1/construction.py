"""The state of a new wrapper, made of checked options.

1. check         refuse parameters that cannot be sharded, before the first one is changed
2. materialise   give meta modules memory and values; send rank 0's values to all ranks
3. shard         put all parameters below the module that are in no other wrapper into one group
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import torch_border
from fullshard.api import BackwardPrefetch, MixedPrecision, ShardingStrategy
from fullshard.engine import process_hooks
from fullshard.engine.options import StateOptions
from fullshard.engine.ownership import (
    OwnedParam,
    check_can_be_owned,
    check_not_sharded_by_torch,
    check_real_for_wire,
    ignored_below,
    managed_modules,
    move_buffers,
    owned_params,
)
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.state import FSDPState, attach_state
from fullshard.errors import ConfigurationError, UnsupportedError
from fullshard.features import registration
from fullshard.fsdp1.wrapper_options import WrapperOptions
from fullshard.layout.names import FLAT_PARAM, clean_name
from fullshard.layout.placement import DTensorPlacer, ParamPlacement, local_tensor
from fullshard.mesh.axes import DataParallelAxes, DataParallelMeshInfo
from fullshard.policies import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    check_wire_dtype,
)
from fullshard.storage.param import FSDPParam, fits_in_buffers
from fullshard.storage.shard_formats import FlatFormat, FlatParameterFormat, ShardFormat
from fullshard.storage.sharded_params import ParamModuleInfo, reads_gradients
from fullshard.transport import collectives
from fullshard.transport.tags import tag

_KEPT_AFTER_FORWARD = (
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
    ShardingStrategy._HYBRID_SHARD_ZERO2,
)
_SENDING = tag("sync_module_states of FullyShardedDataParallel")
_ALIGNMENT = 16
"""Parameters start at multiples of so many bytes in a flat array, as torch's do: enough for any vector load."""


# --- meta modules ------------------------------------------------------------------------------


def materialise(
    modules: Sequence[tuple[str, nn.Module]],
    param_init_fn: Callable[[nn.Module], None] | None,
    device: torch.device,
) -> None:
    """Give meta parameters and buffers memory and values, by ``param_init_fn`` or `reset_parameters`.

    Parameters that were tied before stay tied. Nothing happens if the model is to stay on the meta device.
    """
    if device.type == "meta":
        return
    on_meta = [(name, module) for name, module in modules if _tensors_on_meta(module)]
    if not on_meta:
        return
    tied = [owned.owners for owned in owned_params(modules, ()) if len(owned.owners) > 1]
    if param_init_fn is not None:
        for _, module in modules:
            param_init_fn(module)
    else:
        without_reset = [
            name or type(module).__name__
            for name, module in on_meta
            if not callable(getattr(module, "reset_parameters", None))
        ]
        if without_reset:
            raise ConfigurationError(
                "Modules on the meta device need a reset_parameters() that initialises them, but these have none: "
                f"{without_reset}. Pass param_init_fn, or give them a reset_parameters()."
            )
        for _, module in on_meta:
            module.to_empty(device=device, recurse=False)
            module.reset_parameters()  # type: ignore[operator]  # nn.Module declares no such attribute
    for owners in tied:
        first = owners[0].current()
        for owner in owners[1:]:
            if first is not None:
                owner.install(first)
    left = [
        f"{name}.{tensor}" if name else tensor
        for name, module in modules
        for tensor in _tensors_on_meta(module)
    ]
    if left:
        raise ConfigurationError(
            "param_init_fn must materialise the tensors of the module that it is called with, but these are still on the "
            f"meta device: {left}. Call module.to_empty(device=..., recurse=False) in it."
        )


def _tensors_on_meta(module: nn.Module) -> list[str]:
    named = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return [name for name, tensor in named if tensor.is_meta]


def _check_all_ranks_can_receive(
    modules: Sequence[tuple[str, nn.Module]],
    params: Sequence[OwnedParam],
    axes: DataParallelAxes,
    failure: Exception | None,
) -> None:
    """Raise on all ranks if one rank has failed, or has other parameters or buffers than rank 0. Collective."""
    own = [f"{each.name}: {each.param.dtype} of shape {tuple(each.param.shape)}" for each in params]
    own += [
        f"{prefix}.{name}: {buffer.dtype} of shape {tuple(buffer.shape)}".removeprefix(".")
        for prefix, module in modules
        for name, buffer in module.named_buffers(recurse=False)
    ]
    for group in (axes.shard_process_group, axes.replicate_process_group):
        if group is None:
            continue
        reports = collectives.values_of_all_ranks((own, failure), group, _SENDING)
        failures = [error for _, error in reports if error is not None]
        if failure is not None or failures:
            raise failure or failures[0]
        expected = reports[0][0]
        others = sorted({text for theirs, _ in reports for text in set(expected) ^ set(theirs)})
        if others or any(theirs != expected for theirs, _ in reports):
            raise ConfigurationError(
                "With sync_module_states, all ranks must have the parameters and buffers of rank 0, in the same order. "
                f"These are not on all ranks: {others or 'none, but orders differ'}. Build the same module on all ranks."
            )


@torch.no_grad()
def send_from_rank_0(
    modules: Sequence[tuple[str, nn.Module]],
    params: Sequence[OwnedParam],
    axes: DataParallelAxes,
    device: torch.device,
) -> None:
    """Give every rank the parameters and buffers of rank 0, on the compute device. Collective."""
    tensors = [owned.param for owned in params]
    tensors += [buffer for _, module in modules for buffer in module.buffers(recurse=False)]  # type: ignore[misc]
    for tensor in tensors:
        tensor.data = tensor.data.to(device)
        held = local_tensor(tensor)
        for group in (axes.shard_process_group, axes.replicate_process_group):
            if group is not None:
                collectives.broadcast(held, group, _SENDING)


# --- sharding -----------------------------------------------------------------------------------


def shard(wrapper: nn.Module, wrapped: nn.Module, options: WrapperOptions) -> FSDPState:
    """Shard the parameters below ``wrapped`` that are in no other wrapper, and attach the state to ``wrapper``."""
    policy = policy_of(options.precision)  # refuses dtypes that were changed one by one
    modules = [
        (clean_name(name), module)
        for name, module in managed_modules([wrapper], options.ignored.modules)
        if module is not wrapper
    ]
    failure: ConfigurationError | UnsupportedError | None = None
    try:
        check_not_sharded_by_torch(modules)
        _check(owned_params(modules, options.ignored.params), options)
        materialise(modules, options.param_init_fn, options.device)
    except (ConfigurationError, UnsupportedError) as error:
        if not options.sync_module_states:
            raise
        failure = error  # maybe of this rank only: the modules of other ranks may not be on meta
    params = owned_params(modules, options.ignored.params)  # materialising may have replaced them
    move_buffers(modules, options.device)
    if options.sync_module_states:
        _check_all_ranks_can_receive(modules, params, options.axes, failure)
        send_from_rank_0(modules, params, options.axes, options.device)
    groups = []
    if params:
        offload = CPUOffloadPolicy() if options.offload.offload_params else OffloadPolicy()
        group = FSDPParamGroup(
            [
                FSDPParam(each.name, each.owners, each.param, placement)
                for each, placement in zip(params, _placements(params, options.axes), strict=True)
            ],
            options.axes,
            options.device,
            policy,
            offload,
            type(wrapped).__name__,
            shard_format=_shard_format(wrapped, params, options),
            low_precision_gradients=options.precision.keep_low_precision_grads,
        )
        groups.append(group)
    state = FSDPState(
        [wrapper],
        groups,
        options.device,
        StateOptions(
            policy,
            reshard_after_forward=options.strategy not in _KEPT_AFTER_FORWARD,
            auto_reshard=options.strategy not in _KEPT_AFTER_FORWARD,
            kept_for_backward_only=True,  # users may write to parameters between forwards
            cast_root_inputs=options.precision.cast_root_forward_inputs,
            backward_prefetch=() if options.backward_prefetch is None else None,
            prefetches_late=options.backward_prefetch is BackwardPrefetch.BACKWARD_POST,
            fuse_gradients=options.fuse_gradients,
        ),
        ignored=ignored_below([wrapper], options.ignored.params, options.ignored.modules),
    )
    process_hooks.install()
    registration.register(state.options)
    attach_state(wrapper, state)
    return state


def policy_of(precision: MixedPrecision) -> MixedPrecisionPolicy:
    """Return the engine's policy for these dtypes."""
    check_wire_dtype(precision.wire_dtype, precision.reduce_dtype)  # users may have changed them
    return MixedPrecisionPolicy(
        param_dtype=precision.param_dtype,
        reduce_dtype=precision.reduce_dtype or precision.param_dtype,
        cast_forward_inputs=precision.cast_forward_inputs,
        wire_dtype=precision.wire_dtype,
    )


def _shard_format(
    wrapped: nn.Module, params: Sequence[OwnedParam], options: WrapperOptions
) -> ShardFormat:
    if not options.use_orig_params:
        # On the module itself: below an activation wrapper its name would depend on which was wrapped first, and the
        # compiler's wrapper looks for attributes in its module only.
        return FlatParameterFormat(
            ParamModuleInfo(torch_border.without_wrappers(wrapped), FLAT_PARAM)
        )
    dtype = options.precision.param_dtype or params[0].param.dtype
    return FlatFormat(alignment=max(_ALIGNMENT // dtype.itemsize, 1))


def _check(params: Sequence[OwnedParam], options: WrapperOptions) -> None:
    """Refuse parameters that cannot be sharded in this format, before the first one is changed."""
    if options.precision.wire_dtype is not None:
        check_real_for_wire((each.name, each.param) for each in params)
        collectives.check_exchanges(options.precision.wire_dtype, options.axes, options.device)
    check_can_be_owned(
        params,
        "Wrap modules that share a parameter together: wrap a module that contains both.",
    )
    subclasses = [each.name for each in params if not fits_in_buffers(local_tensor(each.param))]
    if subclasses:
        raise ConfigurationError(
            f"Parameters of a wrapper must be plain tensors, but these are tensor subclasses: {subclasses}. Shard "
            "their modules with fully_shard, or leave them out with ignored_states."
        )
    _placements(params, options.axes)
    if options.use_orig_params:
        return
    by_jit = [
        each.name
        for each in params
        if any(isinstance(owner.module, torch.jit.ScriptModule) for owner in each.owners)
    ]
    if by_jit:
        raise ConfigurationError(
            "With use_orig_params=False the parameters of a wrapper are taken off their modules, which those of torch.jit do "
            f"not allow: {by_jit}. Pass use_orig_params=True."
        )
    hooked = [each.name for each in params if reads_gradients(each.param)]
    if hooked:
        raise ConfigurationError(
            "With use_orig_params=False the parameters of a wrapper become one FlatParameter and have no gradients of their "
            f"own, but these have hooks on their gradients: {hooked}. Pass use_orig_params=True, or register the hooks on "
            "the flat parameter."
        )
    frozen = [each.name for each in params if not each.param.requires_grad]
    if frozen and len(frozen) < len(params):
        raise ConfigurationError(
            "With use_orig_params=False the parameters of a wrapper become one FlatParameter, so all or none must be "
            f"trainable. Of {len(params)} parameters these are frozen: {frozen}. Pass use_orig_params=True, or wrap frozen "
            "modules by themselves."
        )
    dtypes = {each.param.dtype for each in params}
    if len(dtypes) > 1:
        listed = [f"{each.name}: {each.param.dtype}" for each in params]
        raise ConfigurationError(
            "With use_orig_params=False the parameters of a wrapper become one FlatParameter of one dtype, but there are:\n  "
            + "\n  ".join(listed)
            + "\nCast them, pass use_orig_params=True, or wrap modules of different dtypes by themselves."
        )


def _placements(params: Sequence[OwnedParam], axes: DataParallelAxes) -> list[ParamPlacement]:
    """Return the placements of parameters: plain ones have a shape only, DTensors lie on other axes of the mesh."""
    placer, found, faults = DTensorPlacer(), list[ParamPlacement](), list[str]()
    for each in params:
        if not isinstance(each.param, DTensor):
            found.append(ParamPlacement(shape=tuple(each.param.shape)))
        elif not isinstance(axes, DataParallelMeshInfo):
            faults.append(f"{each.name}: on {each.param.device_mesh}, but there is no device_mesh")
        else:
            try:
                found.append(placer.place(each.param, 0, axes))
            except ConfigurationError as error:
                faults.append(f"{each.name}: {error}")
    if faults:
        raise ConfigurationError(
            "Parameters that are DTensors (tensor parallelism) must lie on other axes of the mesh whose data-parallel "
            "axes are passed as device_mesh:\n  "
            + "\n  ".join(faults)
            + "\nTake both from one init_device_mesh call, parallelize first, and pass device_mesh=mesh['dp']."
        )
    return found


def full_precision_in_eval() -> bool:
    """Return whether torch's environment variable lets modules in eval mode compute in full precision."""
    return os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL", "") == "1"
