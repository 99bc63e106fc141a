"""Optimizers that work on plain shard memory instead of one DTensor after the other, and averages of parameters.

It may import the engine and below; it knows neither of the two APIs.
It owns the fused ranges of shard memory that one kernel updates, the optimizers over them, and averages of shards.
"""

from fullshard.optim.ema import EMA
from fullshard.optim.sharded_optimizer import ShardedOptimizer

__all__ = ["EMA", "ShardedOptimizer"]
