"""Names of modules and parameters without the wrappers around them."""

from __future__ import annotations

from fullshard.torch_border import ACTIVATION_CHECKPOINTED

FSDP_WRAPPED_MODULE = "_fsdp_wrapped_module"
"""The attribute under which a `FullyShardedDataParallel` has its module; torch's word, part of all names below it."""
FSDP_PREFIX = FSDP_WRAPPED_MODULE + "."
FLAT_PARAM = "_flat_param"
"""The attribute under which a wrapped module has its `FlatParameter`; torch's word."""
_WRAPPERS = (FSDP_WRAPPED_MODULE, ACTIVATION_CHECKPOINTED)


def clean_name(name: str) -> str:
    """Return a name as it was before modules were wrapped.

    >>> clean_name("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_wrapper(name: str) -> bool:
    """Return whether a child of this name is a module with a wrapper around it."""
    return name in _WRAPPERS
