"""The composable API: `fully_shard` and `replicate`, torch's FSDP2 API on this engine, and groups by plan.

It may import the engine and below, and `wrap`, and nothing of `fsdp1`.
It owns what the arguments of `fully_shard` mean, and the methods of `FSDPModule`.
"""
