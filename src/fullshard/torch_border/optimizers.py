"""Base classes of optimizers and loss scalers, and observers of ``zero_grad`` and of updates."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.torch_border.compiler import opaque_to_compiler


class OpenGradScaler(torch.amp.GradScaler):
    """torch's loss scaler; a derived class says what happens to the gradients."""

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, factor: Tensor, found_inf: Tensor
    ) -> None:
        """Multiply an optimizer's gradients by ``factor``, and make ``found_inf`` 1 if one is not finite.

        For `unscale_`, and with a factor of 1 for optimizers that unscale in their own step.
        """
        raise NotImplementedError

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        self.unscale_gradients(optimizer, inv_scale, found_inf)
        return {found_inf.device: found_inf}


def unscale_and_check(tensors: list[Tensor], factor: Tensor, found_inf: Tensor) -> None:
    """Multiply tensors of one device and dtype by ``factor``; make ``found_inf`` 1 if one was not finite."""
    with torch.no_grad():
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, factor)


class DelegatingOptimizer(torch.optim.Optimizer):
    """torch's base class, for an optimizer whose updates another one makes."""

    inner: torch.optim.Optimizer
    """The optimizer that makes the updates. No other object knows it, and its hooks do not run."""
    takes_pieces = True
    """It knows that parameters may be pieces (`engine.optimizer_checks`)."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `step` unscales gradients, as fused optimizers do; loss scalers read this."""
        return getattr(self.inner, "_step_supports_amp_scaling", False)

    def step_inner(self) -> None:
        """Step the inner optimizer, with what a loss scaler has set on this one."""
        scaling = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        self.inner.__dict__.update(scaling)
        # The constructor of every optimizer wraps its class's step, to run hooks: some are for all optimizers.
        step: Callable[..., Any] = type(self.inner).step
        if getattr(step, "hooked", False):
            step = inspect.getattr_static(step, "__wrapped__")
        step(self.inner)


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks that run before an optimizer's steps."""
    return list(optimizer._optimizer_step_pre_hooks.values())


def observe_zero_grad(
    by_optimizer: Callable[[torch.optim.Optimizer, bool], None],
    by_module: Callable[[nn.Module, bool], None],
) -> None:
    """Call functions after ``zero_grad`` of every optimizer and module, with it and ``set_to_none``.

    torch has no hook for it. Classes that override it without calling the one they inherit are not observed.
    """
    _tell_of_zero_grad(torch.optim.Optimizer, by_optimizer)
    _tell_of_zero_grad(nn.Module, by_module)


def _tell_of_zero_grad(cls: Any, told: Callable[[Any, bool], None]) -> None:
    original, told = cls.zero_grad, opaque_to_compiler(told)

    @functools.wraps(original)
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        original(self, set_to_none)
        told(self, set_to_none)

    cls.zero_grad = zero_grad


ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Optimizers of torch that update each element from its own gradient and state only, with any options."""


def observe_updates(run_observed: Callable[..., None]) -> None:
    """Run the arithmetic of the `ELEMENTWISE` optimizers through ``run_observed``.

    It gets torch's function, the lists of parameters, gradients and states that this is called with, and its options.
    """
    for optimizer_class in ELEMENTWISE - {torch.optim.AdamW}:  # which uses Adam's
        name = optimizer_class.__name__.lower()
        module = importlib.import_module(f"torch.optim.{name}")
        setattr(module, name, _observed_update(getattr(module, name), run_observed))


def _observed_update(update: Callable[..., None], run: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(update)
    def observed(*tensors: Any, **options: Any) -> None:
        if torch.compiler.is_compiling():
            update(*tensors, **options)
        else:
            run(update, *tensors, **options)

    return observed


IN_BACKWARD_OPTIMIZERS = "_in_backward_optimizers"
"""Attribute of a parameter for the optimizers of torch's `_apply_optimizer_in_backward`."""
