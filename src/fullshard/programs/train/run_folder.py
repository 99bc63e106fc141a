"""The folder of a run: what is where in it, who may use it, and whether its run is this one.

    RUN/
      config.toml      the configuration, written first
      metrics.jsonl    what happened
      checkpoints/     where the run can go on
      trace/  tensorboard/  model/  report.html
      lock             held while a run is on its way

A folder belongs to one run: the configuration in it must agree with the one given in all fields that decide the
trajectory. One process at a time uses it, the first rank; the lock goes with its process, however that ends.
Nothing in a folder is ever deleted from here. This file imports no torch.
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
"""How long the first rank waits for the lock: after a restart on other hosts, its predecessor may still be ending."""


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / CONFIG
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.trace = path / "trace"
        self.tensorboard = path / "tensorboard"
        self.exported_model = path / "model"

    def check(self, config: RunConfig) -> None:
        """Raise unless the folder is new, empty, or that of the run that ``config`` describes.

        Raises:
            ConfigurationError: it has other things in it, or a run that differs; all fields are named. Or it cannot be
                read.
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
                f"The run in {self.path} was begun with other values of what decides its course:\n{fields}\n"
                "Give the values it was begun with to go on with it; choose another folder (run.folder) for a new run; or "
                "begin anew in this one with --fresh, which moves the old run aside."
            )

    def _check_empty(self) -> None:
        if not self.path.is_dir():
            raise ConfigurationError(
                f"run.folder must be a folder, or not there yet; {self.path} is a file. Choose another."
            )
        others = sorted(
            entry.name
            for entry in self.path.iterdir()
            # A disk of its own has a folder that is not empty, and not anybody's.
            if entry.name not in (LOCK, "lost+found") and not entry.name.startswith(CONFIG)
        )
        if others:
            raise ConfigurationError(
                f"run.folder must be new, empty, or that of a run; {self.path} has no {CONFIG}, but other things: "
                f"{', '.join(others[:10])}. Choose another folder."
            )

    def begin(self, config: RunConfig) -> bool:
        """Check the folder, and write the configuration as it is from now on; say whether there is something left to do.

        The configuration of a finished run stays as it is. Under the lock.
        """
        self.check(config)
        if self.is_finished(config.train.steps):
            return False
        with atomic_write(self.config, durable=True) as file:
            file.write(to_toml(config).encode())
        return True

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and within the block be the only process that has it.

        Raises:
            ConfigurationError: another process has it, or it cannot be made or written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / LOCK).open("a+")
        except OSError as error:
            raise ConfigurationError(
                f"run.folder must be a folder that can be written to: {error}. Choose another."
            ) from error
        with file:
            self._take(file.fileno())
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    def _take(self, descriptor: int) -> None:
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

    def is_finished(self, steps: int) -> bool:
        """Say whether the run in it came to its end after at least so many steps.

        Raises:
            ConfigurationError: its metrics have a format that this version does not read.
        """
        last_end = -1
        try:
            for event in read_events(self.metrics):
                if isinstance(event, Start | End):
                    last_end = event.step if isinstance(event, End) else -1
        except UnknownFormatError as error:
            raise ConfigurationError(
                f"{self.metrics} was written by another version of fullshard: {error}. Go on with that version, or "
                "choose another folder (run.folder)."
            ) from None
        return last_end >= steps

    def move_aside(self) -> Path | None:
        """Give the folder another name, so that a run can begin anew under this one; return the new name.

        Raises:
            ConfigurationError: a run is on its way in it.
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
