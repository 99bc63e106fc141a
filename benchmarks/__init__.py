"""Programs that measure fullshard against torch's own FSDP and against no sharding at all."""
