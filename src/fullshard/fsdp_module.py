"""What a sharded module can do beside what its class could: the methods of `FSDPModule`.

`fully_shard` gives a module a class that derives from `FSDPModule` and from the module's own class,
so it stays what it was (`isinstance`, attributes, parameter names) and gains these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, cast

from torch import nn

from .comm import AllGather, ReduceScatter
from .errors import ConfigurationError, LifecycleError, UnsupportedError
from .runtime import FSDPState, state_of


class UnshardHandle:
    """What `FSDPModule.unshard(async_op=True)` returns: the gather in flight."""

    def __init__(self, state: FSDPState) -> None:
        self._state: FSDPState | None = state

    def wait(self) -> None:
        """Wait until the parameters are unsharded; the current stream may use them afterwards."""
        if self._state is not None:
            self._state.wait()
            self._state = None  # waiting twice is harmless


class FSDPModule:
    """Methods of a module that `fully_shard` was applied to."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise LifecycleError(
            "A sharded module cannot be copied: its parameters share one buffer, its hooks one runtime. "
            "Copy the module before fully_shard, or build a second one and load the state dict."
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Move or cast: parameters are sharded while it happens, and packed again afterwards."""
        state = _state(self)
        state.reshard()
        # The class this one is mixed with has nn.Module's _apply.
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        for group in state.groups:
            group.repack()
        return result

    def reshard(self) -> None:
        """Free the unsharded parameters and put the sharded ones back, of this module's group only."""
        _state(self).reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module's group, not of those below it.

        Args:
            async_op: Return at once with an `UnshardHandle`; the module's forward waits by itself
                if nobody else did.
        """
        state = _state(self)
        for group in state.groups:
            group.context.gathers_wait_for_current_stream()
            group.unshard()
            group.remember_shards()
        handle = UnshardHandle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self) -> None:
        """Return to the state between steps, after an exception in forward or backward.

        Waits for what is in flight, drops gradients that were not reduced and shards all
        parameters. Gradients that had been reduced stay in `.grad`; clear them with
        `optimizer.zero_grad()`. On the root only.
        """
        state = _state(self)
        if state.runtime is None:
            return
        if state.runtime.root is not state:
            raise LifecycleError(
                f"reset_iter_state is for the root module; {state.name!r} is below it. Call it on the module "
                "whose forward you call."
            )
        state.runtime.reset()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Reduce gradients at backward, or only accumulate them locally (gradient accumulation)."""
        _check_bool("requires_gradient_sync", requires_gradient_sync)
        for state in _states(self, recurse):
            state.requires_gradient_sync = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free the unsharded parameters after forward and gather them again for backward, or keep them."""
        _check_bool("reshard_after_forward", reshard_after_forward)
        for state in _states(self, recurse):
            state.reshard_after_forward = reshard_after_forward
            state.auto_reshard = False

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Free the unsharded parameters after backward, or keep them for the next microbatch."""
        _check_bool("reshard_after_backward", reshard_after_backward)
        for state in _states(self, recurse):
            state.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these modules' parameters while this one computes its forward, instead of the forecast."""
        _state(self).forward_prefetch = _prefetch_states(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these modules' parameters while this one computes its backward, instead of the forecast."""
        _state(self).backward_prefetch = _prefetch_states(modules)

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this module's group with a comm object: one staged input, one output, copies around it."""
        _check_type("comm", comm, AllGather)
        for group in _state(self).groups:
            group.set_custom_all_gather(comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this module's group with a comm object: one staged input, one output, copies around it."""
        _check_type("comm", comm, ReduceScatter)
        for group in _state(self).groups:
            group.custom_reduce_scatter = comm


_NOT_YET = (
    "set_is_last_backward",
    "set_requires_all_reduce",
    "set_all_reduce_hook",
    "set_post_optim_event",
    "set_gradient_divide_factor",
    "set_reduce_scatter_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_reduce_scatter_unused_params",
    "set_reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group",
    "set_unshard_in_backward",
    "set_allocate_memory_from_process_group_for_comm",
    "set_symm_mem_for_comm",
)
"""Methods of torch's FSDPModule that this version does not have; calling one says so."""


def _unsupported(name: str) -> Callable[..., NoReturn]:
    def method(self: FSDPModule, *args: object, **kwargs: object) -> NoReturn:
        raise UnsupportedError(
            f"FSDPModule.{name} is not supported by this version of fullshard. Leave the call out, or stay "
            "with torch.distributed.fsdp for this model until it is."
        )

    return method


for _name in _NOT_YET:
    setattr(FSDPModule, _name, _unsupported(_name))


_SHARDED_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class a sharded instance of ``cls`` has: ``FSDP<cls>``, made once."""
    if cls not in _SHARDED_CLASSES:
        namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__}
        _SHARDED_CLASSES[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), namespace)
    return _SHARDED_CLASSES[cls]


def _state(module: FSDPModule) -> FSDPState:
    state = state_of(cast(nn.Module, module))
    assert state is not None, "fully_shard gives the class and the state together"
    return state


def _states(module: FSDPModule, recurse: bool) -> Iterator[FSDPState]:
    if not recurse:
        yield _state(module)
        return
    for submodule in cast(nn.Module, module).modules():
        state = state_of(submodule)
        if state is not None:
            yield state


def _prefetch_states(modules: Sequence[FSDPModule]) -> tuple[FSDPState, ...]:
    if not isinstance(modules, (list, tuple)):
        raise ConfigurationError(
            f"A list of sharded modules is needed, got {type(modules).__name__}."
        )
    foreign = [type(module).__name__ for module in modules if not isinstance(module, FSDPModule)]
    if foreign:
        raise ConfigurationError(
            f"Only modules that fully_shard was applied to can be prefetched, got {foreign}."
        )
    return tuple(_state(module) for module in modules)


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} must be True or False, got {value!r}.")


def _check_type(name: str, value: object, expected: type) -> None:
    if not isinstance(value, expected):
        raise ConfigurationError(
            f"{name} must be an instance of {expected.__name__}, got {type(value).__name__}."
        )
