"""Facts of model and optimizer that a captured step has taken over: addresses, options, modes.

A graph reads and writes memory by its addresses, and does what the options said when it was captured. A replay
compares first, so this looks at groups and not at single parameters where it can.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from fullshard import torch_border
from fullshard.engine.options import StateOptions
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.state import FSDPState
from fullshard.storage.sharded_params import group_of

_OPTIONS = tuple(
    field.name
    for field in fields(StateOptions)
    if field.name not in ("post_optim_event", "event_is_captured")
)
"""Not the event: it counts once."""


def baked_in(
    model: nn.Module, states: Iterable[FSDPState], optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """Return what a capture would take over now, by what it is called in messages."""
    states = list(states)
    groups = [group for state in states for group in state.groups]
    for group in groups:
        group.notice_replacements()
    return {
        "the parameters": [_memory_of(group) for group in groups],
        "buffers and parameters that are not sharded": _addresses(_unsharded_tensors(model)),
        "options of the model": [
            [*(getattr(state.options, name) for name in _OPTIONS), *map(_settings_of, state.groups)]
            for state in states
        ],
        "the optimizer's state": sorted(_addresses(_state_tensors(optimizer))),
        "options of the optimizer": _optimizer_options(optimizer),
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names of what differs."""
    return [name for name, value in now.items() if before[name] != value]


def modes(model: nn.Module) -> tuple[bool, ...]:
    """Return which modules are in training mode."""
    return tuple([module.training for module in model.modules()])


def kind_of(value: Any) -> Hashable:
    """Return what must be equal for two inputs to use the same graph: shapes and dtypes, and all that is no tensor.

    Raises:
        TypeError: there is something that cannot be compared.
    """
    if isinstance(value, Tensor):
        return ("tensor", tuple(value.shape), value.dtype)
    if isinstance(value, (tuple, list)):
        return (type(value), *map(kind_of, value))
    if isinstance(value, Mapping):
        return (type(value), *((key, kind_of(item)) for key, item in value.items()))
    if isinstance(value, (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)):
        return (type(value), value)
    raise TypeError(
        f"inputs of a graphed step are tensors, numbers, strings, or tuples, lists and dicts of these, not {type(value).__name__}"
    )


def _memory_of(group: FSDPParamGroup) -> tuple[Any, ...]:
    shards = group.shards
    unbuffered = [id(each.local) for each in group.sharded_params if each not in shards.shard_views]
    return (weakref.ref(shards.buffer), *unbuffered)  # to be equal, it must be alive


def _settings_of(group: FSDPParamGroup) -> tuple[Any, ...]:
    gathers = group.routes
    return (
        group.mp_policy,
        group.reduction.settings,
        gathers.custom,
        gathers.post_forward is not None,
        gathers.keeps_memory,
        tuple(group.shards.trainable),
    )


def _unsharded_tensors(model: nn.Module) -> list[Tensor]:
    return [*model.buffers(), *(param for param in model.parameters() if not group_of(param))]


def _state_tensors(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    if optimizer is None:
        return []
    holder = optimizer
    if isinstance(optimizer, torch_border.DelegatingOptimizer):
        holder = optimizer.inner  # to ask for the outer state would split it
    return [
        value
        for state in holder.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]


def _optimizer_options(optimizer: torch.optim.Optimizer | None) -> list[Any]:
    groups: Sequence[dict[str, Any]] = [] if optimizer is None else optimizer.param_groups
    return [
        [
            len(group["params"]),
            *(
                (key, *_addresses([value])) if isinstance(value, Tensor) else (key, value)
                for key, value in group.items()
                if key not in ("params", "param_names", "initial_lr")
            ),
        ]
        for group in groups
    ]


def _addresses(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    # To ask a subclass (a DTensor) for its address takes long, and these are not given other memory.
    return tuple(
        [each.data_ptr() if type(each) in (Tensor, nn.Parameter) else id(each) for each in tensors]
    )
