"""State dicts of wrapped modules: whole, sharded or local tensors under the names of the unwrapped model.

    FULL      whole parameters, in memory of their own; loaded from the same
    SHARDED   ShardedTensors, or DTensors if the wrapper has a mesh, in rows; loaded from the same, over any ranks
    LOCAL     what each rank holds as it rests; for the same wrapping and as many ranks only

Making one and loading one is collective: all ranks call `state_dict` or `load_state_dict`.

Whole parameters are shown on the modules while their state dict is made or loaded, so that hooks
of the user's, and modules that do it their own way, see what they would see without wrappers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard import torch_border
from fullshard.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fullshard.comm import collectives
from fullshard.engine import full_params
from fullshard.engine.ownership import params_by_owner
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.state import state_of
from fullshard.errors import ConfigurationError, LifecycleError, OptionTypeError, UsageError
from fullshard.fsdp1.wrapper_base import WrapperBase, wrappers_in
from fullshard.names import FLAT_PARAM, FSDP_WRAPPED_MODULE, clean_name
from fullshard.plan.placement import ParamPlacement

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


# --- settings -------------------------------------------------------------------------------------


def default_settings() -> StateDictSettings:
    """Whole tensors, on the compute device."""
    return StateDictSettings(
        StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
    )


def set_settings(
    module: nn.Module,
    kind: StateDictType,
    config: StateDictConfig | None,
    optim_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    """See `FullyShardedDataParallel.set_state_dict_type`."""
    if not isinstance(kind, StateDictType):
        raise OptionTypeError(
            f"state_dict_type must be a StateDictType of fullshard, got {kind!r} ({type(kind).__module__}). Import "
            "it from fullshard."
        )
    expected, optim_expected = _CONFIGS[kind]
    config = expected() if config is None else config
    optim_config = optim_expected() if optim_config is None else optim_config
    for given, cls in ((config, expected), (optim_config, optim_expected)):
        if type(given) is not cls:
            raise UsageError(
                f"{kind} takes a {cls.__name__} of fullshard, got {given!r} ({type(given).__module__})."
            )
    before = settings_of(module)
    for wrapper in wrappers_in(module):
        wrapper._state_dict_settings = StateDictSettings(
            kind, _with_mesh(config, wrapper), _with_mesh(optim_config, wrapper)
        )
    return before


@contextlib.contextmanager
def kept_settings(module: nn.Module) -> Iterator[None]:
    """After it, the wrappers have the settings that they had before."""
    before = {wrapper: wrapper._state_dict_settings for wrapper in wrappers_in(module)}
    try:
        yield
    finally:
        for wrapper, settings in before.items():
            wrapper._state_dict_settings = settings


def _with_mesh(config: Any, wrapper: WrapperBase) -> Any:
    """The same config; one for sharded tensors asks for DTensors if the wrapper has a mesh."""
    if hasattr(config, "_use_dtensor"):
        return replace(config, _use_dtensor=wrapper._device_mesh is not None)
    return config


def _without_mesh(settings: StateDictSettings) -> list[Any]:
    """What must be the same for all wrappers."""
    configs: list[Any] = [settings.state_dict_config, settings.optim_state_dict_config]
    return [
        settings.state_dict_type,
        *(
            replace(each, _use_dtensor=False) if hasattr(each, "_use_dtensor") else each
            for each in configs
        ),
    ]


def settings_of(module: nn.Module) -> StateDictSettings:
    """See `FullyShardedDataParallel.get_state_dict_type`."""
    wrappers = wrappers_in(module)
    if not wrappers:
        return default_settings()
    first = wrappers[0]._state_dict_settings
    others = [
        wrapper._label
        for wrapper in wrappers
        if _without_mesh(wrapper._state_dict_settings) != _without_mesh(first)
    ]
    if others:
        raise ConfigurationError(
            f"All wrappers of a model must make the same kind of state dict; the first makes {first}, and these make "
            f"another: {others}. Call set_state_dict_type on the whole model."
        )
    return first


# --- hooks ----------------------------------------------------------------------------------------


def register_hooks(module: nn.Module) -> None:
    """Let a wrapper's state dicts be what its settings say."""
    wrapper: Any = module  # torch declares no types for these
    wrapper.register_state_dict_pre_hook(_before_saving)
    wrapper.register_state_dict_post_hook(_after_saving)
    wrapper.register_load_state_dict_pre_hook(_before_loading)
    wrapper.register_load_state_dict_post_hook(_after_loading)


def _groups(wrapper: nn.Module) -> tuple[FSDPParamGroup, ...]:
    state = state_of(wrapper)
    assert state is not None, "attached when the wrapper was made"
    return state.groups


def _begin(wrapper: WrapperBase) -> None:
    """Refuse state dicts at the wrong time; clean up after one that failed."""
    if wrapper._fsdp_state.summoned:
        raise LifecycleError(
            "State dicts cannot be made or loaded within summon_full_params. Do it outside."
        )
    wrapper._require_idle("state_dict or load_state_dict")
    wrapper._fsdp_state.installed_full_params.uninstall()


def _show_whole(wrapper: WrapperBase, device: torch.device | None) -> None:
    """Show whole parameters, each in memory of its own, on ``device`` or on the compute device."""
    full_params.refresh_shards_together(_groups(wrapper))
    for group in _groups(wrapper):
        wholes = [
            whole.to(device or whole.device, copy=True)
            for whole in full_params.gather_params(group)
        ]
        wrapper._fsdp_state.installed_full_params.install(group, wholes)


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
    _show_whole(wrapper, torch.device("cpu") if config.offload_to_cpu and kept else None)


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
    _keep_shown(wrapper, state_dict)
    wrapper._fsdp_state.installed_full_params.uninstall()
    _restore_buffers(wrapper, state_dict, prefix, offload=config.offload_to_cpu)
    _replace_beginning(state_dict, f"{prefix}{FSDP_WRAPPED_MODULE}.", prefix)
    metadata = torch_border.module_versions(state_dict)
    if metadata is not None:  # by names of modules: versions of what they save
        _replace_beginning(metadata, f"{prefix}{FSDP_WRAPPED_MODULE}.", prefix)
        own = metadata.pop(f"{prefix}{FSDP_WRAPPED_MODULE}", None)
        if own is not None:
            metadata[prefix.removesuffix(".")] = own
    if isinstance(config, FullStateDictConfig) and config.rank0_only and wrapper.rank != 0:
        for key in [key for key in state_dict if key.startswith(prefix)]:
            del state_dict[key]


def _keep_shown(wrapper: WrapperBase, state_dict: dict[str, Any]) -> None:
    """Put parameters of their own in the place of those that are about to become sharded: ``keep_vars``."""
    kept: dict[Any, nn.Parameter] = {}
    sharded_params = {
        sharded_param.param
        for group in wrapper._fsdp_state.installed_full_params.groups
        for sharded_param in group.sharded_params
    }
    for key, value in state_dict.items():
        if isinstance(value, nn.Parameter) and value in sharded_params:
            if value not in kept:
                kept[value] = nn.Parameter(value.data, requires_grad=value.requires_grad)
            state_dict[key] = kept[value]


def _replace_beginning(table: MutableMapping[str, Any], old: str, new: str) -> None:
    """Let keys that begin with ``old`` begin with ``new``; the order of all stays."""
    items = list(table.items())
    table.clear()
    for key, value in items:
        table[new + key[len(old) :] if key.startswith(old) else key] = value


def _restore_buffers(
    wrapper: WrapperBase, state_dict: dict[str, Any], prefix: str, *, offload: bool
) -> None:
    """Give buffers that were cast for compute the dtype they had, and move them where parameters are."""
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
    """Every module of a wrapper, under every name it has, with that name and a dot; not those of others."""

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
    """Put this rank's rows in the place of whole parameters."""
    group = wrapper._fsdp_state.groups[0] if wrapper._fsdp_state.groups else None
    if group is None or group.mesh_info.shard_process_group is None:
        return  # nothing is sharded: every rank has everything
    config = wrapper._state_dict_settings.state_dict_config
    as_dtensor = isinstance(config, ShardedStateDictConfig) and config._use_dtensor
    by_name = {
        _key_of(state_dict, prefix, name): owner.params[index].placement
        for name, (owner, index) in _own_entries(wrapper).items()
    }
    # A hook of the user's may have given one another name.
    shown = {
        (whole.data_ptr(), whole.shape)
        for whole in wrapper._fsdp_state.installed_full_params.tensors
        if whole.numel()
    }
    for key, value in state_dict.items():
        if key in by_name or (type(value) is Tensor and (value.data_ptr(), value.shape) in shown):
            placement = by_name.get(key)
            state_dict[key] = sharded_rows(wrapper, value, placement, as_dtensor=as_dtensor)


def _key_of(state_dict: MutableMapping[str, Any], prefix: str, name: str) -> str | None:
    """The key of a parameter, with or without the wrapper's name in it."""
    return next(
        (
            key
            for key in (f"{prefix}{FSDP_WRAPPED_MODULE}.{name}", f"{prefix}{name}")
            if key in state_dict
        ),
        None,
    )


def sharded_rows(
    wrapper: WrapperBase,
    whole: Tensor,
    placement_before: ParamPlacement | None = None,
    *,
    as_dtensor: bool,
) -> Any:
    """This rank's rows of a whole tensor, as a DTensor or ShardedTensor of all ranks' rows.

    What is a DTensor already, by tensor parallelism, or belongs to one, is divided further.
    """
    whole = whole.detach()
    axes = _groups(wrapper)[0].mesh_info
    group = axes.shard_process_group
    assert group is not None, "asked for where something is sharded"
    if placement_before is not None and placement_before.parallel:
        local = placement_before.local_part(whole)
        return placement_before.rows(local, group.rank(), group.size())
    if as_dtensor:
        mesh = wrapper._device_mesh
        assert mesh is not None, "DTensors are asked for if there is a mesh"
        placement = Shard(0) if whole.ndim else Replicate()
        placements = (*[Replicate()] * (mesh.ndim - 1), placement)
        chunks = whole.chunk(group.size()) if whole.ndim else (whole,) * group.size()
        rank = group.rank()
        local = chunks[rank] if rank < len(chunks) else whole[:0]
        made = DTensor.from_local(
            local.clone(memory_format=torch.contiguous_format),
            mesh,
            placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.contiguous().stride(),
        )
        return made if made.device == whole.device else made.to(whole.device)  # offloaded
    parts = whole.chunk(group.size()) if whole.ndim else (whole,)
    return torch_border.sharded_tensor(whole, [part.shape for part in parts], group)


def is_spread(value: object) -> bool:
    """Whether ranks have parts of a value."""
    return isinstance(value, DTensor) or torch_border.is_sharded_tensor(value)


def whole_of_rows(value: Any, device: torch.device) -> Any:
    """The whole tensor of a DTensor or ShardedTensor; anything else as it is. Collective."""
    if isinstance(value, DTensor):
        if value.device.type != device.type:
            value = value.to(device)
        return collectives.whole_of_dtensor(value)
    if torch_border.is_sharded_tensor(value):
        return _whole_of_sharded_tensor(value, device)
    return value


def _whole_of_sharded_tensor(value: Any, device: torch.device) -> Tensor:
    parts = torch_border.parts_of_sharded_tensor(value)
    largest = max(parts.numels)
    own = torch.zeros(largest, dtype=parts.dtype, device=device)
    if largest == 0:
        return own.view(parts.size)
    if parts.local is not None:
        own[: parts.local.numel()] = parts.local.reshape(-1)
    gathered = own.new_empty(largest * len(parts.numels))
    collectives.all_gather(
        [gathered.view(torch.uint8)], [own.view(torch.uint8)], parts.group, async_op=False
    )
    rows = gathered.view(-1, largest)
    flat = torch.cat([row[:numel] for row, numel in zip(rows, parts.numels, strict=True)])
    return flat.view(parts.size)


# --- local ----------------------------------------------------------------------------------------


def _add_local_entries(wrapper: WrapperBase, state_dict: dict[str, Any], prefix: str) -> None:
    for group in _groups(wrapper):
        if group.mesh_info.shard_process_group is None:
            raise LifecycleError(
                "A local state dict is one of shards, but nothing is sharded here (NO_SHARD, or a single rank). Use "
                "FULL_STATE_DICT."
            )
        if wrapper._use_orig_params:
            continue  # parameters themselves are what this rank holds
        offload = wrapper._state_dict_settings.state_dict_config.offload_to_cpu
        state_dict[f"{prefix}{FSDP_WRAPPED_MODULE}.{FLAT_PARAM}"] = (
            torch_border.local_sharded_tensor(
                _flat_piece(group).to("cpu") if offload else _flat_piece(group),
                group.layout.held_numels(0),
                group.mesh_info.shard_process_group,
            )
        )


def _flat_piece(group: FSDPParamGroup) -> Tensor:
    """What this rank holds of a group that rests as one array, without padding."""
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
    if not any(key.startswith(f"{prefix}{FSDP_WRAPPED_MODULE}.") for key in state_dict):
        _replace_beginning(state_dict, prefix, f"{prefix}{FSDP_WRAPPED_MODULE}.")
    if wrapper._state_dict_settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        _prepare_local_entries(wrapper, state_dict, prefix)
        return
    flat = f"{prefix}{FSDP_WRAPPED_MODULE}.{FLAT_PARAM}"
    if any(
        state_dict.get(flat) is sharded_param.param
        for g in _groups(wrapper)
        for sharded_param in g.sharded_params
    ):
        # torch.distributed.checkpoint has copied it from the module, among the entries to load.
        del state_dict[flat]
    others = tuple(f"{prefix}{FSDP_WRAPPED_MODULE}.{name}" for name in _paths_of_others(wrapper))
    spread = [
        key
        for key in sorted(state_dict)
        if key.startswith(prefix) and not key.startswith(others) and is_spread(state_dict[key])
    ]
    _check_same_on_all_ranks(wrapper, spread)
    parallel = {
        f"{prefix}{FSDP_WRAPPED_MODULE}.{name}": group.params[index].placement
        for name, (group, index) in _own_entries(wrapper).items()
        if group.params[index].placement.parallel
    }
    for key in spread:
        if key not in parallel or not parallel[key].is_as_before(state_dict[key]):
            state_dict[key] = whole_of_rows(state_dict[key], wrapper.compute_device)
    for key, placement in parallel.items():
        value = state_dict.get(key)
        if type(value) is Tensor and tuple(value.shape) == placement.shape:
            state_dict[key] = placement.as_before(placement.local_part(value).contiguous())
    _show_whole(wrapper, None)


def _check_same_on_all_ranks(wrapper: WrapperBase, spread: list[str]) -> None:
    """Tensors of which ranks have parts are gathered one after the other, so all must have the same ones."""
    process_group = wrapper._fsdp_state.groups and _groups(wrapper)[0].mesh_info.shard_process_group
    if not process_group:
        return
    everybody = collectives.values_of_all_ranks(spread, process_group)
    common = set(everybody[0]).intersection(*everybody[1:])
    faults = [
        f"rank {rank}: {clean_name(key)}"
        for rank, keys in enumerate(everybody)
        for key in keys
        if key not in common
    ]
    if faults:
        raise ConfigurationError(
            "Sharded entries of a state dict are gathered from all ranks, so all must have the same; only some ranks "
            "have:\n  " + "\n  ".join(faults) + "\nLoad the same checkpoint on all ranks."
        )


def _paths_of_others(wrapper: nn.Module) -> list[str]:
    """The clean names, with a dot, of the wrappers next below this one."""
    return [
        clean_name(f"{path}{name}.")
        for path, module in _paths(wrapper)
        for name, child in torch_border.child_table(module).items()
        if child is not None and state_of(child) is not None
    ]


def _prepare_local_entries(wrapper: WrapperBase, state_dict: dict[str, Any], prefix: str) -> None:
    key = f"{prefix}{FSDP_WRAPPED_MODULE}.{FLAT_PARAM}"
    for group in _groups(wrapper):
        group.refresh_shards()
        value = state_dict.pop(key, None)
        if value is not None and not wrapper._use_orig_params:
            local, held = torch_border.parts_of_sharded_tensor(value).local, _flat_piece(group)
            numel = 0 if local is None else local.numel()
            if numel != held.numel():
                raise ConfigurationError(
                    f"A local state dict can be loaded by the same wrapping over as many ranks only; {key} has "
                    f"{numel} elements for this rank, which holds {held.numel()}. Save a full or sharded state "
                    "dict to change either."
                )
            state_dict[key] = torch.zeros_like(group.sharded_params[0].param.data)
            if local is not None:
                state_dict[key][:numel] = local


def _after_loading(module: nn.Module, incompatible: Any) -> None:
    wrapper = cast(WrapperBase, module)
    wrapper._fsdp_state.installed_full_params.uninstall(write=True)
    for group in _groups(wrapper):
        group.repack()  # loading by assignment puts other parameters on the modules
    wrapper._precision.forget_mode()  # ... and other buffers
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [clean_name(key) for key in keys]
    errors, wrapper._load_errors = wrapper._load_errors, []
    errors[:] = [text.replace(f"{FSDP_WRAPPED_MODULE}.", "") for text in errors]


def with_versions(model: nn.Module, state_dict: Any) -> Any:
    """The same state dict, whose metadata, which are by names of modules, are found through wrappers."""
    found = torch_border.module_versions(state_dict)
    if found is None:
        return state_dict
    versions = dict(found)
    for name, _ in model.named_modules(remove_duplicate=False):
        if clean_name(name) in found:
            versions.setdefault(name, found[clean_name(name)])
    return torch_border.with_module_versions(state_dict, versions)
