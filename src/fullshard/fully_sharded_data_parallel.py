"""The wrapper and its options: the public names of `torch.distributed.fsdp.fully_sharded_data_parallel`."""

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
from fullshard.fsdp1.wrapper import FullyShardedDataParallel
from fullshard.layout.names import FLAT_PARAM, FSDP_PREFIX, FSDP_WRAPPED_MODULE
from fullshard.storage.flat_parameter import FlatParameter
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy

__all__ = [
    "FLAT_PARAM",
    "FSDP_PREFIX",
    "FSDP_WRAPPED_MODULE",
    "BackwardPrefetch",
    "CPUOffload",
    "CustomPolicy",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]
