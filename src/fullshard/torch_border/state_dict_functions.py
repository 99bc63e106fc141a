"""Wrappers in `torch.distributed.checkpoint.state_dict`, whose functions know torch's class of wrappers only.

They ask every module of a model for `_fqn_modifiers`, before they ask whether there are wrappers. That is when our wrapper
introduces its class (`introduce_wrapper`): names of that module then stand for both classes.

    FSDP                                              the class: `isinstance`, the wrappers of a model, state dicts of optimizers
    _get_module_fsdp_state_if_fully_sharded_module    asked of every wrapper; None would be an error
    HYBRID_SHARDING_STRATEGIES                        such wrappers have no single process group

With torch's wrappers everything is as before. Nothing is imported for it: that module is loaded, since it asks.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

_KNOWS_OURS = "_fullshard_wrappers_are_known"
"""Mark of objects that stand for both classes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateDictWrapper:
    """A class of wrappers, as the functions for state dicts use it."""

    cls: Any
    """Has torch's static methods: `fsdp_modules`, `state_dict_type`, `optim_state_dict`, `optim_state_dict_to_load`."""
    hybrid_strategies: Sequence[object]
    translate: Callable[[Any], Any]
    """Returns our option for one of torch's, and others as they are."""
    refuse_mixture: Callable[[nn.Module], NoReturn]
    """Called with a model that has wrappers of both classes."""


def introduce_wrapper(ours: StateDictWrapper) -> None:
    """Let the functions of `torch.distributed.checkpoint.state_dict` know our wrappers, unless they do."""
    module: Any = importlib.import_module("torch.distributed.checkpoint.state_dict")
    if module.FSDP is not ours.cls and not hasattr(module.FSDP, _KNOWS_OURS):
        module.FSDP = _either_class(module.FSDP, ours)
    state_of = module._get_module_fsdp_state_if_fully_sharded_module
    if not hasattr(state_of, _KNOWS_OURS):
        module._get_module_fsdp_state_if_fully_sharded_module = _either_state(state_of, ours.cls)
    known = getattr(module, "HYBRID_SHARDING_STRATEGIES", None)  # not all versions have it
    if known is not None and not set(ours.hybrid_strategies) <= set(known):
        module.HYBRID_SHARDING_STRATEGIES = [*known, *ours.hybrid_strategies]


def _either_state(theirs: Callable[[nn.Module], Any], cls: type) -> Callable[[nn.Module], Any]:
    @functools.wraps(theirs)
    def state_of(module: nn.Module) -> Any:
        return module if isinstance(module, cls) else theirs(module)

    setattr(state_of, _KNOWS_OURS, True)
    return state_of


def _either_class(theirs: Any, ours: StateDictWrapper) -> type:
    """Return a class that stands for torch's and ours, and passes every call on to the one that the model has."""

    def class_for(model: nn.Module) -> Any:
        if not ours.cls.fsdp_modules(model):
            return theirs
        if theirs.fsdp_modules(model):
            ours.refuse_mixture(model)
        return ours.cls

    class EitherMeta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (theirs, ours.cls))

    class FullyShardedDataParallel(metaclass=EitherMeta):
        @staticmethod
        def fsdp_modules(module: nn.Module, root_only: bool = False) -> Any:
            return class_for(module).fsdp_modules(module, root_only)

        @staticmethod
        def state_dict_type(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            cls = class_for(module)
            if cls is ours.cls:
                args = tuple(map(ours.translate, args))
                kwargs = {name: ours.translate(value) for name, value in kwargs.items()}
            return cls.state_dict_type(module, *args, **kwargs)

        @staticmethod
        def optim_state_dict(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return class_for(model).optim_state_dict(model, *args, **kwargs)

        @staticmethod
        def optim_state_dict_to_load(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return class_for(model).optim_state_dict_to_load(model, *args, **kwargs)

    setattr(FullyShardedDataParallel, _KNOWS_OURS, True)
    return FullyShardedDataParallel
