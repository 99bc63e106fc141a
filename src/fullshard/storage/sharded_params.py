"""Sharded parameters: what users, optimizers and state dicts see while a group is not unsharded.

    DTensorShardedParam   one per parameter: a DTensor over this rank's rows
    OrigParamShard        one per parameter: the parameter the user made, of which this rank keeps a flat piece
    FlatShardedParam      one for all parameters of a segment: this rank's piece of it (`flat_parameter`)

A `ShardedParam` keeps its `nn.Parameter` for life, unless a user puts another one on the module, which it then
adopts. The parameter's data are a view of the group's shard buffer.

This file, `flat_parameter` and `param` are the only ones that put parameters on modules.
"""

from __future__ import annotations

import operator
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import torch_border
from fullshard.errors import ConfigurationError
from fullshard.layout.placement import ParamPlacement, local_tensor
from fullshard.storage.buffers import in_memory_order

GROUP_MARK = "_fullshard_group"
"""Attribute of a parameter that belongs to a group, on the sharded parameter and on the original it replaced."""
_REPLACED_MARK = "_fullshard_replaced"
"""Attribute of a parameter that a sharded one has replaced on its modules: its name."""
_UNSHARDED_MARK = "_fullshard_unsharded"
"""Attribute of an unsharded parameter: its full name."""


@dataclass(frozen=True, slots=True)
class ParamModuleInfo:
    """A module that has the parameter, and under which name; tied parameters have several."""

    module: nn.Module
    name: str

    @property
    def plain(self) -> bool:
        """Whether assigning the parameter has no side effect of the module's own (RNNs keep lists, say)."""
        return type(self.module).__setattr__ is nn.Module.__setattr__

    def path_in(self, paths: Mapping[nn.Module, str]) -> str | None:
        """Return the parameter's path in the model whose modules have these paths; None if its module has been taken out."""
        path = paths.get(self.module)
        return path if path is None else f"{path}.{self.name}" if path else self.name

    def current(self) -> Tensor | None:
        """The parameter now on the module."""
        table = torch_border.parameter_table(self.module)
        return table[self.name] if self.name in table else None

    def install(self, value: Tensor) -> None:
        """Put a parameter, or a stand-in for one, on the module."""
        # A module refuses a plain tensor while it has a parameter of that name.
        if not isinstance(value, nn.Parameter):
            self.remove()
        setattr(self.module, self.name, value)

    def remove(self) -> None:
        """Take the parameter off the module."""
        torch_border.parameter_table(self.module).pop(self.name, None)


class MemoryIdentity(NamedTuple):
    """Test of a parameter's memory: whether it is that of another tensor.

    Asked for every parameter in every forward, so both are functions without a Python frame.
    """

    of: Callable[[Tensor], object]
    """Returns what identifies a parameter's memory: its local tensor, or an address."""
    is_same: Callable[[Any, Any], bool]
    """Returns the identity of a parameter's memory: its local tensor, or an address."""


_HOLDERS: weakref.WeakValueDictionary[int, ShardedParam] = weakref.WeakValueDictionary()
"""The sharded parameters of this process, by the id of their parameters; one that was replaced may be there still."""


class ShardedParam(ABC):
    """A parameter object that is on the modules while the group is sharded: of one parameter or several."""

    param: nn.Parameter

    memory: ClassVar[MemoryIdentity]
    """Test that a parameter of this kind is over the memory it should be over."""

    def __init__(self, name: str, owners: Sequence[ParamModuleInfo], *, trainable: bool) -> None:
        self.name = name
        """Name in messages: its path in the model from the model's first forward on, and in its group's module before."""
        self.trainable = trainable
        """Whether its parameters were trainable at the last look."""
        self.owners = tuple(owners)
        """The modules that have it."""

    def set_name(self, paths: Mapping[nn.Module, str]) -> None:
        """Take the path in the model, whose modules have these paths."""
        self.name = self.owners[0].path_in(paths) or self.name

    @property
    @abstractmethod
    def local(self) -> Tensor:
        """This rank's elements."""

    @property
    def versioned(self) -> tuple[Tensor, ...]:
        """The tensors whose version counters tell of writes to it."""
        return (self.param,)

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """Dtype of its gradients; None for the dtype they come in."""
        return self.param.dtype

    @abstractmethod
    def replace_local(self, local: Tensor) -> None:
        """Let the same parameter object be over other memory of the same shape and dtype."""

    @abstractmethod
    def fault(self, candidate: Tensor | None) -> str | None:
        """Return why ``candidate`` cannot be the parameter from now on, or None if it can."""

    @abstractmethod
    def accumulate_gradient(self, gradient: Tensor) -> None:
        """Make a reduced gradient `.grad`, or add it there; the user's hooks run before and after."""

    def _hooked(self, gradient: Tensor) -> Tensor:
        """Return the gradient that the user's tensor hooks make of one before it is accumulated."""
        for hook in tuple((torch_border.tensor_hooks(self.param) or {}).values()):
            returned = hook(gradient)
            if returned is None:
                continue
            if type(returned) is not type(gradient) or returned.shape != gradient.shape:
                raise ConfigurationError(
                    "A hook on a sharded parameter gets the reduced gradient, sharded as the parameter is, and returns "
                    f"None or another like it; for {self.name} it got a {type(gradient).__name__} of shape "
                    f"{tuple(gradient.shape)} and returned a {type(returned).__name__} of shape "
                    f"{tuple(returned.shape)}."
                )
            gradient = returned
        return gradient

    def clear_gradient(self, *, set_to_none: bool) -> None:
        """Reset gradients as ``zero_grad`` does."""
        if set_to_none:
            self.param.grad = None
        elif self.param.grad is not None:
            self.param.grad.zero_()

    def value_on(self, owner: ParamModuleInfo) -> Tensor:
        """Return the value that an owner of one of its parameters has while the group is sharded."""
        return self.param

    def unsharded(self, full: Tensor, placement: ParamPlacement, *, trainable: bool) -> Tensor:
        """Return a leaf for autograd over the gathered data of one of its parameters."""
        return placement.unsharded(full, trainable=trainable)

    def found(self) -> Tensor | None:
        """Return the parameter that is on the modules now; another than `param` if any owner has another."""
        return next(iter(self.others()), self.param)

    def others(self) -> list[Tensor | None]:
        """Return the values that owners have instead of `param`; None where it was taken away."""
        found = [owner.current() for owner in self.owners]
        return [each for each in found if each is not self.param]

    def tie_fault(self) -> str | None:
        """Return why tensors assigned on several owners cannot be one parameter, or None if they can."""
        locals_ = [None if each is None else local_tensor(each) for each in self.others()]
        return None if are_equal(locals_) else f"{self.name}: {NOT_TIED}"

    @property
    def is_on_modules(self) -> bool:
        """Whether any owner has its parameter."""
        return any(owner.current() is self.param for owner in self.owners)

    def values_on_modules(self) -> list[tuple[ParamModuleInfo, Tensor]]:
        """Return all owners that have something of it while the group is sharded, with what they have."""
        return [(owner, self.param) for owner in self.owners]

    def assigned_members(self) -> dict[int, Any]:
        """Return full tensors that users assigned to single members of a `FlatParameter`, by index of the member.

        Empty for all others, which are on the modules themselves.
        """
        return {}

    def in_buffer_order(self) -> Tensor:
        """Return this rank's elements, in the order they have in the buffer."""
        return self.local

    def adopt(self, candidate: Tensor, group_name: str) -> None:
        """Take a parameter that a user put on the modules: moved, cast, assigned."""
        self._set_param(cast(nn.Parameter, candidate), group_name)

    def _set_param(self, param: nn.Parameter, group_name: str) -> None:
        self.param = param
        _HOLDERS[id(param)] = self
        setattr(param, GROUP_MARK, group_name)
        self._install()

    def _install(self) -> None:
        for owner in self.owners:
            owner.install(self.param)


class DTensorShardedParam(ShardedParam):
    """A DTensor over this rank's shard of one parameter."""

    memory = MemoryIdentity(torch_border.local_of, operator.is_)

    def __init__(
        self,
        name: str,
        owners: Sequence[ParamModuleInfo],
        original: nn.Parameter,
        placement: ParamPlacement,
        local: Tensor,
        group_name: str,
    ) -> None:
        super().__init__(name, owners, trainable=original.requires_grad)
        self._shape = placement.shape
        self._local_shape = tuple(local.shape)
        sharded_param = placement.sharded(local, trainable=original.requires_grad)
        if type(local) is Tensor:
            # Attributes users hang on parameters move along; a subclass keeps its data in there.
            sharded_param.__dict__.update(original.__dict__)
        if original.grad_dtype != original.dtype:
            sharded_param.grad_dtype = original.grad_dtype
        torch_border.move_hooks(original, sharded_param)
        mark_replaced(original, name, group_name)
        self._set_param(sharded_param, group_name)

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """See `ShardedParam`; users may choose it, before or after sharding."""
        return self.param.grad_dtype

    @property
    def local(self) -> Tensor:
        """See `ShardedParam`."""
        return torch_border.local_of(self.param)

    @property
    def versioned(self) -> tuple[Tensor, ...]:
        """See `ShardedParam`."""
        # An operator on a DTensor counts there, one on its local tensor here.
        return self.param, self.local

    def replace_local(self, local: Tensor) -> None:
        """See `ShardedParam`."""
        torch_border.replace_local(self.param, local)

    def fault(self, candidate: Tensor | None) -> str | None:
        """See `ShardedParam`."""
        if not isinstance(candidate, DTensor):
            return f"{self.name}: expected a DTensor, got {type(candidate).__name__}"
        if not isinstance(candidate, nn.Parameter):
            return (
                f"{self.name}: expected a parameter, got a DTensor that is none (torch.func.functional_call cannot "
                "compute with tensors in the place of sharded parameters)"
            )
        if tuple(candidate.shape) != self._shape:
            return f"{self.name}: expected shape {self._shape}, got {tuple(candidate.shape)}"
        expected = torch_border.spec_of(self.param)
        if candidate.placements != expected.placements or candidate.device_mesh != expected.mesh:
            return (
                f"{self.name}: expected placements {expected.placements} on {expected.mesh}, "
                f"got {candidate.placements} on {candidate.device_mesh}"
            )
        local = torch_border.local_of(candidate)
        held = tuple(local.shape)
        # A subclass decides itself what its shards are.
        if type(local) is Tensor and held != self._local_shape:
            return f"{self.name}: expected a part of shape {self._local_shape} on this rank, got {held}"
        return None

    def accumulate_gradient(self, gradient: Tensor) -> None:
        """See `ShardedParam`."""
        param = self.param
        if torch_border.tensor_hooks(param):
            hooked = self._hooked(torch_border.dtensor(gradient, torch_border.spec_of(param)))
            gradient = torch_border.redistributed_local(
                hooked, torch_border.spec_of(param).placements
            )
        if param.grad is None:
            param.grad = torch_border.dtensor(gradient, torch_border.spec_of(param))
        else:
            torch_border.local_of(param.grad).add_(gradient)
        if (
            torch_border.post_accumulate_grad_hooks(param)
            or torch_border.IN_BACKWARD_OPTIMIZERS in param.__dict__
        ):
            _after_accumulation(param)


class PlainShardedParam(ShardedParam):
    """A plain parameter over a part of the shard buffer.

    Full parameters can be installed in its place for a while, outside of training.
    """

    memory = MemoryIdentity(Tensor.data_ptr, operator.eq)

    stands_for_several = False
    """Whether it is one parameter for all of a segment."""
    _unreduced_shape: torch.Size | None = None
    """Shape of the gradient that `show_unreduced` has put into `.grad`, if it has."""
    _reduced_gradient: Tensor | None = None
    """The content of `.grad` before."""

    def __init__(
        self, name: str, owners: Sequence[ParamModuleInfo], local: Tensor, *, trainable: bool
    ) -> None:
        super().__init__(name, owners, trainable=trainable)
        # Not to be asked of the parameter: users may assign data of another shape.
        self._shape, self._strides = tuple(local.shape), local.stride()

    @abstractmethod
    def install_full_params(self, values: Sequence[Tensor]) -> None:
        """Let the modules have these full parameters, one for each of its own."""

    @abstractmethod
    def uninstall_full_params(self) -> list[Tensor]:
        """Put the sharded parameter back on the modules, and return the full ones as they are now."""

    @property
    def local(self) -> Tensor:
        """See `ShardedParam`."""
        return self.param.data

    def replace_local(self, local: Tensor) -> None:
        """See `ShardedParam`."""
        self.param.data = self._shaped(local)

    def fault(self, candidate: Tensor | None) -> str | None:
        """See `ShardedParam`."""
        if not isinstance(candidate, nn.Parameter) or isinstance(candidate, DTensor):
            return f"{self.name}: expected a plain parameter, got {type(candidate).__name__}"
        if tuple(candidate.shape) != self._shape:
            return (
                f"{self.name}: expected a part of shape {self._shape} on this rank, got "
                f"{tuple(candidate.shape)}"
            )
        return None

    def in_buffer_order(self) -> Tensor:
        """See `ShardedParam`."""
        return in_memory_order(self.local, self._strides)

    def accumulate_gradient(self, gradient: Tensor) -> None:
        """See `ShardedParam`."""
        param, shaped = self.param, self._shaped(gradient)
        if torch_border.tensor_hooks(param):
            shaped = self._hooked(shaped)
        if param.grad is None:
            self._have_gradient(shaped)
        else:
            param.grad.add_(shaped)
        _after_accumulation(param)

    def show_unreduced(self, full: Tensor) -> None:
        """Let `.grad` be this rank's own gradient of the full parameters, until `show_reduced`."""
        if self.unreduced is None:
            self._reduced_gradient = self.param.grad
        self._unreduced_shape = full.shape
        self._assign_gradient(full)

    @property
    def unreduced(self) -> Tensor | None:
        """The gradient of `show_unreduced` as it is now; None if it was cleared, or another assigned."""
        found = self.param.grad
        return found if found is not None and found.shape == self._unreduced_shape else None

    def show_reduced(self) -> None:
        """Let `.grad` be what it was before `show_unreduced`; if it was cleared since then, it stays so."""
        if self.unreduced is not None:
            self._assign_gradient(self._reduced_gradient)
        self._unreduced_shape = self._reduced_gradient = None

    def forget_reduced(self) -> None:
        """Let there be no gradient after `show_reduced`: it has been cleared."""
        self._reduced_gradient = None

    def _assign_gradient(self, gradient: Tensor | None) -> None:
        """Let `.grad` be a tensor of any shape, dtype and device."""
        param = self.param
        param.grad = None
        if gradient is None:
            return
        if gradient.shape == param.shape and gradient.device == param.device:
            self._have_gradient(gradient)
        else:
            # torch looks at it when it is assigned, and lets it become another afterwards.
            param.grad = like_param = torch.empty_like(param, dtype=param.grad_dtype)
            like_param.data = gradient

    def _have_gradient(self, gradient: Tensor) -> None:
        if gradient.dtype != self.param.grad_dtype:
            self.param.grad_dtype = gradient.dtype
        self.param.grad = gradient

    def _shaped(self, flat: Tensor) -> Tensor:
        if len(self._shape) == 1:
            return flat
        return flat.as_strided(self._shape, self._strides, flat.storage_offset())


class OrigParamShard(PlainShardedParam):
    """The parameter the user made, whose data are now this rank's piece of it: flat, and maybe empty."""

    def __init__(
        self,
        name: str,
        owners: Sequence[ParamModuleInfo],
        original: nn.Parameter,
        local: Tensor,
        group_name: str,
    ) -> None:
        """Let ``original`` be a parameter over ``local`` from now on."""
        super().__init__(name, owners, local, trainable=original.requires_grad)
        original.grad = None  # it would be of another shape
        original.data = local
        self._sharded_data: Tensor
        self._gradient_before: Tensor | None
        self._sharded_gradient: Tensor | None
        self._set_param(original, group_name)

    def _set_param(self, param: nn.Parameter, group_name: str) -> None:
        torch_border.mark_flattened(param)
        super()._set_param(param, group_name)

    def install_full_params(self, values: Sequence[Tensor]) -> None:
        """See `PlainShardedParam`."""
        self._sharded_data, self._gradient_before = self.param.data, self.param.grad
        self.param.data = values[0]

    def uninstall_full_params(self) -> list[Tensor]:
        """See `PlainShardedParam`."""
        values = [installed_on(self.owners, self.param).data]
        self.param.data = self._sharded_data
        gradient = self.param.grad
        if gradient is not None and gradient is not self._gradient_before:  # of the full one
            self._assign_gradient(self._gradient_before)
        del self._sharded_data, self._gradient_before
        if self.found() is not self.param:  # the user assigned another
            self._install()
        return values

    def install_full_gradient(self, full: Tensor | None) -> None:
        """Give the full parameter that is installed its gradient, until `uninstall_full_gradient`."""
        self._sharded_gradient, self.param.grad = self.param.grad, None
        if full is not None:
            self._have_gradient(full)

    def uninstall_full_gradient(self) -> Tensor | None:
        """Take the full gradient off, and return it as it is now; before `uninstall_full_params`."""
        full, self.param.grad = self.param.grad, None
        return full

    def restore_sharded_gradient(self) -> None:
        """Have the sharded gradient again; after `uninstall_full_params`."""
        if self._sharded_gradient is not None:
            self._have_gradient(self._sharded_gradient)
        del self._sharded_gradient

    def set_gradient(self, part: Tensor | None) -> None:
        """Have this rank's shard of a full gradient, flat, or none."""
        self.param.grad = None
        if part is not None and part.numel():
            self._have_gradient(self._shaped(part))

    def accumulate_gradient(self, gradient: Tensor) -> None:
        """See `ShardedParam`."""
        if gradient.numel():  # an optimizer should not find anything to do here otherwise
            super().accumulate_gradient(gradient)


class ParallelOrigParamShard(OrigParamShard):
    """This rank's flat piece of what tensor parallelism has left here of a parameter.

    A DTensor cannot become a piece, so this is another parameter than the user made. While full
    parameters are installed, modules have a DTensor as before instead of this one.
    """

    def __init__(
        self,
        name: str,
        owners: Sequence[ParamModuleInfo],
        original: nn.Parameter,
        placement: ParamPlacement,
        local: Tensor,
        group_name: str,
    ) -> None:
        """Put a parameter over ``local`` on the modules instead of ``original``."""
        piece = nn.Parameter(local, requires_grad=original.requires_grad)
        piece.__dict__.update(original.__dict__)  # attributes users hang on parameters move along
        super().__init__(name, owners, piece, local, group_name)
        mark_replaced(original, name, group_name)
        self._placement = placement
        self._installed: nn.Parameter

    def install_full_params(self, values: Sequence[Tensor]) -> None:
        """See `PlainShardedParam`."""
        trainable = self.param.requires_grad
        self._installed = cast(
            nn.Parameter, self._placement.unsharded(values[0], trainable=trainable)
        )
        for owner in self.owners:
            owner.install(self._installed)

    def uninstall_full_params(self) -> list[Tensor]:
        """See `PlainShardedParam`."""
        values = [self._placement.local_part(installed_on(self.owners, self._installed)).detach()]
        del self._installed
        self._install()
        return values

    def install_full_gradient(self, full: Tensor | None) -> None:
        """See `OrigParamShard`."""
        if full is not None:
            self._installed.grad = self._placement.as_before(full)

    def uninstall_full_gradient(self) -> Tensor | None:
        """See `OrigParamShard`."""
        full = self._installed.grad
        return None if full is None else self._placement.local_part(full)

    def restore_sharded_gradient(self) -> None:
        """See `OrigParamShard`: it was never hidden."""


def holder_of(param: Tensor) -> ShardedParam | None:
    """Return the sharded parameter that has this parameter on its modules, if there is one."""
    found = _HOLDERS.get(id(param))
    return found if found and found.param is param and found.is_on_modules else None


def group_of(param: Tensor) -> str | None:
    """Name of the group a parameter belongs to, or None."""
    found: str | None = getattr(param, GROUP_MARK, None)
    return found


NOT_TIED = "shared by several modules, on which there are different parameters now"


def are_equal(tensors: Sequence[Any]) -> bool:
    """Whether all are tensors with the same elements."""
    first, *others = tensors or [None]
    return all(
        isinstance(other, Tensor)
        and (first.dtype, first.device, first.shape) == (other.dtype, other.device, other.shape)
        and (first.is_meta or torch.equal(first, other))
        for other in others
    )


def installed_on(owners: Sequence[ParamModuleInfo], installed: nn.Parameter) -> Tensor:
    """Return the value on the owners where ``installed`` was put: itself, or the one that was last assigned there."""
    found = [owner.current() for owner in owners]
    return next(
        (each for each in reversed(found) if each is not None and each is not installed), installed
    )


def unsharded_name(tensor: Tensor) -> str | None:
    """Return the full name of the parameter if ``tensor`` is an unsharded one, or None."""
    return cast("str | None", getattr(tensor, _UNSHARDED_MARK, None))


def mark_replaced(original: Tensor, name: str, group_name: str) -> None:
    """Let `group_of` and `replaced_name` know a parameter that a sharded one replaces."""
    setattr(original, GROUP_MARK, group_name)
    setattr(original, _REPLACED_MARK, name)


def replaced_name(param: Tensor) -> str | None:
    """Return the name of a parameter that a sharded one has replaced, or None."""
    return cast("str | None", getattr(param, _REPLACED_MARK, None))


def mark_unsharded(tensor: Tensor, name: str) -> None:
    """Let `unsharded_name` know an unsharded parameter."""
    setattr(tensor, _UNSHARDED_MARK, name)


def restore_gradients(gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Let parameters have these gradients again, which are in memory still: a replayed graph has written them."""
    for param, gradient in gradients:
        if param.grad is not gradient:
            param.grad = gradient


def reads_gradients(param: nn.Parameter) -> bool:
    """Whether something of the user's runs when a gradient is accumulated."""
    return bool(
        torch_border.post_accumulate_grad_hooks(param)
        or torch_border.tensor_hooks(param)
        or param.__dict__.get(torch_border.IN_BACKWARD_OPTIMIZERS)
    )


def _after_accumulation(param: nn.Parameter) -> None:
    """Run the user's hooks for a complete gradient."""
    hooks = torch_border.post_accumulate_grad_hooks(param)
    if hooks:
        for hook in tuple(hooks.values()):
            hook(param)
    optimizers = param.__dict__.get(torch_border.IN_BACKWARD_OPTIMIZERS)
    if optimizers:
        # torch hangs its own hook on the parameter's node in the graph, where a sharded one never is.
        for optimizer in optimizers:
            optimizer.step()
        param.grad = None
