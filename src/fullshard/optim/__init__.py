"""Optimizers that know the shards: fused memory instead of one DTensor after the other, matrices by owner, averages.

It may import the engine and below; it knows neither of the two APIs.
It owns the fused ranges of shard memory that one kernel updates, the plans by which ranks exchange matrices, the
optimizers over both, and averages of shards.
"""

from fullshard.optim.eight_bit.adamw8bit import AdamW8bit
from fullshard.optim.ema import EMA
from fullshard.optim.matrices.muon import Muon
from fullshard.optim.sharded_optimizer import ShardedOptimizer

__all__ = ["EMA", "AdamW8bit", "Muon", "ShardedOptimizer"]
