"""Checkpoints: safe, elastic, and never half-written.

    from fullshard import checkpoint

    checkpoint.save("runs/a/step-100", model, optimizer, extra={"step": 100})
    newest = checkpoint.latest("runs/a")
    loaded = checkpoint.load(newest, model, optimizer)  # any number of ranks, either door
    step = loaded.extra["step"]

All ranks call these. On disk are safetensors files and a JSON manifest: see docs/checkpoints.md.
"""

from .formats import load
from .huggingface import load_huggingface, save_huggingface
from .loading import Loaded
from .publishing import latest
from .saving import PendingSave, async_save, save
from .writing import Saved

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
