"""The model of one root: its step's knowledge of it, and the checks when it has changed."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fullshard.engine import process_hooks
from fullshard.engine.feature_events import PIPELINING_IMPORTED
from fullshard.engine.model_changes import CHANGES
from fullshard.engine.ownership import unmanaged_params
from fullshard.transport.monitor import monitor
from fullshard.transport.streams import FSDPCommContext

if TYPE_CHECKING:
    from fullshard.engine.state import FSDPState


class RootModel:
    """A root and the states below it; the model is compared with those of other ranks before it is gathered."""

    def __init__(self, root: FSDPState, states: Sequence[FSDPState]) -> None:
        self.root, self.states = root, tuple(states)
        self._monitor = monitor().of_model()
        self.changes_seen = -1
        """`CHANGES.count` when ranks last compared the model."""
        self.tree_changed = True
        """Whether modules or parameters may have joined the model since it was last checked."""
        self.may_drop = True
        """Whether dropout that is active without gradients has not been looked for yet."""
        self.observes_stages = False

    def connect(self, context: FSDPCommContext) -> None:
        """Let all groups use the model's streams."""
        for state in self.states:
            for number, group in enumerate(state.groups, 1):
                several = len(state.groups) > 1
                part = f" (group {number} of {len(state.groups)})" if several else ""
                group.connect(context, state.name, in_tags=state.name_in_common + part)
        self.limit_reductions(context)

    def limit_reductions(self, context: FSDPCommContext) -> None:
        """Let as many reductions be in flight as the most demanding state asks for."""
        context.max_reductions = max(state.options.max_reductions for state in self.states)

    # --- before a forward ---------------------------------------------------------------------------

    def look(self) -> None:
        """Look for changes since the last forward: modules, dropout, whatever ranks must have in common."""
        if self.tree_changed:
            self._check_tree()
        if self.may_drop and not torch.is_grad_enabled():
            self._look_for_dropout()
        self.agree()

    def agree(self) -> None:
        """Compare the model with those of other ranks, if something has changed since they were compared."""
        if self.changes_seen == CHANGES.count:
            return
        self._monitor.agree(self.root, self.states)
        self.changes_seen = self._monitor.changes_seen

    def observe_stages(self) -> None:
        """Let features observe stages of pipelines, which have been imported; asked for at every forward until then."""
        self.observes_stages = all(observe() for observe in PIPELINING_IMPORTED)

    def _look_for_dropout(self) -> None:
        """Tell of one forward without gradients in training mode: each rank would drop something else."""
        module = self.root.modules[0]
        if module.training and self._has_peers:
            self.may_drop = False
            self._monitor.runs_without_gradients(module)

    @property
    def _has_peers(self) -> bool:
        """Whether other ranks have a part of the model, or a replica."""
        return any(
            group.mesh_info.shard_mesh_size * group.mesh_info.replicate_mesh_size > 1
            for state in self.states
            for group in state.groups
        )

    def _check_tree(self) -> None:
        """Warn of trainable parameters that joined the model after it was sharded: the engine does not reduce them.

        That is legal, since users may average their gradients by hand, where the engine cannot see it.
        """
        if any(group.full_params_installed for state in self.states for group in state.groups):
            return  # the modules have other parameters for a while
        module = self.root.modules[0]
        strangers = unmanaged_params(module, [state.ignored for state in self.states])
        if strangers and self._has_peers:
            warnings.warn(
                "All trainable parameters of a sharded model should be sharded or ignored, or their gradients stay "
                f"different on every rank; these were added afterwards: {strangers}. Call fully_shard (or replicate) on "
                "the new modules, too, or replace modules before the model is sharded. Nothing is wrong if you average "
                "these gradients yourself, before the optimizer's step.",
                stacklevel=2,
            )
        self.tree_changed = False
        process_hooks.watch(module.modules(), functools.partial(_tree_changed, weakref.ref(self)))


def _tree_changed(model: weakref.ref[RootModel]) -> None:
    alive = model()
    if alive is not None:
        alive.tree_changed = True
