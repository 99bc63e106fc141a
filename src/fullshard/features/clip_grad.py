"""Norms of sharded gradients, and clipping to them.

    1. gradients by spread   the process groups over whose ranks a gradient is divided; () if each rank has all of it
    2. this rank's part      per spread one number: a sum of powers, a maximum or a minimum (`gradient_norms`)
    3. all ranks' parts      ... reduced over each of the spread's groups
    4. the norm              of all spreads together, the same on all ranks; gradients are scaled in place

Parts are plain tensors in all steps: no operator on a DTensor. Every rank takes part in every reduction, also
with no gradients, or with empty ones: the parameters alone decide which reductions there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fullshard import torch_border
from fullshard.divergence import monitor
from fullshard.engine.known_groups import groups_of
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.state import named_states
from fullshard.errors import ConfigurationError, LifecycleError, UsageError
from fullshard.features.gradient_norms import reduction_for, wide_dtype
from fullshard.layout.placement import ParamPlacement
from fullshard.storage.flat_parameter import FlatParameter
from fullshard.storage.sharded_params import PlainShardedParam, unsharded_name
from fullshard.transport.streams import is_capturing
from fullshard.transport.tags import tag

__all__ = ["clip_grad_norm_"]

Spread = tuple[ProcessGroup, ...]
"""The groups over which the elements of a tensor are divided."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that their norm, over all parameters and ranks, is at most ``max_norm``.

    `torch.nn.utils.clip_grad_norm_` for models of `fully_shard` and of the wrapper: sharded, replicated, ignored
    and tensor-parallel parameters together, on any meshes, with shards of any size. Call it on all ranks.

    Args:
        parameters: A model, or the parameters whose gradients are clipped.
        max_norm: The largest norm. ``inf`` computes the norm and changes nothing.
        norm_type: Which norm: any number, ``inf`` for the largest absolute value, ``-inf`` for the
            smallest. As in torch, 0 counts the parameters with a gradient that is not zero.
        error_if_nonfinite: Raise an error on all ranks, instead of scaling, if the norm is NaN or
            infinite.
        foreach: Whether gradients are treated many at a time; by default they are.

    Returns:
        The norm before, on every rank: a float32 scalar, float64 if there are parameters of that dtype.

    Raises:
        LifecycleError: the norm is not finite, and ``error_if_nonfinite`` is set.
        UsageError: ``error_if_nonfinite`` is set in the capture of a CUDA graph.
    """
    if error_if_nonfinite and is_capturing():
        raise UsageError(
            "error_if_nonfinite makes the host read the norm, which cannot be captured in a CUDA graph. Leave it out in a "
            "captured step, and look at the norm that is returned after the replay."
        )
    monitor.install()
    clipping = Clipping(parameters, norm_type)
    norm = clipping.norm(max_norm, foreach=foreach is not False)
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise LifecycleError(
            f"The norm of order {float(norm_type)} of the gradients must be finite, since error_if_nonfinite is set, but "
            f"it is {norm.item()}. Skip the step, or pass error_if_nonfinite=False to scale them by it."
        )
    clipping.clip(norm, max_norm, foreach=foreach is not False)
    return norm


@dataclass(slots=True)
class _Parts:
    """This rank's parts of gradients with one spread, on one device."""

    measured: list[Tensor | None] = field(default_factory=list)
    """One entry per parameter; None if it has no gradient here."""
    scaled: list[Tensor] = field(default_factory=list)


class Clipping:
    """The gradients of one call, and their norm."""

    def __init__(
        self, parameters: nn.Module | Tensor | Iterable[Tensor], norm_type: float = 2.0
    ) -> None:
        self._order = float(norm_type)
        if math.isnan(self._order):
            raise ConfigurationError("norm_type must be a number, inf or -inf, got nan.")
        params = _params_of(parameters)
        self._parts: dict[tuple[Spread, torch.device], _Parts] = {}
        wide = any(param.dtype in (torch.float64, torch.complex128) for param in params)
        self._dtype = torch.float64 if wide else torch.float32
        self._collect(params)

    @property
    def gradients(self) -> list[Tensor]:
        """This rank's parts of the gradients."""
        return [gradient for parts in self._parts.values() for gradient in parts.scaled]

    def _collect(self, params: list[Tensor]) -> None:
        # Groups in the order in which they were made, with all their parameters: which reductions there are, and in
        # which order, must not depend on what a rank passes first, or leaves out for lack of a gradient.
        given = {id(param): param for param in params}
        for group in sorted(groups_of(params), key=lambda each: each.serial_number):
            parallel = any(param.placement.parallel for param in group.params)
            for sharded_param in group.sharded_params:
                is_given = given.pop(id(sharded_param.param), None) is not None
                if parallel and isinstance(sharded_param, PlainShardedParam):
                    self._add_members(sharded_param, group, is_given=is_given)
                else:
                    self._add(sharded_param.param, group, is_given=is_given)
        for param in given.values():
            self._add(param, None, is_given=True)

    def _add(self, param: Tensor, group: FSDPParamGroup | None, *, is_given: bool) -> None:
        device = _device_of(param) if group is None else group.device
        parts = self._parts.setdefault((_spread_of(param, group), device), _Parts())
        gradient = param.grad
        if gradient is None or not is_given:
            parts.measured.append(None)
            return
        measured, scaled = _part_of(param, gradient, group)
        parts.measured.append(measured)
        parts.scaled.append(scaled)

    def _add_members(
        self, sharded_param: PlainShardedParam, group: FSDPParamGroup, *, is_given: bool
    ) -> None:
        """Add what stands for parameters of tensor parallelism, which divides some of them further."""
        gradient = sharded_param.param.grad if is_given else None
        rank, scaled = group.mesh_info.shard_mesh_rank, gradient
        for index, member in enumerate(group.params):
            if member.sharded_param is not sharded_param:
                continue
            spread = (*_spread_of(sharded_param.param, group), *_spread_before(member.placement))
            parts = self._parts.setdefault((spread, group.device), _Parts())
            if gradient is None:
                parts.measured.append(None)
                continue
            measured = gradient
            if isinstance(sharded_param.param, FlatParameter):
                is_piece = gradient.shape == sharded_param.param.shape
                slot, piece = group.layout.slots[index], group.layout.piece(index, rank)
                start, numel = (piece.offset, piece.numel) if is_piece else (slot.start, slot.numel)
                measured = gradient.narrow(0, start, numel)
            parts.measured.append(measured)
            if scaled is not None:  # once for all members
                parts.scaled.append(scaled)
                scaled = None

    def norm(self, max_norm: float, *, foreach: bool = True) -> Tensor:
        """Return the norm of all gradients on all ranks. ``max_norm``, to which they will be clipped, must be equal on all."""
        reduce = reduction_for(self._order)
        # To some digits: a program may have computed it, and its last bits scale nothing.
        name = f"gradient norm (clip_grad_norm_ to {float(max_norm):.4g}, order {self._order:g})"
        total: Tensor | None = None
        for (spread, device), parts in self._parts.items():
            own = reduce.own(parts.measured, wide_dtype(device), device, foreach=foreach)
            for process_group in spread:
                reduce.over(own, process_group, tag(name))
            value = reduce.value(own)
            total = value if total is None else reduce.both(total, value.to(total.device))
        if total is None:
            return torch.zeros((), dtype=self._dtype)
        return reduce.norm(total).to(self._dtype)

    def clip(self, norm: Tensor, max_norm: float, *, foreach: bool = True) -> None:
        """Scale the gradients by the factor that brings ``norm`` down to ``max_norm``."""
        max_norm = float(max_norm)
        if not max_norm >= 0:
            raise ConfigurationError(f"max_norm must not be negative, or nan, got {max_norm}.")
        if max_norm == math.inf:
            return
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in self.gradients:
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, _), together in by_kind.items():
            factor = coefficient.to(device)
            if foreach:
                torch._foreach_mul_(together, factor)
            else:
                for gradient in together:
                    gradient.mul_(factor)


# --- 1. gradients by spread -----------------------------------------------------------------------


def _params_of(parameters: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that are meant, each once; sharded parameters, not unsharded ones."""
    if isinstance(parameters, Tensor):
        params = [parameters]
    elif isinstance(parameters, nn.Module):
        # Modules may have unsharded parameters now; gradients are on the sharded ones.
        groups = [group for state in named_states(parameters) for group in state.groups]
        for group in groups:
            group.notice_replacements()
        params = [sharded_param.param for group in groups for sharded_param in group.sharded_params]
        params += [param for param in parameters.parameters() if unsharded_name(param) is None]
    else:
        params = list(parameters)
    wrong = sorted({type(param).__name__ for param in params if not isinstance(param, Tensor)})
    if wrong:
        raise ConfigurationError(
            f"clip_grad_norm_ takes a module, a parameter or parameters, got also {wrong}. Pass model or "
            "model.parameters()."
        )
    unsharded = [name for param in params if (name := unsharded_name(param))]
    if unsharded:
        raise LifecycleError(
            f"Gradients are on sharded parameters, but these are unsharded now: {unsharded}. Pass the model itself, or "
            "call reshard() of its modules before model.parameters()."
        )
    return list({id(param): param for param in params}.values())


def _spread_of(param: Tensor, group: FSDPParamGroup | None) -> Spread:
    """Return the process groups over which a parameter's elements, and so its gradient's, are divided."""
    if isinstance(param, DTensor):
        spec = torch_border.spec_of(param)
        return tuple(
            spec.mesh.get_group(axis)
            for axis, placement in enumerate(spec.placements)
            if spec.mesh.size(axis) > 1 and not placement.is_replicate()
        )
    if group is None or group.mesh_info.shard_process_group is None or group.layout.world == 1:
        return ()
    return (group.mesh_info.shard_process_group,)


def _spread_before(placement: ParamPlacement) -> Spread:
    """Return the process groups over which tensor parallelism had divided a parameter before it was sharded."""
    mesh = placement.unsharded_mesh
    if mesh is None:
        return ()
    return tuple(
        mesh.get_group(axis)
        for axis, each in enumerate(placement.unsharded_placements)
        if mesh.size(axis) > 1 and not each.is_replicate()
    )


def _device_of(param: Tensor) -> torch.device:
    return torch_border.local_of(param).device if isinstance(param, DTensor) else param.device


def _part_of(
    param: Tensor, gradient: Tensor, group: FSDPParamGroup | None
) -> tuple[Tensor, Tensor]:
    """Return what of a gradient this rank measures, and what it scales: mostly the same."""
    if isinstance(gradient, DTensor):
        local = torch_border.local_of(gradient)
        if isinstance(param, DTensor) and gradient.placements != param.placements:
            # Tensor parallelism leaves unfinished sums, say: scaling them scales the sum.
            return torch_border.redistributed_local(gradient, param.placements), local
        return local, local
    if gradient.is_sparse:
        values = torch_border.sparse_values(gradient.coalesce())
        return values, torch_border.sparse_values(gradient)
    if group is not None and isinstance(param, FlatParameter) and gradient.shape == param.shape:
        # The last ranks' pieces may end with padding.
        used = sum(slot.numel for slot in group.layout.slots)
        own = used - group.mesh_info.shard_mesh_rank * param.numel()
        return gradient[: max(0, own)], gradient
    return gradient, gradient
