"""The part of a wrapper's mixed precision that the engine does not have.

Buffers are cast at the first forward. With ``FSDP_USE_FULL_PREC_IN_EVAL=1``, modules in eval mode compute
in full precision, and every forward after a change of mode casts buffers and parameters.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from fullshard import torch_border
from fullshard.api import MixedPrecision
from fullshard.engine.state import FSDPState
from fullshard.fsdp1.construction import full_precision_in_eval, policy_of
from fullshard.policies import MixedPrecisionPolicy


class Precision:
    """The dtypes of one wrapper: of its buffers, and of its groups in training and in eval mode."""

    def __init__(self, modules: Iterable[nn.Module], options: MixedPrecision) -> None:
        self._low = policy_of(options)
        # The reduce dtype stays the same in eval mode: gradients may be accumulating in it.
        self._full = MixedPrecisionPolicy(
            reduce_dtype=options.reduce_dtype or options.param_dtype,
            cast_forward_inputs=False,
            wire_dtype=options.wire_dtype,
        )
        self._buffer_dtype = options.buffer_dtype
        self._casts_root_inputs = options.cast_root_forward_inputs
        self._follows_mode = full_precision_in_eval()
        self._is_low: bool | None = None
        self._buffers = (
            []
            if self._buffer_dtype is None
            else [
                (module, name, buffer.dtype)
                for module in modules
                for name, buffer in module.named_buffers(recurse=False)
                if buffer.is_floating_point()
            ]
        )
        """Owner, name, and original dtype of every buffer that is cast."""

    def prepare_forward(self, state: FSDPState, *, training: bool) -> None:
        """Give groups and buffers the dtypes of the forward that is about to begin."""
        low = training or not self._follows_mode
        if low is self._is_low:
            return
        self._is_low = low
        with torch_border.outside_transforms():  # the cast buffers outlive a torch.func transform
            for module, name, dtype in self._buffers:
                buffer = getattr(module, name)
                setattr(module, name, buffer.to(self._buffer_dtype if low else dtype))
        if self._follows_mode:
            policy = state.options.mp_policy = self._low if low else self._full
            state.options.cast_root_inputs = low and self._casts_root_inputs
            for group in state.groups:
                group.set_mp_policy(policy)

    def forget_mode(self) -> None:
        """Cast again at the next forward: the modules may have other buffers."""
        self._is_low = None

    def original_buffer_dtypes(self) -> dict[tuple[nn.Module, str], torch.dtype]:
        """Return the original dtypes of the buffers that may have another one now, by owner and name."""
        return {(module, name): dtype for module, name, dtype in self._buffers}
