"""Whether the run in a folder can go on: its checkpoints are there, and its data are those that it began with."""

from __future__ import annotations

from fullshard.checkpoint import latest
from fullshard.errors import ConfigurationError
from fullshard.programs.train.data_record import DataRecord, read_record
from fullshard.programs.train.earlier_starts import EarlierStarts
from fullshard.programs.train.run_folder import RunFolder, step_of_checkpoint

ANEW = "start a new run with --fresh, which moves this one aside, or in another folder (run.folder)"


def check_continuation(folder: RunFolder, earlier: EarlierStarts, data: DataRecord) -> str:
    """Raise unless the run can go on, or has not saved anything yet. Return what the user should know, or nothing.

    Raises:
        ConfigurationError: its checkpoints are gone, so it would begin again at step 0; or its data have changed, so others
            would be held out. Nothing was written.
        CheckpointError: it cannot be known which checkpoints there are.
    """
    newest = latest(folder.checkpoints)
    if newest is None:
        if earlier.saved_step:
            raise ConfigurationError(
                f"The run in {folder.path} has saved a checkpoint of step {earlier.saved_step}, as its metrics say, and there is "
                f"none in {folder.checkpoints}. It would begin again at step 0. Put the checkpoints back; or {ANEW}."
            )
        return ""
    stored = read_record(folder.data)
    if stored not in (None, data):
        change = f"{stored} then, {data} now" if str(stored) != str(data) else "other tokens"
        raise ConfigurationError(
            f"The data of the run in {folder.path} have changed since its first start: {change}. It would hold out "
            "others, and train on tokens that it has been evaluated with. Put the old data back; or "
            f"{ANEW}: model.weights lets it begin with the weights of this one. To go on with the new data all the same, remove "
            f"{folder.data}."
        )
    step = step_of_checkpoint(newest)
    if step is not None and step < earlier.saved_step:
        return (
            f"Going on after step {step}: the checkpoint of step {earlier.saved_step}, which the run had saved, is not there "
            "any more, or cannot be read."
        )
    return ""
