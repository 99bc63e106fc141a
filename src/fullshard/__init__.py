"""Fully sharded data parallel training for PyTorch.

    from fullshard import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)

The public names of `torch.distributed.fsdp`, on an engine whose groups are gathered in place, without copies.
"""

from .errors import (
    CommunicationError,
    ConfigurationError,
    FullshardError,
    LayoutError,
    LifecycleError,
    UnsupportedError,
)
from .fsdp_module import FSDPModule, UnshardHandle
from .functional import fully_shard
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__version__ = "0.1.0"

__all__ = [
    "CPUOffloadPolicy",
    "CommunicationError",
    "ConfigurationError",
    "FSDPModule",
    "FullshardError",
    "LayoutError",
    "LifecycleError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "UnsupportedError",
    "fully_shard",
]
