"""Fully sharded data parallel training for PyTorch.

    from fullshard import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)

The public names of `torch.distributed.fsdp`, on an engine whose groups are gathered in place,
without copies.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from .version import __version__ as __version__

if _TYPE_CHECKING:
    from . import checkpoint as checkpoint, optim as optim
    from .clipping import clip_grad_norm_
    from .errors import (
        CheckpointError,
        CommunicationError,
        ConfigurationError,
        FullshardError,
        LayoutError,
        LifecycleError,
        OptionTypeError,
        UnsupportedError,
        UsageError,
    )
    from .flat_parameter import FlatParameter
    from .fsdp_module import (
        FSDPModule,
        ReplicateModule,
        UnshardHandle,
        register_fsdp_forward_method,
        share_comm_ctx,
    )
    from .functional import fully_shard, replicate
    from .grouping import GroupPlan, PlannedGroup, plan_groups
    from .policies import (
        CPUOffloadPolicy,
        DataParallelMeshDims,
        MixedPrecisionPolicy,
        OffloadPolicy,
    )
    from .tracing import Recording, trace
    from .wrapper.module import FullyShardedDataParallel
    from .wrapper_options import (
        BackwardPrefetch,
        CPUOffload,
        FullOptimStateDictConfig,
        FullStateDictConfig,
        LocalOptimStateDictConfig,
        LocalStateDictConfig,
        MixedPrecision,
        OptimStateDictConfig,
        OptimStateKeyType,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        ShardingStrategy,
        StateDictConfig,
        StateDictSettings,
        StateDictType,
    )

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CheckpointError",
    "CommunicationError",
    "ConfigurationError",
    "DataParallelMeshDims",
    "FSDPModule",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullshardError",
    "FullyShardedDataParallel",
    "GroupPlan",
    "LayoutError",
    "LifecycleError",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "OptionTypeError",
    "PlannedGroup",
    "Recording",
    "ReplicateModule",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
    "UnsupportedError",
    "UsageError",
    "clip_grad_norm_",
    "fully_shard",
    "plan_groups",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
    "trace",
]

_HOMES = {
    "BackwardPrefetch": "wrapper_options",
    "CPUOffload": "wrapper_options",
    "CPUOffloadPolicy": "policies",
    "DataParallelMeshDims": "policies",
    "FSDPModule": "fsdp_module",
    "FlatParameter": "flat_parameter",
    "FullOptimStateDictConfig": "wrapper_options",
    "FullStateDictConfig": "wrapper_options",
    "FullyShardedDataParallel": "wrapper.module",
    "GroupPlan": "grouping",
    "LocalOptimStateDictConfig": "wrapper_options",
    "LocalStateDictConfig": "wrapper_options",
    "MixedPrecision": "wrapper_options",
    "MixedPrecisionPolicy": "policies",
    "OffloadPolicy": "policies",
    "OptimStateDictConfig": "wrapper_options",
    "OptimStateKeyType": "wrapper_options",
    "PlannedGroup": "grouping",
    "Recording": "tracing",
    "ReplicateModule": "fsdp_module",
    "ShardedOptimStateDictConfig": "wrapper_options",
    "ShardedStateDictConfig": "wrapper_options",
    "ShardingStrategy": "wrapper_options",
    "StateDictConfig": "wrapper_options",
    "StateDictSettings": "wrapper_options",
    "StateDictType": "wrapper_options",
    "UnshardHandle": "fsdp_module",
    "clip_grad_norm_": "clipping",
    "fully_shard": "functional",
    "plan_groups": "grouping",
    "register_fsdp_forward_method": "fsdp_module",
    "replicate": "functional",
    "share_comm_ctx": "fsdp_module",
    "trace": "tracing",
}
"""Where the names live that are not in `errors`."""

_SUBPACKAGES = ("checkpoint", "optim")


def __getattr__(name: str) -> object:
    # Names are fetched when first used: importing torch takes seconds, and the command line must be
    # able to set environment variables, and to answer --help, before that.
    if name in _SUBPACKAGES:
        return _import_module(f".{name}", __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(_import_module(f".{_HOMES.get(name, 'errors')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
