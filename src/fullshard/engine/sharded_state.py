"""The life of a group of parameters: the states it can be in, and the changes between them.

    SHARDED --> GATHERING --> GATHERED <--> UNSHARDED
       ^ ^          ^             |
       | |          |             |   reshard
       | +----------|-------------+
       |            |             |   reshard after forward, with a post-forward mesh
       +-- SHARDED_POST_FORWARD <-+

`FSDPParamGroup.full_params_installed` is independent of this: it says that the modules have full parameters for a while,
outside of training. `Retention` says how long gathered memory that is not used now stays.
"""

from __future__ import annotations

import enum


class ShardedState(enum.Enum):
    """The parameters of a group that are in memory, sharded or full, and those that are on the modules."""

    SHARDED = "sharded"
    """Shards only. The sharded parameters are on the modules, as in all states but UNSHARDED."""
    GATHERING = "gathering"
    """The all-gather has been issued; compute has not waited for it."""
    GATHERED = "gathered"
    """The full parameters are in memory and compute may read them, as backward does."""
    UNSHARDED = "unsharded"
    """As GATHERED, and the unsharded parameters are on the modules."""
    SHARDED_POST_FORWARD = "sharded post-forward"
    """Shards, and a post-forward shard from which backward gathers."""


TRANSITIONS: dict[ShardedState, frozenset[ShardedState]] = {
    ShardedState.SHARDED: frozenset({ShardedState.GATHERING}),
    ShardedState.GATHERING: frozenset({ShardedState.GATHERED}),
    ShardedState.GATHERED: frozenset(
        {ShardedState.UNSHARDED, ShardedState.SHARDED, ShardedState.SHARDED_POST_FORWARD}
    ),
    ShardedState.UNSHARDED: frozenset({ShardedState.GATHERED}),
    ShardedState.SHARDED_POST_FORWARD: frozenset({ShardedState.GATHERING, ShardedState.SHARDED}),
}
"""For each state, those that may follow it. The tests check every change of every group: `tests/helpers/life_cycle.py`."""


class Retention(enum.Enum):
    """The answer about a state's gathered memory while it is not used: may it be used again, and until when?

    Set by the `Step` that a state runs under, wherever it is gathered or left. The one state that is kept until the next
    gather is that step's own to know.
    """

    NONE = "none"
    """It is in use or given back; or the user keeps it, and the next forward asks whether the shards are unchanged."""
    FORECAST = "forecast"
    """It was gathered early and has not been used yet. Given back at the end of the pass if it is not."""
    BACKWARD = "backward"
    """Kept for the backward of the forward that has ended, and for no other forward."""
