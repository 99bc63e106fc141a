"""Calls of the module inside a wrapper that do not come through the wrapper.

    wrapper(x)              forward of the wrapper gathers, then calls the module
    wrapper.module(x)       the module is called directly, and its hooks gather
    wrapper.generate(x)     a method of the module, which calls the module itself: the same

So every method that uses parameters through ``self(...)`` works on the wrapper as on the module. Methods that use
parameters without a call of the module do so within `summon_full_params`, or after `register_fsdp_forward_method`.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from fullshard.engine import module_hooks
from fullshard.fsdp1.summon_full_params import check_whole
from fullshard.fsdp1.wrapper_base import WrapperBase


class DirectCalls:
    """Hooks on the module of one wrapper; they do nothing while the wrapper's own forward runs."""

    def __init__(self, wrapper: WrapperBase, module: nn.Module) -> None:
        self._wrapper = weakref.ref(wrapper)
        self.through_wrapper = 0
        """Forwards of the wrapper now running."""
        self._direct = 0
        """Direct calls now running, one inside the other."""
        if wrapper._fsdp_state.groups:  # otherwise there is nothing to gather
            module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after, always_call=True)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies of the module, made or pickled while it is whole, belong to no wrapper."""
        return _of_a_copy, ()

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.through_wrapper:
            return None
        wrapper = self._wrapper()
        if wrapper is None:
            return None
        if wrapper._fsdp_state.summoned:
            check_whole(wrapper)
            return None
        self._direct += 1  # first of all: `_after` is called in any case
        return wrapper._pre_forward(args, kwargs)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.through_wrapper or not self._direct:
            return None
        self._direct -= 1
        wrapper = self._wrapper()
        if wrapper is None:
            return None
        return module_hooks.post_forward(wrapper._fsdp_state, wrapper, args, output)


def _of_a_copy() -> DirectCalls:
    """Hooks that never do anything."""
    made = DirectCalls.__new__(DirectCalls)
    made.through_wrapper = 1
    return made
