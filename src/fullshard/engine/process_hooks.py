"""Hooks on torch itself, for events that no hook on a module or parameter can notice.

    optimizer.step()      the optimizer cannot update shards (`optimizer_checks`), or has tensors that are not the
                          model's parameters, or gradients that were not reduced (`plain_params`, too); writes that no
                          version counter counts
                          torch's elementwise updates work on local tensors (`local_updates`)
    zero_grad()           gradients that wait to be reduced, outside of `.grad`, must be cleared, too
    backward()            see `run_backward`
    module.name = ...     modules and parameters that join a sharded model

They are installed once per process, when a sharded model first runs. They do nothing to models that
fullshard has not sharded.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fullshard import torch_border
from fullshard.engine import local_updates, optimizer_checks
from fullshard.engine.feature_events import UPDATE_BEGINS
from fullshard.engine.known_groups import groups_of, unsharded_groups
from fullshard.engine.optimizer_checks import params_of
from fullshard.engine.plain_params import compare_plain_gradients, is_to_be_compared
from fullshard.engine.step import run_backward
from fullshard.engine.unreduced_gradients import gradients_were_cleared, not_to_be_updated
from fullshard.errors import LifecycleError
from fullshard.storage.sharded_params import (
    GROUP_MARK,
    group_of,
    replaced_name,
    unsharded_name,
)
from fullshard.transport.monitor import POSITION, monitor

_INSTALLING = threading.Lock()


def install() -> None:
    """Install the hooks, unless that has been done. A model was sharded: optimizers are checked again.

    Not later than that: a step before the first forward counts, on ranks that have sharded another model before, too.
    """
    with _INSTALLING:  # ranks may be threads
        _install()
    _CHECKED.clear()


@functools.cache
def _install() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    torch_border.observe_updates(local_updates.update)
    torch_border.observe_zero_grad(_cleared_by_optimizer, _cleared_by_module)
    torch_border.observe_backward(run_backward)
    torch_border.show_alone(unsharded_name)
    register_module_module_registration_hook(_joins)
    register_module_parameter_registration_hook(_joins)


# --- optimizers -----------------------------------------------------------------------------------

_CHECKED: weakref.WeakKeyDictionary[Optimizer, tuple[int, ...]] = weakref.WeakKeyDictionary()
"""Per optimizer, the number of parameters in each of its groups when it was checked."""


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    monitor().optimizer_begins(optimizer)
    POSITION.phase = "optimizer"
    optimizer_checks.check(optimizer)
    sizes = _group_sizes(optimizer)
    if _CHECKED.get(optimizer) != sizes:
        _check_params(optimizer)
        optimizer_checks.warn_of_pieces(optimizer)
        _CHECKED[optimizer] = sizes
    if is_to_be_compared(optimizer) and torch_border.backward_pass_id() == -1:
        compare_plain_gradients(optimizer)
    unreduced = not_to_be_updated(lambda: params_of(optimizer))
    if unreduced:
        raise LifecycleError(
            "Gradients must be reduced before an optimizer updates sharded parameters. The gradients of these parameters were "
            f"only accumulated, in no_sync(): {unreduced}. Run the last backward before step() outside of no_sync()."
        )
    for check in UPDATE_BEGINS:
        check(lambda: params_of(optimizer))


def _check_params(optimizer: Optimizer) -> None:
    """Refuse tensors that are not, or no longer, the model's parameters: they would never train the model."""
    params = params_of(optimizer)
    early = [f"{name} (of {group_of(param)})" for param in params if (name := replaced_name(param))]
    if early:
        raise LifecycleError(
            f"{type(optimizer).__name__} was made before the model was sharded: it has parameters that sharding has replaced, "
            f"and would never train the model: {early}. Make the optimizer from model.parameters() after fully_shard or "
            "FullyShardedDataParallel."
        )
    params = [param for param in params if param.grad is None]
    unsharded = [name for param in params if (name := unsharded_name(param))]
    if unsharded:
        raise LifecycleError(
            f"{type(optimizer).__name__} was made while these parameters were unsharded, and would never train them: "
            f"{unsharded}. Make the optimizer before the first forward, after a backward, or after reshard() of the "
            "module."
        )
    lost = [
        f"one of shape {tuple(param.shape)} in group {group!r}"
        for param in params
        if (group := group_of(param)) is not None and not groups_of([param])
    ]
    if lost:
        raise LifecycleError(
            f"{type(optimizer).__name__} has parameters that a load with assign=True, say, has replaced in the "
            f"model, and would never train the model: {lost}. Make the optimizer from model.parameters() afterwards."
        )


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Count the step, and the writes to sharded parameters: fused operators, and those on lists of DTensors, do not."""
    in_backward = torch_border.backward_pass_id() != -1
    POSITION.phase = "backward" if in_backward else "outside"
    # An optimizer that steps in backward does so when its gradients have arrived: not at the same place on all ranks.
    if not in_backward:
        monitor().optimizer_ended(optimizer)
    if isinstance(optimizer, torch_border.DelegatingOptimizer):
        return  # does so itself
    # For every parameter in every step, so without a call of `group_of`.
    written = [
        param
        for param in params_of(optimizer)
        if param.grad is not None and getattr(param, GROUP_MARK, None)
    ]
    torch.autograd.graph.increment_version(written)


def _group_sizes(optimizer: Optimizer) -> tuple[int, ...]:
    """Return the number of parameters of each group, which changes when parameters join or leave."""
    return tuple([len(group["params"]) for group in optimizer.param_groups])


# --- zero_grad ------------------------------------------------------------------------------------


def _cleared_by_optimizer(optimizer: Optimizer, set_to_none: bool) -> None:
    gradients_were_cleared(lambda: params_of(optimizer))


def _cleared_by_module(module: nn.Module, set_to_none: bool) -> None:
    """Between forward and backward a module may have unsharded parameters, whose `.grad` is another one."""
    gradients_were_cleared(module.parameters)
    groups = unsharded_groups()
    if groups:
        cleared = {id(param) for param in module.parameters()}
        for group in groups:
            group.reduction.clear_sharded_gradients(cleared, set_to_none=set_to_none)


# --- modules and parameters that join a model -----------------------------------------------------

_WATCHED: weakref.WeakKeyDictionary[nn.Module, Callable[[], None]] = weakref.WeakKeyDictionary()
"""Modules of sharded models, and the functions to call when something joins them."""


def watch(modules: Iterable[nn.Module], changed: Callable[[], None]) -> None:
    """Call ``changed`` when a module or parameter is put on one of the modules.

    ``changed`` must not keep a module alive.
    """
    for module in modules:
        _WATCHED[module] = changed


def _joins(module: nn.Module, name: str, value: nn.Module | Tensor | None) -> None:
    if isinstance(value, Tensor) and (group_of(value) or unsharded_name(value)):
        return  # put there by us
    changed = _WATCHED.get(module)
    if changed is not None and value is not None:
        changed()
