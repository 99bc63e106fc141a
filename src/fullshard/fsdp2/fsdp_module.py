"""`FSDPModule`: the methods that a sharded module has beside those of its own class.

`fully_shard` gives a module a class that derives from `FSDPModule` and from the module's own class. So the module keeps
its attributes, its parameter names and its place in `isinstance`, and gains these methods.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from numbers import Real
from types import MethodType
from typing import Any, ClassVar, NoReturn, cast

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fullshard import torch_border
from fullshard.engine import hooks, interruption
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.state import FSDPState, state_of
from fullshard.errors import ConfigurationError, LifecycleError, OptionTypeError, UsageError
from fullshard.features import backward_finalization, skipped_forward
from fullshard.features.backward_finalization import GradientReductionHandle
from fullshard.features.fused_gradients import fused_linear
from fullshard.features.unshard_handle import UnshardHandle, unshard_state
from fullshard.fsdp2.comm_checks import (
    check_comms_can_be_chosen,
    check_one_input_buffer,
    check_reduce_scatters,
    reduces_in_symmetric_memory,
)
from fullshard.mesh.axes import twin_group
from fullshard.policies import check_type, switch
from fullshard.transport.comm_objects import (
    AllGather,
    ProcessGroupAllGather,
    ProcessGroupReduceScatter,
    ReduceScatter,
    SymmetricAllGather,
    SymmetricReduceScatter,
    check_group_allocates,
    choose_symmetric_memory,
)
from fullshard.transport.streams import FSDPCommContext


class FSDPModule(torch_border.ConvertibleModule):
    """The methods of a module that `fully_shard` was applied to."""

    _original_class: type[nn.Module]
    _initialises: ClassVar[bool] = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of the class that the module had before.

        A container builds others of its own class when it is sliced, and those are not sharded.
        """
        if not hasattr(cls, "_original_class"):
            raise LifecycleError(
                f"{cls.__name__} has no instances of its own. Call fully_shard or replicate on a module."
            )
        made = cls._original_class.__new__(cls._original_class, *args, **kwargs)
        if cls._initialises:
            # Python calls __init__ only on instances of cls, and this is none.
            cls._original_class.__init__(made, *args, **kwargs)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise LifecycleError(
            "A sharded module cannot be copied, because its parameters share one buffer and its hooks one runtime. "
            "Copy the module before fully_shard, or build a second one and load the state dict. For averages of the "
            "parameters, as torch.optim.swa_utils.AveragedModel keeps them, use fullshard.optim.EMA(model)."
        )

    def _before_conversion(self) -> None:
        """Shard the parameters: they are converted as shards."""
        _state(self).reshard()

    def _after_conversion(self) -> None:
        """Pack the converted shards into a buffer again."""
        repack_when_complete(_state(self))

    def reshard(self) -> None:
        """Free the unsharded parameters of this module's group and install the sharded ones."""
        with torch_border.outside_transforms():
            for group in _state(self).groups:
                group.check_nothing_assigned()
                group.reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module's group, not those of groups below it.

        Args:
            async_op: Return at once with an `UnshardHandle`; the module's forward waits by itself if the handle is not
                used.
        """
        return unshard_state(_state(self), async_op)

    def fused_gradients(self) -> dict[str, str]:
        """Return, by name, why weight gradients here and below are not fused; "" for those that are.

        It covers modules that were sharded with ``fuse_gradients``. The first forward decides, so call it after that.
        """
        return fused_linear.reasons(_state(self))

    def skip_forward(self, output: Any = None, *, inputs_require_grad: bool = False) -> Any:
        """Take part in this module's gathers and reductions, and those of modules in it, without computing.

        Call it on a rank that has no input for the module, at the place where other ranks call the module:

            h = h + self.vision(images) if images is not None else self.vision.skip_forward(h)

        In backward, the module's parameters get gradients of zero on this rank, so that gradients are averaged over
        all ranks. If all ranks skip the module, its gradients are zero, not None. Use the return value: backward
        reaches the module through it.

        The collectives are those of the last forward and backward that this rank has computed. Before the first,
        sharded modules in the module are taken in the order of their registration, each once, and all trainable
        parameters are assumed to get gradients. If other ranks do otherwise, that is a `DivergenceError` on gloo, or
        with ``fullshard.debug("order")``; then compute the module once on every rank. Checkpoint `skip_forward` as
        you checkpoint the module, if several sharded modules are in one checkpoint.

        Args:
            output: A tensor, or a nest of tensors, to be returned: what goes on in forward.
            inputs_require_grad: Whether the module's inputs on other ranks require gradients; needed if the module, or
                its first part, is frozen.

        Returns:
            A copy of ``output`` through which backward reaches the module; if it is None, the number 0, to be added to
            something.
        """
        return skipped_forward.skip_forward(
            cast(nn.Module, self),
            output,
            inputs_require_grad=inputs_require_grad,
            prepare=lambda _: None,
        )

    def reset_iter_state(self) -> None:
        """Return to the state between steps, after an exception in forward or backward.

        It waits for collectives in flight, drops gradients that were not reduced and shards all parameters. Reduced
        gradients stay in `.grad`; clear them with `optimizer.zero_grad()`. Call it on the root.
        """
        state = _state(self)
        if state.step is None:
            return
        if state.step.root is not state:
            raise LifecycleError(
                f"reset_iter_state must be called on the root module; {state.name!r} is below it. Call it on the module "
                "whose forward you call."
            )
        interruption.reset(state.step)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last one for the forwards that have run. Call it on the root.

        With False, the shards that ``reshard_after_forward=n`` keeps for backward stay for the next one. Gradients are
        complete in `.grad` after every backward that reduces, last or not.
        """
        _state(self).options.set_is_last_backward(is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Choose whether you end backward by `finalize_backward`, or the end of each backward pass does. Call it on the root.

        Passes then reduce gradients as before, or only add them up (`set_requires_gradient_sync`), but do not wait for
        reductions: gradients are complete after `finalize_backward`. `set_is_last_backward` has no effect.
        """
        enabled = switch("enabled", enabled)
        backward_finalization.set_manual(_state(self), enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End backward, after all its passes and outside of forward and backward. Call it on the root.

        Gradients that passes have only added up are reduced, unless `set_requires_gradient_sync` is still False, and
        parameters that were kept for backward are released as the options say now. With several passes,
        set it to False for all of them and to True before this call: then there is one reduction. Needs
        `set_manual_backward_finalization`. Nothing happens before the first forward.

        Args:
            async_op: Return at once with a `GradientReductionHandle`; its `wait` must come before anything reads the
                gradients.
        """
        return backward_finalization.finalize(_state(self), async_op)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Reduce gradients at backward, or only accumulate them locally (gradient accumulation).

        Accumulated gradients are not in `.grad` until a backward reduces them, and ``zero_grad()`` drops them.
        """
        for state in _states(self, recurse):
            state.options.set_requires_gradient_sync(requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sum reduced gradients over replicas at backward (HSDP), or keep partial sums for a later backward."""
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

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Keep the memory of unsharded parameters when they are resharded, so that each gather finds it at the same address.

        It then takes as much memory as without sharding. With False, memory that was kept is given back.
        """
        keep = switch("keep", keep)
        for state in _states(self, recurse):
            for group in state.groups:
                group.keep_unsharded_storage(keep)

    def set_modules_to_forward_prefetch(self, modules: Iterable[FSDPModule]) -> None:
        """Gather these modules' parameters during this one's forward, instead of those of the next in order."""
        _state(self).options.set_forward_prefetch(_sharded_states(modules))

    def set_modules_to_backward_prefetch(self, modules: Iterable[FSDPModule]) -> None:
        """Gather these modules' parameters during this one's backward, instead of those of the next in order."""
        _state(self).options.set_backward_prefetch(_sharded_states(modules))

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Gather this module's parameters for backward, or not.

        Backward does not need all parameters: that of an embedding, for example, needs no weight.
        """
        _state(self).options.set_unshard_in_backward(unshard_in_backward)

    def set_post_optim_event(self, event: Any) -> None:
        """Let the next forward's gathers wait for this event instead of the current stream. Call it on the root.

        Record it right after the optimizer's step. It counts for one forward.
        """
        _state(self).options.set_post_optim_event(event)

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this module's group with a comm object: from one staged input to one output, with copies around it."""
        check_type("comm", comm, AllGather, home="fullshard.comm")
        check_comms_can_be_chosen(_state(self), type(self).__name__, "set_custom_all_gather")
        for group in _state(self).groups:
            group.set_custom_all_gather(comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this module's group with a comm object: from one staged input to one output, with copies around it.

        A ``wire_dtype`` excludes it.
        """
        check_type("comm", comm, ReduceScatter, home="fullshard.comm")
        state, label = _state(self), type(self).__name__
        check_comms_can_be_chosen(state, label, "set_custom_reduce_scatter")
        check_reduce_scatters(state, label, "set_custom_reduce_scatter")
        for group in state.groups:
            group.set_custom_reduce_scatter(comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Stage this module's collectives in memory that the process group's backend allocates, or not.

        NCCL registers this memory with the network, which can save copies there. Gathers and reductions of the module
        pay for it with a copy from and to the staging memory. Comm objects, symmetric memory and ``wire_dtype`` exclude
        it. Collective: call it on all ranks.
        """
        enable = switch("enable", enable)
        state, label = _state(self), type(self).__name__
        check_comms_can_be_chosen(state, label, "set_allocate_memory_from_process_group_for_comm")
        check_reduce_scatters(state, label, "set_allocate_memory_from_process_group_for_comm")
        groups = state.groups
        if not enable:
            for group in groups:
                group.set_custom_all_gather(None)
                group.set_custom_reduce_scatter(None)
            return
        for group in groups:
            for process_group in _process_groups(group):
                check_group_allocates(process_group, group.device)
        for group in groups:
            gathers, reduces = _process_groups(group)
            if group.routes.custom is None:
                group.set_custom_all_gather(ProcessGroupAllGather(gathers, group.device))
                group.set_custom_reduce_scatter(ProcessGroupReduceScatter(reduces, group.device))

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Stage this module's gathers in symmetric memory, so that NCCL can use its faster algorithms.

        Reductions are staged there, too, if `set_force_sum_reduction_for_comms(True)` was called before: NCCL's algorithms
        for symmetric memory only sum. The choice is final. Comm objects and memory of the process group exclude it; for
        reductions, so do several input buffers and ``wire_dtype``. Collective: call it on all ranks.

        Args:
            backend: Source of symmetric memory, for the whole process; only "NCCL" is possible.
        """
        state, label = _state(self), type(self).__name__
        check_comms_can_be_chosen(state, label, "set_symm_mem_for_comm")
        if backend != "NCCL":
            raise UsageError(f"backend must be 'NCCL', got {backend!r}. Leave it out.")
        for group in state.groups:
            if group.reduction.settings.force_sum:
                check_reduce_scatters(state, label, "set_symm_mem_for_comm")
                check_one_input_buffer([state], state.options.max_reductions)
            for process_group in _process_groups(group):
                choose_symmetric_memory(backend, process_group, group.device)
        for group in state.groups:
            gathers, reduces = _process_groups(group)
            if group.routes.custom is None:
                group.set_custom_all_gather(SymmetricAllGather(gathers, group.device))
            if group.reduction.settings.force_sum and group.reduction.settings.transport is None:
                group.set_custom_reduce_scatter(SymmetricReduceScatter(reduces, group.device))

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call ``hook`` with this group's reduced shards before they are accumulated into `.grad`.

        The hook runs after the reduce-scatter, or with HSDP after the all-reduce. It may change the shards in place,
        for example by another all-reduce.

        Args:
            hook: Takes the flat reduced shards.
            stream: The stream to run it in, instead of the reduction's own; HSDP excludes it.
        """
        if not callable(hook):
            raise OptionTypeError(f"hook must be callable, got {type(hook).__name__}.")
        groups = _state(self).groups
        if stream is not None and any(g.mesh_info.replicate_process_group for g in groups):
            raise ConfigurationError(
                "With HSDP the hook runs in the all-reduce stream, so stream cannot be chosen. Leave it out."
            )
        _change_reduction(self, recurse=False, hook=hook, hook_stream=stream)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this group's summed gradients by ``factor`` instead of by the number of ranks."""
        given: object = factor  # a number of numpy is a Real and no float
        if not isinstance(given, Real):
            raise OptionTypeError(f"factor must be a positive number, got {factor!r}.")
        if not factor > 0:
            raise ConfigurationError(f"factor must be positive, got {factor!r}.")
        _change_reduction(self, recurse=False, divide_by=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call `set_gradient_divide_factor`. Deprecated."""
        warnings.warn(
            "set_reduce_scatter_divide_factor is deprecated; use set_gradient_divide_factor.",
            FutureWarning,
            stacklevel=2,
        )
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Let this group's collectives only sum, and divide in a separate step."""
        enable = switch("enable", enable)
        if not enable and reduces_in_symmetric_memory(_state(self)):
            raise ConfigurationError(
                "Reductions in symmetric memory can only sum, and this module has such: set_symm_mem_for_comm was called "
                "after set_force_sum_reduction_for_comms(True). Keep it True."
            )
        _change_reduction(self, recurse=False, force_sum=enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Give trainable parameters that backward did not use gradients of zero, and reduce them.

        Use it where ranks use different parameters of a group, so that all ranks reduce the same ones. Parameters of a
        module that has never run get no gradient.
        """
        zero_unused = switch("reduce_scatter_unused_params", reduce_scatter_unused_params)
        _change_reduction(self, recurse, zero_unused=zero_unused)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set how many reduce-scatters may read their inputs at once; the largest number in a model counts.

        More than one helps where a reduce-scatter takes longer than the backward of a layer. It costs the memory of the
        inputs.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise OptionTypeError(f"max_input_buffers must be an int, got {max_input_buffers!r}.")
        if max_input_buffers < 1:
            raise ConfigurationError(
                f"max_input_buffers must be at least 1, got {max_input_buffers}."
            )
        states = list(_states(self, recurse))
        check_one_input_buffer(
            [state for state in states if reduces_in_symmetric_memory(state)], max_input_buffers
        )
        for state in states:
            state.options.max_reductions = max_input_buffers
        step = _state(self).step
        if step is not None:
            step.model.limit_reductions(step.context)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce over a separate process group, so that gathers do not queue behind reductions.

        Collective: call it on all ranks.
        """
        enable = switch("enable", enable)
        for state in _states(self, recurse):
            for group in state.groups:
                shared = group.mesh_info.shard_peers
                if shared is None:
                    continue  # nothing is reduce-scattered
                own = twin_group(shared) if enable else shared
                transport = group.reduction.settings.transport
                if transport is not None:
                    transport = transport.over(own)
                group.change_reduction(process_group=own, transport=transport)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing; accepted for compatibility. Gathers never stop the host or the compute stream."""
        switch("async_op", async_op)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather a sharded module's parameters around one of its methods, as around forward.

    The module is one of `fully_shard`, or a `FullyShardedDataParallel` whose wrapped module has the method. Nothing
    happens to a module that is not sharded.
    """
    state = state_of(module)
    if state is None:
        return
    if not hasattr(module, method_name):
        raise ConfigurationError(
            f"register_fsdp_forward_method needs a method of the module, but {type(module).__name__} has no "
            f"{method_name!r}. Check the name."
        )
    original = getattr(module, method_name)
    # A wrapper also casts its buffers before a forward, in a method of its own.
    prepare = (
        functools.partial(hooks.pre_forward, state, module)
        if isinstance(module, FSDPModule)
        else cast(Any, module)._pre_forward
    )

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = prepare(args, kwargs)
        output = None
        try:
            output = original(*args, **kwargs)
        finally:  # an exception must not leave the parameters unsharded
            output = hooks.post_forward(state, self, args, output)
        return output

    setattr(module, method_name, MethodType(method, module))


def share_comm_ctx(modules: Iterable[FSDPModule]) -> None:
    """Let several root modules use the same streams, and so the same memory pools.

    Use it for models that run one after the other in a step, such as the stages of a pipeline.
    """
    states = _sharded_states(modules)
    if not states:
        return
    context = next((s.step.context for s in states if s.step is not None), None)
    context = context or FSDPCommContext(states[0].device)
    for state in states:
        state.shared_context = context
        if state.step is not None and state.step.context is not context:
            state.step.context.join()
            state.step.context = context
            state.step.model.connect(context)


class ReplicateModule(FSDPModule):
    """The methods of a module that `replicate` was applied to."""


_SHARDED_CLASSES: dict[tuple[type[FSDPModule], type[nn.Module]], type[nn.Module]] = {}


def sharded_class(cls: type[nn.Module], mixin: type[FSDPModule]) -> type[nn.Module]:
    """Return the class that an instance of ``cls`` gets, ``FSDP<cls>`` or ``Replicate<cls>``; build it once."""
    key = (mixin, cls)
    if key not in _SHARDED_CLASSES:
        prefix = mixin.__name__.removesuffix("Module")
        namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__, "_original_class": cls}
        _SHARDED_CLASSES[key] = type(f"{prefix}{cls.__name__}", (mixin, cls), namespace)
    return _SHARDED_CLASSES[key]


def get_cls_to_fsdp_cls() -> dict[type[nn.Module], type[nn.Module]]:
    """Return the classes that `fully_shard` has given modules, by the classes that they had before."""
    return {cls: made for (mixin, cls), made in _SHARDED_CLASSES.items() if mixin is FSDPModule}


@contextlib.contextmanager
def disable_fsdp_module_new_init() -> Iterator[None]:
    """Return a context in which calling a sharded module's class returns an uninitialised instance of the original."""
    FSDPModule._initialises = False
    try:
        yield
    finally:
        FSDPModule._initialises = True


def _state(module: FSDPModule) -> FSDPState:
    """Return the state of a sharded module."""
    state = state_of(cast(nn.Module, module))
    assert state is not None, "fully_shard gives the class and the state together"
    return state


def _states(module: FSDPModule, recurse: bool) -> Iterator[FSDPState]:
    """Yield the state of a module, and with ``recurse`` those below it."""
    if not recurse:
        yield _state(module)
        return
    for submodule in cast(nn.Module, module).modules():
        state = state_of(submodule)
        if state is not None:
            yield state


def repack_when_complete(state: FSDPState) -> None:
    """Pack the parameters of a state again, after one of its modules was moved, cast or loaded.

    If a state has several modules, they are moved one by one, so parameters are on two devices for a while. Packing
    waits for the last one. If that never comes, the first forward raises an error.
    """
    for group in state.groups:
        found = [sharded_param.found() for sharded_param in group.sharded_params]
        devices = {param.device for param in found if param is not None}
        if len(state.modules) == 1 or len(devices) <= 1:
            group.repack()


def _change_reduction(module: FSDPModule, recurse: bool, **changes: Any) -> None:
    """Change settings of how the gradients of a module's groups are reduced."""
    for state in _states(module, recurse):
        for group in state.groups:
            group.change_reduction(**changes)


def _process_groups(group: FSDPParamGroup) -> tuple[ProcessGroup, ProcessGroup]:
    """Return the process groups that a group is gathered over and reduced over."""
    gathers = group.mesh_info.shard_process_group
    assert gathers is not None, "check_comms_can_be_chosen refuses others"
    return gathers, group.reduction.settings.process_group or gathers


def _sharded_states(modules: Iterable[FSDPModule]) -> tuple[FSDPState, ...]:
    """Return the states of modules, or refuse modules that are not sharded."""
    if not isinstance(modules, Iterable):
        raise OptionTypeError(
            f"modules must be a list of sharded modules, got {type(modules).__name__}."
        )
    modules = tuple(modules)  # a generator can be read only once
    unsharded = [type(module).__name__ for module in modules if not isinstance(module, FSDPModule)]
    if unsharded:
        raise ConfigurationError(
            f"modules must be modules that fully_shard was applied to, got {unsharded}. Shard them first, or leave them "
            "out."
        )
    return tuple(_state(module) for module in modules)
