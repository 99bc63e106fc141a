"""Names of modules and parameters without the wrappers around them."""

from __future__ import annotations

from fullshard.torch_border import ACTIVATION_CHECKPOINTED

WRAPPED = "_fsdp_wrapped_module"
"""The child of a `FullyShardedDataParallel` that it wraps; part of all names below it."""
FLAT = "_flat_param"
"""Under which a wrapped module has its `FlatParameter`."""
_WRAPPERS = (WRAPPED, ACTIVATION_CHECKPOINTED)


def clean_name(name: str) -> str:
    """A name as it was before modules were wrapped.

    >>> clean_name("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
