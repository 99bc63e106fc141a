"""What a sharded module can do beside what its class could: the methods of `FSDPModule`.

`fully_shard` gives a module a class that derives from `FSDPModule` and from the module's own class,
so it stays what it was (`isinstance`, attributes, parameter names) and gains these methods.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from numbers import Real
from types import MethodType
from typing import Any, ClassVar, NoReturn, cast

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fullshard import torch_border
from fullshard.comm.collectives import (
    AllGather,
    ProcessGroupAllGather,
    ProcessGroupReduceScatter,
    ReduceScatter,
    SymmetricAllGather,
    SymmetricReduceScatter,
    check_group_allocates,
    choose_symmetric_memory,
)
from fullshard.comm.streams import FSDPCommContext
from fullshard.engine import module_hooks
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.state import FSDPState, state_of
from fullshard.engine.unshard_handle import UnshardHandle, unshard_state
from fullshard.errors import ConfigurationError, LifecycleError, OptionTypeError, UsageError
from fullshard.plan.mesh import twin_group
from fullshard.plan.policies import check_type, switch


class FSDPModule(torch_border.ConvertibleModule):
    """Methods of a module that `fully_shard` was applied to."""

    _original_class: type[nn.Module]
    _initialises: ClassVar[bool] = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance of the class the module had before.

        Containers make others of their own class when they are sliced; those are not sharded.
        """
        if not hasattr(cls, "_original_class"):
            raise LifecycleError(f"{cls.__name__} is not made, but given to a module by its door.")
        made = cls._original_class.__new__(cls._original_class, *args, **kwargs)
        if cls._initialises:
            cls._original_class.__init__(made, *args, **kwargs)  # Python does it for a cls only
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise LifecycleError(
            "A sharded module cannot be copied: its parameters share one buffer, its hooks one runtime. "
            "Copy the module before fully_shard, or build a second one and load the state dict."
        )

    def _before_conversion(self) -> None:
        """Shard the parameters: they are converted as shards."""
        _state(self).reshard()

    def _after_conversion(self) -> None:
        """Pack the converted shards into a buffer again."""
        repack_when_complete(_state(self))

    def reshard(self) -> None:
        """Free the unsharded parameters and put the sharded ones back, of this module's group only."""
        with torch_border.outside_transforms():
            for group in _state(self).groups:
                group.check_nothing_assigned()
                group.reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module's group, not of those below it.

        Args:
            async_op: Return at once with an `UnshardHandle`; the module's forward waits by itself
                if nobody else did.
        """
        return unshard_state(_state(self), async_op)

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

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward is the last one of the forwards that have run; on the root.

        With False, parts that ``reshard_after_forward=n`` keeps for backward are kept for the next one. Gradients
        are complete in `.grad` after every backward that synchronises, last or not.
        """
        _state(self).options.set_is_last_backward(is_last_backward)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Reduce gradients at backward, or only accumulate them locally (gradient accumulation).

        What is accumulated is in no `.grad` until a backward reduces it, and ``zero_grad()`` drops it.
        """
        for state in _states(self, recurse):
            state.options.set_requires_gradient_sync(requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """With HSDP, sum reduced gradients over replicas at backward, or keep partial sums for later."""
        all_reduce = switch("requires_all_reduce", requires_all_reduce)
        _change_reduction(self, recurse, all_reduce=all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free the unsharded parameters after forward and gather them again for backward, or keep them."""
        for state in _states(self, recurse):
            state.options.set_reshard_after_forward(reshard_after_forward)
            for group in state.groups:
                group.disable_post_forward_shard()

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Free the unsharded parameters after backward, or keep them for the next microbatch."""
        for state in _states(self, recurse):
            state.options.set_reshard_after_backward(reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: Iterable[FSDPModule]) -> None:
        """Gather these modules' parameters while this one computes its forward, instead of the forecast."""
        _state(self).options.forward_prefetch = _sharded_states(modules)

    def set_modules_to_backward_prefetch(self, modules: Iterable[FSDPModule]) -> None:
        """Gather these modules' parameters while this one computes its backward, instead of the forecast."""
        _state(self).options.backward_prefetch = _sharded_states(modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Gather this module's parameters for backward, or not, if backward does not need them.

        An embedding's backward, for one, needs no weight.
        """
        _state(self).options.set_unshard_in_backward(unshard_in_backward)

    def set_post_optim_event(self, event: Any) -> None:
        """Let the next forward's gathers wait for this event instead of the current stream; on the root.

        Record it right after the optimizer's step; it counts once.
        """
        _state(self).options.set_post_optim_event(event)

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this module's group with a comm object: one staged input, one output, copies around it."""
        check_type("comm", comm, AllGather, home="fullshard.comm")
        _check_comms_can_be_chosen(self, "set_custom_all_gather")
        for group in _state(self).groups:
            group.set_custom_all_gather(comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this module's group with a comm object: one staged input, one output, copies around it.

        Not with a ``wire_dtype``.
        """
        check_type("comm", comm, ReduceScatter, home="fullshard.comm")
        _check_comms_can_be_chosen(self, "set_custom_reduce_scatter")
        _check_reduce_scatters(self, "set_custom_reduce_scatter")
        _change_reduction(self, recurse=False, custom=comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Stage this module's collectives in memory that the process group's backend allocates, or not.

        NCCL's is registered with the network, which can spare it copies; gathers and reductions of
        the module pay for it with a copy from and to the staging memory. Not together with comm
        objects, symmetric memory or a ``wire_dtype``. Collective: call it on all ranks.
        """
        enable = switch("enable", enable)
        name, groups = "set_allocate_memory_from_process_group_for_comm", _state(self).groups
        _check_comms_can_be_chosen(self, name)
        _check_reduce_scatters(self, name)
        if not enable:
            for group in groups:
                group.set_custom_all_gather(None)
                group.reducer.settings = replace(group.reducer.settings, custom=None)
            return
        for group in groups:
            for process_group in _process_groups(group):
                check_group_allocates(process_group, group.device)
        for group in groups:
            gathers, reduces = _process_groups(group)
            if group.all_gathers.custom is None:
                group.set_custom_all_gather(ProcessGroupAllGather(gathers, group.device))
                custom = ProcessGroupReduceScatter(reduces, group.device)
                group.reducer.settings = replace(group.reducer.settings, custom=custom)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Stage this module's gathers in symmetric memory, so that NCCL can use its faster algorithms.

        Reductions too, if `set_force_sum_reduction_for_comms(True)` was called before: NCCL's
        algorithms for symmetric memory only sum. There is no way back. Not together with comm
        objects or memory of the process group, nor, for reductions, with several input buffers or a
        ``wire_dtype``. Collective: call it on all ranks.

        Args:
            backend: Where symmetric memory comes from, for the whole process; "NCCL" is the only one.
        """
        state = _state(self)
        _check_comms_can_be_chosen(self, "set_symm_mem_for_comm")
        if backend != "NCCL":
            raise UsageError(
                f"backend must be 'NCCL', the only one there is, got {backend!r}. Leave it out."
            )
        for group in state.groups:
            if group.reducer.settings.force_sum:
                _check_reduce_scatters(self, "set_symm_mem_for_comm")
                _check_one_input_buffer([state], state.options.max_reductions)
            for process_group in _process_groups(group):
                choose_symmetric_memory(backend, process_group, group.device)
        for group in state.groups:
            gathers, reduces = _process_groups(group)
            if group.all_gathers.custom is None:
                group.set_custom_all_gather(SymmetricAllGather(gathers, group.device))
            if group.reducer.settings.force_sum and group.reducer.settings.custom is None:
                custom = SymmetricReduceScatter(reduces, group.device)
                group.reducer.settings = replace(group.reducer.settings, custom=custom)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call ``hook`` with this group's reduced shards before they are accumulated into `.grad`.

        After the reduce-scatter, or with HSDP after the all-reduce. It may change them in place: an
        all-reduce of one's own, say.

        Args:
            hook: Takes the flat reduced shards.
            stream: Where to run it, if not in the reduction's own stream. Not with HSDP.
        """
        if not callable(hook):
            raise OptionTypeError(f"hook must be callable, got {type(hook).__name__}.")
        groups = _state(self).groups
        if stream is not None and any(g.mesh_info.replicate_process_group for g in groups):
            raise ConfigurationError(
                "With replicas the hook runs in the all-reduce stream; leave stream out."
            )
        _change_reduction(self, recurse=False, hook=hook, hook_stream=stream)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this group's summed gradients by ``factor`` instead of by the number of ranks."""
        given: object = factor  # numpy's numbers are no floats, but Reals
        if not isinstance(given, Real):
            raise OptionTypeError(f"factor must be a positive number, got {factor!r}.")
        if not factor > 0:
            raise ConfigurationError(f"factor must be positive, got {factor!r}.")
        _change_reduction(self, recurse=False, divide_by=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Deprecated name of `set_gradient_divide_factor`."""
        warnings.warn(
            "set_reduce_scatter_divide_factor is deprecated; use set_gradient_divide_factor.",
            FutureWarning,
            stacklevel=2,
        )
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Let this group's collectives only sum, and divide in a step of its own."""
        enable = switch("enable", enable)
        if not enable and _reduces_symmetrically(_state(self)):
            raise ConfigurationError(
                "Reductions in symmetric memory can only sum, and this module has them: "
                "set_symm_mem_for_comm was called after set_force_sum_reduction_for_comms(True). Keep it True."
            )
        _change_reduction(self, recurse=False, force_sum=enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Give trainable parameters that backward did not use a gradient of zero, and reduce it.

        Needed where ranks use different parameters of a group: all of them then reduce the same. Parameters of a
        module that has never run get none.
        """
        zero_unused = switch("reduce_scatter_unused_params", reduce_scatter_unused_params)
        _change_reduction(self, recurse, zero_unused=zero_unused)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Let so many reduce-scatters read their inputs at once; the largest number in a model counts.

        More than one helps where reduce-scatters take longer than the backward of a layer, for the
        memory of their inputs.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise OptionTypeError(f"max_input_buffers must be an int, got {max_input_buffers!r}.")
        if max_input_buffers < 1:
            raise ConfigurationError(
                f"max_input_buffers must be at least 1, got {max_input_buffers}."
            )
        states = list(_states(self, recurse))
        _check_one_input_buffer(
            [state for state in states if _reduces_symmetrically(state)], max_input_buffers
        )
        for state in states:
            state.options.max_reductions = max_input_buffers
        runtime = _state(self).runtime
        if runtime is not None:
            runtime.limit_reductions()

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce over a process group of its own, so that gathers do not queue behind reductions.

        Collective: call it on all ranks.
        """
        enable = switch("enable", enable)
        for state in _states(self, recurse):
            for group in state.groups:
                shared = group.mesh_info.shard_peers
                if shared is None:
                    continue  # nothing is reduce-scattered
                own = twin_group(shared) if enable else shared
                custom = group.reducer.settings.custom
                if custom is not None:
                    custom = custom.moved_to(own)
                group.reducer.settings = replace(
                    group.reducer.settings, process_group=own, custom=custom
                )

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted for torch's sake: gathers here never stop the host or the compute stream."""
        switch("async_op", async_op)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather a sharded module's parameters around another of its methods, as around forward.

    A module of `fully_shard`, or a `FullyShardedDataParallel` that has the method from the module it wraps.
    Nothing happens to a module that is not sharded.
    """
    state = state_of(module)
    if state is None:
        return
    if not hasattr(module, method_name):
        raise ConfigurationError(
            f"{type(module).__name__} has no method {method_name!r} to gather parameters around."
        )
    original = getattr(module, method_name)
    # A wrapper has buffers to cast as well, and says so itself.
    prepare = (
        functools.partial(module_hooks.pre_forward, state, module)
        if isinstance(module, FSDPModule)
        else cast(Any, module)._pre_forward
    )

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = prepare(args, kwargs)
        output = None
        try:
            output = original(*args, **kwargs)
        finally:  # as the hooks do: when it raises, too
            output = module_hooks.post_forward(state, self, args, output)
        return output

    setattr(module, method_name, MethodType(method, module))


def share_comm_ctx(modules: Iterable[FSDPModule]) -> None:
    """Let several root modules use the same streams, and so the same memory pools.

    For models that run one after the other in a step, such as the chunks of a pipeline.
    """
    states = _sharded_states(modules)
    if not states:
        return
    context = next((s.runtime.context for s in states if s.runtime is not None), None)
    context = context or FSDPCommContext(states[0].device)
    for state in states:
        state.shared_context = context
        if state.runtime is not None and state.runtime.context is not context:
            state.runtime.context.join()
            state.runtime.context = context
            state.runtime.connect()


class ReplicateModule(FSDPModule):
    """Methods of a module that `replicate` was applied to."""


_SHARDED_CLASSES: dict[tuple[type[FSDPModule], type[nn.Module]], type[nn.Module]] = {}


def sharded_class(cls: type[nn.Module], mixin: type[FSDPModule]) -> type[nn.Module]:
    """The class that an instance of ``cls`` gets, ``FSDP<cls>`` or ``Replicate<cls>``; made once."""
    key = (mixin, cls)
    if key not in _SHARDED_CLASSES:
        prefix = mixin.__name__.removesuffix("Module")
        namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__, "_original_class": cls}
        _SHARDED_CLASSES[key] = type(f"{prefix}{cls.__name__}", (mixin, cls), namespace)
    return _SHARDED_CLASSES[key]


def get_cls_to_fsdp_cls() -> dict[type[nn.Module], type[nn.Module]]:
    """The classes that `fully_shard` has given modules, by the classes they had before."""
    return {cls: made for (mixin, cls), made in _SHARDED_CLASSES.items() if mixin is FSDPModule}


@contextlib.contextmanager
def disable_fsdp_module_new_init() -> Iterator[None]:
    """Within it, calling a sharded module's class makes an instance of the class it had, uninitialised."""
    FSDPModule._initialises = False
    try:
        yield
    finally:
        FSDPModule._initialises = True


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


def repack_when_complete(state: FSDPState) -> None:
    """Pack the parameters of a state anew, after a module of it was moved, cast or loaded.

    Of several modules the others follow one by one, so meanwhile parameters are on two devices. If they do
    not follow, the first forward says so.
    """
    for group in state.groups:
        found = [sharded_param.found() for sharded_param in group.sharded_params]
        devices = {param.device for param in found if param is not None}
        if len(state.modules) == 1 or len(devices) <= 1:
            group.repack()


def _change_reduction(module: FSDPModule, recurse: bool, **changes: Any) -> None:
    for state in _states(module, recurse):
        for group in state.groups:
            group.reducer.settings = replace(group.reducer.settings, **changes)


def _process_groups(group: FSDPParamGroup) -> tuple[ProcessGroup, ProcessGroup]:
    """Over which a group is gathered, and over which it is reduced."""
    gathers = group.mesh_info.shard_process_group
    assert gathers is not None, "_check_comms_can_be_chosen refuses others"
    return gathers, group.reducer.settings.process_group or gathers


_STAGED_BY: dict[str, tuple[type, ...]] = {
    "set_allocate_memory_from_process_group_for_comm": (
        ProcessGroupAllGather,
        ProcessGroupReduceScatter,
    ),
    "set_symm_mem_for_comm": (
        SymmetricAllGather,
        SymmetricReduceScatter,
    ),
}
"""The comm objects that methods make; all others are the user's."""


def _check_comms_can_be_chosen(module: FSDPModule, method: str) -> None:
    """Only one method may decide how a module's group is staged, or the user's comm objects."""
    if any(group.mesh_info.shard_process_group is None for group in _state(module).groups):
        raise ConfigurationError(
            f"{method} is about gathers and reduce-scatters, but this {type(module).__name__} is replicated "
            "and has none. Leave the call out."
        )
    present = [
        comm
        for group in _state(module).groups
        for comm in (group.all_gathers.custom, group.reducer.settings.custom)
        if comm is not None
    ]
    for other, classes in _STAGED_BY.items():
        if other != method and any(isinstance(comm, classes) for comm in present):
            back = f", or call {other}(False) before" if "allocate" in other else ""
            raise ConfigurationError(
                f"{method} and {other} exclude each other, as both decide where collectives are staged; the "
                f"latter was called on this {type(module).__name__}. Leave one of them out{back}."
            )
    if method in _STAGED_BY:
        users = [
            type(comm).__name__ for comm in present if not isinstance(comm, _STAGED_BY[method])
        ]
        if users:
            raise ConfigurationError(
                f"{method} cannot decide where the collectives of comm objects are staged; this "
                f"{type(module).__name__} has {' and '.join(sorted(users))}. Leave the call out, or "
                "set_custom_all_gather and set_custom_reduce_scatter."
            )


def _check_reduce_scatters(module: FSDPModule, method: str) -> None:
    """Gradients that are exchanged are not reduced by a collective, so there is nothing to stage or replace."""
    dtypes = {group.mp_policy.wire_dtype for group in _state(module).groups} - {None}
    if dtypes:
        raise ConfigurationError(
            f"{method} is about the reduce-scatter of a module's group, but this {type(module).__name__} has none: "
            f"with wire_dtype={dtypes.pop()} gradients are exchanged and summed by the receiver. Leave out the call, "
            "or wire_dtype in the module's mp_policy."
        )


def _reduces_symmetrically(state: FSDPState) -> bool:
    return any(
        isinstance(group.reducer.settings.custom, SymmetricReduceScatter) for group in state.groups
    )


def _check_one_input_buffer(symmetric: Sequence[FSDPState], max_input_buffers: int) -> None:
    """Each input in flight would take symmetric memory, which is never given back."""
    if symmetric and max_input_buffers > 1:
        names = [state.name or type(state.modules[0]).__name__ for state in symmetric]
        raise ConfigurationError(
            "Modules that reduce in symmetric memory have one reduce-scatter input buffer; got "
            f"max_input_buffers={max_input_buffers} for {', '.join(names)}. Keep it at 1, or do not call "
            "set_force_sum_reduction_for_comms before set_symm_mem_for_comm there, so that only gathers are "
            "in symmetric memory."
        )


def _sharded_states(modules: Iterable[FSDPModule]) -> tuple[FSDPState, ...]:
    if not isinstance(modules, Iterable):
        raise OptionTypeError(f"A list of sharded modules is needed, got {type(modules).__name__}.")
    modules = tuple(modules)  # it may be a generator, which can be read once
    foreign = [type(module).__name__ for module in modules if not isinstance(module, FSDPModule)]
    if foreign:
        raise ConfigurationError(
            f"Only modules that fully_shard was applied to can be given here, got {foreign}."
        )
    return tuple(_state(module) for module in modules)
