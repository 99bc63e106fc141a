"""The folder of a run: its files, its lock, and whether the run in it is this one.

    RUN/
      config.toml      the configuration, written first
      metrics.jsonl    what happened
      data.json        which data it has, to notice that they have changed
      checkpoints/     to resume from
      best/            weights with the lowest held-out loss, with checkpoint.best
      base/            frozen parameters, with checkpoint.only_trainable
      trace/  tensorboard/  wandb/  model/  report.html
      wandb_id  mlflow_id   by which Weights & Biases, or MLflow, knows the run
      lock             held while a run is active

A folder belongs to one run: its configuration must agree with the given one in all fields that decide the trajectory. One
process at a time uses it, the first rank. The lock ends with its process, however that ends. Nothing in a folder is ever
deleted here. This file imports no torch.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fullshard.errors import ConfigurationError
from fullshard.files import atomic_write
from fullshard.programs.run_events import End, Start, UnknownFormatError, read_events
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.config_file import differences, read_config, to_toml

CONFIG = "config.toml"
LOCK = "lock"
LOCK_PATIENCE_S = 5.0
"""Seconds for which the first rank waits for the lock. After a restart on other hosts its predecessor may still be ending."""


STEP = "step_"
"""Names of checkpoints begin with it; the number of the step follows."""


def step_of_checkpoint(path: Path) -> int | None:
    """Return the step of a run's checkpoint, which is in its name; None for other names."""
    number = path.name.removeprefix(STEP)
    return int(number) if path.name.startswith(STEP) and number.isdecimal() else None


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / CONFIG
        self.metrics = path / "metrics.jsonl"
        self.data = path / "data.json"
        self.checkpoints = path / "checkpoints"
        self.base = path / "base"
        self.best = path / "best"
        self.trace = path / "trace"
        self.tensorboard = path / "tensorboard"
        self.wandb_id = path / "wandb_id"
        self.mlflow_id = path / "mlflow_id"
        self.exported_model = path / "model"

    def check(self, config: RunConfig) -> None:
        """Raise unless the folder is new, empty, or has the run that ``config`` describes.

        Raises:
            ConfigurationError: it has other files or another run (the message names all fields that differ), or it
                cannot be read.
        """
        try:
            if self.config.exists():
                self._check_same_run(config)
            elif self.path.exists():
                self._check_empty()
        except OSError as error:
            raise ConfigurationError(
                f"run.folder must be a folder that can be read: {error}. Choose another."
            ) from error

    def _check_same_run(self, config: RunConfig) -> None:
        changed = differences(read_config(self.config), config)
        if changed:
            fields = "\n".join(
                f"  - {each.field} was {each.old}, and is {each.new} now" for each in changed
            )
            raise ConfigurationError(
                f"The run in {self.path} was started with other values of fields that decide its trajectory:\n{fields}\n"
                "Use the old values to resume it; choose another folder (run.folder) for a new run; or start a new run in "
                "this folder with --fresh, which moves the old one aside."
            )

    def _check_empty(self) -> None:
        if not self.path.is_dir():
            raise ConfigurationError(
                f"run.folder must be a folder, or not there yet; {self.path} is a file. Choose another."
            )
        others = sorted(
            entry.name
            for entry in self.path.iterdir()
            # The root of a file system is not empty: it has lost+found.
            if entry.name not in (LOCK, "lost+found") and not entry.name.startswith(CONFIG)
        )
        if others:
            raise ConfigurationError(
                f"run.folder must be new, empty, or that of a run; {self.path} has no {CONFIG}, but other things: "
                f"{', '.join(others[:10])}. Choose another folder."
            )

    def has_steps_left(self, config: RunConfig) -> bool:
        """Check the folder, and say whether the run has steps left. Call it under the lock."""
        self.check(config)
        return not self.is_finished(config.train.steps, config.evaluation.patience)

    def begin(self, config: RunConfig) -> None:
        """Write the configuration of a run that has steps left."""
        with atomic_write(self.config, durable=True) as file:
            file.write(to_toml(config).encode())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder, and lock it within the block.

        Raises:
            ConfigurationError: another process has the lock, or the folder cannot be created or written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / LOCK).open("a+")
        except OSError as error:
            raise ConfigurationError(
                f"run.folder must be a folder that can be written to: {error}. Choose another."
            ) from error
        with file:
            self._lock(file.fileno())
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    def _lock(self, descriptor: int) -> None:
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    owner = (self.path / LOCK).read_text().strip()
                    raise ConfigurationError(
                        f"One run at a time uses a folder; {self.path} is in use by process {owner}. "
                        "Wait for it, or choose another folder (run.folder)."
                    ) from None
                time.sleep(0.1)
            else:
                return

    def is_finished(self, steps: int, patience: int = 0) -> bool:
        """Say whether the run in the folder is finished and had at least this many steps, or would end early again.

        Raises:
            ConfigurationError: its metrics have a format that this version does not read.
        """
        last_end: End | None = None
        try:
            for event in read_events(self.metrics):
                if isinstance(event, Start | End):
                    last_end = event if isinstance(event, End) else None
        except UnknownFormatError as error:
            raise ConfigurationError(
                f"{self.metrics} was written by another version of fullshard: {error}. Go on with that version, or "
                "choose another folder (run.folder)."
            ) from None
        if last_end is None:
            return False
        return last_end.step >= steps or 0 < patience <= last_end.patience

    def move_aside(self) -> Path | None:
        """Rename the folder to make room for a new run, and return the new name; None if there is no folder.

        Raises:
            ConfigurationError: a run is active in it.
        """
        if not self.path.exists():
            return None
        with self.locked():
            for number in itertools.count(1):
                target = self.path.with_name(f"{self.path.name}.old-{number}")
                if not target.exists():
                    self.path.rename(target)
                    return target
        raise AssertionError("there is always another number")
