"""Starting weights, the same on any number of ranks and any device.

Each parameter is drawn whole on the CPU, from a generator seeded by the run's seed and the
parameter's name, and every rank keeps its own piece. That costs the memory of one unsharded
parameter at a time and no communication. (Drawing straight into the shards would be cheaper, but
then the values depend on how the parameter is cut.)
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from fullshard.train.model import Decoder


@torch.no_grad()
def fill_weights(model: Decoder, *, seed: int) -> None:
    """Fill the parameters of a decoder, sharded or not, with its starting weights."""
    for name, parameter, deviation in model.starting_deviations():
        if deviation is None:
            full = torch.ones(parameter.shape)
        else:
            full = torch.empty(parameter.shape).normal_(
                std=deviation, generator=_generator(f"{seed} {name}")
            )
        _local(parameter).copy_(_piece_of(full, parameter))


def _generator(label: str) -> torch.Generator:
    # Not hash(): Python salts it anew in every process.
    digest = hashlib.sha256(label.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _piece_of(full: Tensor, parameter: Tensor) -> Tensor:
    """Return the part of a full tensor that this rank holds of a parameter, without communication."""
    if not isinstance(parameter, DTensor):
        return full
    mesh, placements = parameter.device_mesh, parameter.placements
    # src_data_rank=None: every rank cuts its own copy instead of waiting for rank 0's.
    return distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
