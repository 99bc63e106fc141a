"""A model between steps: its sharded parameters are on the modules, and nothing is in flight."""

from __future__ import annotations

from torch import nn

from fullshard.engine.state import FSDPState, state_of
from fullshard.errors import LifecycleError
from fullshard.features.full_params import uninstall_all

__all__ = ["bring_to_rest"]


def bring_to_rest(model: nn.Module, method: str) -> list[FSDPState]:
    """Put the sharded parameters on the modules, and return the states that both APIs keep for them.

    Args:
        model: Sharded by either API, by both, or by none.
        method: The caller's name, for messages.

    Raises:
        LifecycleError: within forward, backward or `summon_full_params`.
    """
    found = (state_of(module) for module in model.modules())
    states = list(dict.fromkeys(state for state in found if state is not None))
    if any(state.step is not None and state.step.busy for state in states):
        raise LifecycleError(
            f"{method} was called within forward or backward of the model. Call it between them. (After an exception, "
            "call reset_iter_state of a model that was sharded with fully_shard, or run a forward of a wrapped one.)"
        )
    if any(state.summoned for state in states):
        raise LifecycleError(f"{method} was called within summon_full_params. Call it outside.")
    for state in states:
        uninstall_all(state)  # loading a state dict has failed
        for group in state.groups:
            group.reshard()
            group.notice_replacements()
    return states
