"""What an optimizer wants of a checkpoint, whatever kind of optimizer of the same parameters has written it.

State is built anew beside the old one, and replaces it when all of it was read. Parameters and groups are found by
names. Options of the checkpoint replace those of the optimizer, but not how it computes (`_OWN_OPTIONS`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from .. import torch_border
from ..shard_runs import like_param
from . import trees
from .blocks import whole
from .holdings import Held, HeldParam, ModelHoldings, local_of
from .optimizer_holdings import NOT_OPTIONS, named_groups
from .source import Source, TensorRef
from .targets import Faults, StoredNames, Want
from .trees import DeviceScalar

_OWN_OPTIONS = (*NOT_OPTIONS, "foreach", "fused", "capturable", "differentiable")
"""Of a group: its parameters, and how this optimizer computes, on these devices."""

State = Mapping[str, Any]


class OptimizerTarget:
    """An optimizer that is loaded into."""

    def __init__(self, optimizer: Optimizer, model: ModelHoldings, source: Source) -> None:
        self.faults = Faults()
        self.wants: list[Want] = []
        self._optimizer = optimizer
        self._source = source
        self._groups: list[State] = []
        """Parallel to the optimizer's: options as they were saved."""
        self._state: dict[nn.Parameter, dict[str, Any]] = {}
        if source.optimizer is None:
            self.faults.missing.append("the optimizer")
            return
        saved_groups, saved_state = source.optimizer["param_groups"], source.optimizer["state"]
        own_groups = named_groups(optimizer, model)
        saved_names = [name for group in saved_groups for name in group["params"]]
        names = StoredNames(model, source.tied, [*saved_names, *saved_state])
        self._match_groups(own_groups, saved_groups, names)
        if self.faults:
            return
        for group in optimizer.param_groups:
            on_device = bool(group.get("capturable") or group.get("fused"))
            for param in group["params"]:
                members = model.params[param]
                states = [saved_state.get(names.stored(held.name)) for held in members]
                if any(state is not None for state in states):
                    self._build(_Param(param, members, on_device), states)

    # --- groups -----------------------------------------------------------------------------------

    def _match_groups(
        self, own: Sequence[State], saved: Sequence[State], names: StoredNames
    ) -> None:
        """Find the saved group of each, by its parameters."""
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
                f"it has {len(own)} groups of parameters, and the checkpoint has {len(saved)}"
            )

    # --- state ------------------------------------------------------------------------------------

    def _build(self, param: _Param, states: Sequence[State | None]) -> None:
        """Make the new state of a parameter, or say why it cannot be."""
        if len(states) == 1 and states[0] is not None:
            held = param.members[0]
            built = {key: self._value(param, held, key, value) for key, value in states[0].items()}
        else:
            built = self._joined(param, states)
        if param.has_state:
            self._state[param.param] = built

    def _joined(self, param: _Param, states: Sequence[State | None]) -> dict[str, Any]:
        """The state of a `FlatParameter`, of which the checkpoint has its members'."""
        present = [
            (held, state or {})
            for held, state in zip(param.members, states, strict=True)
            if 0 not in held.shape
        ]
        built: dict[str, Any] = {}
        for key in dict.fromkeys(key for _, state in present for key in state):
            values = [(held, state[key]) for held, state in present if key in state]
            refs = [(held, value) for held, value in values if self._is_like(held, value)]
            first = values[0][1]
            if len(refs) == len(present):
                built[key] = self._flat(param, refs)
            elif len(values) == len(present) and all(_same(first, each) for _, each in values):
                built[key] = self._value(param, param.members[0], key, first)
            else:
                names = ", ".join(held.name for held, _ in present)
                self.faults.others.append(
                    f"all that a FlatParameter stands for must have the same kind of {key!r}, or the same number: "
                    f"{names}"
                )
        return built

    def _is_like(self, held: HeldParam, value: Any) -> bool:
        """Whether a value is stored with an element for each of a parameter's."""
        if not isinstance(value, TensorRef):
            return False
        return self._source.tensors[value.key].shape == held.shape

    def _flat(self, param: _Param, refs: Sequence[tuple[HeldParam, TensorRef]]) -> Tensor:
        dtypes = {self._source.tensors[ref.key].dtype for _, ref in refs}
        if len(dtypes) > 1:
            keys = ", ".join(ref.key for _, ref in refs)
            self.faults.dtypes.append(f"{keys}: {dtypes}, and a FlatParameter has one")
        memory = torch.zeros_like(param.local, dtype=dtypes.pop())  # there is padding
        for held, ref in refs:
            self._want_parts(held, ref, held.part_of(memory))
        return memory

    def _value(self, param: _Param, held: HeldParam, key: str, value: Any) -> Any:
        """A value of a tree, as this optimizer has it; ``key`` is the state's."""
        if isinstance(value, TensorRef):
            return self._tensor(param, held, value)
        if key == "step" and isinstance(value, DeviceScalar | Tensor):
            # torch's rule, whatever wrote it: kernels read it where the parameter is, all else on the host.
            count = value.value if isinstance(value, DeviceScalar) else value
            if param.on_device:
                return count.to(param.local.device, torch.float32, copy=True)
            return count.clone()
        if isinstance(value, DeviceScalar | Tensor):
            return _placed(value, param.local.device)
        if isinstance(value, Mapping):
            return {name: self._value(param, held, key, each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            items = [self._value(param, held, key, each) for each in value]
            return items if isinstance(value, list) else tuple(items)
        return value

    def _tensor(self, param: _Param, held: HeldParam, value: TensorRef) -> Tensor | None:
        info = self._source.tensors[value.key]
        if info.shape == held.shape and held.window is None:
            local = torch.empty_like(param.local, dtype=info.dtype)
            self._want_parts(held, value, local)
            return like_param(param.param, local)
        if not held.is_whole and not isinstance(param.param, DTensor):
            self.faults.shapes.append(f"{value.key}: {info.shape}, not {held.shape}")
            return None
        memory = torch.empty(info.shape, dtype=info.dtype, device=param.local.device)
        if memory.numel():
            self.wants.append(Want(value.key, [(whole(info.shape), memory)]))
        if not isinstance(param.param, DTensor):
            return memory
        # How it was spread is not known; what optimizers keep beside the elements is small.
        mesh = param.param.device_mesh
        placements = (Replicate(),) * mesh.ndim
        spec = torch_border.dtensor_spec(mesh, placements, info.shape, info.dtype)
        return torch_border.dtensor(memory, spec)

    def _want_parts(self, held: HeldParam, value: TensorRef, local: Tensor) -> None:
        parts = list(Held(value.key, local.dtype, held.shape, held.spread, local).parts())
        if parts:
            self.wants.append(Want(value.key, parts))

    # --- afterwards -------------------------------------------------------------------------------

    def install(self) -> None:
        """Let the optimizer have the state and the options; all wants have been read."""
        state: Any = self._optimizer.state
        for param in [param for group in self._optimizer.param_groups for param in group["params"]]:
            state.pop(param, None)
        state.update(self._state)
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            devices = [local_of(param).device for param in group["params"]]
            device = devices[0] if devices else torch.device("cpu")
            for option, value in saved.items():
                if option not in _OWN_OPTIONS:
                    group[option] = _option(group.get(option), value, device)


class _Param:
    """A parameter of the optimizer."""

    def __init__(self, param: nn.Parameter, members: Sequence[HeldParam], on_device: bool) -> None:
        self.param = param
        self.members = members
        self.on_device = on_device
        """Whether counts are kept on the parameter's device."""
        self.local = local_of(param)

    @property
    def has_state(self) -> bool:
        """Whether an optimizer would have made any: of a flat piece without elements it has not."""
        flat = self.members[0].spread.flat and self.members[0].window is None
        return not flat or bool(self.local.numel())


def _placed(saved: Any, device: torch.device) -> Any:
    """A saved value with copies of its numbers, on ``device`` where they were on one."""
    if isinstance(saved, DeviceScalar):
        return saved.value.to(device, copy=True)
    if isinstance(saved, Tensor):
        return saved.clone()
    if isinstance(saved, list | tuple):
        items = [_placed(each, device) for each in saved]
        return items if isinstance(saved, list) else tuple(items)
    return saved


def _option(own: Any, saved: Any, device: torch.device) -> Any:
    """An option as it was saved; where the optimizer has a tensor, as such a tensor."""
    saved = _placed(saved, device)
    if isinstance(own, Tensor) and not own.ndim and isinstance(saved, int | float | Tensor):
        return torch.as_tensor(saved).to(own.device, own.dtype)
    return saved


def _same(one: Any, other: Any) -> bool:
    return bool(trees.encode(one, "", []) == trees.encode(other, "", []))
