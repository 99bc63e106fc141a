"""`summon_full_params`: full parameters on the modules for a while, outside of forward and backward.

    enter   adopt what users assigned, gather every group, install the full parameters
    leave   uninstall them, and write this rank's part into the shards of groups that were changed

Every rank gathers, also one that installs nothing (``rank0_only``): gathers are collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from fullshard.engine.lazy_init import lazy_init
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.state import named_states, state_of
from fullshard.errors import ConfigurationError, LifecycleError, UnsupportedError
from fullshard.features import full_params
from fullshard.fsdp1.wrapper_base import WrapperBase, wrappers_in
from fullshard.layout.names import clean_name


def notice_assigned(module: nn.Module) -> None:
    """Adopt parameters that a user assigned on modules, so that they are listed as parameters of the model.

    Parameters that cannot be adopted are listed as they are. The next use of them raises the error.
    """
    own = state_of(module)
    if own is not None and own.step is not None and own.step.root is own:
        states = own.step.states
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
            "With rank0_only=True only rank 0 has full parameters, so other ranks have nothing to write back. Pass "
            "writeback=False, too."
        )
    wrappers = wrappers_in(module, root_only=not recurse)
    if with_grads:
        _check_full_gradients(wrappers, offload_to_cpu)
    for wrapper in wrappers:
        wrapper._require_idle("summon_full_params")
        if wrapper._fsdp_state.summoned:
            raise LifecycleError(
                "summon_full_params cannot be nested, but the module has its full parameters already. Leave the inner "
                "call out."
            )
    paths = {each: clean_name(name) for name, each in module.named_modules()}
    summoned: list[_SummonedGroup] = []
    faults: list[str] = []
    left_by: BaseException | None = None
    entered = False
    try:
        full_params.refresh_shards_together(
            [g for each in wrappers for g in each._fsdp_state.groups]
        )
        for wrapper in wrappers:
            wrapper._fsdp_state.summoned = True
        for wrapper in wrappers:
            installs = not rank0_only or wrapper.rank == 0
            for group in wrapper._fsdp_state.groups:
                each = _SummonedGroup(
                    group, paths[wrapper], installs, with_grads=with_grads, offload=offload_to_cpu
                )
                summoned.append(each)
        entered = True
        yield
    except BaseException as error:
        left_by = error
        raise
    finally:
        for wrapper in wrappers:
            wrapper._fsdp_state.summoned = False
        # A signal, say, may have ended the block on this rank alone; then ranks do not meet again.
        together = entered and (left_by is None or isinstance(left_by, Exception))
        faults = _end(summoned, writeback=writeback, together=together)
    if faults:
        raise ConfigurationError(
            "Parameters must keep their shapes within summon_full_params, but these have other shapes now:\n  "
            + "\n  ".join(faults)
            + "\nNothing was written back to the wrappers of these parameters. Assign tensors of the same shapes."
        )


def _end(summoned: Sequence[_SummonedGroup], *, writeback: bool, together: bool) -> list[str]:
    """Put the sharded parameters back and write what was changed, and return what keeps groups from that.

    If not ``together``, other ranks may not come to compare, and all is written.
    """
    fulls = {each: each.uninstall() for each in summoned if each.installs}
    changed = {each.group: True for each in fulls}
    if writeback and together:
        changed = full_params.changed_anywhere({each.group: full for each, full in fulls.items()})
    return [
        fault
        for each, full in fulls.items()
        for fault in each.end(full, writeback=writeback, changed=changed[each.group])
    ]


def forward(wrapper: WrapperBase, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the forward of a wrapper whose full parameters are on its modules."""
    check_full_params(wrapper)
    return wrapper._fsdp_wrapped_module(*args, **kwargs)


def check_full_params(wrapper: WrapperBase) -> None:
    """Refuse a forward within `summon_full_params` on ranks without full parameters."""
    state = wrapper._fsdp_state
    if any(not group.full_params_installed for group in state.groups):
        raise LifecycleError(
            "Within summon_full_params(rank0_only=True) only rank 0 has full parameters to compute with. Run forward "
            "on rank 0 only, or leave rank0_only out."
        )
    if state.step is None:
        lazy_init(state)  # wrappers below that are not summoned must know their root


class _SummonedGroup:
    """One group within `summon_full_params`; its full parameters are on the modules if ``installs``."""

    def __init__(
        self, group: FSDPParamGroup, path: str, installs: bool, *, with_grads: bool, offload: bool
    ) -> None:
        self.group = group
        self.installs = installs
        self._path = path
        self._with_grads = with_grads
        self._gradients: Sequence[Tensor | None] = ()
        full = full_params.gather_params(group)
        gradients = full_params.gather_gradients(group) if with_grads else []
        if not installs:
            return
        if offload:
            full = [tensor.to("cpu") for tensor in full]
        full_params.install_full_params(group, full)
        if with_grads:
            full_params.install_full_gradients(group, gradients)

    def uninstall(self) -> list[Tensor]:
        """Put the sharded parameters back, and return the full ones as they are now."""
        if self._with_grads:
            self._gradients = full_params.uninstall_full_gradients(self.group)
        return full_params.uninstall_full_params(self.group)

    def end(self, full: Sequence[Tensor], *, writeback: bool, changed: bool) -> list[str]:
        """Write full parameters back if they have ``changed``, and return what keeps this group from that."""
        faults = self._faults(full) if writeback else []
        writeback = writeback and not faults
        if self._with_grads:
            kept = self._gradients if writeback else None
            full_params.restore_sharded_gradients(self.group, kept)
        if writeback and changed:
            full_params.write_to_shards(self.group, full)
        return faults

    def _faults(self, full: Sequence[Tensor]) -> list[str]:
        prefix = f"{self._path}." if self._path else ""
        return [
            f"{prefix}{param.name}: {tuple(tensor.shape)} instead of {param.shape}"
            for param, tensor in zip(self.group.params, full, strict=True)
            if tuple(tensor.shape) != param.shape
        ]


def _check_full_gradients(wrappers: Sequence[WrapperBase], offload_to_cpu: bool) -> None:
    if offload_to_cpu:
        raise UnsupportedError(
            "with_grads=True and offload_to_cpu=True exclude each other: gradients stay on the device of their sharded "
            "parameters. Leave one out."
        )
    flat = [wrapper._label for wrapper in wrappers if not wrapper._use_orig_params]
    if flat:
        raise UnsupportedError(
            "with_grads=True needs wrappers with use_orig_params=True, but these have a FlatParameter: "
            f"{flat}. Pass use_orig_params=True to them, or leave with_grads out."
        )
    unreduced = [
        name
        for wrapper in wrappers
        for group in wrapper._fsdp_state.groups
        for name in group.reduction.unreduced.sharded_names()
    ]
    if unreduced:
        raise LifecycleError(
            "with_grads=True needs reduced gradients, but those of these parameters were only accumulated within no_sync(): "
            f"{unreduced}. Run a backward outside of no_sync() first, call zero_grad(), or read .grad, which is the full "
            "gradient of this rank now."
        )
