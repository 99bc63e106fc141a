"""The numbers of a run as files of TensorBoard (`log.tensorboard`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullshard.programs.run_events import Start


class TensorBoardFiles:
    """A `Tracker` that writes curves for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def begin(self, start: Start) -> None:
        """Open a file."""
        from torch.utils.tensorboard import SummaryWriter

        # Steps that are taken again after a resume must not be drawn twice.
        first = None if start.resumed_from is None else start.resumed_from + 1
        self._writer = SummaryWriter(str(self._folder), purge_step=first)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, *, succeeded: bool) -> None:
        """Close the file."""
        self._writer.close()
