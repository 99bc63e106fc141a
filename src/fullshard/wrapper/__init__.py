"""The wrapper door."""

from .module import FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel"]
