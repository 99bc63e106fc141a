"""Loading a checkpoint: every rank reads the blocks it holds, and everything is checked before anything changes.

    compare   names, shapes, dtypes and the optimizer's groups: the checkpoint's against the model's
    verify    files, headers, and checksums of the data that this rank will read
    read      into the memory of optimizer and model, or into new tensors for state that an optimizer does not have yet
    install   new state and options into the optimizer, and values that were read into copies

After each of these, ranks exchange the outcome: an error on one rank is the same error on all.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.checkpoint.agreement import check_optimizer_classes
from fullshard.checkpoint.rank_group import RankGroup
from fullshard.checkpoint.save_plan import OnProgress, log, speed
from fullshard.checkpoint.source import MODEL, Source, averages_in
from fullshard.checkpoint.staging import Staging, rows_of
from fullshard.checkpoint.state.averages_target import AveragesTarget
from fullshard.checkpoint.state.local_state import LocalModelState
from fullshard.checkpoint.state.model_target import Faults, ModelTarget, ReadRequest
from fullshard.checkpoint.state.optimizer_compatibility import class_names
from fullshard.checkpoint.state.optimizer_target import OptimizerTarget
from fullshard.errors import CheckpointError
from fullshard.layout.blocks import whole
from fullshard.optim import EMA

Target = ModelTarget | OptimizerTarget | AveragesTarget

COMPARED_BYTES = 4 << 20
"""Bytes of each of two tensors that are compared at once."""
STAGED_BYTES = 64 << 20
"""Bytes that are read at once for memory of another device or dtype, into which files cannot be read directly."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that was loaded."""

    path: Path
    extra: Any
    """The value that was given to `save`."""
    nbytes: int
    """Bytes that this rank has read."""
    seconds: float

    def __str__(self) -> str:
        return f"loaded {speed(self.nbytes, self.seconds)} on this rank from {self.path}"


def load_source(
    source: Source,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    ema: EMA | None = None,
    without_optimizer: bool = False,
    cast: bool | Collection[str] = False,
    only: Collection[str] | None = None,
    rank_group: RankGroup | None = None,
    on_progress: OnProgress | None = None,
) -> Loaded:
    """Load from a source, and close it; see `formats.load`. All ranks of the group call it.

    ``only`` has the names of the model's tensors that are loaded. Other ones stay as they are, and what else the source has is
    left out.
    """
    rank_group = RankGroup() if rank_group is None else rank_group
    began = time.perf_counter()
    try:
        comparison = rank_group.on_each(
            lambda: compare(
                source,
                model,
                optimizer,
                ema=ema,
                without_optimizer=without_optimizer,
                cast=cast,
                only=only,
            )
        )
        targets = _checked_targets(rank_group, comparison, optimizer)
        requests = rank_group.on_each(
            lambda: [request for target in reversed(targets) for request in target.requests]
        )
        rank_group.on_each(lambda: _verify(source, requests))
        rank_group.on_first(lambda: _check_copies(source, comparison.tied))
        nbytes = rank_group.on_each(lambda: _read(source, requests, on_progress))
        rank_group.on_each(lambda: [target.install() for target in targets])
    finally:
        source.close()
    loaded = Loaded(source.path, source.extra, nbytes, time.perf_counter() - began)
    if rank_group.is_first:
        for note in (note for target in targets for note in target.notes):
            log.warning("%s", note)
        log.info("%s", loaded)
    return loaded


@dataclass(slots=True)
class Comparison:
    """Comparison of model and optimizer with a source: targets, and the faults for which they cannot take it."""

    source: Source
    targets: list[Target]
    faults: Faults
    others: list[str]
    """Sentences about an optimizer that is missing on one side."""
    tied: Mapping[str, str]
    """The model's further names of tensors, with the first name."""

    def raise_faults(self) -> None:
        """Raise one error with all reasons why the checkpoint does not fit."""
        paragraphs = [*self.faults.paragraphs(), *self.others]
        if paragraphs:
            raise CheckpointError(
                "A checkpoint must have exactly what model and optimizer have. Nothing was loaded from "
                f"{self.source.path}.\n" + "\n".join(paragraphs)
            )


def compare(
    source: Source,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    ema: EMA | None = None,
    without_optimizer: bool = False,
    cast: bool | Collection[str] = False,
    only: Collection[str] | None = None,
) -> Comparison:
    """Compare a source with what this rank has."""
    local_state = LocalModelState(model, "fullshard.checkpoint.load")
    targets: list[Target] = [ModelTarget(local_state, source, cast=cast, only=only)]
    others = []
    if optimizer is not None and without_optimizer:
        others.append(
            "An optimizer was passed, and without_optimizer was set. Leave one of them out."
        )
    elif optimizer is not None and source.optimizer is None:
        others.append("The checkpoint has no optimizer, but one was passed. Load only the model.")
    elif optimizer is not None:
        targets.append(OptimizerTarget(optimizer, local_state, source))
    elif source.optimizer is not None and not without_optimizer:
        others.append(
            "The checkpoint has optimizer state, but no optimizer was passed. Pass it, or without_optimizer=True."
        )
    has_averages = averages_in(source.optimizer) is not None
    if ema is not None and has_averages:
        targets.append(AveragesTarget(ema, local_state, source))
    elif ema is not None:
        others.append(
            "The checkpoint has no averages, but an EMA was passed. Load without it, then call its reset() to start "
            "from the loaded weights."
        )
    elif has_averages and not without_optimizer:
        others.append(
            "The checkpoint has averages of the parameters, but no EMA was passed. Pass ema, or without_optimizer=True."
        )
    faults = sum((target.faults for target in targets), Faults())
    return Comparison(source, targets, faults, others, local_state.tied)


def _checked_targets(
    rank_group: RankGroup, comparison: Comparison, optimizer: Optimizer | None
) -> list[Target]:
    """Return the targets after checking that the checkpoint fits on all ranks.

    A tensor that one rank does not have may be another rank's: stages of a pipeline.
    """
    faults = comparison.faults
    kind = None if optimizer is None else class_names(optimizer)[0]
    kinds, unexpected = zip(*rank_group.collect((kind, faults.unexpected)), strict=True)
    check_optimizer_classes(dict(zip(rank_group.ranks, kinds, strict=True)), "load")
    by_nobody = set[str].intersection(*map(set, unexpected))
    faults.unexpected = [name for name in faults.unexpected if name in by_nobody]
    rank_group.on_each(comparison.raise_faults)
    return comparison.targets


def _verify(source: Source, requests: Sequence[ReadRequest]) -> None:
    faults = source.verify(
        [(request.key, block) for request in requests for block, _ in request.parts]
    )
    if faults:
        raise CheckpointError(
            f"The checkpoint {source.path} is damaged, and nothing was loaded from it:\n  "
            + "\n  ".join(faults)
            + "\nLoad another checkpoint."
        )


@torch.no_grad()
def _read(source: Source, requests: Sequence[ReadRequest], on_progress: OnProgress | None) -> int:
    """Read all requests, and return the number of bytes."""
    total = sum(
        block.numel * source.tensors[request.key].dtype.itemsize
        for request in requests
        for block, _ in request.parts
    )
    done = 0
    staging = Staging()
    for request in requests:
        try:
            for nbytes in _read_one(source, request, staging):
                done += nbytes
                if on_progress is not None:
                    on_progress(done, total)
        except (OSError, CheckpointError) as error:
            raise CheckpointError(
                f"{request.key} was verified, but cannot be read now: {error} Model and optimizer may be loaded in "
                "part. Load another checkpoint before you go on."
            ) from error
    return total


def _read_one(source: Source, request: ReadRequest, staging: Staging) -> Iterator[int]:
    """Read one tensor's blocks, and yield the number of bytes of each read."""
    dtype = source.tensors[request.key].dtype
    for block, out in request.parts:
        if out.device.type == "cpu" and out.dtype == dtype:
            source.read(request.key, block, out)
            yield out.nbytes
            continue
        for rows in rows_of(block, STAGED_BYTES // dtype.itemsize):
            staged = staging.of(rows.shape, dtype)
            source.read(request.key, rows, staged)
            out[rows.slices_in(block)].copy_(staged)
            yield staged.nbytes


def _check_copies(source: Source, tied: Mapping[str, str]) -> None:
    """Raise unless tensors that the model has once, and the source under several names, are the same there."""
    different = [
        f"{name} and {first}"
        for name, first in tied.items()
        if {f"{MODEL}{name}", f"{MODEL}{first}"} <= source.tensors.keys()
        and not _are_equal(source, f"{MODEL}{name}", f"{MODEL}{first}")
    ]
    if different:
        raise CheckpointError(
            f"Tensors that the model ties must be equal in a checkpoint that has both; in {source.path} these are not: "
            f"{', '.join(different)}. Nothing was loaded. Load into a model that does not tie them."
        )


def _are_equal(source: Source, one: str, other: str) -> bool:
    """Return whether two tensors have the same bytes."""
    info = source.tensors[one]
    if info != source.tensors[other]:
        return False
    staging = Staging()
    for block in rows_of(whole(info.shape), COMPARED_BYTES // info.dtype.itemsize):
        both = staging.of((2, *block.shape), info.dtype)
        source.read(one, block, both[0])
        source.read(other, block, both[1])
        if not torch.equal(*both.view(2, -1).view(torch.uint8)):
            return False
    return True
