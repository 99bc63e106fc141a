"""This rank's observations of a state's use; a rank that skips the state does as observed (`skipped_forward`).

`Step` writes in forward which states are used within which, and in backward where it comes in, and
which parameters get gradients. Every step overwrites it, at the cost of a few attribute writes per state.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from fullshard.storage.param import FSDPParam

if TYPE_CHECKING:
    from fullshard.engine.state import FSDPState


class ObservedUse:
    """The last use of one state; lives as long as the state."""

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
        """Number of parameters that were trainable when backward reached it."""
        self.unused: Collection[FSDPParam] = ()
        """Trainable parameters that got no gradient."""
