"""What a sharded module returns: the tensors in it, and copies of parameters among them.

The memory of unsharded parameters is given back after forward. A module may return one all the same:
tables of positions, tied weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fullshard import torch_border
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.tensor_trees import map_tensors, tensors_within
from fullshard.errors import LifecycleError


class Returned(NamedTuple):
    """An output that outlives the parameters."""

    output: Any
    tensors: list[Tensor]
    """All that were found in it."""
    refusal: LifecycleError | None
    """Why it cannot be returned."""


def without_parameters(output: Any, groups: Sequence[FSDPParamGroup], name: str) -> Returned:
    """The output of module ``name`` with copies in the place of unsharded parameters and views of them."""

    def is_lent(tensor: Tensor) -> bool:
        parts = torch_border.plain_parts(tensor)
        return any(part.data_ptr() in memory for part in parts for memory in gathered)

    gathered = [addresses for group in groups if (addresses := group.gathered_addresses)]
    tensors = tensors_within(output)
    if not any(map(is_lent, tensors)):
        return Returned(output, tensors, None)
    output = map_tensors(lambda tensor: tensor.clone() if is_lent(tensor) else tensor, output)
    tensors = tensors_within(output)
    refusal = None
    if any(map(is_lent, tensors)):
        refusal = LifecycleError(
            "Parameters must not be returned inside of objects in which they cannot be replaced: "
            f"{name} returns one, or a view of one, in a {type(output).__name__}, and its memory is given back "
            "after forward. Return a clone, or return it in a tuple, list, dict or dataclass: then a copy is made."
        )
    return Returned(output, tensors, refusal)
