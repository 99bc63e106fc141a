"""The numbers of a run for MLflow (`log.mlflow`).

MLflow knows a run by an id, which is kept in the run's folder: a resumed run goes on in the same curves. Where it sends them
is said by its environment variables (MLFLOW_TRACKING_URI, ...).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullshard.files import atomic_write
from fullshard.programs.run_events import Start
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.run_folder import RunFolder

MOST_PARAMS = 100
"""Parameters that MLflow takes in one call."""


class MlflowRun:
    """A `Tracker` that sends numbers to MLflow."""

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        self._folder = folder
        self._config = config
        self._mlflow: Any = None

    def begin(self, start: Start) -> None:
        """Start the run, or go on with it; a new one gets the configuration."""
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(self._config.log.mlflow_experiment)
        known = self._folder.mlflow_id
        if known.exists():
            mlflow.start_run(run_id=known.read_text().strip())
            return
        run = mlflow.start_run(run_name=self._folder.path.absolute().name)
        with atomic_write(known, durable=False) as file:
            file.write(f"{run.info.run_id}\n".encode())
        params = _params(self._config)
        for first in range(0, len(params), MOST_PARAMS):
            mlflow.log_params(dict(params[first : first + MOST_PARAMS]))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        self._mlflow.log_metrics(dict(numbers), step=step)

    def finish(self, *, succeeded: bool) -> None:
        """End the run."""
        self._mlflow.end_run("FINISHED" if succeeded else "FAILED")


def _params(config: RunConfig) -> list[tuple[str, Any]]:
    """Return the fields that are set, by their full names."""
    return [
        (f"{section}.{name}", str(value) if isinstance(value, Path) else value)
        for section, fields in dataclasses.asdict(config).items()
        for name, value in fields.items()
        if value is not None
    ]
