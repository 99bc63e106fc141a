"""Optimizers that work on plain shard memory instead of one DTensor after the other.

It may import the engine and below; it knows neither of the two APIs.
It owns the fused ranges of shard memory that one kernel updates, and the optimizers over them.
"""

from fullshard.optim.sharded_optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
