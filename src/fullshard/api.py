"""The options of `FullyShardedDataParallel`: the names of `torch.distributed.fsdp.api`.

Users can change them after they are made, as torch's, so they do not hash; the policies of `fully_shard` are frozen. A
value of the wrong type is refused when it is written, in the constructor or later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import torch

from fullshard import torch_border
from fullshard.errors import OptionTypeError
from fullshard.policies import check_floating_dtype, check_type, check_wire_dtype, switch

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
    """What is sharded, and when parameters are gathered."""

    FULL_SHARD = auto()
    """Shard parameters, gradients and optimizer state; release gathered parameters after forward and after backward."""
    SHARD_GRAD_OP = auto()
    """Shard the same, but keep parameters gathered from forward to the end of backward."""
    NO_SHARD = auto()
    """Shard nothing: every rank has all parameters, and gradients are averaged."""
    HYBRID_SHARD = auto()
    """FULL_SHARD within a node, replicas across nodes."""
    _HYBRID_SHARD_ZERO2 = auto()
    """SHARD_GRAD_OP within a node, replicas across nodes."""


class BackwardPrefetch(Enum):
    """When backward gathers the parameters that it needs next."""

    BACKWARD_PRE = auto()
    """Before it computes with the current ones: more overlap, two groups in memory."""
    BACKWARD_POST = auto()
    """After it has computed with the current ones: less overlap, less memory."""


class StateDictType(Enum):
    """The kind of a state dict: what it holds on each rank."""

    FULL_STATE_DICT = auto()
    """Full tensors under the names of the unwrapped model."""
    LOCAL_STATE_DICT = auto()
    """This rank's shards, for the same wrapping and number of ranks only."""
    SHARDED_STATE_DICT = auto()
    """Sharded tensors under the names of the unwrapped model."""


class OptimStateKeyType(Enum):
    """The kind of keys of parameters in an optimizer's state dict."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


class _Checked:
    """A base class that checks attributes whenever they are written, also in ``__init__``."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _SWITCHES:
            value = switch(name, value)
        elif name in _CHECKS:
            _CHECKS[name](name, value)
        super().__setattr__(name, value)


@dataclass
class MixedPrecision(_Checked):
    """The dtypes in which a wrapped module computes and reduces; its shards keep their own dtype."""

    param_dtype: torch.dtype | None = None
    """Dtype of unsharded parameters, and so of gathers and compute; None keeps the shards' dtype."""

    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients are summed over ranks; None means the compute dtype."""

    buffer_dtype: torch.dtype | None = None
    """Dtype of floating-point buffers; None leaves them alone."""

    keep_low_precision_grads: bool = False
    """Whether gradients stay in the dtype in which they were reduced, for an optimizer that needs it."""

    cast_forward_inputs: bool = False
    """Whether floating-point inputs of this module are cast to ``param_dtype``."""

    cast_root_forward_inputs: bool = True
    """Whether those of the outermost wrapped module are; there it overrides ``cast_forward_inputs``."""

    _module_classes_to_ignore: Collection[type] = (torch_border.BatchNorm,)
    """Classes of modules that get wrappers of their own, without mixed precision."""

    wire_dtype: torch.dtype | None = None
    """Dtype in which gradients are sent to the rank that sums them in ``reduce_dtype``, which must be wider; None means
    ``reduce_dtype``. All gradients of the module are rounded to it once."""

    def __post_init__(self) -> None:
        check_wire_dtype(self.wire_dtype, self.reduce_dtype)


@dataclass
class CPUOffload(_Checked):
    """What is in host memory between steps."""

    offload_params: bool = False
    """Whether shards and their gradients are, so that the optimizer runs on the host, too."""


@dataclass
class StateDictConfig(_Checked):
    """How a model's state dict is made."""

    offload_to_cpu: bool = False
    """Whether its tensors are moved to host memory."""


@dataclass
class FullStateDictConfig(StateDictConfig):
    """How a state dict of full tensors is made."""

    rank0_only: bool = False
    """Whether only rank 0 gets it; the dict of other ranks is empty then."""


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """How a state dict of this rank's shards is made."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """How a state dict of sharded tensors is made."""

    _use_dtensor: bool = False
    """Whether sharded tensors are DTensors; a wrapper with a mesh sets it."""


@dataclass
class OptimStateDictConfig(_Checked):
    """How an optimizer's state dict is made."""

    offload_to_cpu: bool = True
    """Whether its tensors are moved to host memory."""


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """How an optimizer's state dict of full tensors is made."""

    rank0_only: bool = False
    """Whether only rank 0 gets it; the dict of other ranks is empty then."""


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """How an optimizer's state dict of this rank's shards is made."""

    offload_to_cpu: bool = False
    """Whether its tensors are moved to host memory."""


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """How an optimizer's state dict of sharded tensors is made."""

    _use_dtensor: bool = False
    """Whether sharded tensors are DTensors; a wrapper with a mesh sets it."""


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
            f"{name} must hold only classes, got also {others!r}. Use for example torch.nn.LayerNorm."
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
"""Attributes that are on or off, of all options."""

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
"""Checks by name of the attribute; a name means the same in all options."""
