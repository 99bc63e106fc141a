"""A sharded module's state: its groups, its options, and where it is in the step.

Nothing here decides what happens when: `Step` does, and `hooks` and autograd call it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from fullshard.engine.observed_use import ObservedUse
from fullshard.engine.options import StateOptions
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.schedule import FORWARD, Call
from fullshard.engine.sharded_state import Retention
from fullshard.engine.step import Step, watch_gradient
from fullshard.engine.training_state import TrainingState
from fullshard.layout.names import clean_name
from fullshard.transport.streams import FSDPCommContext

IgnoredParams = Mapping[nn.Module, Collection[str]]
"""Names of parameters by the module that has them, which is referred to weakly."""


class FSDPState:
    """The state that one `fully_shard` call put on a module, or on several that share groups.

    Lives as long as the modules.
    """

    num_made: ClassVar[int] = 0
    """Number of states made in this process, on models that exist or not."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[FSDPParamGroup],
        device: torch.device,
        options: StateOptions,
        *,
        ignored: IgnoredParams | None = None,
    ) -> None:
        FSDPState.num_made += 1
        self.modules = tuple(modules)
        self.groups = tuple(groups)
        for group in groups:
            group.watch_gradient = functools.partial(watch_gradient, weakref.ref(self))
        self.device = device
        self.options = options
        self.ignored: IgnoredParams = {} if ignored is None else ignored
        """Parameters below the modules that the user wants to be left alone."""
        self.set_name("")
        self.shared_context: FSDPCommContext | None = None
        """For a root: streams that it shares with other models."""
        self.step: Step | None = None
        """The step of the root that this state runs under; known after the first forward."""
        self.summoned = False
        """Whether the modules are within `summon_full_params`."""
        self.original_buffer_dtypes: Mapping[tuple[nn.Module, str], torch.dtype] = {}
        """The dtypes of buffers before they were cast for compute, by owner and name."""

        self.load_errors: list[str] = []
        """Errors that torch will report of the state dict that is being loaded."""

        self.training_state = TrainingState.IDLE
        self.call: Call[FSDPState] | None = None
        """The forward now running."""
        self.depth = 0
        """Forwards of this state's modules now running, one inside the other."""
        self.modules_run: set[nn.Module] = set()
        """The modules whose forward has ended in this call."""
        self.retention = Retention.NONE
        """The stay of gathered memory that is not used now."""
        self.written_in_forward = False
        """Whether its parameters were once written between a gather in forward and their use: [Note: writes in forward]."""
        self.use = ObservedUse()
        """Its last use, for forwards that are skipped."""
        self.recomputes = False
        """Whether a backward has been seen to run this state's forward again."""
        self.awaited: set[int] = set()
        """Ids of parameters whose gradients have not arrived, while backward is in this state; see `ReachedState`."""
        self.trainable_ids: tuple[int, tuple[int, ...]] = (-1, ())
        """`CHANGES.count` when they were looked up, and the ids of the trainable parameters: see `ReachedState`."""
        self.watched_leaves: weakref.WeakValueDictionary[int, Tensor] = (
            weakref.WeakValueDictionary()
        )
        """Inputs without a graph that have our hook already, by their ids: users may pass them again."""

    def set_name(self, name: str, in_common: str | None = None) -> None:
        """Take the full name, known at the first forward, and the one that ranks compare: see `names_in_common`."""
        self.name = name
        self.name_in_common = name if in_common is None else in_common

    @property
    def gathered(self) -> bool:
        """Whether the full parameters are in memory or on their way."""
        return any(group.gathered for group in self.groups)

    def wait_for_unshard(self) -> None:
        """Put the unsharded parameters on the modules; their gather has been issued."""
        for group in self.groups:
            group.wait()

    def use_sharded_params(self) -> None:
        """Put the sharded parameters on the modules and keep the memory of the unsharded ones."""
        for group in self.groups:
            group.use_sharded_params()

    def reshard(self) -> None:
        """Put the sharded parameters on the modules and give the memory of the unsharded ones back."""
        for group in self.groups:
            group.reshard()

    @property
    def in_forward(self) -> bool:
        """Whether a forward is running that is no recomputation."""
        return self.call is not None and self.call.made_in == FORWARD


def state_of(module: nn.Module) -> FSDPState | None:
    """Return the state that `fully_shard` put on a module, or None."""
    return module.__dict__.get("_fullshard_state")


def attach_state(module: nn.Module, state: FSDPState) -> None:
    """Make ``state`` the module's."""
    module.__dict__["_fullshard_state"] = state


def named_states(root: nn.Module) -> dict[FSDPState, list[str]]:
    """Return all states in ``root``, each with the names of its modules; that of the root itself is empty."""
    names: dict[FSDPState, list[str]] = {}
    for name, module in root.named_modules():
        found = state_of(module)
        if found is not None:
            names.setdefault(found, []).append(clean_name(name))
    return names
