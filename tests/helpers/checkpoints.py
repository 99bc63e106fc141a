"""Checkpoints in memory: what ranks hold put together, and a source that has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard.checkpoint.agreement import Outline, agreed, outline_of
from fullshard.checkpoint.manifest import StoredTensor
from fullshard.checkpoint.source import Source, TensorInfo
from fullshard.checkpoint.state.local_state import LocalModelState, LocalTensor
from fullshard.checkpoint.state.model_target import ModelTarget, ReadRequest
from fullshard.checkpoint.state.optimizer_local_state import optimizer_tree
from fullshard.checkpoint.state.optimizer_target import OptimizerTarget
from fullshard.layout.blocks import Block, whole
from fullshard.layout.param_shardings import inverse


class MemorySource:
    """A `Source` over whole tensors."""

    path = Path("memory")
    format = "memory"

    def __init__(
        self,
        whole: Mapping[str, Tensor],
        tied: Mapping[str, str] | None = None,
        optimizer: Mapping[str, Any] | None = None,
        extra: Any = None,
    ) -> None:
        self.whole = dict(whole)
        self.largest_read = 0
        self.tensors = {
            key: TensorInfo(tensor.dtype, tuple(tensor.shape)) for key, tensor in whole.items()
        }
        self.tied, self.optimizer, self.extra = tied or {}, optimizer, extra

    def read(self, key: str, wanted: Block, out: Tensor) -> None:
        found = self.whole[key][wanted.slices_in(whole(self.tensors[key].shape))]
        assert (found.dtype, found.shape, out.device.type) == (out.dtype, out.shape, "cpu")
        self.largest_read = max(self.largest_read, wanted.numel)
        out.copy_(found)

    def verify(self, wanted: Iterable[tuple[str, Block]]) -> list[str]:
        return [f"{key}: is not there" for key, _ in wanted if key not in self.whole]

    def close(self) -> None:
        pass


Snapshot = tuple[Outline, list[LocalTensor]]
"""What one rank holds, in memory of its own."""


def snapshot(model: nn.Module, optimizer: Optimizer | None = None) -> Snapshot:
    local_state = LocalModelState(model, "save")
    tree, tensors = None, local_state.tensors
    if optimizer is not None:
        tree, of_optimizer = optimizer_tree(optimizer, local_state)
        tensors = [*tensors, *of_optimizer]
    copies = [
        replace(tensor, local=None if tensor.local is None else tensor.local.to("cpu", copy=True))
        for tensor in tensors
    ]
    return outline_of(copies, local_state.tied, tree, local_state.updated_together), copies


def source_of(of_ranks: Sequence[Snapshot]) -> MemorySource:
    """What all ranks hold, as a source."""
    outline = agreed_outline([outline for outline, _ in of_ranks])
    whole = assembled(outline, [tensors for _, tensors in of_ranks])
    return MemorySource(whole, outline.tied, outline.optimizer)


def load_into(model: nn.Module, optimizer: Optimizer | None, source: MemorySource) -> None:
    local_state = LocalModelState(model, "load")
    targets: list[Any] = [ModelTarget(local_state, source)]
    if optimizer is not None:
        targets.append(OptimizerTarget(optimizer, local_state, source))
    for target in targets:
        assert not target.faults, target.faults
        _fill(source, target.requests)
    for target in targets:
        target.install()


def _fill(source: MemorySource, requests: Iterable[ReadRequest]) -> None:
    """Read what is wanted, as a loader does."""
    for request in requests:
        for block, out in request.parts:
            assert tuple(out.shape) == block.shape
            staged = torch.empty(block.shape, dtype=out.dtype)
            source.read(request.key, block, staged)
            out.copy_(staged)


def agreed_outline(outlines: Sequence[Outline]) -> Outline:
    """What all ranks say together, as each of them finds it."""
    if len({outline.digest() for outline in outlines}) == 1:
        return outlines[0]
    reported = {rank: outline.part_reported_by(rank) for rank, outline in enumerate(outlines)}
    results = [agreed(outline, reported, rank) for rank, outline in enumerate(outlines)]
    assert len({result.digest() for result in results}) == 1
    return results[0]


def assembled(outline: Outline, of_ranks: Sequence[Sequence[LocalTensor]]) -> dict[str, Tensor]:
    """Whole tensors of what ranks hold: each element from every one of its holders, which have the same."""
    held = [{each.key: each for each in tensors} for tensors in of_ranks]
    return {
        key: _assembled(key, stored, [tensors.get(key) for tensors in held])
        for key, stored in outline.tensors.items()
    }


def _assembled(key: str, known: StoredTensor, of_ranks: Sequence[LocalTensor | None]) -> Tensor:
    sharding = known.sharding
    stored = torch.zeros(sharding.shape, dtype=known.dtype)
    times_written = torch.zeros(sharding.shape, dtype=torch.int)
    for rank, local_tensor in enumerate(of_ranks):
        cell = sharding.cell_of(rank)
        if cell is None or not sharding.extent(cell).numel:
            continue
        assert local_tensor is not None and local_tensor.local is not None, (
            f"rank {rank} has nothing of {key}"
        )
        assert (local_tensor.dtype, local_tensor.local.dtype, local_tensor.shape) == (
            known.dtype,
            known.dtype,
            known.shape,
        )
        assert tuple(local_tensor.local.shape) == sharding.extent(cell).shape
        for block, offset in sharding.blocks(cell):
            part = local_tensor.local
            if sharding.flat:
                part = part[offset : offset + block.numel].view(block.shape)
            place = block.slices_in(whole(sharding.shape))
            written = times_written[place] > 0
            assert torch.equal(stored[place][written], part[written]), f"replicas of {key} differ"
            stored[place] = part
            times_written[place] += 1
    assert (times_written == len(sharding.holders)).all(), key
    return stored if sharding.order is None else stored.permute(inverse(sharding.order))


def plain_source(
    model: nn.Module, optimizer: Optimizer | None = None, extra: Any = None
) -> MemorySource:
    """The checkpoint of a model in one process."""
    source = source_of([snapshot(model, optimizer)])
    source.extra = extra
    return source


def value_of(source: Source, key: str) -> Tensor:
    """A whole tensor of any source."""
    info = source.tensors[key]
    out = torch.empty(info.shape, dtype=info.dtype)
    source.read(key, whole(info.shape), out)
    return out
