"""Plain trainable parameters that an optimizer updates beside sharded ones, while nothing reduces their gradients.

A program that shards the layers and forgets the root trains another head on each rank, and a checkpoint has that of one. Many
things may reduce gradients: DDP around the sharded model, hooks, a loop over parameters. Most of them leave no trace on a
parameter. But all of them leave the same gradients on all ranks. So ranks compare these, once for each optimizer, at its
first step that has such gradients. It costs the norm and a few elements of each of them.

Ranks compare through the store, each with the next one, and none waits long for another: a rank may by right have no such
parameters. They have just reduced the gradients of the sharded ones together, so they usually arrive at the same time.

Not compared are parameters that a user has told to leave alone (`mark_ignored`): experts of other ranks, for example.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import warnings
import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard import torch_border
from fullshard.engine.known_groups import groups_of
from fullshard.engine.optimizer_checks import params_of
from fullshard.layout.names import clean_name
from fullshard.mesh.backends import has_peers
from fullshard.storage.sharded_params import group_of, unsharded_name
from fullshard.transport.streams import is_capturing

_IGNORED = "_fullshard_ignored"
_LOOKS = 3
"""An optimizer's parameters are looked through at so many steps at most: in the first ones they may have no gradients."""
_TOLERANCE = 1e-3
"""Relative. Norms of equal gradients may differ in their last digits, as kernels add in different orders."""
_SAMPLES = 16
_PATIENCE_S = 2.0
"""Time for which a rank waits for the next one."""
_FIRST_LOOK_S = 0.001

_LOOKED: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""Number of steps at which an optimizer's parameters were looked through."""

Numbers = list[float]
"""Numbers of one gradient: its norm and some elements."""


def mark_ignored(param: Tensor) -> None:
    """Note that a user wants a parameter to be left alone."""
    param.__dict__[_IGNORED] = True


def is_to_be_compared(optimizer: Optimizer) -> bool:
    """Return whether nothing is known yet of an optimizer's plain parameters; for every step, so it is cheap."""
    return _LOOKED.get(optimizer, 0) < _LOOKS


def compare_plain_gradients(optimizer: Optimizer) -> None:
    """Warn of plain parameters whose gradients differ between ranks that share the optimizer's sharded ones."""
    if is_capturing():
        return
    _LOOKED[optimizer] = _LOOKED.get(optimizer, 0) + 1
    meshes = [group.mesh_info for group in groups_of(params_of(optimizer))]
    groups = (
        each for mesh in meshes for each in (mesh.shard_process_group, mesh.replicate_process_group)
    )
    peers = [each for each in dict.fromkeys(groups) if each is not None and has_peers(each)]
    params = [param for param in params_of(optimizer) if _is_plain(param)] if peers else []
    with_gradient = [param for param in params if param.grad is not None]
    if params and not with_gradient:
        return
    _LOOKED[optimizer] = _LOOKS
    if not with_gradient:
        return
    own = _numbers_of(with_gradient)
    shapes = [list(param.shape) for param in with_gradient]
    different = {
        index
        for theirs in _of_next_ranks(json.dumps([shapes, own]), peers)
        if theirs[0] == shapes
        for index, (mine, other) in enumerate(zip(own, theirs[1], strict=True))
        if not _are_equal(mine, other)
    }
    if different:
        names = torch_border.names_in_modules([with_gradient[index] for index in sorted(different)])
        warnings.warn(
            f"{type(optimizer).__name__} updates plain parameters beside sharded ones, and nothing reduces their gradients, which "
            "differ between ranks. So each rank trains others of these, and a checkpoint has those of one rank: "
            f"{', '.join(map(clean_name, names))}. Call fully_shard (or replicate) on the module that contains them, too, after "
            "the modules in it. Or average their gradients: with DistributedDataParallel around the model, or in a hook "
            "(register_post_accumulate_grad_hook).",
            stacklevel=2,
        )


def _is_plain(param: Tensor) -> bool:
    return (
        param.requires_grad
        and not isinstance(param, DTensor)
        and not group_of(param)
        and not unsharded_name(param)
        and _IGNORED not in param.__dict__
    )


@torch.no_grad()
def _numbers_of(params: Iterable[Tensor]) -> list[Numbers]:
    """Return numbers of the parameters' gradients, with one transfer from each device."""
    found: list[Tensor] = []
    for param in params:
        gradient = param.grad
        assert gradient is not None, "only those with gradients are compared"
        dense = gradient.coalesce().values() if gradient.is_sparse else gradient
        real = torch.view_as_real(dense) if dense.is_complex() else dense
        flat = real.detach().reshape(-1) if real.is_contiguous() else real.detach()[:0].reshape(-1)
        norm = torch.linalg.vector_norm(real, dtype=torch.float32).reshape(1)
        samples = flat[:: -(-flat.numel() // _SAMPLES) or 1].float()
        found.append(torch.cat([norm, samples]))
    result: list[Numbers] = [[] for _ in found]
    for device in {each.device for each in found}:
        there = [index for index, each in enumerate(found) if each.device == device]
        parts = torch.cat([found[index] for index in there]).cpu()
        for index, part in zip(there, parts.split([len(found[i]) for i in there]), strict=True):
            result[index] = part.tolist()
    return result


def _are_equal(mine: Numbers, theirs: Numbers) -> bool:
    if not all(map(math.isfinite, (*mine, *theirs))):
        return True  # nothing is known
    if len(mine) != len(theirs):
        return False  # sparse gradients of other rows
    slack = _TOLERANCE * max(mine[0], theirs[0])
    return all(abs(one - other) <= slack for one, other in zip(mine, theirs, strict=True))


def _of_next_ranks(own: str, groups: Iterable[ProcessGroup]) -> list[list[list[list[float]]]]:
    """Bring ``own``, and return the numbers of the next rank of each group, if it comes in time.

    Keys are below ``fullshard/plain/<ranks>/``. A rank counts in the store how often it has come, also in process groups that
    are made again. Only the rank before reads a rank's key, and deletes it.
    """
    store, rank, found = torch_border.own_store_client(), dist.get_rank(), []
    expected = []
    for group in groups:
        ranks = dist.get_process_group_ranks(group)
        base = f"fullshard/plain/{hashlib.sha256(str(ranks).encode()).hexdigest()[:16]}"
        number = store.add(f"{base}/count/{rank}", 1)
        store.set(f"{base}/{number}/{rank}", own)
        expected.append(f"{base}/{number}/{ranks[(ranks.index(rank) + 1) % len(ranks)]}")
    end, interval = time.monotonic() + _PATIENCE_S, _FIRST_LOOK_S
    for key in expected:
        while not store.check([key]) and time.monotonic() < end:
            time.sleep(interval)
            interval = min(2 * interval, 0.05)
        if store.check([key]):
            found.append(json.loads(store.get(key)))
            store.delete_key(key)
    return found
