"""Settings of the state dicts that a model's wrappers make: `set_state_dict_type` and its relatives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, NoReturn

from torch import nn

from fullshard import torch_border
from fullshard.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fullshard.errors import ConfigurationError, UnsupportedError, UsageError
from fullshard.fsdp1.wrapper_base import WrapperBase, wrappers_in
from fullshard.policies import check_type

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def default_settings() -> StateDictSettings:
    """Return the settings of a new wrapper: full tensors, on the compute device."""
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
    check_type("state_dict_type", kind, StateDictType)
    expected, optim_expected = _CONFIGS[kind]
    config = expected() if config is None else config
    optim_config = optim_expected() if optim_config is None else optim_config
    for given, cls in ((config, expected), (optim_config, optim_expected)):
        if type(given) is not cls:
            raise UsageError(
                f"{kind} takes a fullshard.{cls.__name__}, got {given!r} ({type(given).__module__}). Pass one, or leave "
                "it out for the default."
            )
    before = settings_of(module)
    for wrapper in wrappers_in(module):
        wrapper._state_dict_settings = StateDictSettings(
            kind, _with_mesh(config, wrapper), _with_mesh(optim_config, wrapper)
        )
    return before


@contextlib.contextmanager
def restored_settings(module: nn.Module) -> Iterator[None]:
    """Return a context after which the wrappers have the settings that they had before it."""
    before = {wrapper: wrapper._state_dict_settings for wrapper in wrappers_in(module)}
    try:
        yield
    finally:
        for wrapper, settings in before.items():
            wrapper._state_dict_settings = settings


def _with_mesh(config: Any, wrapper: WrapperBase) -> Any:
    """Return a config for one wrapper: one for sharded tensors asks for DTensors if the wrapper has a mesh."""
    if hasattr(config, "_use_dtensor"):
        return replace(config, _use_dtensor=wrapper._device_mesh is not None)
    return config


def _without_mesh(settings: StateDictSettings) -> list[Any]:
    """Return the values of settings that must be the same for all wrappers."""
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
            f"All wrappers of a model must have the same settings of state dicts. The first has {first}; these have "
            f"others: {others}. Call set_state_dict_type on the whole model."
        )
    return first


# --- torch.distributed.checkpoint.state_dict ------------------------------------------------------


def for_torch_s_functions(cls: type[WrapperBase]) -> torch_border.StateDictWrapper:
    """Return the facts about the class of wrappers for torch's functions for state dicts."""
    return torch_border.StateDictWrapper(
        cls=cls,
        hybrid_strategies=(ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2),
        translate=_from_torch,
        refuse_mixture=_refuse_mixture,
    )


_BY_NAME: dict[str, Any] = {cls.__name__: cls for pair in _CONFIGS.values() for cls in pair}


def _from_torch(option: Any) -> Any:
    """Return the setting that means the same as one of torch's, by its name; other values as they are."""
    name = type(option).__name__
    if name == StateDictType.__name__:
        return StateDictType[option.name]
    if name in _BY_NAME:
        return _BY_NAME[name](**{each.name: getattr(option, each.name) for each in fields(option)})
    return option


def _refuse_mixture(model: nn.Module) -> NoReturn:
    raise UnsupportedError(
        "A model must be wrapped by one library for torch.distributed.checkpoint.state_dict, but some of its modules are "
        f"wrapped by torch's FullyShardedDataParallel and these by fullshard's: {[w._label for w in wrappers_in(model)]}. Wrap "
        "all of them with fullshard."
    )
