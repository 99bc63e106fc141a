"""Whole parameters for a while, outside of forward and backward: `summon_full_params`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from fullshard.engine import full_params
from fullshard.engine.lazy_init import lazy_init
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.state import named_states, state_of
from fullshard.errors import ConfigurationError, LifecycleError, UnsupportedError
from fullshard.fsdp1.wrapper_base import WrapperBase, wrappers_in
from fullshard.names import clean_name


def notice_assigned(module: nn.Module) -> None:
    """Take over parameters that were assigned on modules, before anybody is told which ones there are.

    What cannot be taken over is listed as it is; whoever uses it is told.
    """
    own = state_of(module)
    if own is not None and own.runtime is not None and own.runtime.root is own:
        states = own.runtime.states
    else:
        states = tuple(named_states(module))
    for group in (group for state in states for group in state.groups):
        if group.expects_sharded_params and not group.shards.on_modules:
            with contextlib.suppress(ConfigurationError):
                group.notice_replacements()


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """See `FullyShardedDataParallel.summon_full_params`."""
    if rank0_only and writeback:
        raise UnsupportedError(
            "rank0_only=True shows whole parameters on rank 0 alone, so the other ranks have nothing to write back. "
            "Pass writeback=False, too."
        )
    wrappers = wrappers_in(module, root_only=not recurse)
    if with_grads:
        _check_gradients_can_be_shown(wrappers, offload_to_cpu)
    for wrapper in wrappers:
        wrapper._require_idle("summon_full_params")
        if wrapper._fsdp_state.summoned:
            raise LifecycleError(
                "summon_full_params was called within itself, on a module that is whole already. Leave the inner "
                "call out."
            )
    paths = {each: clean_name(name) for name, each in module.named_modules()}
    shown: list[_Shown] = []
    faults: list[str] = []
    try:
        full_params.refresh_shards_together(
            [g for each in wrappers for g in each._fsdp_state.groups]
        )
        for wrapper in wrappers:
            wrapper._fsdp_state.summoned = True
        for wrapper in wrappers:
            state = state_of(wrapper)
            assert state is not None, "attached when the wrapper was made"
            for group in state.groups:
                shows = not rank0_only or wrapper.rank == 0
                each = _Shown(
                    group, paths[wrapper], shows, with_grads=with_grads, offload=offload_to_cpu
                )
                shown.append(each)
        yield
    finally:
        for wrapper in wrappers:
            wrapper._fsdp_state.summoned = False
        faults = [fault for each in shown for fault in each.end(writeback=writeback)]
    if faults:
        raise ConfigurationError(
            "Parameters must keep their shapes within summon_full_params; these have not, and nothing of their "
            "wrappers was written back:\n  " + "\n  ".join(faults)
        )


def forward(wrapper: WrapperBase, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward of a wrapper whose whole parameters are on its modules."""
    check_whole(wrapper)
    return wrapper._fsdp_wrapped_module(*args, **kwargs)


def check_whole(wrapper: WrapperBase) -> None:
    """Refuse a forward within `summon_full_params` on ranks that have no whole parameters."""
    state = wrapper._fsdp_state
    if any(not group.full_params_installed for group in state.groups):
        raise LifecycleError(
            "Within summon_full_params(rank0_only=True) only rank 0 has whole parameters to compute with. Run forward "
            "there, or on all ranks without rank0_only."
        )
    if state.runtime is None:
        lazy_init(state)  # wrappers below that are not summoned must know whom they belong to


class _Shown:
    """One group whose whole parameters are on its modules."""

    def __init__(
        self, group: FSDPParamGroup, path: str, shows: bool, *, with_grads: bool, offload: bool
    ) -> None:
        self._group = group
        self._path = path
        self._shows = shows
        self._with_grads = with_grads
        wholes = full_params.gather_params(group)
        gradients = full_params.gather_gradients(group) if with_grads else []
        if not shows:
            return
        if offload:
            wholes = [whole.to("cpu") for whole in wholes]
        full_params.install_full_params(group, wholes)
        if with_grads:
            full_params.install_full_gradients(group, gradients)

    def end(self, *, writeback: bool) -> list[str]:
        """Put the sharded parameters back, and return why nothing can be written back, if so."""
        if not self._shows:
            return []
        gradients = full_params.uninstall_full_gradients(self._group) if self._with_grads else None
        wholes = full_params.uninstall_full_params(self._group)
        faults = self._faults(wholes) if writeback else []
        writeback = writeback and not faults
        if gradients is not None:
            full_params.restore_sharded_gradients(self._group, gradients if writeback else None)
        if writeback:
            full_params.write(self._group, wholes)
        return faults

    def _faults(self, wholes: Sequence[Tensor]) -> list[str]:
        prefix = f"{self._path}." if self._path else ""
        return [
            f"{prefix}{param.name}: {tuple(whole.shape)} instead of {param.shape}"
            for param, whole in zip(self._group.params, wholes, strict=True)
            if tuple(whole.shape) != param.shape
        ]


def _check_gradients_can_be_shown(wrappers: Sequence[WrapperBase], offload_to_cpu: bool) -> None:
    if offload_to_cpu:
        raise UnsupportedError(
            "Gradients are on the device of their parameters, so with_grads=True excludes offload_to_cpu=True. "
            "Leave one out."
        )
    flat = [wrapper._label for wrapper in wrappers if not wrapper._use_orig_params]
    if flat:
        raise UnsupportedError(
            f"Only parameters that kept their identity can show gradients, but these wrappers have a FlatParameter: "
            f"{flat}. Pass use_orig_params=True to them."
        )
    unreduced = [
        name
        for wrapper in wrappers
        for group in wrapper._fsdp_state.groups
        for name in group.reducer.unreduced.sharded_names()
    ]
    if unreduced:
        raise LifecycleError(
            "with_grads=True shows gradients that ranks have reduced, but those of these were only added up, in "
            f"no_sync(): {unreduced}. Run a backward outside of no_sync() first, or zero_grad(); or read .grad, which is "
            "whole now."
        )
