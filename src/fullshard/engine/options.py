"""The user's choices for the modules of one `fully_shard` call, or for one wrapper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fullshard.engine.model_changes import CHANGES
from fullshard.errors import ConfigurationError, OptionTypeError
from fullshard.policies import MixedPrecisionPolicy, switch
from fullshard.transport.streams import is_capturing

if TYPE_CHECKING:
    from fullshard.engine.state import FSDPState


@dataclass
class StateOptions:
    """The choices; code that takes one from a user calls the method that checks it."""

    mp_policy: MixedPrecisionPolicy
    reshard_after_forward: bool
    auto_reshard: bool
    """Whether the user left `reshard_after_forward` open, so that the root may decide otherwise."""
    kept_for_backward_only: bool = False
    """Whether parameters that stay unsharded after forward are for backward alone. The modules have their
    sharded parameters until then, and the next forward gathers again, whether or not they were changed."""
    cast_root_inputs: bool = False
    """Whether inputs are cast if this is the root, whatever the policy says."""
    reshard_after_backward: bool = True
    requires_gradient_sync: bool = True
    unshard_in_backward: bool = True
    forward_prefetch: tuple[FSDPState, ...] | None = None
    """States to gather while this state computes its forward; None for the forecast."""
    backward_prefetch: tuple[FSDPState, ...] | None = None
    """States to gather while this state computes its backward; None for the forecast."""
    prefetches_late: bool = False
    """Whether backward gathers the next state when all gradients of this one have arrived, and not before."""
    max_reductions: int = 1
    """Most reduce inputs that may be in flight."""
    is_last_backward: bool = True
    """For the root: whether the end of backward releases what was kept for it."""
    manual_finalization: bool = False
    """For the root: whether the user ends backward (`backward_finalization`), and not the end of each pass."""
    post_optim_event: Any = None
    """For the root: the event that the next forward's gathers wait for, instead of the current stream."""
    event_is_captured: bool = False
    """Whether `post_optim_event` was set during the capture of a CUDA graph."""
    fuse_gradients: bool = False
    """Whether linear layers write the gradients of their weights into the reduce buffer: see `fused_linear`."""
    _chosen: tuple[bool, bool, bool] | None = None
    """Within a pipeline's step: the user's choices that the step has changed."""

    def set_reshard_after_forward(self, reshard_after_forward: bool) -> None:
        """Choose it for this state, whatever the root would decide."""
        if not isinstance(reshard_after_forward, bool):  # an int means something else elsewhere
            raise ConfigurationError(
                f"reshard_after_forward must be True or False, got {reshard_after_forward!r}."
            )
        self.reshard_after_forward = reshard_after_forward
        self.auto_reshard = False
        CHANGES.note()

    def set_reshard_after_backward(self, reshard_after_backward: bool) -> None:
        """Choose whether to give the unsharded parameters back after backward."""
        self.reshard_after_backward = switch("reshard_after_backward", reshard_after_backward)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Choose whether backward reduces gradients, or only adds them up."""
        self.requires_gradient_sync = switch("requires_gradient_sync", requires_gradient_sync)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Choose whether backward needs the parameters."""
        self.unshard_in_backward = switch("unshard_in_backward", unshard_in_backward)
        CHANGES.note()

    def set_forward_prefetch(self, states: tuple[FSDPState, ...]) -> None:
        """Gather these while this state computes its forward."""
        self.forward_prefetch = states
        CHANGES.note()

    def set_backward_prefetch(self, states: tuple[FSDPState, ...]) -> None:
        """Gather these while this state computes its backward."""
        self.backward_prefetch = states
        CHANGES.note()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward is the last one of the forwards that have run."""
        self.is_last_backward = switch("is_last_backward", is_last_backward)

    def set_post_optim_event(self, event: Any) -> None:
        """Let the next forward's gathers wait for ``event``."""
        if not callable(getattr(event, "record", None)):
            raise OptionTypeError(f"event must be a torch.Event, got {type(event).__name__}.")
        self.post_optim_event, self.event_is_captured = event, is_capturing()

    def begin_microbatches(self) -> None:
        """Let backward add gradients up and keep what was gathered, until `end_microbatches`."""
        if self._chosen is None:
            self._chosen = (
                self.requires_gradient_sync,
                self.reshard_after_backward,
                self.is_last_backward,
            )
            self.requires_gradient_sync = False
            self.reshard_after_backward = False
            self.is_last_backward = False

    def end_microbatches(self) -> None:
        """Restore the user's choices."""
        if self._chosen is not None:
            (
                self.requires_gradient_sync,
                self.reshard_after_backward,
                self.is_last_backward,
            ) = self._chosen
            self._chosen = None
