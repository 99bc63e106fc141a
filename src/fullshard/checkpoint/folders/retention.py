"""Checkpoints of one training run, and the removal of all but the newest of them.

A training run is the saves of one model with ``keep_last`` in one process. It continues the run of the checkpoint that the
model was loaded from. So a run that was stopped and resumed in another process removes its own old checkpoints.

    process 1   saves step-1 (run a, serial 1), step-2 (run a, serial 2), and is killed
    process 2   loads step-2; saves step-3 (run b, after a up to 2); with keep_last=2, step-1 is removed

These are never removed: checkpoints of other runs; checkpoints that were saved without ``keep_last``, or copied or renamed
since; checkpoints that the earlier run wrote after the one that was loaded; and checkpoints of a run that is still alive:
its process has locked the manifest of its newest checkpoint (see `unfinished_save`).
"""

from __future__ import annotations

import gc
import os
import secrets
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from torch import nn

from fullshard import torch_border
from fullshard.checkpoint.folders.publication import Survey, file_system_time, remove, survey
from fullshard.checkpoint.folders.unfinished_save import is_locked, remove_all_leftovers, unlock
from fullshard.checkpoint.manifest import MANIFEST, Manifest, RunRecord
from fullshard.errors import CheckpointError
from fullshard.layout.names import FSDP_WRAPPED_MODULE


class TrainingRun:
    """The checkpoints that a model saves with ``keep_last`` in this process; lives as long as the model."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(6)
        self.pid = os.getpid()
        self._loaded: dict[Path, dict[str, int]] = {}
        """Earlier runs that this one continues, with the last serial number of each, by the folder of the checkpoints."""
        self._newest: IO[str] | None = None
        """The manifest of the newest checkpoint, locked."""

    def continue_from(self, path: Path, record: RunRecord, serial: int) -> None:
        """Continue the run of the checkpoint at ``path``, an absolute path, that the model was loaded from."""
        self._loaded[path.parent.resolve()] = {**record.before, record.run: serial}

    def record_for(self, path: Path, beside: Survey) -> RunRecord:
        """Return this run's record in a checkpoint at ``path``. Earlier runs without checkpoints are left out."""
        loaded = self._loaded.get(path.parent.resolve(), {})
        found = {each.run.run for each in beside.manifests.values() if each.run is not None}
        left = found if beside.is_certain else loaded.keys()
        before = {run: serial for run, serial in loaded.items() if run in left and run != self.id}
        return RunRecord(self.id, path.name, before)

    def keep_locked(self, manifest: IO[str]) -> None:
        """Keep the newest manifest locked, which shows that the run is alive, and unlock the one before it."""
        self.release()
        self._newest = manifest

    def release(self) -> None:
        """Unlock the newest manifest: the run has ended.

        A forked process has the same lock, and must not take it from the one that saves.
        """
        if self._newest is not None and self.pid == os.getpid():
            unlock(self._newest)
        self._newest = None


_WRAPPED = (
    FSDP_WRAPPED_MODULE,
    torch_border.ACTIVATION_CHECKPOINTED,
    "module",
    torch_border.COMPILED,
)
"""Names of the only child of a wrapper: ours, activation checkpointing, DDP, torch.compile."""

_RUNS: weakref.WeakKeyDictionary[nn.Module, TrainingRun] = weakref.WeakKeyDictionary()
_OWN_IDS: set[str] = set()
"""Ids of all runs of this process, also of those that have ended."""


def training_run_of(model: nn.Module) -> TrainingRun:
    """Return the training run of a model; the first call begins it. A forked process begins its own."""
    model = _unwrapped(model)
    if model not in _RUNS or _RUNS[model].pid != os.getpid():
        run = _RUNS[model] = TrainingRun()
        _OWN_IDS.add(run.id)
        weakref.finalize(model, run.release)
    return _RUNS[model]


def note_loaded(model: nn.Module, path: Path, manifest: Manifest) -> None:
    """Let a model continue the run of a checkpoint that it was loaded from."""
    if manifest.run is not None:
        training_run_of(model).continue_from(path, manifest.run, manifest.serial)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return a model without its outermost wrappers: it may be loaded before it is wrapped, and saved after."""
    children = list(model.named_children())
    while len(children) == 1 and children[0][0] in _WRAPPED:
        model = children[0][1]
        children = list(model.named_children())
    return model


# --- removal -----------------------------------------------------------------------------------------------


def remove_old_checkpoints(path: Path, manifest: Manifest, keep: int) -> tuple[Path, ...]:
    """Remove the run's checkpoints beside the one just written to ``path``, except the newest ``keep``, of which it is one.

    Returns those that were removed, the oldest first.

    Leftovers of dead writers are removed, too. A checkpoint that cannot be removed stays, with a warning. If an error
    hides a checkpoint, all stay: it may be one by which another run shows that it is alive.
    """
    folder, now = path.parent, file_system_time(path)
    found = survey(folder)
    if not found.is_certain:
        reasons = [f"{each}: {found.faults[each]}" for each in sorted(found.unsettled)]
        warnings.warn(
            f"No old checkpoint in {folder} is removed, because it is not certain which are there: "
            f"{'; '.join(reasons) or found.unlisted}",
            stacklevel=2,
        )
        return ()
    removed = []
    for each in _old_checkpoints(path, manifest, keep, found):
        try:
            remove(each, found.complete[each], now)
            removed.append(each)
        except (OSError, CheckpointError) as error:
            warnings.warn(f"An old checkpoint cannot be removed, and stays: {error}", stacklevel=2)
    remove_all_leftovers(folder, now)
    return tuple(removed)


def _old_checkpoints(path: Path, manifest: Manifest, keep: int, found: Survey) -> list[Path]:
    """Return the run's older checkpoints, the oldest first, without the newest ``keep - 1`` of them."""
    record = manifest.run
    assert record is not None, "it was saved with keep_last"
    living = {run for run in record.before if _is_alive(run, found.manifests)}
    limits = {**record.before, record.run: manifest.serial}
    older = sorted(
        (each.serial, place)
        for place, each in found.complete.items()
        if place != path
        and each.run is not None
        and each.run.name == place.name
        and each.run.run not in living
        and each.serial <= limits.get(each.run.run, -1)
    )
    newer = [manifest.serial, *(serial for serial, _ in reversed(older))][keep - 1 : keep]
    # Of equal numbers it is not certain which is older.
    return [place for serial, place in older if newer and serial < newer[0]]


def _is_alive(run: str, found: Mapping[Path, Manifest]) -> bool:
    """Return whether a process, or a model of this process, still writes the checkpoints of a run."""
    own = [path for path, each in found.items() if each.run is not None and each.run.run == run]
    if not any(is_locked(path / MANIFEST) for path in own):
        return False
    if run in _OWN_IDS:
        gc.collect()  # an unused model may still be in memory, and with it the lock
    return any(is_locked(path / MANIFEST) for path in own)
