"""Ranges of shard memory that an elementwise optimizer can update as one tensor.

The parameters of a group lie one after the other in its shard buffer, and their reduced gradients lie
in the same order, at the same distances, in the memory they were reduced into. A **run** is a range of
the shard buffer over parameters that are treated alike; its gradient, and each state an optimizer keeps
of it, is one tensor, of which the parameters' own are views:

    run         | w row 0 | w row 1 |  ?  | b 0..1 |      weight (3, 4) and bias (4,), rank 0 of 2
    gradient    | w row 0 | w row 1 |  ?  | b 0..1 |
    exp_avg     | w row 0 | w row 1 |  ?  | b 0..1 |

Between parameters is padding. Its values are arbitrary, NaN maybe: an elementwise optimizer carries
them along, and nobody reads them.

That gradients lie so is verified by their addresses in each step. Where they do not, they are copied.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import torch_border
from fullshard.engine.param_group import groups_of
from fullshard.errors import ConfigurationError, LifecycleError
from fullshard.storage.sharded_params import ShardedParam, group_of


class FusedShard:
    """Parameters of one group that are neighbours in its shard buffer, and the range they fill."""

    def __init__(self, sharded_params: Sequence[ShardedParam], views: Sequence[Tensor]) -> None:
        """Over the memory ``views``, which the sharded parameters are over."""
        self.params = [sharded_param.param for sharded_param in sharded_params]
        self._names = [sharded_param.name for sharded_param in sharded_params]
        self._of_dtensors = isinstance(self.params[0], DTensor)
        locals_ = [_local(param) for param in self.params]
        self._addresses = [local.data_ptr() for local in locals_]
        self._shapes = [(local.shape, local.stride()) for local in locals_]
        filled = [index for index, local in enumerate(locals_) if local.numel()] or [0]
        self._filled = filled
        """Those of which this rank holds something: only they have an address."""
        first, last = views[filled[0]], views[filled[-1]]
        begin = int(first.storage_offset())
        self._starts = [int(view.storage_offset()) - begin if view.numel() else 0 for view in views]
        """Elements of the run before each parameter."""
        whole = locals_[0]
        if len(sharded_params) > 1 or not whole.ndim:
            # At least one dimension, to tell an element's state from a number.
            numel = int(last.storage_offset()) + last.numel() - begin
            whole = first.as_strided((numel,), (1,), begin)
        trainable = whole.is_floating_point() or whole.is_complex()
        self.tensor = nn.Parameter(whole, requires_grad=trainable)
        """What an optimizer updates."""
        self._is_param = whole is locals_[0]
        """Whether that is the one parameter's own local tensor."""
        self._gradient_dtype = whole.dtype
        """That of gradients in the last step; asking `tensor` takes longer."""

    @torch.no_grad()
    def take_gradients(self) -> bool:
        """Let `tensor` have the parameters' gradients, or none if they have none.

        False if there is no such tensor now: the parameters are elsewhere, or differ in what gradients they have.
        """
        params = self.params
        locals_ = torch_border.locals_of(params) if self._of_dtensors else params
        if [local.data_ptr() for local in locals_] != self._addresses:
            return False
        gradients = (
            torch_border.local_gradients_of(params)
            if self._of_dtensors
            else [param.grad for param in params]
        )
        present = [gradient for gradient in gradients if gradient is not None]
        dtypes = {gradient.dtype for gradient in present}
        if len(dtypes) > 1 or 0 < len(present) < len(params):
            return False
        for dtype in dtypes - {self._gradient_dtype}:
            self._gradient_dtype = self.tensor.grad_dtype = dtype
        self.tensor.grad = self.joined(present) if present else None
        return True

    @property
    def has_gradient(self) -> bool:
        """Whether the parameters have gradients in this step."""
        return self.tensor.grad is not None

    def drop_gradient(self) -> None:
        """Let go of what `take_gradients` took."""
        self.tensor.grad = None

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """One tensor over parts of the parameters' local shapes: the memory they lie in, or a copy.

        They lie in it if it is one storage, and their distances are those of the parameters.
        """
        if self._is_param:
            return parts[0]
        first = parts[self._filled[0]]
        base, itemsize = first.data_ptr(), first.itemsize
        room = first.untyped_storage().nbytes() - int(first.storage_offset()) * itemsize
        # Neighbouring storages may have the right distances, too, but the first of them has not the room.
        if room >= self.tensor.numel() * itemsize and all(
            parts[index].data_ptr() - base == self._starts[index] * itemsize
            and parts[index].stride() == self._shapes[index][1]
            for index in self._filled
        ):
            return first.as_strided(self.tensor.shape, (1,), first.storage_offset())
        whole = first.new_empty(self.tensor.shape)
        torch._foreach_copy_(self._split(whole), list(parts))
        return whole

    def _split(self, whole: Tensor) -> list[Tensor]:
        """The parameters' parts of a tensor over the run, in their local shapes."""
        if len(self.params) == 1:
            return [whole.view(self._shapes[0][0])]
        return [
            whole.as_strided(shape, strides, int(whole.storage_offset()) + start)
            for (shape, strides), start in zip(self._shapes, self._starts, strict=True)
        ]

    # --- state ------------------------------------------------------------------------------------

    def states_of_params(self, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        """An optimizer's state of `tensor` as the states of the parameters.

        What has an element for each of the run's is shown as views, of the parameters' own type; all else
        belongs to each of them alike, and each gets a copy.
        """
        states: list[dict[str, Any]] = [{} for _ in self.params]
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == self.tensor.shape:
                parts: list[Any] = [
                    like_param(param, part)
                    for param, part in zip(self.params, self._split(value), strict=True)
                ]
            elif isinstance(value, Tensor) and value.ndim:
                raise ConfigurationError(
                    f"An elementwise optimizer keeps a tensor like the parameter, or one number; its {key!r} has shape "
                    f"{tuple(value.shape)} for {self.tensor.numel()} elements. Use the optimizer itself, without "
                    "ShardedOptimizer."
                )
            else:
                parts = [copy.deepcopy(value) for _ in self.params]
            for own, part in zip(states, parts, strict=True):
                own[key] = part
        return states

    def state_of_run(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The other way round; the states agree in `kind_of_state`."""
        strange = [
            f"{name}: {key!r}"
            for name, param, state in zip(self._names, self.params, states, strict=True)
            for key, value in state.items()
            if _is_like(param, value) and not _is_spread_like(param, value)
        ]
        if strange:
            raise ConfigurationError(
                "The optimizer state of a sharded parameter must be spread over the same mesh as the parameter; these "
                "are not:\n  "
                + "\n  ".join(strange)
                + "\nLoad whole tensors, and those of other meshes, with "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict."
            )
        return {
            key: self.joined(
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
    """The longest runs of parameters of one kind, out of those given.

    Parameters in none of them are best left to themselves: those of no group, those that no shard buffer
    holds, plain ones without neighbours, and plain ones without dimensions, whose state could be a number.
    """
    groups = groups_of(kinds)
    for group in groups:
        if group.full_params_installed:
            raise LifecycleError(
                f"The parameters of group {group.name!r} are shown whole now, and an optimizer updates shards. Make "
                "the optimizer, load its state, and step, outside of FullyShardedDataParallel.summon_full_params."
            )
        group.notice_replacements()
    _check_current(
        kinds, {sharded_param.param for group in groups for sharded_param in group.sharded_params}
    )
    runs: list[list[tuple[ShardedParam, Tensor]]] = []
    for group in groups:
        open_kind: Hashable = None
        for sharded_param, view in group.shards.shard_views_in_order():
            param = sharded_param.param
            if param not in kinds or not (param.ndim or isinstance(param, DTensor)):
                open_kind = None
                continue
            kind = (kinds[param], param.dtype)
            if kind != open_kind:
                runs.append([])
            open_kind = kind
            runs[-1].append((sharded_param, view))
    return [
        FusedShard([sharded_param for sharded_param, _ in run], [view for _, view in run])
        for run in runs
        if len(run) > 1 or isinstance(run[0][0].param, DTensor)
    ]


def _check_current(params: Mapping[nn.Parameter, Hashable], current: set[nn.Parameter]) -> None:
    stale = [p for p in params if group_of(p) is not None and p not in current]
    if stale:
        raise LifecycleError(
            "An optimizer updates the parameters that are on the modules; these were replaced there, by sharding, or "
            "by another that was assigned or loaded with assign=True:\n  "
            + "\n  ".join(f"shape {tuple(p.shape)}, group {group_of(p)!r}" for p in stale)
            + "\nMake the optimizer after that."
        )


def kind_of_gradient(param: nn.Parameter) -> torch.dtype | None:
    """What parameters must agree in to be updated together in this step."""
    return None if param.grad is None else param.grad.dtype


def kind_of_state(param: nn.Parameter, state: Mapping[str, Any] | None) -> Hashable:
    """What parameters must agree in to be of one run: everything but the elements of their states."""
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
    """Whether a state has an element for each of the parameter's, or is a number."""
    if not isinstance(value, Tensor) or value.shape != param.shape:
        return False
    return param.ndim > 0 or isinstance(value, DTensor)


def _is_spread_like(param: nn.Parameter, value: Tensor) -> bool:
    if isinstance(param, DTensor):
        return isinstance(value, DTensor) and value.device_mesh == param.device_mesh
    return not isinstance(value, DTensor)


def _local(param: nn.Parameter) -> Tensor:
    return torch_border.local_of(param) if isinstance(param, DTensor) else param


def _local_part(param: nn.Parameter, value: Tensor) -> Tensor:
    """This rank's part of a state of a parameter, spread as the parameter is."""
    if not isinstance(param, DTensor):
        return value
    return torch_border.redistributed_local(value, param.placements)


def like_param(param: nn.Parameter, local: Tensor) -> Tensor:
    """A tensor of the parameter's own type over a local part."""
    if not isinstance(param, DTensor):
        return local
    spec = torch_border.spec_of(param)
    if local.dtype != param.dtype:
        spec = torch_border.dtensor_spec(spec.mesh, spec.placements, param.shape, local.dtype)
    return torch_border.dtensor(local, spec)
