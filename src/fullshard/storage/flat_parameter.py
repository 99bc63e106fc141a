"""One parameter for all of a wrapped module: `FlatParameter`, and what stands on the modules instead.

`module.weight` is

    between steps              a `ShardedAttribute`: knows shape and dtype, raises an error when it is used
    in forward and backward    a leaf tensor over the gathered memory
    in summon_full_params      a parameter over full data
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import torch_border
from fullshard.errors import LifecycleError
from fullshard.layout.placement import ParamPlacement
from fullshard.storage.sharded_params import (
    NOT_TIED,
    ParamModuleInfo,
    PlainShardedParam,
    are_equal,
    installed_on,
    mark_replaced,
)

_FLAT_MARK = "_fullshard_flat"
"""Attribute of a `FlatParameter`."""


class _FlatParameterMeta(type(nn.Parameter)):  # type: ignore[misc]  # torch declares no metaclass
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, nn.Parameter) and hasattr(instance, _FLAT_MARK)


class FlatParameter(nn.Parameter, metaclass=_FlatParameterMeta):
    """This rank's piece of all parameters of a wrapped module, flattened one after the other.

    Its type is `nn.Parameter`, because optimizers do not use their fast implementations for derived classes;
    `isinstance` still recognises it.
    """

    def __new__(cls, data: Tensor, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        """Make a parameter over ``data``."""
        made = nn.Parameter(data, requires_grad=requires_grad)
        setattr(made, _FLAT_MARK, True)
        return made


class FlatShardedParam(PlainShardedParam):
    """One parameter for all of a segment; the modules have stand-ins for what their parameters were."""

    stands_for_several = True

    def __init__(
        self,
        name: str,
        owner: ParamModuleInfo,
        members: Sequence[tuple[str, Sequence[ParamModuleInfo], nn.Parameter, ParamPlacement]],
        local: Tensor,
        group_name: str,
    ) -> None:
        """Register a `FlatParameter` over ``local`` at ``owner``, instead of the members at theirs."""
        trainable = members[0][2].requires_grad
        super().__init__(name, [owner], local, trainable=trainable)
        self._members = [tuple(owners) for _, owners, _, _ in members]
        self._placements = [placement for _, _, _, placement in members]
        self._shapes = [
            (name, tuple(original.shape), original.stride()) for name, _, original, _ in members
        ]
        self._stand_ins: dict[ParamModuleInfo, Tensor] = {}
        self._installed: list[nn.Parameter] = []
        for member_name, _, original, _ in members:
            mark_replaced(original, member_name, group_name)
        self._put_stand_ins(local)
        flat_param = FlatParameter(local, requires_grad=trainable)
        self._mark(flat_param)
        self._set_param(flat_param, group_name)

    def _mark(self, flat_param: Tensor) -> None:
        """Say of a parameter that it is this flat parameter: to `FlatParameter`, and to other programs."""
        setattr(flat_param, _FLAT_MARK, True)
        torch_border.mark_flat_parameter(flat_param, [name for name, _, _ in self._shapes])

    def value_on(self, owner: ParamModuleInfo) -> Tensor:
        """See `ShardedParam`."""
        return self._stand_ins[owner]

    def values_on_modules(self) -> list[tuple[ParamModuleInfo, Tensor]]:
        """See `ShardedParam`."""
        return [*super().values_on_modules(), *self._stand_ins.items()]

    def assigned_members(self) -> dict[int, Any]:
        """See `ShardedParam`."""
        found = {index: self._others_of(owners) for index, owners in enumerate(self._members)}
        return {index: others[0] for index, others in found.items() if others}

    def _others_of(self, owners: Sequence[ParamModuleInfo]) -> list[Any]:
        """Return the values on a member's owners that are not its stand-in."""
        values = {owner: getattr(owner.module, owner.name, None) for owner in owners}
        return [value for owner, value in values.items() if value is not self._stand_ins[owner]]

    def fault(self, candidate: Tensor | None) -> str | None:
        """See `ShardedParam`."""
        faults = [super().fault(candidate)]
        # Both may have been cast.
        dtype = self.param.dtype if candidate is None else candidate.dtype
        for index, value in self.assigned_members().items():
            name, shape, _ = self._shapes[index]
            foreign = isinstance(value, DTensor) and not self._placements[index].is_as_before(value)
            if not isinstance(value, Tensor) or foreign or value.is_meta:
                faults.append(f"{name}: expected a plain tensor, got {type(value).__name__}")
            elif tuple(value.shape) != shape or value.dtype != dtype:
                faults.append(
                    f"{name}: expected shape {shape} and {dtype}, the whole parameter, got "
                    f"{tuple(value.shape)} and {value.dtype}"
                )
            elif not are_equal(self._others_of(self._members[index])):
                faults.append(f"{name}: {NOT_TIED}")
        return "\n  ".join(each for each in faults if each) or None

    def put_stand_ins_back(self) -> None:
        """Put the stand-ins back on the modules, after something else was assigned."""
        for owner, stand_in in self._stand_ins.items():
            owner.install(stand_in)

    def replace_local(self, local: Tensor) -> None:
        """See `ShardedParam`."""
        super().replace_local(local)
        known = next(iter(self._stand_ins.values()))
        if (known.dtype, known.device) != (local.dtype, local.device):
            self._put_stand_ins(local)

    def _put_stand_ins(self, local: Tensor) -> None:
        """Put new stand-ins on the modules, in the dtype and on the device of ``local``."""
        for owners, (name, shape, strides) in zip(self._members, self._shapes, strict=True):
            stand_in = ShardedAttribute.of(name, shape, strides, local)
            for owner in owners:
                self._stand_ins[owner] = stand_in
                owner.install(stand_in)

    def unsharded(self, full: Tensor, placement: ParamPlacement, *, trainable: bool) -> Tensor:
        """See `ShardedParam`."""
        # No parameter: modules would list it beside the flat one.
        return placement.unsharded(full, trainable=trainable, as_parameter=False)

    def install_full_params(self, values: Sequence[Tensor]) -> None:
        """See `PlainShardedParam`."""
        for owner in self.owners:
            owner.remove()
        self._installed = [
            cast(nn.Parameter, placement.unsharded(value, trainable=self.param.requires_grad))
            for placement, value in zip(self._placements, values, strict=True)
        ]
        for owners, param in zip(self._members, self._installed, strict=True):
            for owner in owners:
                owner.install(param)

    def uninstall_full_params(self) -> list[Tensor]:
        """See `PlainShardedParam`."""
        values = [
            placement.local_part(installed_on(owners, param).data)
            for placement, owners, param in zip(
                self._placements, self._members, self._installed, strict=True
            )
        ]
        self._installed = []
        self.put_stand_ins_back()
        self._install()
        return values

    def adopt(self, candidate: Tensor, group_name: str) -> None:
        """See `ShardedParam`."""
        self._mark(candidate)  # moving makes another parameter
        super().adopt(candidate, group_name)


class ShardedAttribute(Tensor):
    """Stands where a parameter was while it is part of a `FlatParameter`: knows its shape, has no data."""

    _name: str

    @staticmethod
    def of(
        name: str, shape: Sequence[int], strides: Sequence[int], like: Tensor
    ) -> ShardedAttribute:
        """Return a stand-in for a parameter, with the dtype and device of ``like``."""
        made = torch_border.tensor_without_memory(ShardedAttribute, shape, strides, like)
        made._name = name
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}({self._name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves the function out
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        names = [arg._name for arg in args if isinstance(arg, cls)]
        raise LifecycleError(
            f"{', '.join(names) or 'A parameter'} is sharded now: it has no data outside of its module's forward. "
            "Read or write it within FullyShardedDataParallel.summon_full_params, or wrap the module that "
            f"uses it, whose forward gathers it ({function})."
        )
