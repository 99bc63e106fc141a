"""The numbers of a run for Weights & Biases (`log.wandb`).

W&B knows a run by an id, which is kept in the run's folder: a resumed run goes on in the same curves. All other settings of
W&B are its environment variables (WANDB_ENTITY, WANDB_MODE, ...).
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from fullshard.files import atomic_write
from fullshard.programs.run_events import Start
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.run_folder import RunFolder

STEP = "step"
"""The axis of all curves. W&B's own counter never goes back, but a resumed run may repeat steps."""


class TrackedRun(Protocol):
    """The used part of a run of W&B."""

    def define_metric(self, name: str, **options: Any) -> Any:
        """Say how a number is drawn."""

    def log(self, data: dict[str, Any]) -> Any:
        """Send numbers."""

    def finish(self, exit_code: int | None = None) -> Any:
        """Send the rest, and end."""


class Client(Protocol):
    """The used part of the module wandb."""

    def init(self, **options: Any) -> TrackedRun:
        """Start or resume a run."""


class WandbRun:
    """A `Tracker` that sends numbers to Weights & Biases."""

    def __init__(self, folder: RunFolder, config: RunConfig, client: Client | None = None) -> None:
        """Prepare to send a run's numbers.

        Args:
            folder: The run's folder; it has the id, and W&B's own files.
            config: The run.
            client: The module wandb; imported when the run starts, by default.
        """
        self._folder = folder
        self._config = config
        self._client = client
        self._run: TrackedRun | None = None

    def begin(self, start: Start) -> None:
        """Start the run, or go on with it."""
        if self._client is None:
            import wandb

            self._client = wandb
        log = self._config.log
        self._run = self._client.init(
            project=log.wandb_project,
            name=self._folder.path.absolute().name,
            id=self._id(),
            resume="allow",
            dir=str(self._folder.path.absolute()),
            mode="offline" if log.wandb_offline else None,
            config=_plain(dataclasses.asdict(self._config)),
            allow_val_change=True,  # a resumed run may have other ranks
            settings={"console": "off"},  # the progress line is nothing to keep
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        if self._run is not None:
            self._run.log({STEP: step, **numbers})

    def finish(self, *, succeeded: bool) -> None:
        """Send the rest, and end."""
        if self._run is not None:
            self._run.finish(exit_code=0 if succeeded else 1)

    def _id(self) -> str:
        """Return the run's id; a new run gets one."""
        if self._folder.wandb_id.exists():
            return self._folder.wandb_id.read_text().strip()
        made = uuid.uuid4().hex[:12]
        with atomic_write(self._folder.wandb_id, durable=False) as file:
            file.write(f"{made}\n".encode())
        return made


def _plain(value: Any) -> Any:
    """Return a configuration with texts in place of paths."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return str(value) if isinstance(value, Path) else value
