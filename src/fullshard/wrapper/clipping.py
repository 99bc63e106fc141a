"""The norm of gradients of which every rank has a part."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp

from .. import comm
from ..errors import ConfigurationError
from ..runtime import FSDPState


def clip_grad_norm_(
    root: nn.Module, states: Sequence[FSDPState], max_norm: float, norm_type: float
) -> Tensor:
    """See `FullyShardedDataParallel.clip_grad_norm_`."""
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not norm_type > 0:
        raise ConfigurationError(f"norm_type must be positive, or inf, got {norm_type}.")
    by_group, gradients = _gradients_by_group(root, states)
    if not gradients:
        warnings.warn(
            "clip_grad_norm_ found no gradients on this rank: before backward, or after zero_grad?",
            stacklevel=4,
        )
    device = states[0].device
    total = torch.zeros((), device=device)
    for group, theirs in by_group.items():
        norm = _norm(theirs, norm_type, device)
        if norm_type == math.inf:
            if group is not None:
                comm.all_reduce(norm, group, ReduceOp.MAX)
            total = torch.maximum(total, norm)
        else:
            power = norm**norm_type
            if group is not None:
                comm.all_reduce(power, group, ReduceOp.SUM)
            total += power
    if norm_type != math.inf:
        total = total ** (1.0 / norm_type)
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(coefficient.to(gradient.device, gradient.dtype))
    if not gradients:
        return total
    dtype = gradients[0].dtype
    for gradient in gradients:
        dtype = torch.promote_types(dtype, gradient.dtype)
    return total.to(dtype)


def _gradients_by_group(
    root: nn.Module, states: Sequence[FSDPState]
) -> tuple[dict[ProcessGroup | None, list[Tensor]], list[Tensor]]:
    """Gradients by the group whose ranks have parts of them, None for those that all have whole; and all.

    Every group is there on every rank, also on one that has no gradients of it: summing over a group is
    collective.
    """
    by_group: dict[ProcessGroup | None, list[Tensor]] = {}
    managed: set[nn.Parameter] = set()
    for state in states:
        for group in state.groups:
            theirs = by_group.setdefault(group.mesh_info.shard_process_group, [])
            params = [face.param for face in group.faces]
            managed.update(params)
            theirs += _gradients(params)
    by_group.setdefault(None, []).extend(
        _gradients(param for param in root.parameters() if param not in managed)
    )
    return by_group, [gradient for theirs in by_group.values() for gradient in theirs]


def _gradients(params: Iterable[nn.Parameter]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def _norm(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm of all together, in float32, on the compute device."""
    if not gradients:
        return torch.zeros((), device=device)
    norms = [
        torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float32).to(device)
        for gradient in gradients
    ]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total
