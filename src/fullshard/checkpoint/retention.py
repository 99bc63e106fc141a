"""Which checkpoints belong to one training run, and the removal of all but the newest of them.

A training run is what one model saves with ``keep_last`` in one process. It continues the run of the checkpoint that the
model was loaded from. So a run that was stopped and resumed in another process removes its own old checkpoints.

    process 1   saves step-1 (run a, serial 1), step-2 (run a, serial 2), and is killed
    process 2   loads step-2; saves step-3 (run b, after a up to 2); with keep_last=2, step-1 is removed

These are never removed: checkpoints of other runs; checkpoints that were saved without ``keep_last``, or copied or renamed
since; checkpoints that the earlier run wrote after the one that was loaded; and checkpoints of a run that is still alive:
its process has locked the manifest of its newest checkpoint (see `unfinished_save`).
"""

from __future__ import annotations

import contextlib
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
from fullshard.checkpoint.manifest import MANIFEST, Manifest, RunRecord
from fullshard.checkpoint.publication import (
    complete_checkpoints,
    file_system_time,
    manifests_in,
    remove,
)
from fullshard.checkpoint.unfinished_save import folder_entries, is_locked, remove_leftovers, unlock
from fullshard.plan.names import FSDP_WRAPPED_MODULE


class TrainingRun:
    """What a model saves with ``keep_last`` in this process; lives as long as the model."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(6)
        self.pid = os.getpid()
        self._loaded: dict[Path, dict[str, int]] = {}
        """By the folder of the checkpoints: earlier runs that this one continues, with the last serial number of each."""
        self._newest: IO[str] | None = None
        """The manifest of the newest checkpoint, locked."""

    def continue_from(self, path: Path, record: RunRecord, serial: int) -> None:
        """Continue the run of the checkpoint at ``path``, an absolute path, that the model was loaded from."""
        self._loaded[path.parent.resolve()] = {**record.before, record.run: serial}

    def record_for(self, path: Path) -> RunRecord:
        """Return what a checkpoint at ``path`` says of this run. Earlier runs without checkpoints are left out."""
        loaded = self._loaded.get(path.parent.resolve(), {})
        beside = manifests_in(path.parent).values() if loaded else ()
        left = {found.run.run for found in beside if found.run is not None}
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


def remove_old_checkpoints(path: Path, record: RunRecord, keep: int) -> None:
    """Remove the run's checkpoints beside the one just written to ``path``, except the newest ``keep``.

    Leftovers of dead writers are removed, too. A checkpoint that cannot be removed stays, with a warning.
    """
    folder, now = path.parent, file_system_time(path)
    found = complete_checkpoints(folder)
    living = {run for run in record.before if _is_alive(run, found)}
    old = sorted(
        (manifest.serial, each)
        for each, manifest in found.items()
        if manifest.run is not None
        and manifest.run.name == each.name
        and manifest.run.run not in living
        and manifest.serial
        <= {**record.before, record.run: manifest.serial}.get(manifest.run.run, -1)
    )[:-keep]
    for _, each in old:
        try:
            remove(each, found[each], now)
        except OSError as error:
            warnings.warn(f"An old checkpoint cannot be removed, and stays: {error}", stacklevel=2)
    with contextlib.suppress(OSError):
        for name in folder_entries(folder):
            remove_leftovers(folder / name, now)


def _is_alive(run: str, found: Mapping[Path, Manifest]) -> bool:
    """Return whether a process, or a model of this process, still writes the checkpoints of a run."""
    own = [path for path, each in found.items() if each.run is not None and each.run.run == run]
    if not any(is_locked(path / MANIFEST) for path in own):
        return False
    if run in _OWN_IDS:
        gc.collect()  # a model that nobody uses any more may still be in memory, and with it the lock
    return any(is_locked(path / MANIFEST) for path in own)
