"""`register_comm_hook`: a user's function reduces the gradients of all wrappers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fullshard.errors import ConfigurationError, LifecycleError, OptionTypeError
from fullshard.fsdp1.wrapper_base import WrapperBase, wrappers_in
from fullshard.fsdp1.wrapper_options import HYBRID


def register(wrapper: WrapperBase, state: object, hook: Callable[..., Any]) -> None:
    """See `FullyShardedDataParallel.register_comm_hook`."""
    if not callable(hook):
        raise OptionTypeError(f"hook must be callable, got {type(hook).__name__}.")
    wrapper._require_root("register_comm_hook")
    wrapper._require_idle("register_comm_hook")
    wrappers = wrappers_in(wrapper)
    twice = [each._fsdp_state.name for each in wrappers if each._comm_hook is not None]
    if twice:
        raise LifecycleError(
            f"A wrapper takes one communication hook, but these have one already: {twice}. Register one hook that does "
            "the work of both."
        )
    hybrid = [each._fsdp_state.name for each in wrappers if each.sharding_strategy in HYBRID]
    if hybrid:
        raise ConfigurationError(
            "A communication hook replaces one reduction, but hybrid strategies have two, over shards and over "
            f"replicas. These wrappers have one: {hybrid}. Use another strategy, or fully_shard with set_all_reduce_hook."
        )
    states = [each._fsdp_state for each in wrappers]
    narrow = [s.name for s in states if any(group.mp_policy.wire_dtype for group in s.groups)]
    if narrow:
        raise ConfigurationError(
            "A communication hook chooses the dtype in which gradients travel, so it excludes wire_dtype. These wrappers "
            f"have a wire_dtype: {narrow}. Leave wire_dtype out of their MixedPrecision, or leave the hook out."
        )
    for each in wrappers:
        each._comm_hook = hook
        for group in each._fsdp_state.groups:
            group.change_reduction(replacement=functools.partial(_call, hook, state))


def _call(hook: Callable[..., Any], state: object, gradient: Tensor, output: Tensor | None) -> None:
    if output is None:
        hook(state, gradient)
    else:
        hook(state, gradient, output)
