"""Features that join the step at its events: those that every sharded model has, and those that its options ask for."""

from __future__ import annotations

from fullshard.engine.feature_events import MODEL_CONNECTED, PIPELINING_IMPORTED, call_at
from fullshard.engine.options import StateOptions
from fullshard.features import pipelines
from fullshard.features.fused_gradients import fused_linear
from fullshard.features.padding import warn_of_padding


def register(options: StateOptions) -> None:
    """Let features join the steps of a model of which a part has these options."""
    call_at(MODEL_CONNECTED, warn_of_padding)
    call_at(PIPELINING_IMPORTED, pipelines.observe)
    if options.fuse_gradients:
        call_at(MODEL_CONNECTED, fused_linear.connect)
