"""Shards that replicas update in parts: each replica keeps the optimizer state of its part only.

With HSDP every replica holds the same shards. A **bucket** is a number of parameters of such shards. Their elements, one
parameter after the other, are cut into one part for each replica:

    bucket      | w 0 .. 191      | b 0 .. 5 | v 0 .. 89 |       3 parameters, 288 elements, 2 replicas
    replica 0   | w 0 .. 127 |
    replica 1                | w 128 .. 191 | b  | v |

A replica updates its part in the memory of the shards, with an ordinary optimizer over views. Then an all-gather over the
replicas brings the other parts. Replicas get the bits that the owner has computed, so they stay equal.

Invariants:

- The plan depends on the parameters alone, not on gradients: a rank cannot know whether others have the same ones. So all
  replicas call the same collectives in the same order.
- A parameter is cut at multiples of `_ALIGNMENT` elements. Kernels that work on several elements at once take the same
  elements together with and without the cut, and treat the same ones alone at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fullshard import torch_border
from fullshard.engine.known_groups import groups_of
from fullshard.optim.fused_shards import FusedShard, UpdatedTensor, like_param, local_of
from fullshard.optim.param_cuts import check_backend
from fullshard.optim.replica_messages import (
    OVER_REPLICAS,
    STATES,
    GatheredParams,
    ReplicaMessage,
    raise_differences,
)
from fullshard.storage.sharded_params import ShardedParam
from fullshard.transport import collectives

_ALIGNMENT = 64
"""Twice the elements of the widest vector register, for elements of two bytes."""

State = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Window:
    """A range of the elements of one parameter of a bucket, in the order of memory."""

    param: int
    begin: int
    end: int


class ReplicaPart(UpdatedTensor):
    """The elements of one parameter that this replica updates. It takes the place of a `FusedShard`."""

    def __init__(self, sharded_param: ShardedParam, window: _Window) -> None:
        """Let the elements in a window of the local memory be a tensor of their own."""
        self.params = [sharded_param.param]
        self._param = sharded_param.param
        self.index = window.param
        """The number of the parameter in its bucket."""
        self._window = window
        local = local_of(self._param).detach()
        self._whole = FusedShard([sharded_param], [local])
        self._strides = local.stride()
        trainable = local.is_floating_point() or local.is_complex()
        self.tensor = nn.Parameter(self.part_of(local), requires_grad=trainable)
        self._gradient_dtype = local.dtype

    def part_of(self, local: Tensor) -> Tensor:
        """Return this part of a tensor like the parameter's local one."""
        window = self._window
        offset = int(local.storage_offset()) + window.begin
        return local.as_strided((window.end - window.begin,), (1,), offset)

    def take_gradients(self) -> bool:
        """Set the gradient of `tensor` to its part of the parameter's gradient, or to None if there is none.

        Called with autograd switched off.
        """
        gradient = self._param.grad
        if isinstance(gradient, DTensor):
            gradient = torch_border.local_gradients_of(self.params)[0]
        if gradient is not None:
            if gradient.stride() != self._strides:
                local = local_of(self._param)
                gradient = torch.empty_like(local, dtype=gradient.dtype).copy_(gradient)
            gradient = self.part_of(gradient)
        self._set_gradient(gradient)
        return True

    def fuse_states(self, states: Sequence[State]) -> dict[str, Any]:
        """Return the state of `tensor` from that of the whole parameter, which may be in host memory."""
        found = self._whole.fuse_states(states)
        own = {}
        for key, value in found.items():
            own[key] = value
            if isinstance(value, Tensor) and value.ndim and value.shape == self._whole.tensor.shape:
                part = self.part_of(_in_order(value, self._whole.tensor))
                own[key] = part.to(self.tensor.device, copy=True)  # not to keep the whole
        return own


class Bucket(GatheredParams):
    """Parameters that are cut and gathered together."""

    def __init__(
        self, sharded_params: Sequence[ShardedParam], axes: Any, bucket_numel: int
    ) -> None:
        """Cut the parameters, which are of one dtype, over the replicas of ``axes``."""
        self.params = [each.param for each in sharded_params]
        self.names = [each.name for each in sharded_params]
        self.group: ProcessGroup = axes.replicate_process_group
        self.rank: int = axes.replicate_mesh_rank
        self._locals = [local_of(param).detach() for param in self.params]
        self.device = self._locals[0].device
        numels = [local.numel() for local in self._locals]
        cuts = _cuts(numels, axes.replicate_mesh_size)
        # A cut moves by half an alignment at most, so two more fit in.
        limit = max(bucket_numel // axes.replicate_mesh_size, 1) + _ALIGNMENT
        longest = max(end - begin for begin, end in pairwise(cuts))
        self._windows = [
            [
                list(_windows(numels, begin + first, min(begin + first + limit, end)))
                for begin, end in pairwise(cuts)
            ]
            for first in range(0, longest, limit)
        ]
        """Windows, by message and replica."""
        self.owners = [
            [
                replica
                for replica, (begin, end) in enumerate(pairwise(cuts))
                if max(begin, start) < min(end, stop)
            ]
            for start, stop in pairwise(accumulate(numels, initial=0))
        ]
        """The replicas that own elements of each parameter."""
        self.parts = [
            ReplicaPart(sharded_params[window.param], window)
            for window in _windows(numels, cuts[self.rank], cuts[self.rank + 1])
        ]
        self._messages = self._messages_over(self._locals)

    def _messages_over(self, tensors: Sequence[Tensor | None]) -> list[ReplicaMessage]:
        """Return messages over tensors like the local ones; parameters without one take no part."""
        flat = [
            None
            if tensor is None
            else tensor.as_strided((tensor.numel(),), (1,), int(tensor.storage_offset()))
            for tensor in tensors
        ]
        return [
            ReplicaMessage(
                [
                    [
                        whole[window.begin : window.end]
                        for window in windows
                        if (whole := flat[window.param]) is not None
                    ]
                    for windows in by_replica
                ],
                self.group,
                self.rank,
            )
            for by_replica in self._windows
        ]

    def whole_states(
        self, own: Mapping[int, State], kinds: Sequence[Mapping[str, Any]], *, on_host: bool
    ) -> list[dict[str, Any]]:
        """Return the state of each parameter, like the parameter. Collective.

        Args:
            own: State of this replica's part, by index of parameter.
            kinds: For each parameter the names of its states, with the dtype of elements, or else the value.
            on_host: Whether elements are to be in host memory.
        """
        states: list[dict[str, Any]] = [dict(each) for each in kinds]
        for index, state in own.items():
            states[index].update(
                {
                    key: v
                    for key, v in state.items()
                    if not isinstance(kinds[index][key], torch.dtype)
                }
            )
        gathers = dict.fromkeys(
            (key, kind)
            for each in kinds
            for key, kind in each.items()
            if isinstance(kind, torch.dtype)
        )
        for key, dtype in gathers:
            wholes = [
                torch.empty_like(local, dtype=dtype) if each.get(key) is dtype else None
                for local, each in zip(self._locals, kinds, strict=True)
            ]
            for part in self.parts:
                whole = wholes[part.index]
                if whole is not None:
                    part.part_of(whole).copy_(own[part.index][key])
            for message in self._messages_over(wholes):
                message.start(STATES)
                message.land()
            for index, whole in enumerate(wholes):
                if whole is not None:
                    found = whole.cpu() if on_host else whole
                    states[index][key] = like_param(self.params[index], found)
        return states


class ReplicaParts:
    """The parameters of an optimizer that are replicated, in buckets, and the parts of this replica."""

    def __init__(self, kinds: Mapping[nn.Parameter, int], bucket_numel: int) -> None:
        """Plan the buckets of parameters that have replicas; ``kinds`` has the numbers of their groups.

        Left out are parameters of which this rank holds nothing, those with memory that is not one range, and 0-d plain
        tensors, whose state could be a number.
        """
        self._kinds = [(id(param), kind) for param, kind in kinds.items()]
        by_kind: dict[Any, list[ShardedParam]] = {}
        axes_of: dict[Any, Any] = {}
        for group in groups_of(kinds):
            axes, replicas = group.mesh_info, group.mesh_info.replicate_process_group
            if replicas is None or axes.replicate_mesh_size == 1:
                continue
            for sharded_param in group.sharded_params:
                param = sharded_param.param
                if param not in kinds or not _can_be_cut(param):
                    continue
                local = local_of(param)
                check_backend(replicas, local.device, OVER_REPLICAS)
                kind = (
                    replicas,
                    local.dtype,
                    local.device,
                    param.requires_grad,
                )
                axes_of[kind] = axes
                by_kind.setdefault(kind, []).append(sharded_param)
        self.buckets = [
            Bucket(each, axes_of[kind], bucket_numel)
            for kind, sharded_params in by_kind.items()
            for each in _bucketed(sharded_params, bucket_numel)
        ]
        self.params = {param for bucket in self.buckets for param in bucket.params}
        self.parts = [part for bucket in self.buckets for part in bucket.parts]
        self._ordered = [param for bucket in self.buckets for param in bucket.params]
        self._addresses = self._present_addresses()

    def _present_addresses(self) -> list[int]:
        return [local_of(param).data_ptr() for param in self._ordered]

    def fits(self, kinds: Mapping[nn.Parameter, int]) -> bool:
        """Return whether this plan is still the right one: for the same parameters, in the same memory."""
        return self._kinds == [(id(p), kind) for p, kind in kinds.items()] and self.is_in_place()

    def is_in_place(self) -> bool:
        """Return whether all shards are in the memory that was planned for."""
        return self._present_addresses() == self._addresses

    def whole_states(
        self, own: Mapping[nn.Parameter, State], *, on_host: bool = False
    ) -> dict[nn.Parameter, dict[str, Any]]:
        """Return the state of each parameter from those of the replicas' parts. Collective over the replicas.

        Args:
            own: States of this replica's parts, by parameter.
            on_host: Whether elements are to be in host memory: the device needs room for one state of a bucket then.

        Raises:
            LifecycleError: replicas do not have the same states.
        """
        for part in self.parts:
            for key, value in own.get(part.params[0], {}).items():
                part.check_state(key, value)
        found: dict[nn.Parameter, dict[str, Any]] = {}
        for group in dict.fromkeys(bucket.group for bucket in self.buckets):
            buckets = [bucket for bucket in self.buckets if bucket.group is group]
            described = [
                [_described(own.get(param)) for param in bucket.params] for bucket in buckets
            ]
            by_replica = collectives.values_of_all_ranks(described, group, STATES)
            agreed = [
                _agreed(bucket, [each[number] for each in by_replica])
                for number, bucket in enumerate(buckets)
            ]
            raise_differences(fault for _, faults in agreed for fault in faults)
            for bucket, (kinds, _) in zip(buckets, agreed, strict=True):
                held = {
                    index: own[param]
                    for index, param in enumerate(bucket.params)
                    if param in own and kinds[index]
                }
                kinds = [
                    {key: _placed(value, bucket.device) for key, value in each.items()}
                    for each in kinds
                ]
                states = bucket.whole_states(held, kinds, on_host=on_host)
                found.update(
                    (param, state)
                    for param, state in zip(bucket.params, states, strict=True)
                    if state
                )
        return found


def _can_be_cut(param: nn.Parameter) -> bool:
    local = local_of(param)
    is_absent = local.is_meta and not torch_border.device_for(local.device).is_planned
    if type(local.data) is not Tensor or is_absent or not local.numel():
        return False
    return (param.ndim > 0 or isinstance(param, DTensor)) and _is_one_range(local)


def _is_one_range(tensor: Tensor) -> bool:
    """Return whether the elements fill one range of memory, in any order."""
    reach = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dims if size != 1):
        if stride != reach:
            return False
        reach *= size
    return True


def _in_order(value: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with its elements in the order of memory that ``like`` has."""
    if value.stride() == like.stride():
        return value
    return torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value)


# --- cuts -------------------------------------------------------------------------------------------


def _bucketed(
    sharded_params: Sequence[ShardedParam], bucket_numel: int
) -> Iterator[list[ShardedParam]]:
    """Yield parameters in order, as many together as have at most ``bucket_numel`` elements, but one at least."""
    bucket: list[ShardedParam] = []
    numel = 0
    for sharded_param in sharded_params:
        own = local_of(sharded_param.param).numel()
        if bucket and numel + own > bucket_numel:
            yield bucket
            bucket, numel = [], 0
        bucket.append(sharded_param)
        numel += own
    if bucket:
        yield bucket


def _cuts(numels: Sequence[int], parts: int) -> list[int]:
    """Return where the elements of parameters, one after the other, are cut: the beginning, all cuts, the end.

    >>> _cuts([192, 6, 90], 2)
    [0, 128, 288]
    """
    total = sum(numels)
    cuts = [0]
    for part in range(1, parts):
        wanted, start = total * part // parts, 0
        for numel in numels:
            if wanted <= start + numel:
                rounded = (wanted - start + _ALIGNMENT // 2) // _ALIGNMENT * _ALIGNMENT
                cuts.append(start + min(rounded, numel))
                break
            start += numel
    return [*cuts, total]


def _windows(numels: Sequence[int], begin: int, end: int) -> Iterator[_Window]:
    """Yield the windows of parameters that are the elements from ``begin`` to ``end``."""
    start = 0
    for index, numel in enumerate(numels):
        first, last = max(begin - start, 0), min(end - start, numel)
        if first < last:
            yield _Window(index, first, last)
        start += numel


# --- states -----------------------------------------------------------------------------------------


def _described(state: State | None) -> dict[str, Any] | None:
    """Return a replica's report about a state: the dtype of elements, or the value of anything else."""
    if state is None:
        return None
    return {
        key: value.dtype if isinstance(value, Tensor) and value.ndim else _Value.of(value)
        for key, value in state.items()
    }


@dataclass(frozen=True, slots=True)
class _Value:
    """A state that has no elements, on its way to other replicas."""

    value: Any
    on_device: bool
    """Whether it is a tensor on the device of the shards."""

    @classmethod
    def of(cls, value: Any) -> _Value:
        if isinstance(value, Tensor):
            return cls(value.detach().cpu(), value.device.type != "cpu")
        return cls(value, on_device=False)


def _placed(kind: Any, device: torch.device) -> Any:
    """Return a described state as this replica has it: a dtype stays, a value comes to its device."""
    if not isinstance(kind, _Value):
        return kind
    if not isinstance(kind.value, Tensor):
        return kind.value
    return kind.value.to(device) if kind.on_device else kind.value


def _agreed(
    bucket: Bucket, by_replica: Sequence[Sequence[dict[str, Any] | None]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the description of each parameter's state, and where replicas differ."""
    kinds: list[dict[str, Any]] = []
    faults = []
    for index, owners in enumerate(bucket.owners):
        theirs = [by_replica[owner][index] or {} for owner in owners]
        kinds.append(theirs[0])
        if any(each != theirs[0] for each in theirs):
            found = {owner: _text(each) for owner, each in zip(owners, theirs, strict=True)}
            faults.append(f"{bucket.names[index]}, by replica: {found}")
    return kinds, faults


def _text(state: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {kind.value if isinstance(kind, _Value) else kind}" for key, kind in state.items()
    )
