"""Which checkpoints are of one run, and removing all but the newest of these.

A run is what one model saves with ``keep_last`` in one process, and what the checkpoint has behind it that the model
was loaded from: so a run that was stopped, and goes on in another process, removes its own old checkpoints.

    process 1   saves step-1 (run a, serial 1), step-2 (run a, serial 2), and is killed
    process 2   loads step-2; saves step-3 (run b, after a up to 2); with keep_last=2, step-1 is removed

Never removed are checkpoints of other runs, those that were saved without ``keep_last`` or have been copied or
renamed since, those that the run before wrote later than the one that was loaded, and those of a run that still lives:
its process has the manifest of its newest checkpoint locked (see `unfinished`).
"""

from __future__ import annotations

import contextlib
import gc
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
from fullshard.names import FSDP_WRAPPED_MODULE


class TrainingRun:
    """What a model saves with ``keep_last`` in this process; lives as long as the model."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(6)
        self._loaded: dict[Path, dict[str, int]] = {}
        """Runs that this one goes on with, and how far they had come, by the folder in which their checkpoints are."""
        self._newest: IO[str] | None = None
        """The manifest of the newest checkpoint, locked."""

    def go_on_from(self, path: Path, mark: RunRecord, serial: int) -> None:
        """The model now is as it was in the checkpoint at ``path``, an absolute path."""
        self._loaded[path.parent.resolve()] = {**mark.before, mark.run: serial}

    def mark_for(self, path: Path) -> RunRecord:
        """What a checkpoint that this run writes to ``path`` says of it; runs that have nothing left are left out."""
        loaded = self._loaded.get(path.parent.resolve(), {})
        beside = manifests_in(path.parent).values() if loaded else ()
        left = {found.run.run for found in beside if found.run is not None}
        before = {run: serial for run, serial in loaded.items() if run in left and run != self.id}
        return RunRecord(self.id, path.name, before)

    def note_published(self, manifest: IO[str]) -> None:
        """Show by the lock on its manifest that the run which wrote a checkpoint lives; the one before has shown it."""
        self.let_go()
        self._newest = manifest

    def let_go(self) -> None:
        """The run has ended."""
        if self._newest is not None:
            unlock(self._newest)
            self._newest = None


_WRAPPED = (
    FSDP_WRAPPED_MODULE,
    torch_border.ACTIVATION_CHECKPOINTED,
    "module",
    torch_border.COMPILED,
)
"""What wrappers call the only child they have: ours, torch's for activation checkpointing, DDP, a compiled module."""

_RUNS: weakref.WeakKeyDictionary[nn.Module, TrainingRun] = weakref.WeakKeyDictionary()
_OWN_IDS: set[str] = set()
"""Of all runs of this process, also those that have ended."""


def training_run_of(model: nn.Module) -> TrainingRun:
    """The run that a model is in."""
    model = _unwrapped(model)
    if model not in _RUNS:
        run = _RUNS[model] = TrainingRun()
        _OWN_IDS.add(run.id)
        weakref.finalize(model, run.let_go)
    return _RUNS[model]


def note_loaded(model: nn.Module, path: Path, manifest: Manifest) -> None:
    """A model goes on from a checkpoint."""
    if manifest.run is not None:
        training_run_of(model).go_on_from(path, manifest.run, manifest.serial)


def _unwrapped(model: nn.Module) -> nn.Module:
    """A model without what is around all of it: it may be loaded before it is wrapped, and saved after."""
    children = list(model.named_children())
    while len(children) == 1 and children[0][0] in _WRAPPED:
        model = children[0][1]
        children = list(model.named_children())
    return model


# --- removing ----------------------------------------------------------------------------------------------


def remove_old_checkpoints(path: Path, mark: RunRecord, keep: int) -> None:
    """Remove the run's checkpoints beside the one just written to ``path``, all but the newest ``keep``.

    What dead saves have left there is removed, too. What cannot be removed stays, with a warning.
    """
    folder, now = path.parent, file_system_time(path)
    found = complete_checkpoints(folder)
    living = {run for run in mark.before if _lives(run, found)}
    old = sorted(
        (manifest.serial, each)
        for each, manifest in found.items()
        if manifest.run is not None
        and manifest.run.name == each.name
        and manifest.run.run not in living
        and manifest.serial <= {**mark.before, mark.run: manifest.serial}.get(manifest.run.run, -1)
    )[:-keep]
    for _, each in old:
        try:
            remove(each, found[each], now)
        except OSError as error:
            warnings.warn(f"An old checkpoint cannot be removed: {error}", stacklevel=2)
    with contextlib.suppress(OSError):
        for name in folder_entries(folder):
            remove_leftovers(folder / name, now)


def _lives(run: str, found: Mapping[Path, Manifest]) -> bool:
    """Whether a process, or a model of this one, still writes the checkpoints of a run."""
    own = [path for path, each in found.items() if each.run is not None and each.run.run == run]
    if not any(is_locked(path / MANIFEST) for path in own):
        return False
    if run in _OWN_IDS:
        gc.collect()  # models that nobody has any more are often still there
    return any(is_locked(path / MANIFEST) for path in own)
