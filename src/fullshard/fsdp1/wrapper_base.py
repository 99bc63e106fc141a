"""The part of a wrapper that the other files of this folder use.

`FullyShardedDataParallel` derives from `WrapperBase` and calls the files that implement its methods. Those
take a `WrapperBase`, so none of them imports the wrapper itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fullshard import torch_border
from fullshard.api import ShardingStrategy, StateDictSettings
from fullshard.engine import hooks
from fullshard.engine.lazy_init import lazy_init
from fullshard.engine.state import FSDPState, state_of
from fullshard.engine.step import Step
from fullshard.errors import LifecycleError, UsageError
from fullshard.features import full_params
from fullshard.fsdp1.precision import Precision


class WrapperBase(nn.Module):
    """One wrapper: a module, its options, and its state in the engine."""

    process_group: ProcessGroup
    rank: int
    """The rank in `process_group`."""
    world_size: int
    compute_device: torch.device
    sharding_strategy: ShardingStrategy
    _fsdp_wrapped_module: nn.Module
    _use_orig_params: bool
    _device_mesh: DeviceMesh | None
    _precision: Precision
    _state_dict_settings: StateDictSettings
    _load_errors: list[str]
    """The errors of the load that is running; the list belongs to torch."""
    _comm_hook: Callable[..., Any] | None

    @property
    def _fsdp_state(self) -> FSDPState:
        """The state that the constructor attached."""
        state = state_of(self)
        assert state is not None, "the constructor attaches it"
        return state

    @property
    def _label(self) -> str:
        """The wrapper's name in messages: the full name of its module, or the class of an outermost one."""
        module = torch_border.without_wrappers(self._fsdp_wrapped_module)
        return self._fsdp_state.name or type(module).__name__

    def _step(self) -> Step:
        """Return the step of the model; make it on the first call."""
        return self._fsdp_state.step or lazy_init(self._fsdp_state)

    @torch_border.opaque_to_compiler
    def _pre_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather the parameters, and return the inputs in the compute dtype."""
        self._prepare_forward()
        return hooks.pre_forward(self._fsdp_state, self, args, kwargs)

    def _prepare_forward(self) -> None:
        """Do the work before the parameters are gathered."""
        state = self._fsdp_state
        for group in state.groups:
            if group.full_params_installed:  # loading a module around this one has failed
                full_params.uninstall_all(state)
        self._precision.prepare_forward(state, training=self.training)

    def _require_root(self, method: str) -> None:
        """Refuse a call on a wrapper that is inside another one."""
        if self._step().root is not self._fsdp_state:
            raise LifecycleError(
                f"{method} must be called on the outermost wrapper; {self._fsdp_state.name!r} is inside another one. "
                "Call it on the model whose forward you call."
            )

    def _require_idle(self, method: str) -> None:
        """Refuse a call within forward or backward."""
        step = self._fsdp_state.step
        if step is not None and step.busy:
            raise UsageError(
                f"{method} was called within forward or backward of the model. Call it between them. (After an "
                "exception, run a forward first, or build the model again.)"
            )


def wrappers_in(module: nn.Module, *, root_only: bool = False) -> list[WrapperBase]:
    """Return all wrappers in a module, itself included; with ``root_only``, those inside no other."""
    found = [each for each in module.modules() if isinstance(each, WrapperBase)]
    if root_only:
        inner = {below for each in found for below in each.modules() if below is not each}
        found = [each for each in found if each not in inner]
    return found
