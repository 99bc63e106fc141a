"""Which fullshard this is; checkpoints say it."""

__version__ = "0.1.0"
