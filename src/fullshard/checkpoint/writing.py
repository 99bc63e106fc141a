"""Writing a checkpoint: every rank writes the cells it was chosen for, and the first rank publishes.

    plan      what is where: arithmetic on every rank alike; ranks compare digests, and exchange more only if
              they differ (a wrapper's ranks have optimizer states of what they hold, pipeline stages have layers)
    write     one file a rank, flushed
    publish   the manifest, by a rename

Each of these ends with all ranks knowing how it went. A save that fails anywhere leaves no trace.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import __version__
from ..errors import CheckpointError, ConfigurationError
from . import publishing, trees
from .holdings import Held, hold_model, hold_optimizer, merged_trees
from .manifest import Manifest, StoredTensor, file_name
from .spread import Spread
from .team import Team
from .tensor_files import NewEntry, write_file

T = TypeVar("T")

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
    tensors: dict[str, StoredTensor]
    """All of them, with the ranks that write them."""
    own: list[tuple[str, Tensor]]
    """What this rank writes."""
    tied: dict[str, str]
    optimizer: dict[str, Any] | None
    module_states: dict[str, Any]
    extra: Any
    began: float = field(default_factory=time.perf_counter)

    @property
    def nbytes(self) -> int:
        """That this rank writes."""
        return sum(local.nbytes for _, local in self.own)


# --- planning --------------------------------------------------------------------------------------


_Table = dict[str, tuple[torch.dtype, Spread]]


@dataclass(slots=True)
class _Holdings:
    """What one rank has and knows, before ranks have compared."""

    tensors: list[Held]
    values: dict[str, Any]
    """All else, as JSON."""

    @property
    def table(self) -> _Table:
        """Dtypes and spreads of the tensors."""
        return {held.key: (held.dtype, held.spread) for held in self.tensors}


def make_plan(
    team: Team,
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Any,
    keep_last: int | None,
) -> Plan:
    """Find out what there is to write, and who writes it; the same on all ranks, or an error on all."""
    own = team.each(lambda: _hold(team, model, optimizer, extra, keep_last))
    tables = _of_distinct_ranks(team, own.table, _text_of_table(own.table))
    extra = own.values.pop("extra")
    values = [
        trees.decode(each) for each in _of_distinct_ranks(team, own.values, json.dumps(own.values))
    ]
    table = team.each(lambda: _merged_tables(tables))
    tree = team.each(
        lambda: None if optimizer is None else merged_trees([each["optimizer"] for each in values])
    )
    chosen = {
        key: (dtype, _with_one_writer(spread, turn))
        for turn, (key, (dtype, spread)) in enumerate(table.items())
    }
    return Plan(
        path=Path(path),
        keep_last=keep_last,
        tensors={key: StoredTensor(dtype, spread) for key, (dtype, spread) in chosen.items()},
        own=[
            (held.key, held.local)
            for held in own.tensors
            if held.local is not None
            and held.local.numel()
            and chosen[held.key][1].cell_of(team.rank) is not None
        ],
        tied=_united(each["tied"] for each in values),
        optimizer=tree,
        module_states=_united(each["module_states"] for each in values),
        extra=trees.decode(extra),
    )


def _hold(
    team: Team, model: nn.Module, optimizer: Optimizer | None, extra: Any, keep_last: int | None
) -> _Holdings:
    if keep_last is not None and keep_last < 1:
        raise ConfigurationError(f"keep_last must be at least 1, got {keep_last}.")
    held = hold_model(model)
    tensors = list(held.tensors)
    tree = None
    if optimizer is not None:
        of_optimizer = hold_optimizer(optimizer, model)
        tensors += of_optimizer.tensors
        tree = of_optimizer.tree
    faults: list[str] = []
    # Numbers as they are now: training may go on before they are written.
    values = {
        name: trees.encode(value, name, faults)
        for name, value in (
            ("optimizer", tree),
            ("tied", held.tied),
            ("module_states", held.module_states),
            ("extra", extra),
        )
    }
    if faults:
        raise CheckpointError(
            "A checkpoint runs no code when it is loaded, so beside tensors it has what JSON can say: numbers, strings, "
            "lists, tuples, dicts, small tensors. These are something else:\n  "
            + "\n  ".join(faults)
            + "\nSave what they are made of."
        )
    strangers = sorted(
        {rank for each in tensors for ranks in each.spread.holders for rank in ranks}
        - set(team.ranks)
    )
    if strangers:
        raise CheckpointError(
            f"All ranks that hold parts of the model must save it; process_group has not: {strangers[:20]}. Leave "
            "process_group out, or pass one that has them all."
        )
    return _Holdings(tensors, values)


def _text_of_table(table: _Table) -> str:
    """Short however many ranks there are: they are in few lists."""
    lists: dict[tuple[tuple[int, ...], ...], int] = {}
    lines = [
        (key, dtype, s.shape, s.order, s.flat, s.cuts, lists.setdefault(s.holders, len(lists)))
        for key, (dtype, s) in table.items()
    ]
    return repr((lines, list(lists)))


def _united(tables: Iterable[dict[str, T]]) -> dict[str, T]:
    return {name: value for table in tables for name, value in table.items()}


def _of_distinct_ranks(team: Team, value: T, text: str) -> list[T]:
    """The values of all ranks, in their order, equal ones once: mostly that is one, and only a digest is sent.

    ``text`` says all there is to say of a value.
    """
    digest = hashlib.sha256(text.encode()).digest()
    digests = team.of_all(digest)
    if len(set(digests)) == 1:
        return [value]
    first = team.ranks[digests.index(digest)]
    found = team.of_all(value if team.rank == first else None)
    return [each for each in found if each is not None]


def _merged_tables(tables: Sequence[_Table]) -> _Table:
    merged: _Table = {}
    faults = []
    for table in tables:
        for key, entry in table.items():
            known = merged.setdefault(key, entry)
            if known != entry:
                faults.append(f"{key}: {_told(known)} and {_told(entry)}")
    if faults:
        raise CheckpointError(
            "A tensor must be the same on all ranks that have it, but these have the same name, and differ:\n  "
            + "\n  ".join(faults)
        )
    return merged


def _told(entry: tuple[torch.dtype, Spread]) -> str:
    dtype, spread = entry
    return f"{dtype} of shape {spread.shape} in {spread.cells} parts"


def _with_one_writer(spread: Spread, turn: int) -> Spread:
    """Replicas write in turn."""
    return Spread(
        shape=spread.shape,
        order=spread.order,
        flat=spread.flat,
        cuts=spread.cuts,
        holders=(spread.holders[turn % len(spread.holders)],),
    )


# --- writing ---------------------------------------------------------------------------------------


def write(team: Team, plan: Plan, on_progress: OnProgress | None = None) -> Saved:
    """Write what was planned, and publish it."""
    folder = Path(team.first(lambda: str(publishing.begin(plan.path))))
    try:
        record = team.each(lambda: _write_own(folder, team.rank, plan, on_progress))
        records = team.of_all(record)
        team.first(lambda: _publish(team, plan, folder, records))
    except Exception:
        # On all ranks alike; what was published already does not need the folder's name.
        team.first(lambda: _abandon(plan.path, folder))
        raise
    nbytes = sum(record.nbytes for record in records if record is not None)
    saved = Saved(plan.path, nbytes, time.perf_counter() - plan.began)
    if team.is_first:
        log.info("%s", saved)
    return saved


def _write_own(folder: Path, rank: int, plan: Plan, on_progress: OnProgress | None) -> Any:
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
    return lambda: local.detach().to("cpu").contiguous()


def _publish(team: Team, plan: Plan, folder: Path, records: Sequence[Any]) -> None:
    serial = publishing.next_serial(plan.path)
    manifest = Manifest(
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
        module_states=plan.module_states,
        extra=plan.extra,
        serial=serial,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        fullshard=__version__,
        torch=torch.__version__,
    )
    publishing.publish(plan.path, manifest)
    if plan.keep_last is not None:
        publishing.retain(plan.path.absolute().parent, plan.keep_last)


def _abandon(path: Path, folder: Path) -> None:
    published = publishing.manifest_or_none(path)
    if published is None or published.data != folder.name:
        publishing.abandon(folder)
