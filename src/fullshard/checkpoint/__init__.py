"""Checkpoints: safe, elastic, and never half-written.

    from fullshard import checkpoint

    checkpoint.save("runs/a/step-100", model, optimizer, extra={"step": 100})
    newest = checkpoint.latest("runs/a")
    loaded = checkpoint.load(newest, model, optimizer)  # any number of ranks, either door
    step = loaded.extra["step"]

All ranks call these. On disk are safetensors files and a JSON manifest: see docs/checkpoints.md.
"""

from fullshard.checkpoint.formats import load
from fullshard.checkpoint.huggingface import load_huggingface, save_huggingface
from fullshard.checkpoint.load_plan import Loaded
from fullshard.checkpoint.publication import latest
from fullshard.checkpoint.save import PendingSave, async_save, save
from fullshard.checkpoint.save_plan import Saved

__all__ = [
    "Loaded",
    "PendingSave",
    "Saved",
    "async_save",
    "latest",
    "load",
    "load_huggingface",
    "save",
    "save_huggingface",
]
