"""The place of a sharded module in a training step.

    IDLE ----------> FORWARD           a forward begins, or backward runs it again (recomputation)
    FORWARD -------> IDLE              ... and has ended
    IDLE, FORWARD -> PRE_BACKWARD      backward needs the parameters, gradients are awaited
    PRE_BACKWARD --> POST_BACKWARD     the gradients have been sent off
    POST_BACKWARD -> IDLE              the backward pass has ended

The rest of the table are the ways back. A module is reached again by another of its calls, or by a gradient
that arrives late (POST_BACKWARD to PRE_BACKWARD). It is recomputed for another of its calls (POST_BACKWARD to
FORWARD). Its forward runs a backward pass of its own and then goes on (PRE_BACKWARD or POST_BACKWARD to
FORWARD). A step fails and is given up (PRE_BACKWARD to IDLE).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class TrainingState(enum.Enum):
    """The place of a sharded module in a training step; torch's FSDP uses the same names."""

    IDLE = enum.auto()
    FORWARD = enum.auto()
    PRE_BACKWARD = enum.auto()
    POST_BACKWARD = enum.auto()


TRANSITIONS: Mapping[TrainingState, frozenset[TrainingState]] = {
    TrainingState.IDLE: frozenset({TrainingState.FORWARD, TrainingState.PRE_BACKWARD}),
    TrainingState.FORWARD: frozenset({TrainingState.IDLE, TrainingState.PRE_BACKWARD}),
    TrainingState.PRE_BACKWARD: frozenset(
        {TrainingState.POST_BACKWARD, TrainingState.FORWARD, TrainingState.IDLE}
    ),
    TrainingState.POST_BACKWARD: frozenset(
        {TrainingState.IDLE, TrainingState.PRE_BACKWARD, TrainingState.FORWARD}
    ),
}
"""The allowed transitions; staying in a state is none. `tests/engine/test_training_state.py` checks them."""
