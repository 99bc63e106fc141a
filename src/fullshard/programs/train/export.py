"""A checkpoint as a folder that transformers loads.

An export is made from a checkpoint, not from the model in memory. So it works at the end of a run, for a finished run and
for an earlier step, by any number of ranks. The new folder appears, or replaces an earlier export, when it is complete.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import astuple
from pathlib import Path

from fullshard.checkpoint import latest
from fullshard.checkpoint.folders.found_checkpoint import FoundCheckpoint, read_together
from fullshard.checkpoint.folders.replacement import NEW, replacing
from fullshard.checkpoint.manifest import FileRecord
from fullshard.checkpoint.rank_group import RankGroup
from fullshard.checkpoint.source import Source
from fullshard.checkpoint.sources.formats import open_found, with_base
from fullshard.checkpoint.sources.huggingface import write_huggingface
from fullshard.checkpoint.sources.renamed_source import averages_as_model
from fullshard.checkpoint.tensor_files import TensorFile, record_in
from fullshard.errors import CheckpointError
from fullshard.programs.train.exported_model import (
    MARK,
    ExportForm,
    ExportMark,
    check_target,
    read_mark,
)
from fullshard.programs.train.model_source import ModelSource
from fullshard.programs.train.run_folder import RunFolder


def export_newest(
    folder: RunFolder, source: ModelSource, *, ema: bool = False, best: bool = False
) -> ExportMark:
    """Export the newest checkpoint of a run to its folder `model`, unless that was done before. All ranks call it.

    With ``ema``, the averages of the parameters are exported; with ``best``, the weights with the lowest held-out loss.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read, or the folder cannot be written; the same on all
            ranks. An earlier export is unchanged.
    """
    path = RankGroup().on_first(
        lambda: folder.best if best and folder.best.exists() else newest_checkpoint(folder)
    )
    return export_checkpoint(path, source.export_form(), folder.exported_model, ema=ema)


def has_checkpoint(folder: RunFolder) -> bool:
    """Say whether a run has a checkpoint that it can be resumed from."""
    return latest(folder.checkpoints) is not None


def newest_checkpoint(folder: RunFolder) -> Path:
    """Return the newest checkpoint of a run.

    Raises:
        CheckpointError: there is none.
    """
    found = latest(folder.checkpoints)
    if found is None:
        raise CheckpointError(
            f"A model is exported from a checkpoint, and there is none in {folder.checkpoints}. Train first: fullshard train "
            f"{folder.config}"
        )
    return found


def export_checkpoint(
    path: Path, form: ExportForm, target: Path, *, ema: bool = False
) -> ExportMark:
    """Write a checkpoint as a folder that transformers loads, unless the folder has it. All ranks call it.

    Args:
        path: A checkpoint of any format.
        form: Form of the model for transformers.
        target: New, empty, or an earlier export, which is replaced.
        ema: Export the averages of the parameters in place of the trained weights.

    Raises:
        CheckpointError: the checkpoint cannot be read, or the folder cannot be written. The folder is unchanged.
    """
    ranks = RankGroup()

    def begin() -> ExportMark | None:
        check_target(target)
        return read_mark(target)

    old = ranks.on_first(begin)

    def write(found: FoundCheckpoint) -> ExportMark:
        manifest = found.manifest()
        data = None if manifest is None else manifest.data
        is_of_it = old is not None and data is not None and (old.data, old.ema) == (data, ema)
        if old is not None and is_of_it and ranks.on_first(lambda: _is_whole(target, old)):
            return old
        opened = ranks.on_each(lambda: open_found(found))
        with closing(with_base(opened, rank_group=ranks)) as source:
            weights = ranks.on_each(lambda: averages_as_model(source)) if ema else source
            return _replace(weights, data, form, target, keep=_others(old), ema=ema)

    return read_together(path, ranks, write)


def _replace(
    source: Source,
    data: str | None,
    form: ExportForm,
    target: Path,
    *,
    keep: Callable[[Path], bool] | None,
    ema: bool,
) -> ExportMark:
    ranks = RankGroup()
    with replacing(target, ranks, keep=keep) as workspace:
        new = workspace / NEW
        write_huggingface(source, new, config_from=list(form.companions), rename=form.rename)

        def mark() -> ExportMark:
            step = source.extra.get("step") if isinstance(source.extra, dict) else None
            made = ExportMark(
                checkpoint=source.path.name,
                data=data,
                step=step if isinstance(step, int) else None,
                files=tuple(sorted(file.name for file in new.iterdir())),
                ema=ema,
                weights={file.name: astuple(record_in(file)) for file in new.glob("*.safetensors")},
            )
            made.write(new)
            return made

        return ranks.on_first(mark)


def _is_whole(folder: Path, mark: ExportMark) -> bool:
    """Return whether an export is as it was written: all its files are there, and weights have their checksums.

    Other files may have been changed, by the user.
    """
    faults = [f"{name} is missing" for name in mark.files if not (folder / name).is_file()]
    for name, (nbytes, checksum) in mark.weights.items():
        try:
            with closing(TensorFile(folder / name, FileRecord(nbytes, checksum))) as file:
                faults += file.verify((entry.begin, entry.end) for entry in file.entries.values())
        except CheckpointError as error:
            faults.append(str(error))
    if faults:
        warnings.warn(f"{folder} is exported again: {faults[0]}", stacklevel=2)
    return bool(mark.weights) and not faults


def _others(old: ExportMark | None) -> Callable[[Path], bool] | None:
    """Return which files stay in the folder: those that are not of the old export. None if the folder must be empty."""
    if old is None:
        return None
    replaced = {MARK, *old.files}
    return lambda path: path.name not in replaced
