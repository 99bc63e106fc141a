"""The wrapper door: `FullyShardedDataParallel` is in `module`, and the rest serves it."""
