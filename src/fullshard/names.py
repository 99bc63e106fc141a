"""Names of modules and parameters without the wrappers around them."""

from __future__ import annotations

from collections.abc import Iterable

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


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as a message names them: "rank 3", "ranks 0, 1", "ranks 0-6, 8"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(runs) > 1 or len(runs[0]) > 1 else ''} {', '.join(parts)}"
