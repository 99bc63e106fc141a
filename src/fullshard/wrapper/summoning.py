"""Whole parameters for a while, outside of forward and backward: `summon_full_params`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..errors import ConfigurationError, LifecycleError, UnsupportedError
from ..param_group import FSDPParamGroup
from ..runtime import state_of

if TYPE_CHECKING:
    from .module import FullyShardedDataParallel


def wrappers_in(module: nn.Module, *, root_only: bool = False) -> list[FullyShardedDataParallel]:
    """All wrappers in a module; with ``root_only``, those that no other contains."""
    from .module import FullyShardedDataParallel  # which needs this file

    found = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
    if root_only:
        inner = {below for each in found for below in each.modules() if below is not each}
        found = [each for each in found if each not in inner]
    return found


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
        if wrapper._summoned:
            raise LifecycleError(
                "summon_full_params was called within itself, on a module that is whole already. Leave the inner "
                "call out."
            )
    shown: list[_Shown] = []
    try:
        for wrapper in wrappers:
            wrapper._summoned = True
        for wrapper in wrappers:
            state = state_of(wrapper)
            assert state is not None, "attached when the wrapper was made"
            for group in state.groups:
                shows = not rank0_only or wrapper.rank == 0
                shown.append(_Shown(group, shows, with_grads=with_grads, offload=offload_to_cpu))
        yield
    finally:
        for wrapper in wrappers:
            wrapper._summoned = False
        for each in shown:
            each.end(writeback=writeback)


class _Shown:
    """One group whose whole parameters are on its modules."""

    def __init__(
        self, group: FSDPParamGroup, shows: bool, *, with_grads: bool, offload: bool
    ) -> None:
        self._group = group
        self._shows = shows
        self._with_grads = with_grads
        group.reshard()
        wholes = group.whole_params()
        gradients = group.whole_gradients() if with_grads else []
        if not shows:
            return
        if offload:
            wholes = [whole.to("cpu") for whole in wholes]
        group.show(wholes)
        if with_grads:
            group.show_gradients(gradients)

    def end(self, *, writeback: bool) -> None:
        """Put the sharded parameters back."""
        if not self._shows:
            return
        gradients = self._group.take_shown_gradients() if self._with_grads else None
        wholes = self._group.take_shown()
        if gradients is not None:
            self._group.put_gradients_back(gradients if writeback else None)
        if writeback:
            self._group.write_shards(_of_same_shapes(self._group, wholes))


def _of_same_shapes(group: FSDPParamGroup, wholes: Sequence[Tensor]) -> list[Tensor | None]:
    faults = [
        f"{param.name}: {tuple(whole.shape)} instead of {param.shape}"
        for param, whole in zip(group.params, wholes, strict=True)
        if tuple(whole.shape) != param.shape
    ]
    if faults:
        raise ConfigurationError(
            "Parameters must keep their shapes within summon_full_params; these have not, and nothing of their "
            "wrapper was written back:\n  " + "\n  ".join(faults)
        )
    return list(wholes)


def _check_gradients_can_be_shown(
    wrappers: Sequence[FullyShardedDataParallel], offload_to_cpu: bool
) -> None:
    if offload_to_cpu:
        raise UnsupportedError(
            "Gradients are on the device of their parameters, so with_grads=True excludes offload_to_cpu=True. "
            "Leave one out."
        )
    flat = [
        wrapper._fsdp_state.name or type(wrapper.module).__name__
        for wrapper in wrappers
        if not wrapper._use_orig_params
    ]
    if flat:
        raise UnsupportedError(
            f"Only parameters that kept their identity can show gradients, but these wrappers have a FlatParameter: "
            f"{flat}. Pass use_orig_params=True to them."
        )
