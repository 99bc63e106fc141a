"""The wrapper door: `FullyShardedDataParallel`, torch's FSDP1 API on this engine."""

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
from fullshard.engine import module_hooks
from fullshard.engine.clip_grad import Clipping
from fullshard.engine.ownership import has_forward, managed_modules
from fullshard.engine.state import state_of
from fullshard.engine.unshard_handle import UnshardHandle, unshard_state
from fullshard.errors import LifecycleError, OptionTypeError, UnsupportedError
from fullshard.fsdp1 import (
    comm_hooks,
    optimizer_params,
    optimizer_state_dicts,
    optimizer_state_load,
    precision,
    state_dicts,
    summon_full_params,
)
from fullshard.fsdp1.construction import Choices, shard
from fullshard.fsdp1.direct_calls import DirectCalls
from fullshard.fsdp1.wrapper_base import WrapperBase, wrappers_in
from fullshard.fsdp1.wrapper_options import (
    ProcessGroups,
    choose_axes,
    choose_device,
    choose_ignored,
    process_groups_below,
    wrap_below,
)
from fullshard.names import FSDP_WRAPPED_MODULE
from fullshard.plan.policies import check_type, switch
from fullshard.wrap import reiterable


class FullyShardedDataParallel(torch_border.ConvertibleModule, WrapperBase):
    """A module whose parameters are split over ranks and gathered only while it computes.

        model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
        optimizer = torch.optim.AdamW(model.parameters())

    The parameters below the module that are in no other wrapper are flattened into one array,
    which is gathered and reduced as one; so wrap each layer, by a policy or by hand, and then the
    whole model. Between steps parameters are one `FlatParameter` per wrapper, or with
    ``use_orig_params=True`` the parameters the module was built with, each over a flat piece.

    Args:
        module: The module to wrap.
        process_group: The ranks to shard over, by default all; for hybrid strategies a pair, to
            shard over and to replicate over, by default within and across nodes.
        sharding_strategy: What ranks share out; by default FULL_SHARD.
        cpu_offload: Whether shards, gradients and optimizer state rest in host memory.
        auto_wrap_policy: Which modules below get a wrapper of their own: a policy of `fullshard.wrap`,
            or a function of ``module``, ``recurse`` and ``nonwrapped_numel``. They get the same options.
        backward_prefetch: When backward gathers the next wrapper: before this one's compute, after
            it, or only when it is needed (None).
        mixed_precision: Dtypes of compute, reduction, buffers and inputs.
        ignored_modules: Modules to leave alone, with all below them.
        param_init_fn: Called with every module of a wrapper that has tensors on the meta device, to
            materialise them; by default they are made empty and then `reset_parameters` is called.
        device_id: Where to compute. By default where the module is or, if it is on the CPU, on the
            current accelerator; on machines without one, on the CPU.
        sync_module_states: Give all ranks the parameters and buffers of rank 0.
        forward_prefetch: Accepted for torch's sake: the gather of the next wrapper always runs beside
            this one's compute.
        limit_all_gathers: Accepted for torch's sake: never more than two wrappers are gathered ahead
            of compute, and the host does not wait for it.
        use_orig_params: Whether parameters keep their identity (see above), so that they can be frozen
            one by one and be in parameter groups of an optimizer.
        ignored_states: Parameters, or modules, to leave alone.
        device_mesh: The ranks as a mesh, instead of ``process_group``: (shard,), or (replicate, shard)
            for hybrid strategies.
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
    ) -> None:
        super().__init__()
        strategy = ShardingStrategy.FULL_SHARD if sharding_strategy is None else sharding_strategy
        offload = CPUOffload() if cpu_offload is None else cpu_offload
        precision_ = MixedPrecision() if mixed_precision is None else mixed_precision
        check_type("module", module, nn.Module, home="torch.nn")
        check_type("sharding_strategy", strategy, ShardingStrategy)
        check_type("cpu_offload", offload, CPUOffload)
        check_type("mixed_precision", precision_, MixedPrecision)
        if backward_prefetch is not None:
            check_type("backward_prefetch", backward_prefetch, BackwardPrefetch)
        sync_module_states = switch("sync_module_states", sync_module_states)
        forward_prefetch = switch("forward_prefetch", forward_prefetch)
        limit_all_gathers = switch("limit_all_gathers", limit_all_gathers)
        use_orig_params = switch("use_orig_params", use_orig_params)
        if param_init_fn is not None and not callable(param_init_fn):
            raise OptionTypeError(
                f"param_init_fn must be a function of a module, got {param_init_fn!r}."
            )
        ignored_modules, ignored_states = reiterable(ignored_modules), reiterable(ignored_states)
        ignored = choose_ignored(type(self), ignored_modules, ignored_states)
        if module in ignored.modules:
            warnings.warn(
                f"The wrapped module itself, {type(module).__name__}, is to be ignored, so nothing in it is sharded and no "
                "gradient is averaged. Name the modules below it that are to be left alone.",
                stacklevel=2,
            )
        chosen = strategy
        axes, strategy = choose_axes(strategy, process_group, device_mesh)
        if strategy is not chosen:
            warnings.warn(
                f"There is one rank to shard over, so {type(module).__name__} is kept whole: NO_SHARD instead of "
                f"{chosen.name}.",
                stacklevel=2,
            )
        device = choose_device(
            device_id, (p for p in module.parameters() if p not in ignored.params), axes
        )
        if auto_wrap_policy is not None:
            same_options = {
                "process_group": process_groups_below(axes, process_group, device_mesh),
                "sharding_strategy": sharding_strategy,
                "cpu_offload": cpu_offload,
                "backward_prefetch": backward_prefetch,
                "mixed_precision": mixed_precision,
                "ignored_modules": ignored_modules,
                "param_init_fn": param_init_fn,
                "device_id": device_id,
                "sync_module_states": sync_module_states,
                "forward_prefetch": forward_prefetch,
                "limit_all_gathers": limit_all_gathers,
                "use_orig_params": use_orig_params,
                "ignored_states": ignored_states,
                "device_mesh": device_mesh,
            }
            wrap_below(type(self), module, auto_wrap_policy, same_options, ignored)
        if not has_forward(module):
            warnings.warn(
                f"{type(module).__name__} has no forward, during which its wrapper would gather its parameters. Wrap "
                "the modules in it one by one, or the module around it.",
                stacklevel=2,
            )
        self._fsdp_wrapped_module = module
        self.sharding_strategy = strategy
        self.cpu_offload = offload
        self.mixed_precision = precision_
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        self.compute_device = device
        group = axes.shard_process_group or axes.replicate_process_group
        assert group is not None, "choose_axes finds at least one"
        self.process_group = group
        self.rank = group.rank()
        self.world_size = group.size()
        self._use_orig_params = use_orig_params
        self._device_mesh = device_mesh
        self._load_errors: list[str] = []
        """What has gone wrong in the load now running."""
        self._comm_hook: Any = None
        self._state_dict_settings = state_dicts.default_settings()
        shard(
            self,
            module,
            Choices(
                axes=axes,
                strategy=strategy,
                device=device,
                ignored=ignored,
                precision=precision_,
                offload=offload,
                backward_prefetch=backward_prefetch,
                use_orig_params=use_orig_params,
                param_init_fn=param_init_fn,
                sync_module_states=sync_module_states,
            ),
        )
        self._direct_calls = DirectCalls(self, module)
        managed = (below for _, below in managed_modules([self], ignored.modules))
        self._precision = precision.Precision(managed, precision_)
        self._fsdp_state.original_buffer_dtypes = self._precision.original_buffer_dtypes()
        state_dicts.register_hooks(self)

    # --- the module inside ------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module; of a checkpointed one, the module that is checkpointed."""
        return torch_border.without_activation_wrapper(self._fsdp_wrapped_module)

    def __getattr__(self, name: str) -> Any:
        """Attributes that the wrapper does not have are the wrapped module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == FSDP_WRAPPED_MODULE:
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        """As of the wrapped module: an `nn.Sequential`, say."""
        return cast(Any, self.module)[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise LifecycleError(
            "A wrapped module cannot be copied: its parameters share one buffer. Copy the module before wrapping "
            "it, or wrap a second one and load the state dict."
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
        finally:  # nobody stays unsharded when it raises
            self._direct_calls.through_wrapper -= 1
            output = module_hooks.post_forward(state, self, args, output)
        return output

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
        """Apply ``fn`` to every module below, while its parameters are whole; what it changes is kept."""
        with summon_full_params.summon_full_params(self, recurse=False, writeback=True):
            return super().apply(fn)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; within `summon_full_params`, under names without wrappers."""
        summon_full_params.notice_assigned(self)
        for name, param in super().named_parameters(*args, **kwargs):
            yield self._shown_name(name), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As of any module; within `summon_full_params`, under names without wrappers."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield self._shown_name(name), buffer

    def _shown_name(self, name: str) -> str:
        """Return a name as it is now: within `summon_full_params`, without the wrappers."""
        state = state_of(self)  # None while the wrapper is made
        return (
            name.replace(f"{FSDP_WRAPPED_MODULE}.", "")
            if state is not None and state.summoned
            else name
        )

    # --- training ---------------------------------------------------------------------------------

    def check_is_root(self) -> bool:
        """Whether this is the outermost wrapper; not to be asked of inner ones before the first forward."""
        return self._runtime().root is self._fsdp_state

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward only adds up gradients on this rank; the first one after it reduces them.

        Until then `.grad` is the whole gradient of this rank, and ``zero_grad()`` drops it. On the outermost
        wrapper, around forward and backward.
        """
        self._require_root("no_sync")
        self._require_idle("no_sync")
        states = self._runtime().states
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

        `torch.nn.utils.clip_grad_norm_` would take each rank's norm for the whole. On the outermost
        wrapper, on all ranks. `fullshard.clip_grad_norm_` computes the same and has more options.

        Returns:
            The norm before, in the widest dtype of the gradients.
        """
        self._require_root("clip_grad_norm_")
        self._require_idle("clip_grad_norm_")
        clipping = Clipping(self, norm_type)
        gradients = clipping.gradients
        norm = clipping.norm()
        clipping.clip(norm, max_norm)
        if not gradients:
            warnings.warn(
                "clip_grad_norm_ found no gradients on this rank: before backward, or after zero_grad?",
                stacklevel=3,
            )
            return norm
        dtypes = (gradient.dtype.to_real() for gradient in gradients)
        return norm.to(functools.reduce(torch.promote_types, dtypes))

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook`` reduce gradients instead of the wrapper, averaging included.

        It is called with ``state`` and a wrapper's gradients, flat: with ``hook(state, gradient)``,
        which it averages over ranks in place, if nothing is sharded; otherwise with
        ``hook(state, gradient, output)``, the latter to become this rank's part of the average. Once,
        on the outermost wrapper, before the first forward; not for hybrid strategies, nor with a
        ``wire_dtype``.
        """
        comm_hooks.register(self, state, hook)

    def _unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this wrapper's parameters, not those of wrappers below.

        Args:
            async_op: Return at once with a handle to wait for; forward waits by itself otherwise.
        """
        return unshard_state(self._fsdp_state, async_op)

    # --- all wrappers of a module -----------------------------------------------------------------

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """All wrappers in ``module``, itself included; with ``root_only``, those that are in no other."""
        found = cast("list[FullyShardedDataParallel]", wrappers_in(module, root_only=root_only))
        if root_only:  # one outside of the module may be known
            found = [
                each for each in found if each._fsdp_state.runtime is None or each.check_is_root()
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
        """Within it, modules have their whole parameters, in their own dtypes and under their own names.

        Not within forward or backward; forward within it computes with the whole parameters, in their own
        dtypes. Collective, on entry.

        Args:
            module: A wrapper, or a module that contains some.
            recurse: Also for wrappers below the outermost ones.
            writeback: Keep what was changed. Every rank keeps its part of its own changes, so all
                ranks must make the same.
            rank0_only: Only rank 0 gets whole parameters; not together with ``writeback``.
            offload_to_cpu: Put them in host memory.
            with_grads: Gradients, too; with ``use_orig_params=True`` only, and not offloaded.
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
        """As of any module, under names without wrappers, of the kind that was chosen. Collective."""
        try:
            return super().state_dict(
                *args, destination=destination, prefix=prefix, keep_vars=keep_vars
            )
        finally:
            self._fsdp_state.installed_full_params.uninstall()  # a module below has raised

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As of any module, from what `state_dict` made or an unwrapped model's state dict. Collective."""
        try:
            return super().load_state_dict(
                state_dicts.with_versions(self, state_dict), strict, assign
            )
        finally:
            for wrapper in wrappers_in(self):
                wrapper._fsdp_state.installed_full_params.uninstall()  # a module has raised

    def _fqn_modifiers(self) -> dict[str, str]:
        """Which child is not part of names, for `torch.distributed.checkpoint.state_dict`."""
        if torch_border.in_optimizer_state_dict():
            raise UnsupportedError(
                "torch.distributed.checkpoint.state_dict does not know the wrapper, and takes each rank's piece of an "
                "optimizer's state for the whole. Use FullyShardedDataParallel.optim_state_dict and "
                "optim_state_dict_to_load, or fullshard.checkpoint.save and load."
            )
        return {"": FSDP_WRAPPED_MODULE}

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Choose what state dicts of all wrappers in ``module`` hold, and return what was chosen before."""
        return state_dicts.set_settings(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """What state dicts of the wrappers in ``module`` hold."""
        return state_dicts.settings_of(module)

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Within it, state dicts of all wrappers in ``module`` hold what is chosen here."""
        with state_dicts.kept_settings(module):
            state_dicts.set_settings(
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
        """The state dict of an optimizer of ``model``, by the names of the unwrapped model's parameters.

        It holds what `set_state_dict_type` says: whole tensors by default, in host memory. Collective.
        All ranks' optimizers must have the same parameters, groups, options and kinds of state, in any order.

        Args:
            model: A model that has all parameters of the optimizer.
            optim: The optimizer.
            optim_state_dict: Convert this one, which the optimizer made, instead of its present state.
            group: All ranks that share the model, if the wrappers' own groups do not say so; its first
                is the one that ``rank0_only`` means.

        Returns:
            A dict with ``state``, by names of parameters, and ``param_groups``, with names as ``params``.
            With ``rank0_only`` an empty one on other ranks.
        """
        return optimizer_state_dicts.optim_state_dict(model, optim, optim_state_dict, group)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """The reverse of `optim_state_dict`: what ``optim.load_state_dict`` takes on this rank.

        It may have been made over other ranks, with other wrappers or by an unwrapped model's names.
        Parameters that it does not have get no state; without ``param_groups``, options stay as they are.
        Whole tensors are cut where they are; with ``rank0_only``, rank 0's are sent to all. Collective.

        Args:
            model: A model that has all parameters of the optimizer.
            optim: The optimizer.
            optim_state_dict: What `optim_state_dict` returned.
            is_named_optimizer: Whether the optimizer knows parameters by names, those of
                ``named_parameters``, and not by numbers.
            load_directly: Also load it.
            group: As of `optim_state_dict`.
        """
        result = optimizer_state_load.optim_state_dict_to_load(
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
        """Deprecated: `optim_state_dict` of whole tensors, whatever `set_state_dict_type` says."""
        optimizer_params.warn_of_age("full_optim_state_dict", "optim_state_dict", optim_input)
        return optimizer_state_dicts.saved(
            optimizer_params.ModelParams(model, "full_optim_state_dict"),
            optim,
            None,
            group,
            optimizer_state_dicts.Style(first_only=rank0_only),
        )

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: Optimizer, group: ProcessGroup | None = None
    ) -> dict[str, Any]:
        """Deprecated: `optim_state_dict` of sharded tensors, whatever `set_state_dict_type` says."""
        optimizer_params.warn_of_age("sharded_optim_state_dict", "optim_state_dict")
        return optimizer_state_dicts.saved(
            optimizer_params.ModelParams(model, "sharded_optim_state_dict"),
            optim,
            None,
            group,
            optimizer_state_dicts.Style(sharded=True, on_cpu=False),
        )

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """Deprecated: `optim_state_dict_to_load` from whole tensors that every rank has."""
        method = "shard_full_optim_state_dict"
        optimizer_params.warn_of_age(method, "optim_state_dict_to_load", optim_input)
        known = optimizer_params.ModelParams(model, method)
        return optimizer_state_load.loadable(known, optim, optim_input, full_optim_state_dict, None)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
    ) -> dict[str, Any]:
        """Deprecated: `optim_state_dict_to_load` from sharded tensors."""
        method = "flatten_sharded_optim_state_dict"
        optimizer_params.warn_of_age(method, "optim_state_dict_to_load")
        known = optimizer_params.ModelParams(model, method)
        return optimizer_state_load.loadable(
            known, optim, None, sharded_optim_state_dict, None, over_ranks=True
        )

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Deprecated: `optim_state_dict_to_load` from whole tensors that rank 0 has; others pass None."""
        method = "scatter_full_optim_state_dict"
        optimizer_params.warn_of_age(method, "optim_state_dict_to_load", optim_input)
        known = optimizer_params.ModelParams(model, method)
        return optimizer_state_load.loadable(
            known, optim, optim_input, full_optim_state_dict, group, from_first=True
        )

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """The same state dict by names or by numbers of parameters.

        To load a state dict of `optim_state_dict` into an optimizer without wrappers, and the other
        way round.

        Args:
            optim_state_dict: The state dict of whole tensors.
            optim_state_key_type: What its keys become.
            model: The model without wrappers, or with ``use_orig_params=True``.
            optim_input: What the optimizer was made of, if ``optim`` is not given; by default
                ``model.parameters()``.
            optim: The optimizer. Its parameters have numbers in its own order, which is this rank's.
        """
        return optimizer_params.rekeyed(
            optim_state_dict, optim_state_key_type, model, optim_input, optim
        )
