"""The steps of a run that are recorded for its timeline."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from torch import nn

from fullshard import trace
from fullshard.programs.train.config import TraceSection
from fullshard.tracing.trace import Recording


class TracedSteps(ExitStack):
    """The recording of the steps that a configuration asks for: a block around all steps of a run."""

    def __init__(
        self, section: TraceSection, module: nn.Module, folder: Path, *, rank: int
    ) -> None:
        super().__init__()
        self._section = section
        self._is_wanted = section.steps > 0 and rank < section.ranks
        self._module = module
        self._folder = folder
        self._recording: Recording | None = None

    def begin(self, step: int) -> None:
        """Start the recording before its first step; steps count from 1."""
        if self._is_wanted and step == self._section.start:
            recording = trace(self._module, self._folder, first_step=step)
            self._recording = self.enter_context(recording)

    def end(self, step: int) -> None:
        """Record the end of a step; write the file after the last step that is wanted."""
        if self._recording is not None:
            self._recording.step()
            if step == self._section.start + self._section.steps - 1:
                self._recording = None
                self.close()

    def between_steps(self) -> AbstractContextManager[None]:
        """Return a block for what is not part of a step: checkpoints, evaluation."""
        return nullcontext() if self._recording is None else self._recording.paused()
