"""Calls of a wrapped module that do not go through its wrapper.

    wrapper(x)              the wrapper's forward gathers, then calls the module
    wrapper.module(x)       the caller calls the module, and the module's hooks gather
    wrapper.generate(x)     a method of the module calls the module: the hooks gather, too

So methods that use parameters through ``self(...)`` work on the wrapper as they do on the module. Methods that use
parameters otherwise need `summon_full_params` or `register_fsdp_forward_method`.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from fullshard import torch_border
from fullshard.engine import hooks
from fullshard.fsdp1.summon_full_params import check_full_params
from fullshard.fsdp1.wrapper_base import WrapperBase


class DirectCalls:
    """The hooks on one wrapper's module; they do nothing while the wrapper's own forward runs."""

    def __init__(self, wrapper: WrapperBase, module: nn.Module) -> None:
        self._wrapper = weakref.ref(wrapper)
        self.through_wrapper = 0
        """Number of running forwards of the wrapper."""
        self._direct = 0
        """Number of running direct calls, one inside the other."""
        if wrapper._fsdp_state.groups:  # otherwise there is nothing to gather
            module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after, always_call=True)

    def __reduce__(self) -> tuple[Any, ...]:
        """Give a copy of the module hooks without effect: a copy, pickled or not, belongs to no wrapper."""
        return _without_effect, ()

    @torch_border.opaque_to_compiler
    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.through_wrapper:
            return None
        wrapper = self._wrapper()
        if wrapper is None:
            return None
        if wrapper._fsdp_state.summoned:
            check_full_params(wrapper)
            return None
        # Before anything that can raise: torch calls `_after` in any case, and it counts down.
        self._direct += 1
        return wrapper._pre_forward(args, kwargs)

    @torch_border.opaque_to_compiler
    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.through_wrapper or not self._direct:
            return None
        self._direct -= 1
        wrapper = self._wrapper()
        if wrapper is None:
            return None
        return hooks.post_forward(wrapper._fsdp_state, wrapper, args, output)


def _without_effect() -> DirectCalls:
    """Return hooks that never do anything."""
    made = DirectCalls.__new__(DirectCalls)
    made.through_wrapper = 1
    return made
