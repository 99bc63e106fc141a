"""Recorded steps that the page shows: a view for each rank and step, as many as fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import plotly.graph_objects as go

from fullshard.programs.report.timeline import StepTimes, typical

MAX_BARS = 3000
"""Bars of one view. Plotly draws a shape for each, and stays quick up to this number."""

MAX_TOTAL_BARS = 60_000
"""Bars of all views together: about 8 MB of the page."""


@dataclass(frozen=True)
class Views:
    """The choice of rank and step. At least one step was recorded."""

    steps: Sequence[StepTimes]

    @cached_property
    def shown(self) -> list[StepTimes]:
        """The steps that fit the page: all steps of the lowest ranks."""
        shown: list[StepTimes] = []
        for rank in sorted({step.rank for step in self.steps}):
            of_rank = [step for step in self.steps if step.rank == rank]
            bars = sum(min(MAX_BARS, len(step.spans)) for step in [*shown, *of_rank])
            if shown and bars > MAX_TOTAL_BARS:
                break
            shown += of_rank
        return shown

    @property
    def first(self) -> str:
        """The key of the view that is shown first."""
        return _key(typical(self.shown))

    @property
    def choices(self) -> dict[str, list[str]]:
        """Values to choose from."""
        return {
            "rank": [str(rank) for rank in sorted({step.rank for step in self.shown})],
            "step": [str(step) for step in sorted({step.step for step in self.shown})],
        }

    @property
    def left_out(self) -> str:
        """A sentence about what does not fit; it begins with a space."""
        missing = len(self.steps) - len(self.shown)
        if not missing:
            return ""
        ranks = len(self.choices["rank"])
        return f" The steps of the first {ranks} recorded ranks are shown, to keep the page small."

    def drawn(self, draw: Callable[[StepTimes], go.Figure]) -> Mapping[str, go.Figure]:
        """Return a figure for each step."""
        return {_key(step): draw(step) for step in self.shown}


def _key(step: StepTimes) -> str:
    return f"{step.rank}/{step.step}"
