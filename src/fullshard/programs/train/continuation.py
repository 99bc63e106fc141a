"""Whether the run in a folder can go on: its checkpoints are there, and its data are those that it began with."""

from __future__ import annotations

from fullshard.checkpoint import latest
from fullshard.errors import ConfigurationError
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.data_record import DataRecord, read_record
from fullshard.programs.train.earlier_starts import EarlierStarts
from fullshard.programs.train.optimizer import learning_rate
from fullshard.programs.train.run_folder import RunFolder, step_of_checkpoint

ANEW = "start a new run with --fresh, which moves this one aside, or in another folder (run.folder)"


def check_continuation(
    folder: RunFolder, config: RunConfig, earlier: EarlierStarts, data: DataRecord
) -> list[str]:
    """Raise unless the run can go on, or has not saved anything yet. Return what the user should know.

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
        return []
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
    if step is None:
        return []
    notes = [_schedule_note(config, earlier, step)]
    if step < earlier.saved_step:
        notes.append(
            f"Going on after step {step}: the checkpoint of step {earlier.saved_step}, which the run had saved, is not there "
            "any more, or cannot be read."
        )
    return [note for note in notes if note]


def _schedule_note(config: RunConfig, earlier: EarlierStarts, step: int) -> str:
    """Return how another number of steps changes the learning rate after a step; empty if it does not."""
    steps = config.train.steps
    if not earlier.steps:
        return ""

    def rate(done: int, of: int) -> float:
        return learning_rate(done, highest=config.optimizer.lr, steps=of, section=config.schedule)

    if rate(step, steps) == rate(step, earlier.steps):
        return ""
    verb = "stretches" if steps > earlier.steps else "shortens"
    return (
        f"train.steps was {earlier.steps} and is {steps}, which {verb} the schedule: the learning rate was "
        f"{rate(max(step - 1, 0), earlier.steps):.1e} at step {step}, and is {rate(step, steps):.1e} at step {step + 1}."
    )
