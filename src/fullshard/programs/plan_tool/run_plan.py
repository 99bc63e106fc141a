"""The plan of a run that has been: for reports that compare the two, and for profiles that are corrected by its trace."""

from __future__ import annotations

from pathlib import Path

from fullshard.errors import ConfigurationError
from fullshard.programs.plan_tool.machine import Machine
from fullshard.programs.plan_tool.planned_step import PlannedStep
from fullshard.programs.plan_tool.planning import planned_whole
from fullshard.programs.plan_tool.profile_file import load_profile
from fullshard.programs.plan_tool.question import Question
from fullshard.programs.report.run_files import Run
from fullshard.programs.train.config_file import read_config
from fullshard.programs.train.model_source import open_model
from fullshard.programs.train.run_folder import CONFIG


def plan_of_run(folder: Path, run: Run, profile: str) -> PlannedStep:
    """Plan the step of a run, on the GPU of a profile's name or of its file.

    Raises:
        ConfigurationError: there is no such profile, or the run cannot be planned.
    """
    return planned_run(folder, run, load_profile(profile))


def planned_run(folder: Path, run: Run, machine: Machine) -> PlannedStep:
    """Plan the step of a run on a machine.

    Raises:
        ConfigurationError: the folder does not say how the run was configured, or on how many ranks it ran, or the run cannot
            be planned.
    """
    file = folder / CONFIG
    if not file.is_file() or not run.world:
        raise ConfigurationError(
            f"A plan needs the configuration of the run and its number of ranks; {folder} must be a run of fullshard train, "
            f"with {CONFIG} and a trace or metrics."
        )
    world = run.world
    config = read_config(file, checks=[lambda config: config.world_problems(world)])
    return planned_whole(Question(config, world, machine), open_model(config))
