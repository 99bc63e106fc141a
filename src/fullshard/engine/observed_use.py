"""What this rank has seen of how a state is used; a rank that skips the state does the same (`skipped_forward`).

    enter, leave    in forward: which states are used within which
    reach, finish   in backward: where it comes in, and which parameters get gradients

Every step overwrites it, at the cost of a few attribute writes per state.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING

from fullshard.plan.schedule import Call
from fullshard.storage.param import FSDPParam

if TYPE_CHECKING:
    from fullshard.engine.state import FSDPState


class ObservedUse:
    """How one state was used last; lives as long as the state."""

    def __init__(self) -> None:
        self.inner: tuple[FSDPState, ...] | None = None
        """The states used within its forward, in order; None before the first."""
        self.had_backward = False
        """Whether an output could receive a gradient."""
        self.reached_at = 0
        """The tick at which the forward began that backward reached last; 0 before the first."""
        self.returns_inner_output = False
        """Whether its output is the output of a state within it, the same tensor."""
        self.num_trainable = 0
        """How many parameters were trainable when backward reached it."""
        self.unused: Collection[FSDPParam] = ()
        """Trainable parameters that got no gradient."""

    def reach(
        self, call: Call[FSDPState], num_trainable: int, *, returns_inner_output: bool
    ) -> None:
        """Backward has reached an output of ``call``."""
        self.reached_at = call.begin
        self.num_trainable = num_trainable
        self.returns_inner_output = returns_inner_output


class Nesting:
    """The forwards now running, one inside the other."""

    def __init__(self) -> None:
        self._running: list[tuple[FSDPState, list[FSDPState]]] = []

    def enter(self, state: FSDPState) -> None:
        """A forward begins."""
        if self._running:
            self._running[-1][1].append(state)
        self._running.append((state, []))

    def leave(self, state: FSDPState) -> None:
        """A forward has ended; one that an exception ended tells nothing."""
        while self._running:
            running, inner = self._running.pop()
            if running is state:
                if sys.exception() is None:
                    state.use.inner = tuple(inner)
                return

    def clear(self) -> None:
        """Forget forwards that did not end."""
        self._running.clear()
