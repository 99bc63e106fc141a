"""The loss of windows, and of held-out data over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.programs.train.model_source import ModelSource
from fullshard.programs.train.packed_windows import IGNORED
from fullshard.programs.train.windows import Rows


def window_losses(
    source: ModelSource, module: nn.Module, windows: Tensor, scale: Tensor | None = None
) -> Tensor:
    """Return the loss of each window, in nats per token.

    Args:
        source: Source of the model.
        module: The model.
        windows: Rows of context + 1 tokens, or planes of `PackedWindows`.
        scale: For planes, the factor of the sum over a window's tokens (`PackedWindows.scale`). Otherwise the loss is their mean.
    """
    if windows.ndim == 3:
        assert scale is not None, "windows of records have few or many targets"
        return _sums_over_targets(source, module, windows) * scale
    inputs, targets = windows[:, :-1], windows[:, 1:]
    scores = source.scores(module, inputs).float()
    losses = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(dim=1)


def _sums_over_targets(source: ModelSource, module: nn.Module, planes: Tensor) -> Tensor:
    inputs, targets, *segments = planes.unbind(1)
    scores = source.scores(module, inputs, *segments).float()
    losses = F.cross_entropy(
        scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.view(targets.shape).sum(dim=1)


@torch.no_grad()
def held_out_loss(
    source: ModelSource,
    module: nn.Module,
    held_out: Rows,
    *,
    limit: int,
    rows: int,
    device: torch.device,
) -> float:
    """Return the mean loss over the held-out windows of all ranks.

    Args:
        source: Source of the model.
        module: The sharded model. All ranks call this.
        held_out: Windows that are not trained on.
        limit: Use at most this many windows, spread evenly.
        rows: Windows that a rank computes at a time.
        device: The device of this rank.
    """
    chosen = spread_evenly(limit, len(held_out))
    rank, world = dist.get_rank(), dist.get_world_size()
    total = torch.zeros((), device=device)
    was_training = module.training
    module.eval()
    scale = scale_of(held_out, chosen, device)
    for mine, weights in shares(chosen, rank=rank, world=world, rows=rows):
        windows = held_out.rows(mine).to(device)
        total += window_losses(source, module, windows, scale) @ torch.tensor(
            weights, device=device
        )
    module.train(was_training)
    dist.all_reduce(total)
    return float(total.item() / len(chosen))


def scale_of(rows: Rows, indices: Sequence[int], device: torch.device) -> Tensor | None:
    """Return the factor of the losses of windows of all ranks together, on a device; None if they need none."""
    scale = rows.scale(indices)
    return None if scale is None else torch.full((), scale, device=device)


def spread_evenly(limit: int, num_windows: int) -> list[int]:
    """Return at most ``limit`` numbers of windows, spread evenly over all."""
    count = min(limit, num_windows)
    return [number * num_windows // count for number in range(count)]


def shares(
    chosen: Sequence[int], *, rank: int, world: int, rows: int
) -> Iterator[tuple[list[int], list[float]]]:
    """Yield a rank's windows, some rows at a time, and the weight of each.

    Every rank gets the same number of rows, because every forward of a sharded model is a collective. Missing rows are
    the first window, with weight zero.
    """
    for first in range(0, len(chosen), world * rows):
        mine = first + rank * rows
        indices = range(mine, mine + rows)
        yield (
            [chosen[index] if index < len(chosen) else chosen[0] for index in indices],
            [float(index < len(chosen)) for index in indices],
        )
