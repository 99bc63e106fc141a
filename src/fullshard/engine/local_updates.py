"""Updates of torch's optimizers on local tensors: they cost what they cost on plain tensors.

After `fully_shard` parameters, gradients and states are DTensors, and torch runs every operator on every one of them
through DTensor's dispatch. That takes two to four times as long as the operators themselves. It also decides against its
implementations on lists of tensors (``foreach``), unless a user asks for them.

An update that treats each element for itself computes the same on the local tensors. So torch's own functions get these
in the place of DTensors. All else is as torch does it: which parameters are updated, how states are made and kept. States
stay DTensors, and state dicts do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard import torch_border
from fullshard.storage.sharded_params import GROUP_MARK


def update(
    run: Callable[..., None], params: list[Tensor], *lists: list[Any], **options: Any
) -> None:
    """Update parameters with torch's function ``run``; ``lists`` has their gradients and states, each as a list.

    It gets local tensors if sharded parameters of ours are among the parameters, and if every DTensor is placed like its
    parameter.
    """
    local = None
    # With ``differentiable=True``, autograd records the update.
    if DTensor in set(map(type, params)) and not torch.is_grad_enabled():
        marked = [param for param in params if GROUP_MARK in param.__dict__]
        local = torch_border.local_lists(params, (params, *lists)) if marked else None
    if local is None:
        run(params, *lists, **options)
        return
    run(*local, **options)
    for states, updated in zip(lists, local[1:], strict=True):
        for index, state in enumerate(states):
            if state is None and updated[index] is not None:  # made by this update
                states[index] = torch_border.like_param(params[index], updated[index])
