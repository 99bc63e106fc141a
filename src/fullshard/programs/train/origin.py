"""Meanings of a path: a run, a checkpoint of a run, or another checkpoint. This file imports no torch.

RUN                          its newest checkpoint, or that of a step
RUN/checkpoints/step_...     this checkpoint of the run
RUN/best                     its weights with the lowest held-out loss
any other checkpoint         of a script, of torch.distributed.checkpoint, ...; nothing says what model it is of
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fullshard.errors import CheckpointError, ConfigurationError
from fullshard.programs.train.run_folder import CONFIG, RunFolder, step_of_checkpoint


@dataclass(frozen=True, slots=True)
class Origin:
    """The run or the checkpoint that a path names."""

    run: RunFolder | None
    """None for a checkpoint that is not of a run."""

    checkpoint: Path | None
    """None for the newest of the run."""


def find_origin(path: Path, step: int | None) -> Origin:
    """Return the run or checkpoint that ``path`` names.

    Raises:
        ConfigurationError: ``step`` is given with a checkpoint.
        CheckpointError: the run has no checkpoint of this step, or they cannot be listed.
    """
    if (path / CONFIG).is_file():
        run = RunFolder(path)
        return Origin(run, None if step is None else _checkpoint_of(run, step))
    if step is not None:
        raise ConfigurationError(
            f"--step chooses a checkpoint of a run; {path} is not the folder of a run. Leave --step out."
        )
    parent = path.absolute().parent
    for run in (RunFolder(parent.parent), RunFolder(parent)):
        if run.config.is_file() and (parent == run.checkpoints or path.absolute() == run.best):
            return Origin(run, path)
    return Origin(None, path)


def _checkpoint_of(run: RunFolder, step: int) -> Path:
    found = _steps(run)
    if step not in found:
        there = ", ".join(map(str, sorted(found))) or "none"
        raise CheckpointError(
            f"{run.path} has no checkpoint of step {step}; it has those of: {there}. checkpoint.every and checkpoint.keep "
            "of a run decide which are kept."
        )
    return found[step]


def _steps(run: RunFolder) -> Mapping[int, Path]:
    try:
        steps = {step_of_checkpoint(path): path for path in run.checkpoints.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:  # which are there is not known
        raise CheckpointError(f"{run.checkpoints} cannot be listed: {error}") from error
    return {step: path for step, path in steps.items() if step is not None}
