"""Writing a checkpoint: every rank writes its cells, and the first rank publishes.

    plan      every rank computes which rank writes what; ranks compare digests, and send more only if these differ
              (`agreement`)
    write     one file for each rank, flushed; then each rank reads the file of another rank
    publish   the manifest, by a rename; only then are old data removed

After each of these, all ranks know whether it worked on all. A save that fails anywhere leaves nothing behind.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard.checkpoint import json_values, manifest as manifests
from fullshard.checkpoint.agreement import Outline, agreed, outline_of, parts_to_write
from fullshard.checkpoint.base_weights import Base
from fullshard.checkpoint.folders import publication
from fullshard.checkpoint.folders.retention import (
    TrainingRun,
    remove_old_checkpoints,
    training_run_of,
)
from fullshard.checkpoint.folders.unfinished_save import UnfinishedSave
from fullshard.checkpoint.manifest import FileRecord, Manifest, StoredTensor, file_name
from fullshard.checkpoint.rank_group import RankGroup
from fullshard.checkpoint.source import MODEL
from fullshard.checkpoint.sources.stored_checkpoint import StoredCheckpoint
from fullshard.checkpoint.state.local_state import LocalModelState, LocalTensor
from fullshard.checkpoint.state.optimizer_local_state import optimizer_tree
from fullshard.checkpoint.tensor_files import NewEntry, write_file
from fullshard.checkpoint.tensor_memory import contiguous_values
from fullshard.errors import (
    CheckpointError,
    ConfigurationError,
    FullshardError,
    fault_paragraphs,
    ranks_text,
    size_text,
)
from fullshard.files import local_path
from fullshard.layout.sharding import Sharding
from fullshard.optim import EMA

log = logging.getLogger("fullshard.checkpoint")

OnProgress = Callable[[int, int], None]
"""Called with the number of bytes that this rank has written or read so far, and with their total."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was written."""

    path: Path
    nbytes: int
    """Bytes that all ranks wrote."""
    seconds: float
    removed: tuple[Path, ...] = ()
    """Older checkpoints that were removed for it (``keep_last``)."""

    def __str__(self) -> str:
        return f"saved {speed(self.nbytes, self.seconds)} to {self.path}"


def speed(nbytes: int, seconds: float) -> str:
    """Return an amount of data, the time it took and the rate, for people."""
    rate = size_text(nbytes / max(seconds, 1e-9))
    return f"{size_text(nbytes)} in {seconds:.3g} s ({rate}/s)"


@dataclass(slots=True)
class NewCheckpoint:
    """A checkpoint to be written, as one rank sees it."""

    path: Path
    """Absolute on the first rank, whose path is used: a thread may write after the program has changed its working folder."""
    keep_last: int | None
    run: TrainingRun | None
    """The model's training run, if older checkpoints of it will be removed."""
    tensors: dict[str, StoredTensor]
    """All tensors, with the ranks that write them."""
    own: list[tuple[str, Tensor]]
    """The cells that this rank writes, by key."""
    tied: Mapping[str, str]
    optimizer: Mapping[str, Any] | None
    extra: Any
    base: Base | None
    began: float = field(default_factory=time.perf_counter)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank writes."""
        return sum(local.nbytes for _, local in self.own)


# --- which rank writes what -----------------------------------------------------------------------


@dataclass(slots=True)
class _LocalContent:
    """One rank's content to save, before it was compared with that of other ranks."""

    path: Path
    tensors: list[LocalTensor]
    outline: Outline
    extra: Any


def new_checkpoint(
    rank_group: RankGroup,
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Any,
    keep_last: int | None,
    ema: EMA | None = None,
    base: Base | None = None,
) -> NewCheckpoint:
    """Return the new checkpoint, and which rank writes what. It is the same on all ranks, or an error on all."""
    own = rank_group.on_each(
        lambda: _collect(rank_group, path, model, optimizer, extra, keep_last, ema, base)
    )
    outline = _agreed(rank_group, own)
    turns = {key: turn for turn, key in enumerate(sorted(outline.tensors))}
    tensors = {
        key: replace(stored, sharding=_with_one_writer(stored.sharding, turns[key]))
        for key, stored in outline.tensors.items()
    }
    return NewCheckpoint(
        path=own.path,
        keep_last=keep_last,
        run=None if keep_last is None else training_run_of(model),
        tensors=tensors,
        own=rank_group.on_each(lambda: parts_to_write(tensors, own.tensors, rank_group.rank)),
        tied=outline.tied,
        optimizer=outline.optimizer,
        extra=own.extra,
        base=base,
    )


def _collect(
    rank_group: RankGroup,
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Any,
    keep_last: int | None,
    ema: EMA | None,
    base: Base | None,
) -> _LocalContent:
    if keep_last is not None and keep_last < 1:
        raise ConfigurationError(f"keep_last must be at least 1, got {keep_last}.")
    if ema is not None and optimizer is None:
        raise ConfigurationError(
            "Averages (ema) are saved beside the state of an optimizer, and none was passed. Pass the optimizer; or save "
            "the averages as a model, within EMA.averaged."
        )
    local_state = LocalModelState(model, "fullshard.checkpoint.save", first=rank_group.ranks[0])
    tensors, tied, tree = local_state.tensors, local_state.tied, None
    if base is not None:
        frozen = local_state.frozen
        _check_trains(frozen, local_state, optimizer)
        tensors = [each for each in tensors if each.key.removeprefix(MODEL) not in frozen]
        tied = {name: stored for name, stored in tied.items() if stored not in frozen}
    if optimizer is not None:
        tree, of_optimizer = optimizer_tree(optimizer, local_state, ema)
        tensors = [*tensors, *of_optimizer]
    faults: list[str] = []
    json_values.encode(tree, "optimizer", faults)
    encoded = json_values.encode(extra, "extra", faults)
    if faults:
        raise CheckpointError(
            "Beside tensors, a checkpoint can have what JSON can hold (numbers, strings, lists, tuples, dicts) and small "
            "tensors, because loading runs no code. These are something else:\n  "
            + "\n  ".join(faults)
            + "\nSave the values they are made of."
        )
    lists = {each.sharding.holders for each in tensors}
    absent = {rank for holders in lists for ranks in holders for rank in ranks}
    absent -= set(rank_group.ranks)
    if absent:
        raise CheckpointError(
            f"All ranks that hold parts of the model must save it; process_group lacks ranks {sorted(absent)[:20]}. "
            "Leave process_group out, or pass one that has them all."
        )
    outline = outline_of(tensors, tied, tree, local_state.updated_together)
    # Decoding makes a copy: the caller may change the original before it is written.
    # Only the first rank's path is used, so it need not be one elsewhere.
    place = local_path(path)
    where = Path(os.path.abspath(place)) if rank_group.is_first else place
    return _LocalContent(where, tensors, outline, json_values.decode(encoded))


def _check_trains(
    frozen: Collection[str], model: LocalModelState, optimizer: Optimizer | None
) -> None:
    """Raise unless some parameters are trained, and the optimizer has no others."""
    if not any(param.requires_grad for param in model.params):
        raise CheckpointError(
            "With a base, parameters that are trained are saved, and none requires gradients. Save without base."
        )
    groups = [] if optimizer is None else optimizer.param_groups
    held = [m.name for group in groups for p in group["params"] for m in model.params.get(p, ())]
    for paragraph in fault_paragraphs(
        [name for name in held if name in frozen],
        "With a base, frozen parameters are not saved, so the optimizer must not have them; it has:",
        "Make it of [p for p in model.parameters() if p.requires_grad].",
    ):
        raise CheckpointError(paragraph)


def _agreed(rank_group: RankGroup, own: _LocalContent) -> Outline:
    """Return the ranks' common outline. If all have the same, only a digest is sent."""
    facts = rank_group.collect((own.outline.digest(), own.extra is not None))
    with_extra = [
        rank for rank, (_, has_extra) in zip(rank_group.ranks, facts, strict=True) if has_extra
    ]
    if with_extra and rank_group.ranks[0] not in with_extra:
        raise CheckpointError(
            f"The first rank's extra is saved, so that rank must pass one if any does; {ranks_text(with_extra)} passed one, and "
            f"rank {rank_group.ranks[0]}, the first, did not. Nothing was saved. Pass it there."
        )
    if len({digest for digest, _ in facts}) == 1:
        return own.outline
    told = dict(
        zip(
            rank_group.ranks,
            rank_group.collect(own.outline.part_reported_by(rank_group.rank)),
            strict=True,
        )
    )
    return rank_group.on_each(lambda: agreed(own.outline, told, rank_group.rank))


def _with_one_writer(sharding: Sharding, turn: int) -> Sharding:
    """Return a sharding with one writer for each cell: replicas of sharded tensors take turns, the first rank writes the rest.

    Replicas are equal, except for 0-d parameters, which are not sharded: ranks may sum their gradients in different
    orders. Forward uses the first rank's, so that one is saved.
    """
    lists = sharding.holders
    return replace(sharding, holders=(lists[turn % len(lists) if sharding.cells > 1 else 0],))


# --- writing ---------------------------------------------------------------------------------------


def write(
    rank_group: RankGroup, new: NewCheckpoint, on_progress: OnProgress | None = None
) -> Saved:
    """Write the planned files, read them back, and publish them."""
    save: UnfinishedSave | None = None

    def begin() -> tuple[str, bool]:
        nonlocal save
        # All ranks use the first rank's path: others may have another argument or another working folder.
        save = publication.begin(new.path)
        return str(save.folder), manifests.text_in(save.path) is not None

    try:
        begun, replaces = rank_group.on_first(begin)
        folder = Path(begun)
        record = rank_group.on_each(
            lambda: _write_own_file(folder, rank_group.rank, new, on_progress)
        )
        manifest = _manifest(rank_group, new, folder, rank_group.collect(record))
        # All data are read back if older data will be removed afterwards.
        thorough = replaces or new.run is not None
        rank_group.on_each(lambda: _read_back(rank_group, folder.parent, manifest, thorough))
        removed = rank_group.on_first(lambda: () if save is None else _publish(save, new, manifest))
    except FullshardError as error:  # the same on all ranks
        try:
            rank_group.on_first(lambda: None if save is None else save.abandon())
        except Exception as another:  # of the exchange: it must not hide the first one
            raise error from another
        raise
    except BaseException:  # other ranks may not answer any more, so do not communicate
        if save is not None:
            save.abandon()
        raise
    nbytes = sum(record.nbytes for record in manifest.files.values())
    saved = Saved(folder.parent, nbytes, time.perf_counter() - new.began, removed)
    if rank_group.is_first:
        log.info("%s", saved)
    return saved


def _write_own_file(
    folder: Path, rank: int, new: NewCheckpoint, on_progress: OnProgress | None
) -> FileRecord | None:
    if not new.own:
        return None
    total, done = new.nbytes, 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if on_progress is not None:
            on_progress(done, total)

    entries = [
        NewEntry(key, local.dtype, tuple(local.shape), _fetching(local)) for key, local in new.own
    ]
    return write_file(folder / file_name(rank), entries, on_bytes=count)


def _fetching(local: Tensor) -> Callable[[], Tensor]:
    return lambda: contiguous_values(local.detach().to("cpu"))


def _manifest(
    rank_group: RankGroup, new: NewCheckpoint, folder: Path, records: Sequence[FileRecord | None]
) -> Manifest:
    return Manifest(
        data=folder.name,
        world=max(rank_group.ranks) + 1,
        tensors=new.tensors,
        files={
            rank: record
            for rank, record in zip(rank_group.ranks, records, strict=True)
            if record is not None
        },
        tied=new.tied,
        optimizer=new.optimizer,
        extra=new.extra,
        base=None if new.base is None else new.base.record(folder.parent),
    )


def _read_back(rank_group: RankGroup, path: Path, manifest: Manifest, thorough: bool) -> None:
    """Check the file that the next rank wrote, as `load` does. So each file is read by another rank than its writer.

    Length and header are checked and, if ``thorough``, every byte.
    """
    index = rank_group.ranks.index(rank_group.rank)
    source = StoredCheckpoint(path, manifest)
    try:
        faults = source.verify_file(
            rank_group.ranks[(index + 1) % len(rank_group.ranks)], thorough=thorough
        )
    finally:
        source.close()
    if faults:
        raise CheckpointError(
            "A rank must be able to read what another rank wrote before a checkpoint is published. Here that failed; the "
            f"checkpoint that was at {path} before is still there:\n  "
            + "\n  ".join(faults)
            + "\nSave to a folder that all ranks share, on a file system that keeps what is written."
        )


def _publish(save: UnfinishedSave, new: NewCheckpoint, manifest: Manifest) -> tuple[Path, ...]:
    """Publish a checkpoint, and return the older ones that were removed for it."""
    run = new.run
    beside = publication.survey(save.path.parent, with_files=False)
    record = None if run is None else run.record_for(save.path, beside)
    manifest = publication.stamped(replace(manifest, run=record), beside)
    if run is None or new.keep_last is None:
        publication.publish(save, manifest)
        return ()
    run.keep_locked(publication.publish(save, manifest, keep_lock=True))
    return remove_old_checkpoints(save.path, manifest, new.keep_last)
