"""Option values of `FullyShardedDataParallel`: what is sharded, precision, offloading, state dicts.

Unlike those in `policies` they can be changed after they are made, as torch's can, and so do not hash.
A value of the wrong type is refused where it is written, in the call that makes an option or later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import torch

from fullshard import torch_border
from fullshard.errors import OptionTypeError
from fullshard.plan.policies import check_floating_dtype, check_type, check_wire_dtype, switch

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]


class ShardingStrategy(Enum):
    """What ranks share out, and when the parameters are whole."""

    FULL_SHARD = auto()
    """Parameters, gradients and optimizer state; parameters are released after forward and after backward."""
    SHARD_GRAD_OP = auto()
    """The same, but parameters stay whole from forward to the end of backward."""
    NO_SHARD = auto()
    """Nothing: every rank has all, and gradients are averaged."""
    HYBRID_SHARD = auto()
    """FULL_SHARD within a node, replicas across nodes."""
    _HYBRID_SHARD_ZERO2 = auto()
    """SHARD_GRAD_OP within a node, replicas across nodes."""


class BackwardPrefetch(Enum):
    """When backward asks for the parameters it needs next."""

    BACKWARD_PRE = auto()
    """Before it computes with the present ones: more overlap, two groups in memory."""
    BACKWARD_POST = auto()
    """After it has computed with the present ones: less overlap, less memory."""


class StateDictType(Enum):
    """What a model's state dict holds on each rank."""

    FULL_STATE_DICT = auto()
    """Whole tensors under the names of the unwrapped model."""
    LOCAL_STATE_DICT = auto()
    """This rank's shards as they rest, for the same wrapping and number of ranks only."""
    SHARDED_STATE_DICT = auto()
    """Sharded tensors under the names of the unwrapped model."""


class OptimStateKeyType(Enum):
    """By what an optimizer's state dict knows a parameter."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


class _Checked:
    """Whose attributes are checked whenever they are written, also by ``__init__``."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _SWITCHES:
            value = switch(name, value)
        elif name in _CHECKS:
            _CHECKS[name](name, value)
        super().__setattr__(name, value)


@dataclass
class MixedPrecision(_Checked):
    """In which dtypes a wrapped module computes and reduces; its shards keep their own dtype."""

    param_dtype: torch.dtype | None = None
    """Dtype of the unsharded parameters, hence of gather and compute; None keeps the shard's."""

    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients are summed over ranks; None means the compute dtype."""

    buffer_dtype: torch.dtype | None = None
    """Dtype of floating-point buffers; None leaves them alone."""

    keep_low_precision_grads: bool = False
    """Leave gradients in the dtype they were reduced in, for an optimizer that wants them so."""

    cast_forward_inputs: bool = False
    """Cast floating-point inputs of this module to ``param_dtype``."""

    cast_root_forward_inputs: bool = True
    """The same for the outermost wrapped module, where it overrides ``cast_forward_inputs``."""

    _module_classes_to_ignore: Collection[type] = (torch_border.BatchNorm,)
    """Modules of these classes are wrapped by themselves, without mixed precision."""

    wire_dtype: torch.dtype | None = None
    """Dtype in which gradients travel to the rank that sums them in ``reduce_dtype``, which is wider; None means
    ``reduce_dtype``. All gradients of the module are rounded to it, once."""

    def __post_init__(self) -> None:
        check_wire_dtype(self.wire_dtype, self.reduce_dtype)


@dataclass
class CPUOffload(_Checked):
    """What rests in host memory between steps."""

    offload_params: bool = False
    """Shards and their gradients, so that the optimizer runs on the host too."""


@dataclass
class StateDictConfig(_Checked):
    """How a model's state dict is made."""

    offload_to_cpu: bool = False
    """Move its tensors to host memory."""


@dataclass
class FullStateDictConfig(StateDictConfig):
    """How a state dict of whole tensors is made."""

    rank0_only: bool = False
    """Only rank 0 gets it; the dict of other ranks is empty."""


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """How a state dict of resting shards is made."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """How a state dict of sharded tensors is made."""

    _use_dtensor: bool = False
    """Whether they are DTensors; the wrapper sets it when it has a mesh."""


@dataclass
class OptimStateDictConfig(_Checked):
    """How an optimizer's state dict is made."""

    offload_to_cpu: bool = True
    """Move its tensors to host memory."""


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """How an optimizer's state dict of whole tensors is made."""

    rank0_only: bool = False
    """Only rank 0 gets it; the dict of other ranks is empty."""


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """How an optimizer's state dict of resting shards is made."""

    offload_to_cpu: bool = False
    """Move its tensors to host memory."""


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """How an optimizer's state dict of sharded tensors is made."""

    _use_dtensor: bool = False
    """Whether they are DTensors; the wrapper sets it when it has a mesh."""


@dataclass
class StateDictSettings(_Checked):
    """How the state dicts of a wrapped model and of its optimizer are made."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


def _check_dtype(name: str, value: object) -> None:
    if value is not None:
        check_floating_dtype(name, value)


def _check_classes(name: str, value: object) -> None:
    if not isinstance(value, Collection) or isinstance(value, str):
        raise OptionTypeError(
            f"{name} must be a collection of classes, got {value!r}. "
            "Use for example (torch.nn.LayerNorm,), or () for none."
        )
    others = [item for item in value if not isinstance(item, type)]
    if others:
        raise OptionTypeError(
            f"{name} must hold classes, got also {others!r}. Use for example torch.nn.LayerNorm."
        )


_SWITCHES = {
    "keep_low_precision_grads",
    "cast_forward_inputs",
    "cast_root_forward_inputs",
    "offload_params",
    "offload_to_cpu",
    "rank0_only",
    "_use_dtensor",
}
"""Attributes that are on or off, in any of the options."""

_CHECKS: dict[str, Callable[[str, object], None]] = {
    "param_dtype": _check_dtype,
    "reduce_dtype": _check_dtype,
    "buffer_dtype": _check_dtype,
    "wire_dtype": _check_dtype,
    "_module_classes_to_ignore": _check_classes,
    "state_dict_type": partial(check_type, expected=StateDictType),
    "state_dict_config": partial(check_type, expected=StateDictConfig),
    "optim_state_dict_config": partial(check_type, expected=OptimStateDictConfig),
}
"""By name of the attribute; a name means the same in all options."""
