"""Dtypes of one wrapper that the engine does not know of: buffers, and full precision in eval mode."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from fullshard import torch_border
from fullshard.api import MixedPrecision
from fullshard.engine.state import FSDPState
from fullshard.fsdp1.construction import full_precision_in_eval, policy_of
from fullshard.plan.policies import MixedPrecisionPolicy


class Precision:
    """Casts a wrapper's buffers at its first forward, and follows its mode from then on if told to."""

    def __init__(self, modules: Iterable[nn.Module], options: MixedPrecision) -> None:
        self._low = policy_of(options)
        # Reduction stays as it is: gradients may be accumulating.
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
        """Owner, name, and dtype before."""

    def prepare_forward(self, state: FSDPState, *, training: bool) -> None:
        """Bring groups and buffers into the dtypes of the forward that is about to begin."""
        low = training or not self._follows_mode
        if low is self._is_low:
            return
        self._is_low = low
        with torch_border.outside_transforms():  # the buffers stay
            for module, name, dtype in self._buffers:
                buffer = getattr(module, name)
                setattr(module, name, buffer.to(self._buffer_dtype if low else dtype))
        if self._follows_mode:
            policy = state.options.mp_policy = self._low if low else self._full
            state.options.cast_root_inputs = low and self._casts_root_inputs
            for group in state.groups:
                group.set_mp_policy(policy)

    def forget_mode(self) -> None:
        """Look at the buffers again at the next forward: there may be others."""
        self._is_low = None

    def original_buffer_dtypes(self) -> dict[tuple[nn.Module, str], torch.dtype]:
        """Of the buffers that may be in another dtype now."""
        return {(module, name): dtype for module, name, dtype in self._buffers}
