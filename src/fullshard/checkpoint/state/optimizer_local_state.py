"""This rank's part of an optimizer: its options and numbers as a tree, and its tensors with their shardings.

The optimizer's own state dict is not used, because loading it casts and moves tensors. Parameters have their names in
the model without wrappers. So it does not matter in which order, over how many ranks, by which API, or in how many
`FlatParameter`s they were optimized:

    {"class": ["torch.optim.AdamW", "torch.optim.Adam"],
     "state": {"head.weight": {"step": 3.0, "exp_avg": TensorRef("optimizer/head.weight/exp_avg")}},
     "param_groups": [{"params": ["head.weight"], "lr": 0.1}]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.checkpoint.json_values import DeviceScalar
from fullshard.checkpoint.source import AVERAGES, CLASS, OPTIMIZER, TensorRef
from fullshard.checkpoint.state.local_state import (
    LocalModelState,
    LocalParam,
    LocalTensor,
    local_of,
)
from fullshard.checkpoint.state.optimizer_compatibility import class_names
from fullshard.engine.tensor_trees import map_tensors, tensors_in
from fullshard.errors import CheckpointError, LifecycleError, fault_paragraphs
from fullshard.layout.sharding import Sharding, replicated
from fullshard.optim import EMA, AdamW8bit, ShardedOptimizer

Tree = dict[str, Any]

NOT_OPTIONS = ("params", "param_names")
"""Entries of a parameter group that are not options."""


def optimizer_tree(
    optimizer: Optimizer, model: LocalModelState, ema: EMA | None = None
) -> tuple[Tree, list[LocalTensor]]:
    """Return the optimizer as a tree (see `source.Source.optimizer`), and the tensors that the tree refers to.

    In a wrapper with ``use_orig_params``, a rank's tree lacks parameters that the rank has no elements of (see
    `agreement`).
    """
    collected = _Collected(model)
    groups = named_groups(optimizer, model)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # Read once: some optimizers build it at each access.
    known = (
        optimizer.states_to_save()
        if isinstance(optimizer, ShardedOptimizer | AdamW8bit)
        else optimizer.state
    )
    state = {
        member.name: {
            key: collected.value(param, member, f"{OPTIMIZER}{member.name}/{key}", value)
            for key, value in known[param].items()
        }
        for param in params
        if known.get(param)
        for member in model.params[param]
    }
    if ema is not None:
        for name, reference in _averages(ema, model, collected).items():
            state.setdefault(name, {})[AVERAGES] = reference
    collected.raise_faults(
        foreign=[_described(key) for key in known if not any(key is param for param in params)]
    )
    tree = _with_scalars_on_cpu({"state": state, "param_groups": groups})
    if ema is not None:
        tree = {AVERAGES: {"updates": ema.updates}, **tree}
    return {CLASS: class_names(optimizer), **tree}, collected.tensors


def _averages(ema: EMA, model: LocalModelState, collected: _Collected) -> Tree:
    """Return the averages by the names of parameters, for the tree."""
    if ema.is_swapped:
        raise LifecycleError(
            "Within EMA.averaged the model has the averages in place of its parameters. Save both outside of it, or leave "
            "ema out to save the averages as the model's weights."
        )
    return {
        member.name: collected.value(param, member, f"{OPTIMIZER}{member.name}/{AVERAGES}", average)
        for param, members, average in averaged_params(ema, model)
        for member in members
        # As optimizers, which have no state of an empty flat shard.
        if average.numel() or not member.sharding.flat
    }


def averaged_params(
    ema: EMA, model: LocalModelState
) -> list[tuple[Tensor, list[LocalParam], Tensor]]:
    """Return the averaged parameters, their members, and the averages."""
    averages = ema.averages_by_param()
    unknown = [_described(param) for param in averages if param not in model.params]
    for paragraph in fault_paragraphs(
        unknown,
        "All parameters that an EMA averages must be parameters of the model; these are not:",
        "Pass the model that contains them all, and make the EMA after sharding it.",
    ):
        raise CheckpointError(paragraph)
    return [(param, model.params[param], average) for param, average in averages.items()]


def _described(key: Any) -> str:
    return f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)


def named_groups(optimizer: Optimizer, model: LocalModelState) -> list[Tree]:
    """Return an optimizer's parameter groups, with names in place of parameters."""
    unknown = [
        f"group {number}, parameter {index}: shape {tuple(param.shape)}, {param.dtype}"
        for number, group in enumerate(optimizer.param_groups)
        for index, param in enumerate(group["params"])
        if param not in model.params
    ]
    for paragraph in fault_paragraphs(
        unknown,
        "All parameters of the optimizer must be parameters of the model; these are not:",
        "Pass the model that contains them all, and make the optimizer after sharding it.",
    ):
        raise CheckpointError(paragraph)
    return [
        {
            **{key: value for key, value in group.items() if key not in NOT_OPTIONS},
            "params": [member.name for param in group["params"] for member in model.params[param]],
        }
        for group in optimizer.param_groups
    ]


class _Collected:
    """The tensors of an optimizer's state, and the states that cannot be saved."""

    def __init__(self, model: LocalModelState) -> None:
        self._model = model
        self.tensors: list[LocalTensor] = []
        self._unknown: list[str] = []
        self._partial: list[str] = []
        self._keys: set[str] = set()

    def value(self, param: Tensor, member: LocalParam, key: str, value: Any) -> Any:
        """Return a value of a parameter's state for the tree; add its tensors to `tensors`."""
        if isinstance(value, Tensor):
            return self._tensor(param, member, key, value)
        if isinstance(value, Mapping):
            return {
                name: self.value(param, member, f"{key}/{name}", each)
                for name, each in value.items()
            }
        if isinstance(value, list | tuple):
            items = [
                self.value(param, member, f"{key}/{index}", each)
                for index, each in enumerate(value)
            ]
            return items if isinstance(value, list) else tuple(items)
        return value

    def _tensor(self, param: Tensor, member: LocalParam, key: str, value: Tensor) -> Any:
        if isinstance(value, DTensor):
            if any(placement.is_partial() for placement in value.placements):
                self._partial.append(f"{key}: {value.placements}")
            sharding = self._model.sharding_of(value)
            return self._add(key, tuple(value.shape), sharding, local_of(value))
        local = value.detach()
        if not value.ndim and (
            param.ndim or isinstance(param, DTensor) or is_number_of_state(key.rpartition("/")[2])
        ):
            return local
        if isinstance(param, DTensor):
            return self._refuse(key, value)
        if value.shape == param.shape:
            return self._add(key, member.shape, member.sharding, member.part_of(local))
        if member.is_whole:
            whole = replicated(value.shape, [ranks[0] for ranks in member.sharding.holders])
            return self._add(key, tuple(value.shape), whole, local)
        return self._refuse(key, value)

    def _refuse(self, key: str, value: Tensor) -> None:
        shape = tuple(value.shape)
        self._unknown.append(f"{key}: {type(value).__name__} of shape {shape} on {value.device}")

    def _add(
        self, key: str, shape: tuple[int, ...], sharding: Sharding, local: Tensor
    ) -> TensorRef:
        if type(local) is not Tensor or local.is_meta or key in self._keys:
            self._refuse(key, local)
        self._keys.add(key)
        holds = sharding.cell_of(self._model.rank) is not None
        self.tensors.append(
            LocalTensor(key, local.dtype, shape, sharding, local if holds else None)
        )
        return TensorRef(key)

    def raise_faults(self, foreign: list[str]) -> None:
        """Refuse states that cannot be saved, and entries of the state that belong to no parameter."""
        paragraphs = [
            *fault_paragraphs(
                foreign,
                "An optimizer's state is saved by parameter; these entries belong to none:",
                "Pass them as extra.",
            ),
            *fault_paragraphs(
                self._partial,
                "Optimizer state must have values that are known; these have Partial placements:",
                "Redistribute them to Replicate() or Shard(dim).",
            ),
            *fault_paragraphs(
                self._unknown,
                "Optimizer state of a sharded parameter must be a tensor of the shape of the parameter on this rank, a "
                "DTensor, or a single number; the sharding of these is not known:",
                "Use another optimizer, or leave these parameters unsharded (ignored_params, or ignored_states of the "
                "wrapper).",
            ),
        ]
        if paragraphs:
            raise CheckpointError("\n".join(paragraphs))


def is_number_of_state(key: str) -> bool:
    """Return whether one of torch's optimizers keeps a number under this key, also for a parameter without dimensions."""
    return key in ("step", "eta", "mu", "mu_product")


def _with_scalars_on_cpu(tree: Any) -> Any:
    """Return the tree with copies of its tensors in host memory; 0-d tensors of a device are fetched in one copy, and marked."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for value in tensors_in(tree):
        if not value.ndim:
            by_kind.setdefault((value.device, value.dtype), []).append(value.detach())
    copies = {kind: iter(torch.stack(values).cpu().unbind()) for kind, values in by_kind.items()}

    def copied(value: Tensor) -> Any:
        if value.ndim:
            return value.detach().cpu().clone()
        copy = next(copies[value.device, value.dtype])
        return copy if value.device.type == "cpu" else DeviceScalar(copy)

    return map_tensors(copied, tree)
