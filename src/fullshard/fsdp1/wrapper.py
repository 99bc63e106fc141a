"""`FullyShardedDataParallel`: torch's FSDP1 API on this engine.

The class lists the API and checks the constructor's arguments. Other files of this folder do the work, and take
it as a `WrapperBase`.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fullshard import torch_border
from fullshard.api import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fullshard.divergence import monitor
from fullshard.engine import hooks
from fullshard.engine.ownership import has_forward, managed_modules
from fullshard.engine.state import state_of
from fullshard.errors import LifecycleError
from fullshard.features import full_params, skipped_forward
from fullshard.features.clip_grad import Clipping
from fullshard.features.fused_gradients import fused_linear
from fullshard.features.unshard_handle import UnshardHandle, unshard_state
from fullshard.fsdp1 import comm_hooks, precision, summon_full_params
from fullshard.fsdp1.construction import shard
from fullshard.fsdp1.direct_calls import DirectCalls
from fullshard.fsdp1.state_dicts import (
    loadable_optimizer_state,
    model_state as state_dicts,
    optimizer_params,
    saved_optimizer_state,
    settings as state_dict_settings,
)
from fullshard.fsdp1.wrapper_base import WrapperBase, wrappers_in
from fullshard.fsdp1.wrapper_options import ProcessGroups, read_options, wrap_below
from fullshard.layout.names import FSDP_WRAPPED_MODULE
from fullshard.wrap import reiterable


class FullyShardedDataParallel(
    torch_border.ConvertibleModule, torch_border.ClientAttributes, WrapperBase
):
    """A module whose parameters are sharded over ranks and gathered only while it computes.

        model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
        optimizer = torch.optim.AdamW(model.parameters())

    A wrapper flattens the parameters below its module that are in no other wrapper into one array, and gathers
    and reduces this array as one. So wrap each layer, by a policy or by hand, and then the whole model. Between
    steps the parameters are one `FlatParameter` per wrapper. With ``use_orig_params=True`` they are the parameters
    that the module was built with, each over a flat piece.

    Args:
        module: The module to wrap.
        process_group: The ranks to shard over, by default all. For hybrid strategies a pair: the ranks to shard
            over and those to replicate over, by default within and across nodes.
        sharding_strategy: What is sharded, and when it is gathered; by default FULL_SHARD.
        cpu_offload: Whether shards, gradients and optimizer state are in host memory.
        auto_wrap_policy: Which modules below get wrappers of their own, with the same options: a policy of
            `fullshard.wrap`, or a function of ``module``, ``recurse`` and ``nonwrapped_numel``.
        backward_prefetch: When backward gathers the next wrapper: before the compute of the current one, after
            it, or only when it is needed (None).
        mixed_precision: Dtypes of compute, reduction, buffers and inputs.
        ignored_modules: Modules to leave alone, with all below them.
        param_init_fn: Called with every module of a wrapper that has tensors on the meta device, to materialise
            them. By default they get empty memory, and then `reset_parameters` is called.
        device_id: Where to compute. By default on the module's device or, if that is the CPU, on the current
            accelerator; on machines without one, on the CPU.
        sync_module_states: Give all ranks the parameters and buffers of rank 0.
        forward_prefetch: Accepted for compatibility and without effect: the next wrapper is always gathered during
            the compute of the current one.
        limit_all_gathers: Accepted for compatibility and without effect: at most two wrappers are gathered at a
            time, and the host does not wait for it.
        use_orig_params: Whether the module keeps its own parameters (see above), so that they can be frozen one by
            one and be in different parameter groups of an optimizer.
        ignored_states: Parameters, or modules, to leave alone.
        device_mesh: The ranks as a mesh, instead of ``process_group``: (shard,), or (replicate, shard) for hybrid
            strategies.
        fuse_gradients: Let the backward of linear layers write weight gradients straight into the reduce-scatter
            buffer, as `fully_shard` does. `fused_gradients` says for which weights. In `no_sync` gradients go the ordinary
            way, as `.grad` shows them.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroups | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        fuse_gradients: bool = False,
    ) -> None:
        monitor.install(for_model=True)
        super().__init__()
        arguments = {
            "process_group": process_group,
            "sharding_strategy": sharding_strategy,
            "cpu_offload": cpu_offload,
            "backward_prefetch": backward_prefetch,
            "mixed_precision": mixed_precision,
            "ignored_modules": reiterable(ignored_modules),
            "param_init_fn": param_init_fn,
            "device_id": device_id,
            "sync_module_states": sync_module_states,
            "forward_prefetch": forward_prefetch,
            "limit_all_gathers": limit_all_gathers,
            "use_orig_params": use_orig_params,
            "ignored_states": reiterable(ignored_states),
            "device_mesh": device_mesh,
            "fuse_gradients": fuse_gradients,
        }
        options = read_options(type(self), module, arguments)
        if auto_wrap_policy is not None:
            wrap_below(type(self), module, auto_wrap_policy, arguments, options)
        if not has_forward(module):
            warnings.warn(
                f"{type(module).__name__} has no forward, but wrappers gather parameters in forward. Wrap the modules in it "
                "one by one, or the module around it.",
                stacklevel=2,
            )
        self._fsdp_wrapped_module = module
        self.sharding_strategy = options.strategy
        self.cpu_offload = options.offload
        self.mixed_precision = options.precision
        self.backward_prefetch = options.backward_prefetch
        self.forward_prefetch = options.forward_prefetch
        self.limit_all_gathers = options.limit_all_gathers
        self.compute_device = options.device
        self.process_group = options.process_group
        self.rank = self.process_group.rank()
        self.world_size = self.process_group.size()
        self._use_orig_params = options.use_orig_params
        self._device_mesh = device_mesh
        self._load_errors = []
        self._comm_hook = None
        self._state_dict_settings = state_dict_settings.default_settings()
        shard(self, module, options)
        self._direct_calls = DirectCalls(self, module)
        managed = (below for _, below in managed_modules([self], options.ignored.modules))
        self._precision = precision.Precision(managed, options.precision)
        self._fsdp_state.original_buffer_dtypes = self._precision.original_buffer_dtypes()
        state_dicts.register_hooks(self)

    # --- the module inside ------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without a wrapper for activation checkpointing."""
        return torch_border.without_activation_wrapper(self._fsdp_wrapped_module)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped module if the wrapper does not have it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == FSDP_WRAPPED_MODULE:
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        """Return an item of the wrapped module, for example of an `nn.Sequential`."""
        return cast(Any, self.module)[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise LifecycleError(
            "A wrapped module cannot be copied, because its parameters share one buffer. Copy the module before wrapping "
            "it, or wrap a second one and load the state dict. For averages of the parameters, as "
            "torch.optim.swa_utils.AveragedModel keeps them, use fullshard.optim.EMA(model)."
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module's forward, with its parameters gathered."""
        state = self._fsdp_state
        if state.summoned:
            return summon_full_params.forward(self, args, kwargs)
        args, kwargs = self._pre_forward(args, kwargs)
        output = None
        self._direct_calls.through_wrapper += 1
        try:
            output = self._fsdp_wrapped_module(*args, **kwargs)
        finally:  # an exception must not leave the parameters unsharded
            self._direct_calls.through_wrapper -= 1
            output = hooks.post_forward(state, self, args, output)
        return output

    def fused_gradients(self) -> dict[str, str]:
        """Return, by name, why weight gradients in this wrapper and below are not fused; "" for those that are.

        It covers wrappers with ``fuse_gradients``. The first forward decides, so call it after that.
        """
        return fused_linear.reasons(self._fsdp_state)

    def skip_forward(self, output: Any = None, *, inputs_require_grad: bool = False) -> Any:
        """Take part in this wrapper's collectives, and in those of wrappers in it, without computing.

        See `FSDPModule.skip_forward`, which is the same.
        """
        return skipped_forward.skip_forward(
            self,
            output,
            inputs_require_grad=inputs_require_grad,
            prepare=lambda module: cast(WrapperBase, module)._prepare_forward(),
        )

    def _before_conversion(self) -> None:
        """Shard the parameters: they are converted as shards."""
        if self._fsdp_state.summoned:
            raise LifecycleError(
                "A wrapped module cannot be moved or cast within summon_full_params. Do it outside."
            )
        self._fsdp_state.reshard()

    def _after_conversion(self) -> None:
        """Pack the converted shards into a buffer again."""
        for group in self._fsdp_state.groups:
            group.repack()
        self._precision.forget_mode()

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Apply ``fn`` to every module below while full parameters are installed, and keep its changes."""
        with summon_full_params.summon_full_params(self, recurse=False, writeback=True):
            return super().apply(fn)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters as any module does; within `summon_full_params` names have no wrappers in them."""
        summon_full_params.notice_assigned(self)
        for name, param in super().named_parameters(*args, **kwargs):
            yield self._current_name(name), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield buffers as any module does; within `summon_full_params` names have no wrappers in them."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield self._current_name(name), buffer

    def _current_name(self, name: str) -> str:
        """Return a name as it is now: within `summon_full_params`, without the wrappers."""
        state = state_of(self)  # None while the wrapper is made
        return (
            name.replace(f"{FSDP_WRAPPED_MODULE}.", "")
            if state is not None and state.summoned
            else name
        )

    # --- training ---------------------------------------------------------------------------------

    def check_is_root(self) -> bool:
        """Return whether this is the outermost wrapper; do not ask inner wrappers before the first forward."""
        return self._step().root is self._fsdp_state

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward only accumulates gradients on this rank.

        The first backward after it reduces them. Until then `.grad` is the full gradient of this rank, and
        ``zero_grad()`` drops it. Call it on the outermost wrapper, around forward and backward.
        """
        self._require_root("no_sync")
        self._require_idle("no_sync")
        states = self._step().states
        before = [state.options.requires_gradient_sync for state in states]
        for state in states:
            state.options.requires_gradient_sync = False
        try:
            yield
        finally:
            for state, synchronises in zip(states, before, strict=True):
                state.options.requires_gradient_sync = synchronises

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> Tensor:
        """Scale all gradients such that their norm, over all ranks, is at most ``max_norm``.

        Call it on the outermost wrapper, on all ranks: `torch.nn.utils.clip_grad_norm_` would use the norm of each
        rank's shards. `fullshard.clip_grad_norm_` computes the same and has more options.

        Returns:
            The norm before scaling, in the widest dtype of the gradients.
        """
        self._require_root("clip_grad_norm_")
        self._require_idle("clip_grad_norm_")
        clipping = Clipping(self, norm_type)
        gradients = clipping.gradients
        norm = clipping.norm(max_norm)
        clipping.clip(norm, max_norm)
        if not gradients:
            warnings.warn(
                "clip_grad_norm_ found no gradients on this rank. Call it after backward and before zero_grad.",
                stacklevel=3,
            )
            return norm
        dtypes = (gradient.dtype.to_real() for gradient in gradients)
        return norm.to(functools.reduce(torch.promote_types, dtypes))

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook`` reduce and average gradients instead of the wrapper.

        The hook gets ``state`` and the flat gradients of one wrapper. With NO_SHARD the call is
        ``hook(state, gradient)``, and the hook averages ``gradient`` over ranks in place. Otherwise it is
        ``hook(state, gradient, output)``, and the hook writes this rank's shard of the average to ``output``.

        Call it once, on the outermost wrapper, before the first forward. Hybrid strategies and ``wire_dtype`` exclude
        it.
        """
        comm_hooks.register(self, state, hook)

    def _unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this wrapper's parameters, not those of wrappers below.

        Args:
            async_op: Return at once with a handle; forward waits by itself if the handle is not used.
        """
        return unshard_state(self._fsdp_state, async_op)

    # --- all wrappers of a module -----------------------------------------------------------------

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return all wrappers in ``module``, itself included; with ``root_only``, those inside no other."""
        found = cast("list[FullyShardedDataParallel]", wrappers_in(module, root_only=root_only))
        if root_only:  # after the first forward a wrapper around the module is known, too
            found = [
                each for each in found if each._fsdp_state.step is None or each.check_is_root()
            ]
        return found

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context in which modules have their full parameters, in their own dtypes and under their own names.

        Entering it is collective, and not possible within forward or backward. A forward inside the context computes
        with the full parameters.

        Args:
            module: A wrapper, or a module that contains wrappers.
            recurse: Whether wrappers below the outermost ones are included.
            writeback: Whether changes are kept. Each rank keeps its part of its own changes, so all ranks must make
                the same changes.
            rank0_only: Whether only rank 0 gets full parameters; excludes ``writeback``.
            offload_to_cpu: Whether full parameters are put in host memory.
            with_grads: Whether gradients are full, too; needs ``use_orig_params=True`` and excludes
                ``offload_to_cpu``.
        """
        return summon_full_params.summon_full_params(
            module,
            recurse=recurse,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        )

    # --- state dicts ------------------------------------------------------------------------------

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Return the state dict of the chosen kind, under names without wrappers. Collective."""
        try:
            return super().state_dict(
                *args, destination=destination, prefix=prefix, keep_vars=keep_vars
            )
        finally:
            full_params.uninstall_all(self._fsdp_state)  # if a module below has raised

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict that `state_dict` returned, or an unwrapped model's. Collective."""
        try:
            return super().load_state_dict(
                state_dicts.with_versions(self, state_dict), strict, assign
            )
        finally:
            for wrapper in wrappers_in(self):
                full_params.uninstall_all(wrapper._fsdp_state)  # if a module has raised

    def _named_sharded_params(self) -> list[tuple[str, nn.Parameter]]:
        """See `torch_border.ClientAttributes`."""
        groups = self._fsdp_state.groups
        return [(each.name, each.param) for group in groups for each in group.sharded_params]

    def _fqn_modifiers(self) -> dict[str, str]:
        """Introduce wrappers to `torch.distributed.checkpoint.state_dict`, which asks this first; it knows their names then."""
        torch_border.introduce_wrapper(
            state_dict_settings.for_torch_s_functions(FullyShardedDataParallel)
        )
        return {}

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Choose the kind of state dict of all wrappers in ``module``, and return the previous settings."""
        return state_dict_settings.set_settings(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return which kind of state dict the wrappers in ``module`` make."""
        return state_dict_settings.settings_of(module)

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Return a context in which all wrappers in ``module`` make this kind of state dict."""
        with state_dict_settings.restored_settings(module):
            state_dict_settings.set_settings(
                module, state_dict_type, state_dict_config, optim_state_dict_config
            )
            yield

    # --- state dicts of optimizers ----------------------------------------------------------------

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return the state dict of an optimizer by the names of the unwrapped model's parameters. Collective.

        `set_state_dict_type` chooses its kind: by default full tensors in host memory. The optimizers of all ranks must
        have the same parameters, groups, options and kinds of state, in any order.

        Args:
            model: A model that has all parameters of the optimizer.
            optim: The optimizer.
            optim_state_dict: A state dict that the optimizer made; it is converted instead of the present state.
            group: All ranks that share the model, if the wrappers' own groups do not say so. ``rank0_only`` means
                its first rank.

        Returns:
            A dict with ``state``, by names of parameters, and ``param_groups``, with names as ``params``. With
            ``rank0_only`` it is empty on other ranks.
        """
        return saved_optimizer_state.optim_state_dict(model, optim, optim_state_dict, group)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Convert a state dict of `optim_state_dict` to one for ``optim.load_state_dict`` on this rank. Collective.

        The state dict may come from other ranks, other wrappers or an unwrapped model. Parameters that it lacks get no
        state. Without ``param_groups``, options stay as they are. Every rank cuts its own full tensors; with
        ``rank0_only``, rank 0 sends its tensors to all ranks.

        Args:
            model: A model that has all parameters of the optimizer.
            optim: The optimizer.
            optim_state_dict: The result of `optim_state_dict`.
            is_named_optimizer: Whether the optimizer knows parameters by the names of ``named_parameters``, and not
                by numbers.
            load_directly: Whether the result is also loaded.
            group: See `optim_state_dict`.
        """
        result = loadable_optimizer_state.optim_state_dict_to_load(
            model, optim, optim_state_dict, group, by_name=is_named_optimizer
        )
        if load_directly:
            optim.load_state_dict(result)
        return result

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return `optim_state_dict` of full tensors, whatever `set_state_dict_type` says. Deprecated."""
        optimizer_params.warn_deprecated("full_optim_state_dict", "optim_state_dict", optim_input)
        return saved_optimizer_state.build_state_dict(
            optimizer_params.ModelParams(model, "full_optim_state_dict"),
            optim,
            None,
            group,
            saved_optimizer_state.SaveOptions(first_only=rank0_only),
        )

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: Optimizer, group: ProcessGroup | None = None
    ) -> dict[str, Any]:
        """Return `optim_state_dict` of sharded tensors, whatever `set_state_dict_type` says. Deprecated."""
        optimizer_params.warn_deprecated("sharded_optim_state_dict", "optim_state_dict")
        return saved_optimizer_state.build_state_dict(
            optimizer_params.ModelParams(model, "sharded_optim_state_dict"),
            optim,
            None,
            group,
            saved_optimizer_state.SaveOptions(sharded=True, on_cpu=False),
        )

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """Return `optim_state_dict_to_load` of full tensors that every rank has. Deprecated."""
        method = "shard_full_optim_state_dict"
        optimizer_params.warn_deprecated(method, "optim_state_dict_to_load", optim_input)
        model_params = optimizer_params.ModelParams(model, method)
        return loadable_optimizer_state.build_loadable(
            model_params, optim, optim_input, full_optim_state_dict, None
        )

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
    ) -> dict[str, Any]:
        """Return `optim_state_dict_to_load` of sharded tensors. Deprecated."""
        method = "flatten_sharded_optim_state_dict"
        optimizer_params.warn_deprecated(method, "optim_state_dict_to_load")
        model_params = optimizer_params.ModelParams(model, method)
        return loadable_optimizer_state.build_loadable(
            model_params, optim, None, sharded_optim_state_dict, None, sharded=True
        )

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return `optim_state_dict_to_load` of full tensors that rank 0 has; other ranks pass None. Deprecated."""
        method = "scatter_full_optim_state_dict"
        optimizer_params.warn_deprecated(method, "optim_state_dict_to_load", optim_input)
        model_params = optimizer_params.ModelParams(model, method)
        return loadable_optimizer_state.build_loadable(
            model_params, optim, optim_input, full_optim_state_dict, group, from_rank0=True
        )

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """Return the same state dict by names or by numbers of parameters.

        Use it to load what `optim_state_dict` returned into an optimizer without wrappers, and the other way round.

        Args:
            optim_state_dict: The state dict of full tensors.
            optim_state_key_type: The kind of the new keys.
            model: The model without wrappers, or with ``use_orig_params=True``.
            optim_input: The parameters or groups that the optimizer was built with, if ``optim`` is not given; by
                default ``model.parameters()``.
            optim: The optimizer. Numbers follow the order of its parameters on this rank.
        """
        return optimizer_params.rekeyed(
            optim_state_dict, optim_state_key_type, model, optim_input, optim
        )
