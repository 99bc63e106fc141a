"""The wrapper: `FullyShardedDataParallel`, torch's FSDP1 API on this engine.

It may import the engine and below, `api` and `wrap`, and nothing of `fsdp2`.
It owns what the arguments of the wrapper mean, its state dicts, and the state dicts of its optimizers.
"""
