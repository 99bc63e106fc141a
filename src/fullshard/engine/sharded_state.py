"""The life of a group of parameters: the states it can be in, and which may follow which.

    SHARDED --> GATHERING --> GATHERED <--> UNSHARDED
       ^ ^          ^             |
       | |          |             |   reshard
       | +----------|-------------+
       |            |             |   reshard after forward, with a post-forward mesh
       +-- SHARDED_POST_FORWARD <-+

Two other facts about a group are independent of this and stay beside it. `FSDPParamGroup.full_params_installed` says
that the modules have full parameters for a while, outside of training. Whether a gather was issued ahead of its
use is known to the runtime only: a group does not depend on who asked for it.
"""

from __future__ import annotations

import enum


class ShardedState(enum.Enum):
    """What of a group's parameters is in memory, and which of them are on the modules."""

    SHARDED = "sharded"
    """Shards only. The sharded parameters are on the modules, as in all states but UNSHARDED."""
    GATHERING = "gathering"
    """The all-gather has been issued; compute has not waited for it."""
    GATHERED = "gathered"
    """The full parameters are in memory and compute may read them, as backward does."""
    UNSHARDED = "unsharded"
    """The same, and the unsharded parameters are on the modules."""
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
"""By state, those that may follow it. The tests check every change of every group: `tests/helpers/life_cycle.py`."""
