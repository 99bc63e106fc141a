"""Ranges of shard memory that an elementwise optimizer can update as one tensor.

The parameters of a group lie one after the other in its shard buffer. Their reduced gradients lie in the same order, at
the same distances, in the memory of the reduction. A **fused shard** is a range of the shard buffer over parameters that
are treated alike. Its gradient, and each state that an optimizer keeps of it, is one tensor; those of the parameters are
views of it:

    fused shard   | w row 0 | w row 1 |  ?  | b 0..1 |      weight (3, 4) and bias (4,), rank 0 of 2
    gradient      | w row 0 | w row 1 |  ?  | b 0..1 |
    exp_avg       | w row 0 | w row 1 |  ?  | b 0..1 |

Between parameters is padding. Its values are arbitrary, perhaps NaN: an elementwise optimizer updates them, too, and
nothing reads them.

Each step compares the addresses of gradients with this picture. Gradients that lie otherwise are copied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import torch_border
from fullshard.engine.known_groups import groups_of
from fullshard.errors import ConfigurationError, LifecycleError
from fullshard.storage.sharded_params import ShardedParam, group_of


class UpdatedTensor:
    """A tensor over shard memory that an optimizer updates in the place of parameters."""

    params: list[nn.Parameter]
    tensor: nn.Parameter
    """The tensor that an optimizer updates."""
    _gradient_dtype: torch.dtype
    """The dtype of gradients in the last step; reading it from `tensor` takes longer."""

    def _set_gradient(self, gradient: Tensor | None) -> None:
        """Let the optimizer find this gradient."""
        if gradient is not None and gradient.dtype != self._gradient_dtype:
            self._gradient_dtype = self.tensor.grad_dtype = gradient.dtype
        self.tensor.grad = gradient

    @property
    def has_gradient(self) -> bool:
        """Whether the parameters have gradients in this step."""
        return self.tensor.grad is not None

    def drop_gradient(self) -> None:
        """Release the gradient that was taken for this step."""
        self.tensor.grad = None

    def check_state(self, key: str, value: object) -> None:
        """Refuse a state that is neither a tensor like `tensor` nor a number."""
        if isinstance(value, Tensor) and value.ndim and value.shape != self.tensor.shape:
            raise ConfigurationError(
                "A state of an elementwise optimizer must be a tensor like the parameter or one number, but "
                f"{key!r} has shape {tuple(value.shape)} for {self.tensor.numel()} elements. Use the optimizer itself, "
                "without ShardedOptimizer."
            )


class FusedShard(UpdatedTensor):
    """Parameters of one group that are neighbours in its shard buffer, and the range they fill."""

    def __init__(self, sharded_params: Sequence[ShardedParam], views: Sequence[Tensor]) -> None:
        """Fuse the memory of sharded parameters, which are over ``views``."""
        self.params = [sharded_param.param for sharded_param in sharded_params]
        self._names = [sharded_param.name for sharded_param in sharded_params]
        self._of_dtensors = isinstance(self.params[0], DTensor)
        locals_ = [local_of(param) for param in self.params]
        self._addresses = [local.data_ptr() for local in locals_]
        self._shapes = [(local.shape, local.stride()) for local in locals_]
        filled = [index for index, local in enumerate(locals_) if local.numel()] or [0]
        self._filled = filled
        """Indices of parameters of which this rank holds elements: only these have an address."""
        first, last = views[filled[0]], views[filled[-1]]
        begin = int(first.storage_offset())
        self.starts = [int(view.storage_offset()) - begin if view.numel() else 0 for view in views]
        """The first element of each parameter in the fused shard."""
        fused = locals_[0]
        if len(sharded_params) > 1 or not fused.ndim:
            # One dimension at least, so that the state of one element differs from a number.
            numel = int(last.storage_offset()) + last.numel() - begin
            fused = first.as_strided((numel,), (1,), begin)
        trainable = fused.is_floating_point() or fused.is_complex()
        self.tensor = nn.Parameter(fused, requires_grad=trainable)
        self._numel = fused.numel()
        self._filled_starts = [self.starts[index] for index in filled]
        self._filled_strides = [self._shapes[index][1] for index in filled]
        self._is_param = fused is locals_[0]
        """Whether `tensor` is the local tensor of a single parameter."""
        self._gradient_dtype = fused.dtype

    def has_moved(self) -> bool:
        """Return whether parameters lie elsewhere now."""
        params = self.params
        locals_ = torch_border.locals_of(params) if self._of_dtensors else params
        return [local.data_ptr() for local in locals_] != self._addresses

    def gradients(self) -> list[Tensor | None]:
        """Return this rank's part of the parameters' gradients."""
        if self._of_dtensors:
            return torch_border.local_gradients_of(self.params)
        return [param.grad for param in self.params]

    @torch.no_grad()
    def take_gradients(self) -> bool:
        """Set the gradient of `tensor` to the parameters' gradients, or to None if they have none.

        Returns:
            Whether it was possible. It is not if parameters lie elsewhere now, if only some have gradients, or if
            gradients have several dtypes.
        """
        if self.has_moved():
            return False
        gradients = self.gradients()
        present = [gradient for gradient in gradients if gradient is not None]
        dtypes = {gradient.dtype for gradient in present}
        if len(dtypes) > 1 or 0 < len(present) < len(self.params):
            return False
        self._set_gradient(self.fuse(present) if present else None)
        return True

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        """Return one tensor over the parameters' parts: a view if they lie in one storage as parameters do, else a copy."""
        if self._is_param:
            return parts[0]
        filled = parts
        if len(self._filled) < len(parts):
            filled = [parts[index] for index in self._filled]
        first = filled[0]
        itemsize, offset = first.itemsize, int(first.storage_offset())
        room = first.untyped_storage().nbytes() - offset * itemsize
        # Parts in neighbouring storages may have the same distances, but the first storage is too short then.
        if (
            room >= self._numel * itemsize
            and [part.stride() for part in filled] == self._filled_strides
            and self._have_distances(filled, itemsize)
        ):
            return first.as_strided((self._numel,), (1,), offset)
        fused = first.new_empty(self.tensor.shape)
        torch._foreach_copy_(self._split(fused), list(parts))
        return fused

    def _have_distances(self, filled: Sequence[Tensor], itemsize: int) -> bool:
        """Return whether parts are as far from each other as the parameters are."""
        addresses = torch_border.addresses_of(filled)
        base = addresses[0]
        return addresses == [base + start * itemsize for start in self._filled_starts]

    def _split(self, fused: Tensor) -> list[Tensor]:
        """Return the parameters' parts of a tensor over the fused shard, in their local shapes."""
        if len(self.params) == 1:
            return [fused.view(self._shapes[0][0])]
        return [
            fused.as_strided(shape, strides, int(fused.storage_offset()) + start)
            for (shape, strides), start in zip(self._shapes, self.starts, strict=True)
        ]

    # --- state ------------------------------------------------------------------------------------

    def split_state(self, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return an optimizer's state of `tensor` as the states of the parameters.

        A state like `tensor` is split into views, each of its parameter's type. Of any other state each parameter gets
        a copy.
        """
        states: list[dict[str, Any]] = [{} for _ in self.params]
        for key, value in state.items():
            self.check_state(key, value)
            if isinstance(value, Tensor) and value.shape == self.tensor.shape:
                parts: list[Any] = [
                    like_param(param, part)
                    for param, part in zip(self.params, self._split(value), strict=True)
                ]
            else:
                parts = [copy.deepcopy(value) for _ in self.params]
            for own, part in zip(states, parts, strict=True):
                own[key] = part
        return states

    def fuse_states(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the state of `tensor` from those of the parameters, which are equal in `kind_of_state`."""
        misplaced = [
            f"{name}: {key!r}"
            for name, param, state in zip(self._names, self.params, states, strict=True)
            for key, value in state.items()
            if _is_like(param, value) and not _is_placed_like(param, value)
        ]
        if misplaced:
            raise ConfigurationError(
                "The optimizer state of a sharded parameter must be on the parameter's mesh, but these are not:\n  "
                + "\n  ".join(misplaced)
                + "\nLoad full tensors, and tensors on other meshes, with "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict."
            )
        return {
            key: self.fuse(
                [
                    _local_part(param, state[key])
                    for param, state in zip(self.params, states, strict=True)
                ]
            )
            if _is_like(self.params[0], value)
            else value
            for key, value in states[0].items()
        }


def plan_fused_shards(kinds: Mapping[nn.Parameter, Hashable]) -> list[FusedShard]:
    """Return the longest possible fused shards of parameters of one kind.

    These parameters are in none: those of no group, those that no shard buffer holds, plain tensors without neighbours,
    and 0-d plain tensors, whose state could be a number. `check_shards` has been called.
    """
    ranges: list[list[tuple[ShardedParam, Tensor]]] = []
    for group in groups_of(kinds):
        open_kind: Hashable = None
        for sharded_param, view in group.shards.shard_views_in_order():
            param = sharded_param.param
            if param not in kinds or not (param.ndim or isinstance(param, DTensor)):
                open_kind = None
                continue
            kind = (kinds[param], param.dtype)
            if kind != open_kind:
                ranges.append([])
            open_kind = kind
            ranges[-1].append((sharded_param, view))
    return [
        FusedShard([sharded_param for sharded_param, _ in each], [view for _, view in each])
        for each in ranges
        if len(each) > 1 or isinstance(each[0][0].param, DTensor)
    ]


def check_shards(params: Collection[nn.Parameter]) -> None:
    """Take over what users have done to shards; raise an error unless an optimizer can update the parameters now."""
    groups = groups_of(params)
    for group in groups:
        if group.full_params_installed:
            raise LifecycleError(
                f"An optimizer updates shards, but group {group.name!r} has its full parameters now. Build the optimizer, load "
                "its state and step outside of FullyShardedDataParallel.summon_full_params."
            )
        group.notice_replacements()
    current = {sharded_param.param for group in groups for sharded_param in group.sharded_params}
    stale = [p for p in params if group_of(p) is not None and p not in current]
    if stale:
        raise LifecycleError(
            "An optimizer must have the parameters that are on the modules, but these were replaced there: by sharding, by "
            "an assignment, or by load_state_dict(assign=True):\n  "
            + "\n  ".join(f"shape {tuple(p.shape)}, group {group_of(p)!r}" for p in stale)
            + "\nBuild the optimizer after that."
        )


def kind_of_gradient(param: nn.Parameter) -> torch.dtype | None:
    """Return a key that must be equal for parameters to be updated together in this step."""
    return None if param.grad is None else param.grad.dtype


def kind_of_state(param: nn.Parameter, state: Mapping[str, Any] | None) -> Hashable:
    """Return a key that must be equal for parameters to be in one fused shard: all of their states but the elements."""
    if state is None:
        return None
    return frozenset(
        (key, value.dtype if _is_like(param, value) else _hashable(value))
        for key, value in state.items()
    )


def _hashable(value: object) -> Hashable:
    if isinstance(value, Tensor):
        return (value.dtype, value.device, value.item() if value.numel() == 1 else id(value))
    return value if isinstance(value, Hashable) else id(value)


def _is_like(param: nn.Parameter, value: object) -> bool:
    """Return whether a state has one value for each of the parameter's elements, and is not a number."""
    if not isinstance(value, Tensor) or value.shape != param.shape:
        return False
    return param.ndim > 0 or isinstance(value, DTensor)


def _is_placed_like(param: nn.Parameter, value: Tensor) -> bool:
    if isinstance(param, DTensor):
        return isinstance(value, DTensor) and value.device_mesh == param.device_mesh
    return not isinstance(value, DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: the local part of a DTensor, or all of it."""
    return torch_border.local_of(tensor) if isinstance(tensor, DTensor) else tensor


def _local_part(param: nn.Parameter, value: Tensor) -> Tensor:
    """Return this rank's part of a state, with the placements of its parameter."""
    if not isinstance(param, DTensor):
        return value
    return torch_border.redistributed_local(value, param.placements)


like_param: Callable[[nn.Parameter, Tensor], Tensor] = torch_border.like_param
"""Returns a tensor of the parameter's type over a local part."""
