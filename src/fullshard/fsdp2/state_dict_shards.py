"""The sharded parameters in a state dict: over the memory of the group's shards, each with a storage of its own.

All shards of a group lie in one storage. Torch saves, pickles and deep-copies whole storages, so of an adapter's few
parameters it would write the whole group. In a state dict every shard therefore has a storage that begins and ends with it.
The memory is the same: what is written to a state dict's tensor is written to the parameter. Names of one parameter have
one storage, so torch writes it once and ties them again when it loads.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import torch_border

_SHARDS: weakref.WeakValueDictionary[Any, Tensor] = weakref.WeakValueDictionary()
"""The shards in state dicts, by their memory. As long as one lives, nothing else has its memory."""


def give_own_storages(
    _module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: object
) -> None:
    """Give each shard below ``prefix`` a storage of its own: a hook after `state_dict`."""
    for name, value in state_dict.items():
        if type(value) is DTensor and name.startswith(prefix):
            if isinstance(value, nn.Parameter):  # with keep_vars
                continue
            local = torch_border.local_of(value)
            if _is_part_of_storage(local):
                memory = local.data_ptr(), local.dtype, local.shape, local.device
                shard = _SHARDS.get(memory)
                if shard is None:
                    shard = _SHARDS[memory] = torch_border.with_own_storage(local)
                torch_border.replace_local(value, shard)


def _is_part_of_storage(local: Tensor) -> bool:
    return (
        type(local) is Tensor
        and not local.is_meta
        and local.is_contiguous()
        and local.nbytes < local.untyped_storage().nbytes()
    )
