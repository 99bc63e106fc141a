"""Writing a checkpoint: every rank writes the cells it was chosen for, and the first rank publishes.

    plan      what is where: arithmetic on every rank alike; ranks compare digests, and tell each other more only
              if these differ (`agreement`)
    write     one file a rank, flushed; then each rank reads another one's
    publish   the manifest, by a rename; only then is anything old removed

Each of these ends with all ranks knowing how it went. A save that fails anywhere leaves no trace.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard.checkpoint import publication, trees
from fullshard.checkpoint.agreement import Outline, agreed, outline_of, parts_to_write
from fullshard.checkpoint.local_state import Held, LocalModelState
from fullshard.checkpoint.manifest import MANIFEST, FileRecord, Manifest, StoredTensor, file_name
from fullshard.checkpoint.optimizer_local_state import optimizer_tree
from fullshard.checkpoint.plain_memory import in_plain_memory
from fullshard.checkpoint.rank_group import RankGroup, ranks_text
from fullshard.checkpoint.runs import Run, retain, run_of
from fullshard.checkpoint.spread import Spread
from fullshard.checkpoint.stored import StoredCheckpoint
from fullshard.checkpoint.tensor_files import NewEntry, write_file
from fullshard.checkpoint.unfinished import UnfinishedSave
from fullshard.errors import CheckpointError, ConfigurationError, FullshardError

log = logging.getLogger("fullshard.checkpoint")

OnProgress = Callable[[int, int], None]
"""Is told how many bytes this rank has written or read, of how many."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was written."""

    path: Path
    nbytes: int
    """Of all ranks."""
    seconds: float

    def __str__(self) -> str:
        return f"saved {speed(self.nbytes, self.seconds)} to {self.path}"


def speed(nbytes: int, seconds: float) -> str:
    """For people: an amount of data, the time it took, and both together."""
    return (
        f"{nbytes / 1e9:.3g} GB in {seconds:.3g} s ({nbytes / 1e9 / max(seconds, 1e-9):.3g} GB/s)"
    )


@dataclass(slots=True)
class Plan:
    """A checkpoint that is about to be written, as one rank sees it."""

    path: Path
    keep_last: int | None
    run: Run | None
    """That the model is in, if older checkpoints of it are to be removed."""
    tensors: dict[str, StoredTensor]
    """All of them, with the ranks that write them."""
    own: list[tuple[str, Tensor]]
    """What this rank writes."""
    tied: Mapping[str, str]
    optimizer: Mapping[str, Any] | None
    extra: Any
    began: float = field(default_factory=time.perf_counter)

    @property
    def nbytes(self) -> int:
        """That this rank writes."""
        return sum(local.nbytes for _, local in self.own)


# --- planning --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Own:
    """What one rank has and knows, before ranks have compared."""

    tensors: list[Held]
    outline: Outline
    extra: Any


def make_plan(
    team: RankGroup,
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Any,
    keep_last: int | None,
) -> Plan:
    """Find out what there is to write, and who writes it; the same on all ranks, or an error on all."""
    own = team.each(lambda: _hold(team, model, optimizer, extra, keep_last))
    outline = _agreed(team, own)
    turns = {key: turn for turn, key in enumerate(sorted(outline.tensors))}
    tensors = {
        key: replace(stored, spread=_with_one_writer(stored.spread, turns[key]))
        for key, stored in outline.tensors.items()
    }
    return Plan(
        path=Path(path),
        keep_last=keep_last,
        run=None if keep_last is None else run_of(model),
        tensors=tensors,
        own=team.each(lambda: parts_to_write(tensors, own.tensors, team.rank)),
        tied=outline.tied,
        optimizer=outline.optimizer,
        extra=own.extra,
    )


def _hold(
    team: RankGroup,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Any,
    keep_last: int | None,
) -> _Own:
    if keep_last is not None and keep_last < 1:
        raise ConfigurationError(f"keep_last must be at least 1, got {keep_last}.")
    held = LocalModelState(model, "fullshard.checkpoint.save", first=team.ranks[0])
    tensors, tree = held.tensors, None
    if optimizer is not None:
        tree, of_optimizer = optimizer_tree(optimizer, held)
        tensors = [*tensors, *of_optimizer]
    faults: list[str] = []
    trees.encode(tree, "optimizer", faults)
    encoded = trees.encode(extra, "extra", faults)
    if faults:
        raise CheckpointError(
            "A checkpoint runs no code when it is loaded, so beside tensors it has what JSON can say: numbers, strings, "
            "lists, tuples, dicts, small tensors. These are something else:\n  "
            + "\n  ".join(faults)
            + "\nSave what they are made of."
        )
    lists = {each.spread.holders for each in tensors}
    strangers = {rank for holders in lists for ranks in holders for rank in ranks}
    strangers -= set(team.ranks)
    if strangers:
        raise CheckpointError(
            f"All ranks that hold parts of the model must save it; process_group has not: {sorted(strangers)[:20]}. "
            "Leave process_group out, or pass one that has them all."
        )
    outline = outline_of(tensors, held.tied, tree, held.updated_together)
    # A copy: it may be changed before it is written.
    return _Own(tensors, outline, trees.decode(encoded))


def _agreed(team: RankGroup, own: _Own) -> Outline:
    """What all ranks together have; mostly all have the same, and only a digest is sent."""
    facts = team.of_all((own.outline.digest(), own.extra is not None))
    with_extra = [rank for rank, (_, has_extra) in zip(team.ranks, facts, strict=True) if has_extra]
    if with_extra and team.ranks[0] not in with_extra:
        raise CheckpointError(
            f"Nothing was saved. The first rank's extra is saved; {ranks_text(with_extra)} passed one, and rank "
            f"{team.ranks[0]}, which is the first, did not. Pass it there."
        )
    if len({digest for digest, _ in facts}) == 1:
        return own.outline
    told = dict(zip(team.ranks, team.of_all(own.outline.told_by(team.rank)), strict=True))
    return team.each(lambda: agreed(own.outline, told, team.rank))


def _with_one_writer(spread: Spread, turn: int) -> Spread:
    """Replicas of what is divided write in turn; what every rank has whole is the first one's.

    Replicas are equal, but for 0-d parameters that are divided by nobody: each rank sums their gradients in an order
    of its own, and forward goes by the first rank's.
    """
    lists = spread.holders
    return replace(spread, holders=(lists[turn % len(lists) if spread.cells > 1 else 0],))


# --- writing ---------------------------------------------------------------------------------------


def write(team: RankGroup, plan: Plan, on_progress: OnProgress | None = None) -> Saved:
    """Write what was planned, read it back, and publish it."""
    save: UnfinishedSave | None = None

    def begin() -> tuple[str, bool]:
        nonlocal save
        # The first rank's path for all: others may have been given another, or be in another folder.
        save = publication.begin(Path(os.path.abspath(plan.path)))
        return str(save.folder), (save.path / MANIFEST).exists()

    try:
        begun, replaces = team.first(begin)
        folder = Path(begun)
        record = team.each(lambda: _write_own(folder, team.rank, plan, on_progress))
        manifest = _manifest(team, plan, folder, team.of_all(record))
        # Data is read back where older data is to be removed afterwards.
        thorough = replaces or plan.run is not None
        team.each(lambda: _read_back(team, folder.parent, manifest, thorough))
        team.first(lambda: None if save is None else _publish(save, plan, manifest))
    except FullshardError:  # the same on all ranks
        team.first(lambda: None if save is None else save.abandon())
        raise
    except BaseException:  # the other ranks may not answer any more
        if save is not None:
            save.abandon()
        raise
    nbytes = sum(record.nbytes for record in manifest.files.values())
    saved = Saved(folder.parent, nbytes, time.perf_counter() - plan.began)
    if team.is_first:
        log.info("%s", saved)
    return saved


def _write_own(
    folder: Path, rank: int, plan: Plan, on_progress: OnProgress | None
) -> FileRecord | None:
    if not plan.own:
        return None
    total, done = plan.nbytes, 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if on_progress is not None:
            on_progress(done, total)

    entries = [
        NewEntry(key, local.dtype, tuple(local.shape), _fetching(local)) for key, local in plan.own
    ]
    return write_file(folder / file_name(rank), entries, on_bytes=count)


def _fetching(local: Tensor) -> Callable[[], Tensor]:
    return lambda: in_plain_memory(local.detach().to("cpu"))


def _manifest(
    team: RankGroup, plan: Plan, folder: Path, records: Sequence[FileRecord | None]
) -> Manifest:
    return Manifest(
        data=folder.name,
        world=max(team.ranks) + 1,
        tensors=plan.tensors,
        files={
            rank: record
            for rank, record in zip(team.ranks, records, strict=True)
            if record is not None
        },
        tied=plan.tied,
        optimizer=plan.optimizer,
        extra=plan.extra,
    )


def _read_back(team: RankGroup, path: Path, manifest: Manifest, thorough: bool) -> None:
    """Read the file that the next rank wrote, as `load` will: all ranks together read all files, none its own.

    Lengths and headers are checked, and, if ``thorough``, every byte.
    """
    place = team.ranks.index(team.rank)
    source = StoredCheckpoint(path, manifest)
    try:
        faults = source.verify_file(team.ranks[(place + 1) % len(team.ranks)], thorough=thorough)
    finally:
        source.close()
    if faults:
        raise CheckpointError(
            "A checkpoint is published once every rank has read what another one wrote; here that failed, and what was "
            f"at {path} before is still there:\n  "
            + "\n  ".join(faults)
            + "\nAll ranks must see the same folder, on a file system that keeps what is written."
        )


def _publish(save: UnfinishedSave, plan: Plan, manifest: Manifest) -> None:
    run = plan.run
    mark = None if run is None else run.mark_for(save.path)
    manifest = publication.stamped(save.path, replace(manifest, run=mark))
    if run is None or mark is None or plan.keep_last is None:
        publication.publish(save, manifest)
        return
    run.note_published(publication.publish(save, manifest, keep_lock=True))
    retain(save.path, mark, plan.keep_last)
