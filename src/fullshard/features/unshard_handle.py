"""Gathers that a user asks for: `unshard`, which both APIs have."""

from __future__ import annotations

import weakref

import torch

from fullshard import torch_border
from fullshard.engine import captures
from fullshard.engine.lazy_init import lazy_init
from fullshard.engine.model_changes import CHANGES
from fullshard.engine.sharded_state import Retention, ShardedState
from fullshard.engine.state import FSDPState
from fullshard.transport.monitor import ModelMonitor, monitor

_MONITORS: weakref.WeakKeyDictionary[FSDPState, ModelMonitor] = weakref.WeakKeyDictionary()
"""Monitors of states that are gathered before their model's first forward, one for each state."""


class UnshardHandle:
    """A gather in flight: what `FSDPModule.unshard(async_op=True)` returns."""

    def __init__(self, state: FSDPState) -> None:
        self._state: FSDPState | None = state

    def wait(self) -> None:
        """Wait until the parameters are unsharded; the current stream may use them afterwards."""
        # Nothing is left to wait for if a forward has used the parameters and resharded them.
        if self._state is not None and self._state.gathered:
            with torch_border.outside_transforms():
                self._state.wait_for_unshard()
        self._state = None  # waiting twice is harmless


def unshard_state(state: FSDPState, async_op: bool) -> UnshardHandle | None:
    """Gather the parameters of a state; with ``async_op`` return a handle to wait for."""
    idle = state.step is None or not state.step.busy
    with torch_border.outside_transforms():
        if state.step is None:
            told = _MONITORS.get(state) or _MONITORS.setdefault(state, monitor().of_model())
            if told.changes_seen != CHANGES.count:
                told.agree(state, (state,), "unshard() before the first forward")
            if len(state.modules) == 1 and torch.is_grad_enabled():
                # Its parameters may be used without a forward of its own, and their gradients are to be reduced. A root
                # around it takes it over in its first forward.
                lazy_init(state)
        elif idle:
            context = state.step.context
            if context.asynchronous and context.at_border():
                captures.begin_forward(state.step, (state,))
            state.step.model.agree()
        for group in state.groups:
            # Parameters kept for a backward must stay those that its forward has used.
            awaited = state.retention is Retention.BACKWARD and group.gathered
            if idle and not awaited and group.sharded_state is not ShardedState.UNSHARDED:
                group.notice_replacements()
                if group.outdated:
                    group.reshard()
            if not group.gathered:
                group.context.gathers_wait_for()
                group.unshard(may_stay=True, aside=True)
    handle = UnshardHandle(state)
    if async_op:
        return handle
    handle.wait()
    return None
