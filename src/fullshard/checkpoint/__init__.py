"""Checkpoints: safe, elastic, and never half-written.

    from fullshard import checkpoint

    checkpoint.save("runs/a/step-100", model, optimizer, extra={"step": 100})
    newest = checkpoint.latest("runs/a")
    loaded = checkpoint.load(newest, model, optimizer)  # any number of ranks, either API
    step = loaded.extra["step"]

It may import the engine and below, and `optim`; it knows neither of the two APIs.
It owns what is on the disk: safetensors files and a JSON manifest, described in docs/checkpoints.md.

All ranks call these functions.
"""

from fullshard.checkpoint.base_weights import Base
from fullshard.checkpoint.folders.publication import latest
from fullshard.checkpoint.load_plan import Loaded
from fullshard.checkpoint.save import PendingSave, async_save, save
from fullshard.checkpoint.save_plan import Saved
from fullshard.checkpoint.sources.formats import base_of, load
from fullshard.checkpoint.sources.huggingface import load_huggingface, save_huggingface

__all__ = [
    "Base",
    "Loaded",
    "PendingSave",
    "Saved",
    "async_save",
    "base_of",
    "latest",
    "load",
    "load_huggingface",
    "save",
    "save_huggingface",
]
