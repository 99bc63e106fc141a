"""Torch's errors about operations on plain tensors and sharded parameters, with what to do about them.

A sharded parameter is a DTensor. Torch refuses to compute with it and a plain tensor, and does not say why there is one.
"""

from __future__ import annotations

import re

MIXED = "mixed torch.Tensor and DTensor"
"""Words of all of these errors."""

_NOTE = (
    "A parameter that fullshard has sharded is a DTensor, except while its module's forward and backward run. If the forward of a "
    "module around it uses it, do not shard its module by itself: it is then sharded with the module around it. A method of "
    "its module that is not forward can be named to register_fsdp_forward_method. Between steps use param.full_tensor() on all "
    "ranks."
)
_REPLICATED = r"require placement changes are not supported.*\(R\)\)\) on DeviceMesh"
"""The error about plain tensors of one element, which torch takes for replicated ones."""
_COPYING = re.compile(
    rf'While copying the parameter named "([^"]*)", .*({MIXED}|{_REPLICATED}).*', re.DOTALL
)
_LOADING = (
    "Sharded parameters take sharded tensors. Load whole ones with torch.distributed.checkpoint.state_dict."
    "set_model_state_dict(model, state_dict, options=StateDictOptions(full_state_dict=True)) on all ranks, or a file of them "
    "with fullshard.checkpoint.load; or make them DTensors with torch.distributed.tensor.distribute_tensor."
)


def explain(error: BaseException) -> None:
    """Add the remedy to such an error, once; other errors stay as they are."""
    if isinstance(error, RuntimeError) and MIXED in str(error):
        if _NOTE not in getattr(error, "__notes__", ()):
            error.add_note(_NOTE)


def explain_loading(errors: list[str]) -> None:
    """Say of the messages of ``load_state_dict``, in place, which parameters are sharded, and how whole tensors are loaded.

    May be called again with what it has changed, and new messages.
    """
    explained = [
        _COPYING.sub(r"\1 is sharded, and the state dict has a whole tensor.", each)
        for each in errors
        if each != _LOADING
    ]
    if explained != errors:
        errors[:] = [*explained, _LOADING]
