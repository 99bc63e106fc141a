"""State dicts of wrapped modules, under the names of the unwrapped model.

    FULL      full parameters, in memory of their own
    SHARDED   DTensors or ShardedTensors, cut into rows; loaded by any number of ranks
    LOCAL     the shards of this rank; loaded by the same wrapping over as many ranks only

All ranks call `state_dict` and `load_state_dict`: both are collective.

    before   install full parameters on the modules (not for LOCAL)
    torch    reads or fills the parameters, and runs the user's hooks
    after    convert the entries and rename them; uninstall the full parameters, and write what was loaded

Full parameters are installed so that the user's hooks, and modules with state dicts of their own kind, see
what they would see without wrappers.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from fullshard import torch_border
from fullshard.api import (
    FullStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from fullshard.engine.ownership import params_by_owner
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.state import state_of
from fullshard.errors import ConfigurationError, LifecycleError
from fullshard.features import full_params
from fullshard.fsdp1.state_dicts.sharded_tensors import is_sharded, shard_rows, unshard_rows
from fullshard.fsdp1.wrapper_base import WrapperBase
from fullshard.layout.names import FLAT_PARAM, FSDP_PREFIX, FSDP_WRAPPED_MODULE, clean_name
from fullshard.transport import collectives
from fullshard.transport.tags import tag

# --- hooks ----------------------------------------------------------------------------------------


def register_hooks(module: nn.Module) -> None:
    """Register the hooks that make a wrapper's state dicts what its settings say."""
    wrapper: Any = module  # torch declares no types for these methods
    wrapper.register_state_dict_pre_hook(_before_saving)
    wrapper.register_state_dict_post_hook(_after_saving)
    wrapper.register_load_state_dict_pre_hook(_before_loading)
    wrapper.register_load_state_dict_post_hook(_after_loading)


def _groups(wrapper: nn.Module) -> tuple[FSDPParamGroup, ...]:
    state = state_of(wrapper)
    assert state is not None, "the constructor attaches it"
    return state.groups


def _begin(wrapper: WrapperBase) -> None:
    """Refuse a state dict at the wrong time, and clean up after one that failed."""
    if wrapper._fsdp_state.summoned:
        raise LifecycleError(
            "A state dict cannot be made or loaded within summon_full_params. Do it outside."
        )
    wrapper._require_idle("state_dict or load_state_dict")
    full_params.uninstall_all(wrapper._fsdp_state)


def _install_full_params(wrapper: WrapperBase, device: torch.device | None) -> None:
    """Install full parameters, each in memory of its own, on ``device`` or on the compute device."""
    full_params.refresh_shards_together(_groups(wrapper))
    for group in _groups(wrapper):
        full = [
            tensor.to(device or tensor.device, copy=True)
            for tensor in full_params.gather_params(group)
        ]
        full_params.install_full_params(group, full)


@torch.inference_mode(False)
def _before_saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    wrapper = cast(WrapperBase, module)
    _begin(wrapper)
    settings = wrapper._state_dict_settings
    if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        for group in _groups(wrapper):
            group.refresh_shards()
        return
    config = settings.state_dict_config
    kept = not getattr(config, "rank0_only", False) or wrapper.rank == 0
    _install_full_params(wrapper, torch.device("cpu") if config.offload_to_cpu and kept else None)


@torch.inference_mode(False)
@torch.no_grad()
def _after_saving(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    wrapper = cast(WrapperBase, module)
    settings = wrapper._state_dict_settings
    config = settings.state_dict_config
    if settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
        _shard_entries(wrapper, state_dict, prefix)
    elif settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        _add_local_entries(wrapper, state_dict, prefix)
    _detach_from_modules(wrapper, state_dict)
    full_params.uninstall_all(wrapper._fsdp_state)
    _restore_buffers(wrapper, state_dict, prefix, offload=config.offload_to_cpu)
    _replace_prefix(state_dict, f"{prefix}{FSDP_PREFIX}", prefix)
    versions = torch_border.module_versions(state_dict)
    if versions is not None:  # by names of modules
        _replace_prefix(versions, f"{prefix}{FSDP_PREFIX}", prefix)
        own = versions.pop(f"{prefix}{FSDP_WRAPPED_MODULE}", None)
        if own is not None:
            versions[prefix.removesuffix(".")] = own
    if isinstance(config, FullStateDictConfig) and config.rank0_only and wrapper.rank != 0:
        for key in [key for key in state_dict if key.startswith(prefix)]:
            del state_dict[key]


def _detach_from_modules(wrapper: WrapperBase, state_dict: dict[str, Any]) -> None:
    """Replace the modules' own parameters in a state dict by others over the same memory.

    With ``keep_vars`` torch puts the parameters themselves into the state dict, and these are about to be
    sharded again.
    """
    kept: dict[Any, nn.Parameter] = {}
    sharded_params = {
        sharded_param.param
        for group in _groups(wrapper)
        if group.full_params_installed
        for sharded_param in group.sharded_params
    }
    for key, value in state_dict.items():
        if isinstance(value, nn.Parameter) and value in sharded_params:
            if value not in kept:
                kept[value] = nn.Parameter(value.data, requires_grad=value.requires_grad)
            state_dict[key] = kept[value]


def _replace_prefix(table: MutableMapping[str, Any], old: str, new: str) -> None:
    """Replace the prefix ``old`` of keys by ``new``, and keep the order of all keys."""
    items = list(table.items())
    table.clear()
    for key, value in items:
        table[new + key[len(old) :] if key.startswith(old) else key] = value


def _restore_buffers(
    wrapper: WrapperBase, state_dict: dict[str, Any], prefix: str, *, offload: bool
) -> None:
    """Give buffers that were cast for compute their original dtype, and offload them if parameters are."""
    dtypes = wrapper._fsdp_state.original_buffer_dtypes
    if not dtypes and not offload:
        return
    for path, module in _paths(wrapper):
        for name, _ in module.named_buffers(recurse=False):
            key = _key_of(state_dict, prefix, clean_name(f"{path}{name}"))
            if key is not None:
                buffer = state_dict[key].to(dtypes.get((module, name)))
                state_dict[key] = buffer.to("cpu") if offload else buffer


def _paths(wrapper: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module of a wrapper under each of its names, which end with a dot; modules of others are left out."""

    def visit(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        yield path, module
        for name, child in torch_border.child_table(module).items():
            if child is not None and state_of(child) is None:
                yield from visit(f"{path}{name}.", child)

    return visit("", wrapper)


def _own_entries(wrapper: nn.Module) -> dict[str, tuple[FSDPParamGroup, int]]:
    """Return a wrapper's parameters by their clean names; a tied one under each of its names."""
    by_owner = params_by_owner(_groups(wrapper))
    return {
        clean_name(f"{path}{name}"): found
        for path, module in _paths(wrapper)
        for name, found in by_owner.get(module, {}).items()
    }


# --- sharded --------------------------------------------------------------------------------------


def _shard_entries(wrapper: WrapperBase, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace full parameters by sharded tensors of this rank's rows."""
    group = wrapper._fsdp_state.groups[0] if wrapper._fsdp_state.groups else None
    if group is None or group.mesh_info.shard_process_group is None:
        return  # nothing is sharded: every rank has all parameters in full
    config = wrapper._state_dict_settings.state_dict_config
    as_dtensor = isinstance(config, ShardedStateDictConfig) and config._use_dtensor
    by_name = {
        _key_of(state_dict, prefix, name): owner.params[index].placement
        for name, (owner, index) in _own_entries(wrapper).items()
    }
    # A user's hook may have renamed an entry; it is known by its memory then.
    installed = {
        (tensor.data_ptr(), tensor.shape)
        for tensor in full_params.installed_on_modules(wrapper._fsdp_state)
        if tensor.numel()
    }
    for key, value in state_dict.items():
        if key in by_name or (
            type(value) is Tensor and (value.data_ptr(), value.shape) in installed
        ):
            placement = by_name.get(key)
            state_dict[key] = shard_rows(wrapper, value, placement, as_dtensor=as_dtensor)


def _key_of(state_dict: MutableMapping[str, Any], prefix: str, name: str) -> str | None:
    """Return the key of a parameter, with or without the wrapper's name in it, or None."""
    return next(
        (key for key in (f"{prefix}{FSDP_PREFIX}{name}", f"{prefix}{name}") if key in state_dict),
        None,
    )


# --- local ----------------------------------------------------------------------------------------


def _add_local_entries(wrapper: WrapperBase, state_dict: dict[str, Any], prefix: str) -> None:
    for group in _groups(wrapper):
        if group.mesh_info.shard_process_group is None:
            raise LifecycleError(
                "LOCAL_STATE_DICT holds shards, but this wrapper does not shard (NO_SHARD, or a single rank). Use "
                "FULL_STATE_DICT."
            )
        if wrapper._use_orig_params:
            continue  # the parameters themselves are this rank's shards
        offload = wrapper._state_dict_settings.state_dict_config.offload_to_cpu
        state_dict[f"{prefix}{FSDP_PREFIX}{FLAT_PARAM}"] = torch_border.local_sharded_tensor(
            _local_shard(group).to("cpu") if offload else _local_shard(group),
            group.layout.held_numels(0),
            group.mesh_info.shard_process_group,
        )


def _local_shard(group: FSDPParamGroup) -> Tensor:
    """Return this rank's shard of a flat parameter, without padding."""
    numels = group.layout.held_numels(0)
    return group.shards.buffer.pieces[0][: numels[group.mesh_info.shard_mesh_rank]]


# --- loading --------------------------------------------------------------------------------------


def _before_loading(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    errors: list[str],
) -> None:
    wrapper = cast(WrapperBase, module)
    _begin(wrapper)
    wrapper._load_errors = errors
    if not any(key.startswith(f"{prefix}{FSDP_PREFIX}") for key in state_dict):
        _replace_prefix(state_dict, prefix, f"{prefix}{FSDP_PREFIX}")
    if wrapper._state_dict_settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        _prepare_local_entries(wrapper, state_dict, prefix)
        return
    shards = {
        id(each.param)
        for group in _groups(wrapper)
        for each in group.sharded_params
        if group.layout.world > 1 or not wrapper._use_orig_params
    }
    for key in [key for key, value in state_dict.items() if id(value) in shards]:
        # torch.distributed.checkpoint.state_dict puts them where it has nothing to load.
        del state_dict[key]
    others = tuple(f"{prefix}{FSDP_PREFIX}{name}" for name in _wrappers_below(wrapper))
    sharded = [
        key
        for key in sorted(state_dict)
        if key.startswith(prefix) and not key.startswith(others) and is_sharded(state_dict[key])
    ]
    _check_sharded_entries(wrapper, sharded)
    parallel = {
        f"{prefix}{FSDP_PREFIX}{name}": group.params[index].placement
        for name, (group, index) in _own_entries(wrapper).items()
        if group.params[index].placement.parallel
    }
    for key in sharded:
        if key not in parallel or not parallel[key].is_as_before(state_dict[key]):
            state_dict[key] = unshard_rows(state_dict[key], wrapper.compute_device)
    for key, placement in parallel.items():
        value = state_dict.get(key)
        if type(value) is Tensor and tuple(value.shape) == placement.shape:
            state_dict[key] = placement.as_before(placement.local_part(value).contiguous())
    _install_full_params(wrapper, None)


def _check_sharded_entries(wrapper: WrapperBase, sharded: list[str]) -> None:
    """Refuse sharded entries that only some ranks have: they are gathered one after the other. Collective."""
    process_group = wrapper._fsdp_state.groups and _groups(wrapper)[0].mesh_info.shard_process_group
    if not process_group:
        return
    by_rank = collectives.values_of_all_ranks(sharded, process_group, tag("load_state_dict"))
    common = set(by_rank[0]).intersection(*by_rank[1:])
    faults = [
        f"rank {rank}: {clean_name(key)}"
        for rank, keys in enumerate(by_rank)
        for key in keys
        if key not in common
    ]
    if faults:
        raise ConfigurationError(
            "All ranks must have the same sharded entries in a state dict, but only some ranks have these:\n  "
            + "\n  ".join(faults)
            + "\nLoad the same checkpoint on all ranks."
        )


def _wrappers_below(wrapper: nn.Module) -> list[str]:
    """Return the clean names, each with a dot, of the nearest wrappers below this one."""
    return [
        clean_name(f"{path}{name}.")
        for path, module in _paths(wrapper)
        for name, child in torch_border.child_table(module).items()
        if child is not None and state_of(child) is not None
    ]


def _prepare_local_entries(wrapper: WrapperBase, state_dict: dict[str, Any], prefix: str) -> None:
    key = f"{prefix}{FSDP_PREFIX}{FLAT_PARAM}"
    for group in _groups(wrapper):
        group.refresh_shards()
        value = state_dict.pop(key, None)
        if value is not None and not wrapper._use_orig_params:
            local, held = torch_border.parts_of_sharded_tensor(value).local, _local_shard(group)
            numel = 0 if local is None else local.numel()
            if numel != held.numel():
                raise ConfigurationError(
                    "LOCAL_STATE_DICT is for the same wrapping and the same number of ranks. This rank holds "
                    f"{held.numel()} elements of {clean_name(key)}, but the state dict has {numel}. Save a full or sharded "
                    "state dict to change either."
                )
            state_dict[key] = torch.zeros_like(group.sharded_params[0].param.data)
            if local is not None:
                state_dict[key][:numel] = local


def _after_loading(module: nn.Module, incompatible: Any) -> None:
    wrapper = cast(WrapperBase, module)
    full_params.uninstall_all(wrapper._fsdp_state, write=True)
    for group in _groups(wrapper):
        group.repack()  # load_state_dict(assign=True) puts other parameters on the modules
    wrapper._precision.forget_mode()  # ... and other buffers
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [clean_name(key) for key in keys]
    errors, wrapper._load_errors = wrapper._load_errors, []
    errors[:] = [text.replace(f"{FSDP_PREFIX}", "") for text in errors]


def with_versions(model: nn.Module, state_dict: Any) -> Any:
    """Return a state dict whose module versions torch finds under the names with wrappers, too."""
    found = torch_border.module_versions(state_dict)
    if found is None:
        return state_dict
    versions = dict(found)
    for name, _ in model.named_modules(remove_duplicate=False):
        if clean_name(name) in found:
            versions.setdefault(name, found[clean_name(name)])
    return torch_border.with_module_versions(state_dict, versions)
