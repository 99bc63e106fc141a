"""An optimizer that a checkpoint is loaded into, whichever API wrote it.

State is read into the memory of the old state if that has the same shape and dtype, or else into new tensors. The optimizer
gets new tensors after everything was read. Parameters and groups are matched by names. The checkpoint's options replace
the optimizer's, except those that choose an implementation (`_OWN_OPTIONS`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from fullshard import torch_border
from fullshard.checkpoint.json_values import DeviceScalar, are_same
from fullshard.checkpoint.source import Source, TensorRef, without_averages
from fullshard.checkpoint.state.local_state import (
    LocalModelState,
    LocalParam,
    LocalTensor,
    local_of,
)
from fullshard.checkpoint.state.model_target import Faults, ReadRequest, StoredNames
from fullshard.checkpoint.state.optimizer_compatibility import (
    Compatibility,
    check_compatibility,
    with_counts_it_can_read,
)
from fullshard.checkpoint.state.optimizer_local_state import (
    NOT_OPTIONS,
    is_number_of_state,
    named_groups,
)
from fullshard.checkpoint.tensor_memory import stores_each_element
from fullshard.layout.blocks import whole
from fullshard.optim import AdamW8bit, ShardedOptimizer
from fullshard.optim.fused_shards import like_param

_OWN_OPTIONS = (*NOT_OPTIONS, "foreach", "fused", "capturable", "differentiable")
"""Entries of a group that stay the optimizer's own: its parameters, and the choice of an implementation."""

State = Mapping[str, Any]


class OptimizerTarget:
    """An optimizer that is loaded into."""

    def __init__(self, optimizer: Optimizer, model: LocalModelState, source: Source) -> None:
        """Compare an optimizer with a source; nothing is allocated."""
        self.faults = Faults()
        self._optimizer = optimizer
        self._source = source
        self._groups: list[State] = []
        """The saved group of each of the optimizer's groups."""
        self._saved: list[tuple[_OptimizedParam, list[State]]] = []
        """Parameters, and the saved states of their members."""
        self._compatibility = Compatibility()
        self._new: _NewStates | None = None
        if source.optimizer is None:
            self.faults.missing.append("the optimizer")
            return
        saved = without_averages(source.optimizer)
        saved_groups, saved_state = saved["param_groups"], saved["state"]
        saved_names = [name for group in saved_groups for name in group["params"]]
        names = StoredNames(model, source.tied, [*saved_names, *saved_state])
        self._match_groups(named_groups(optimizer, model), saved_groups, names)
        if self.faults.missing or self.faults.others:
            return
        self._check_compatibility(saved, model, names)
        if self.faults.kinds:
            return
        for group, saved_group in zip(optimizer.param_groups, self._groups, strict=True):
            counts = _counts_on_device(group), _counts_on_device(saved_group)
            for param in group["params"]:
                members = model.params[param]
                states = [
                    with_counts_it_can_read(
                        optimizer, saved_state.get(names.stored(member.name), {})
                    )
                    for member in members
                ]
                if any(states):
                    self._saved.append(
                        (_OptimizedParam(param, members, local_of(param), *counts), states)
                    )
        self.faults += self._build(allocate=False).faults

    @property
    def notes(self) -> list[str]:
        """Sentences about state that is not loaded exactly as it was saved."""
        return self._compatibility.notes

    def _check_compatibility(
        self, saved: State, model: LocalModelState, names: StoredNames
    ) -> None:
        """Find out whether this optimizer can take the state of the saved one."""
        states = [
            {
                member.name: saved["state"].get(names.stored(member.name), {})
                for param in group["params"]
                for member in model.params[param]
            }
            for group in self._optimizer.param_groups
        ]
        self._compatibility = check_compatibility(self._optimizer, saved, self._groups, states)
        self.faults.kinds += self._compatibility.faults

    @property
    def requests(self) -> list[ReadRequest]:
        """Requests of this rank, each with its memory; the first access allocates it."""
        if self._new is None:
            self._new = self._build(allocate=True)
        return self._new.requests

    def _build(self, *, allocate: bool) -> _NewStates:
        # Parts of replicas are not memory to read into, and the whole states might not fit on the device.
        optimizer = self._optimizer
        on_host = (
            isinstance(optimizer, ShardedOptimizer | AdamW8bit) and optimizer.shards_over_replicas
        )
        old = self._optimizer.state if allocate and not on_host else {}
        new = _NewStates(self._source, old, on_host=on_host)
        for param, states in self._saved:
            new.build(param if allocate else replace(param, local=param.local.to("meta")), states)
        return new

    # --- groups -----------------------------------------------------------------------------------

    def _match_groups(
        self, own: Sequence[State], saved: Sequence[State], names: StoredNames
    ) -> None:
        """Find the saved group of each group, by its parameters."""
        number_of = {name: number for number, group in enumerate(saved) for name in group["params"]}
        taken: set[str] = set()
        for number, group in enumerate(own):
            stored = {name: names.stored(name) for name in group["params"]}
            self.faults.missing += [
                f"{name}, in the optimizer"
                for name, found in stored.items()
                if found not in number_of
            ]
            numbers = sorted({number_of[found] for found in stored.values() if found in number_of})
            taken |= {found for found in stored.values() if found is not None}
            if len(numbers) > 1:
                self.faults.others.append(
                    f"group {number} has parameters of the checkpoint's groups {numbers}"
                )
            self._groups.append(saved[numbers[0]] if len(numbers) == 1 else {})
        self.faults.unexpected += [
            f"{name}, in the optimizer" for name in number_of if name not in taken
        ]
        numbers_used = [id(group) for group in self._groups if group]
        if len(set(numbers_used)) < len(numbers_used):
            self.faults.others.append(
                f"the optimizer has {len(own)} groups of parameters, and the checkpoint has {len(saved)}"
            )

    # --- after reading ----------------------------------------------------------------------------

    def install(self) -> None:
        """Give the optimizer the new state and the options. All requests must have been read."""
        assert self._new is not None, "requests were read"
        self._install_states(self._new.states)
        kept = self._compatibility.own_options
        for group, saved, own in zip(self._optimizer.param_groups, self._groups, kept, strict=True):
            devices = [local_of(param).device for param in group["params"]]
            device = devices[0] if devices else torch.device("cpu")
            for option, value in saved.items():
                if option not in _OWN_OPTIONS and option not in own:
                    group[option] = _option(group.get(option), value, device)

    def _install_states(self, states: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        optimizer = self._optimizer
        if isinstance(optimizer, ShardedOptimizer | AdamW8bit) and optimizer.shards_over_replicas:
            optimizer.replace_states(states)
            return
        state: Any = optimizer.state
        for param in [param for group in optimizer.param_groups for param in group["params"]]:
            state.pop(param, None)
        state.update(states)


@dataclass(frozen=True, slots=True)
class _OptimizedParam:
    """A parameter of the optimizer."""

    param: nn.Parameter
    members: Sequence[LocalParam]
    local: Tensor
    """This rank's part of it; on the meta device to find faults without allocating."""
    counts_on_device: bool
    """Whether its optimizer counts steps on the parameter's device."""
    counted_on_device: bool
    """Whether the saved optimizer did."""


class _NewStates:
    """New states of parameters, with what to read into them, or why they cannot be built."""

    def __init__(self, source: Source, old: Mapping[Any, State], *, on_host: bool) -> None:
        """Prepare states for what ``source`` has, in the memory of ``old`` states where these fit.

        Other elements are ``on_host``, or where the parameter is.
        """
        self._old = old
        self._on_host = on_host
        self.states: dict[nn.Parameter, dict[str, Any]] = {}
        self.requests: list[ReadRequest] = []
        self.faults = Faults()
        self._source = source

    def build(self, param: _OptimizedParam, saved: Sequence[State]) -> None:
        """Build the new state of a parameter from the saved states of its members."""
        member = param.members[0]
        if member.window is not None:
            self.states[param.param] = self._joined(param, saved)
            return
        built = {key: self._value(param, member, key, each) for key, each in saved[0].items()}
        # Optimizers have no state of an empty flat shard.
        if param.local.numel() or not member.sharding.flat:
            self.states[param.param] = built

    def _joined(self, param: _OptimizedParam, saved: Sequence[State]) -> dict[str, Any]:
        """Build the state of a `FlatParameter` from the saved states of its members."""
        present = [
            (member, state)
            for member, state in zip(param.members, saved, strict=True)
            if 0 not in member.shape
        ]
        built: dict[str, Any] = {}
        for key in dict.fromkeys(key for _, state in present for key in state):
            values = [(member, state[key]) for member, state in present if key in state]
            like = [
                (member, value) for member, value in values if self._is_like(member, key, value)
            ]
            first = values[0][1]
            if len(like) == len(present):
                built[key] = self._flat(param, key, like)
            elif len(values) == len(present) and all(are_same(first, each) for _, each in values):
                built[key] = self._value(param, param.members[0], key, first)
            else:
                names = ", ".join(member.name for member, _ in present)
                self.faults.others.append(
                    f"all members of a FlatParameter must have the same kind of {key!r}, or the same number; these differ: "
                    f"{names}"
                )
        return built

    def _is_like(self, member: LocalParam, key: str, value: Any) -> bool:
        """Return whether a value has an element for each element of a parameter.

        For a parameter without dimensions, some formats have a number instead of a tensor.
        """
        if isinstance(value, TensorRef):
            fits = self._source.tensors[value.key].shape == member.shape
        else:
            fits = isinstance(value, DeviceScalar | Tensor) and not member.shape
        return fits and not (is_number_of_state(key) and not member.shape)

    def _flat(
        self, param: _OptimizedParam, key: str, values: Sequence[tuple[LocalParam, Any]]
    ) -> Tensor:
        dtypes = {self._dtype(value) for _, value in values}
        if len(dtypes) > 1:
            names = ", ".join(member.name for member, _ in values)
            self.faults.dtypes.append(f"{key} of {names}: {dtypes}, and a FlatParameter has one")
        dtype = dtypes.pop()
        memory = self._old_like(param, key, dtype)
        if memory is None:
            # Zeros, because there may be padding.
            memory = torch.zeros_like(param.local, dtype=dtype, device=self._device(param))
        for member, value in values:
            self._fill(member, value, member.part_of(memory))
        return memory

    def _old_like(self, param: _OptimizedParam, key: str, dtype: torch.dtype) -> Tensor | None:
        """Return the parameter's present state if it can be overwritten, so that no second one needs memory."""
        state = self._old[param.param] if param.param in self._old else {}
        old = state.get(key)
        if type(old) is not type(like_param(param.param, param.local)):
            return None
        local = local_of(old)
        kinds = [(each.shape, each.stride(), each.device) for each in (local, param.local)]
        fits = kinds[0] == kinds[1] and local.dtype == dtype and stores_each_element(local)
        return old if fits else None

    def _device(self, param: _OptimizedParam) -> torch.device:
        on_host = self._on_host and not param.local.is_meta
        return torch.device("cpu") if on_host else param.local.device

    def _dtype(self, value: Any) -> torch.dtype:
        if isinstance(value, TensorRef):
            return self._source.tensors[value.key].dtype
        return _number(value).dtype

    def _fill(self, member: LocalParam, value: Any, local: Tensor) -> None:
        """Fill this rank's part of a state of the parameter's shape with its value, or request to read it."""
        if isinstance(value, TensorRef):
            self._request_parts(member, value, local)
        else:
            local.copy_(_number(value).expand(local.shape))

    def _value(self, param: _OptimizedParam, member: LocalParam, key: str, value: Any) -> Any:
        """Return a value of the saved tree as this optimizer has it; ``key`` is the name of the state."""
        if member.window is None and self._is_like(member, key, value):
            dtype = self._dtype(value)
            old = self._old_like(param, key, dtype)
            if old is not None:
                self._fill(member, value, local_of(old))
                return old
            local = torch.empty_like(param.local, dtype=dtype, device=self._device(param))
            self._fill(member, value, local)
            return like_param(param.param, local)
        if isinstance(value, TensorRef):
            return self._tensor(param, member, key, value)
        if key == "step" and isinstance(value, DeviceScalar | Tensor):
            # torch's rule: fused and capturable kernels read the count on the parameter's device, others on the CPU.
            count = _number(value)
            if param.counts_on_device:
                return count.to(param.local.device, torch.float32, copy=True)
            if param.counted_on_device:
                return count.clone()
        if isinstance(value, DeviceScalar | Tensor):
            return _placed(value, param.local.device)
        if isinstance(value, Mapping):
            return {name: self._value(param, member, key, each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            items = [self._value(param, member, key, each) for each in value]
            return items if isinstance(value, list) else tuple(items)
        return value

    def _tensor(
        self, param: _OptimizedParam, member: LocalParam, key: str, value: TensorRef
    ) -> Tensor | None:
        """Return memory for a state of another shape than the parameter's, and request to read it."""
        info, device = self._source.tensors[value.key], param.local.device
        of_dtensor = isinstance(param.param, DTensor)
        is_number = not info.shape and (
            is_number_of_state(key) or (member.shape and not of_dtensor)
        )
        if not member.is_whole and not of_dtensor and not is_number:
            self.faults.shapes.append(f"{value.key}: {info.shape}, not {member.shape}")
            return None
        if key == "step" and not param.counts_on_device:
            device = torch.device("cpu")
        memory = torch.empty(info.shape, dtype=info.dtype, device=device)
        if memory.numel():
            self.requests.append(ReadRequest(value.key, [(whole(info.shape), memory)]))
        return _replicated(param.param, memory) if of_dtensor and not is_number else memory

    def _request_parts(self, member: LocalParam, value: TensorRef, local: Tensor) -> None:
        parts = list(
            LocalTensor(value.key, local.dtype, member.shape, member.sharding, local).parts()
        )
        if parts:
            self.requests.append(ReadRequest(value.key, parts))


def _replicated(param: Tensor, whole: Tensor) -> Tensor:
    """Return a replicated DTensor. How the state was sharded is not known; a state of another shape is small."""
    mesh = torch_border.spec_of(param).mesh
    placements = (Replicate(),) * mesh.ndim
    spec = torch_border.dtensor_spec(mesh, placements, whole.shape, whole.dtype)
    return torch_border.dtensor(whole, spec)


def _number(value: DeviceScalar | Tensor) -> Tensor:
    return value.value if isinstance(value, DeviceScalar) else value


def _counts_on_device(group: State) -> bool:
    return bool(group.get("capturable") or group.get("fused"))


def _placed(saved: Any, device: torch.device) -> Any:
    """Return a saved value with copies of its numbers, on ``device`` if they were on an accelerator."""
    if isinstance(saved, DeviceScalar):
        return saved.value.to(device, copy=True)
    if isinstance(saved, Tensor):
        return saved.clone()
    if isinstance(saved, list | tuple):
        items = [_placed(each, device) for each in saved]
        return items if isinstance(saved, list) else tuple(items)
    return saved


def _option(own: Any, saved: Any, device: torch.device) -> Any:
    """Return a saved option; as a tensor, if the optimizer has one."""
    saved = _placed(saved, device)
    if isinstance(own, Tensor) and not own.ndim and isinstance(saved, int | float | Tensor):
        return torch.as_tensor(saved).to(own.device, own.dtype)
    return saved
