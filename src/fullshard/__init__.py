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

__version__ = "0.1.0"

if _TYPE_CHECKING:
    from fullshard import checkpoint as checkpoint, optim as optim
    from fullshard.api import (
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
    from fullshard.checks.debug import debug
    from fullshard.divergence.guarded_step import GuardedStep, guarded_step
    from fullshard.divergence.step_guard import StepFailure
    from fullshard.drop_in.install import Installation, install, installed, uninstall
    from fullshard.errors import (
        CheckpointError,
        CommunicationError,
        ConfigurationError,
        DivergenceError,
        FullshardError,
        LayoutError,
        LifecycleError,
        OptionTypeError,
        StepFailedError,
        StreamOrderError,
        UnsupportedError,
        UsageError,
    )
    from fullshard.features.backward_finalization import GradientReductionHandle
    from fullshard.features.clip_grad import clip_grad_norm_
    from fullshard.features.graphs.graphed_step import GraphedStep, graphed
    from fullshard.features.join import JoinedBatches, join
    from fullshard.features.planned_groups import PlannedGroup
    from fullshard.features.unshard_handle import UnshardHandle
    from fullshard.fsdp1.wrapper import FullyShardedDataParallel
    from fullshard.fsdp2.fsdp_module import (
        FSDPModule,
        ReplicateModule,
        register_fsdp_forward_method,
        share_comm_ctx,
    )
    from fullshard.fsdp2.fully_shard import fully_shard, replicate
    from fullshard.fsdp2.group_plan import GroupPlan, plan_groups
    from fullshard.layout.balanced_placement import balanced_placement
    from fullshard.policies import (
        CPUOffloadPolicy,
        DataParallelMeshDims,
        MixedPrecisionPolicy,
        OffloadPolicy,
    )
    from fullshard.storage.flat_parameter import FlatParameter
    from fullshard.tracing.trace import Recording, trace

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CheckpointError",
    "CommunicationError",
    "ConfigurationError",
    "DataParallelMeshDims",
    "DivergenceError",
    "FSDPModule",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullshardError",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "GraphedStep",
    "GroupPlan",
    "GuardedStep",
    "Installation",
    "JoinedBatches",
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
    "StepFailedError",
    "StepFailure",
    "StreamOrderError",
    "UnshardHandle",
    "UnsupportedError",
    "UsageError",
    "balanced_placement",
    "clip_grad_norm_",
    "debug",
    "fully_shard",
    "graphed",
    "guarded_step",
    "install",
    "installed",
    "join",
    "plan_groups",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
    "trace",
    "uninstall",
]

_MODULES = {
    "BackwardPrefetch": "api",
    "CPUOffload": "api",
    "CPUOffloadPolicy": "policies",
    "DataParallelMeshDims": "policies",
    "FSDPModule": "fsdp2.fsdp_module",
    "FlatParameter": "storage.flat_parameter",
    "FullOptimStateDictConfig": "api",
    "FullStateDictConfig": "api",
    "FullyShardedDataParallel": "fsdp1.wrapper",
    "GradientReductionHandle": "features.backward_finalization",
    "GraphedStep": "features.graphs.graphed_step",
    "GroupPlan": "fsdp2.group_plan",
    "GuardedStep": "divergence.guarded_step",
    "Installation": "drop_in.install",
    "JoinedBatches": "features.join",
    "LocalOptimStateDictConfig": "api",
    "LocalStateDictConfig": "api",
    "MixedPrecision": "api",
    "MixedPrecisionPolicy": "policies",
    "OffloadPolicy": "policies",
    "OptimStateDictConfig": "api",
    "OptimStateKeyType": "api",
    "PlannedGroup": "features.planned_groups",
    "Recording": "tracing.trace",
    "ReplicateModule": "fsdp2.fsdp_module",
    "ShardedOptimStateDictConfig": "api",
    "ShardedStateDictConfig": "api",
    "ShardingStrategy": "api",
    "StateDictConfig": "api",
    "StateDictSettings": "api",
    "StateDictType": "api",
    "StepFailure": "divergence.step_guard",
    "UnshardHandle": "features.unshard_handle",
    "balanced_placement": "layout.balanced_placement",
    "clip_grad_norm_": "features.clip_grad",
    "debug": "checks.debug",
    "fully_shard": "fsdp2.fully_shard",
    "graphed": "features.graphs.graphed_step",
    "guarded_step": "divergence.guarded_step",
    "install": "drop_in.install",
    "installed": "drop_in.install",
    "join": "features.join",
    "plan_groups": "fsdp2.group_plan",
    "register_fsdp_forward_method": "fsdp2.fsdp_module",
    "replicate": "fsdp2.fully_shard",
    "share_comm_ctx": "fsdp2.fsdp_module",
    "trace": "tracing.trace",
    "uninstall": "drop_in.install",
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
    value: object = getattr(_import_module(f".{_MODULES.get(name, 'errors')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
