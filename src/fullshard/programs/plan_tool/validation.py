"""How far an answer may be off, and where that has been measured.

A band of the step's time comes from the bands of the profile's sections, each weighted by its seconds. It says how
well the parts are known, not how well the whole was predicted. For that, plans must be compared with measured runs: `VALIDATED`
has these comparisons. Outside of them every answer says that it has not been validated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fullshard.programs.plan_tool.planned_step import PlannedStep

Answer = Literal["memory", "time"]

BILLION = 10**9

IDLE_SECTIONS = {"host": "host", "other": "host"}
"""Sections of a profile that decide how long compute waits, by the reason of the wait. Others wait for links or network."""
COMPUTE_SECTIONS = {"matmul": "matmul", "attention": "attention", "memory": "traffic"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Validated:
    """A range of runs that were planned and measured."""

    answer: Answer
    gpu: str
    """The name of a profile."""
    worlds: tuple[int, int]
    """The fewest and the most ranks."""
    parameters: tuple[int, int]
    """Of the smallest and the largest model."""
    band: float
    """The largest relative error of the plans."""


VALIDATED: tuple[Validated, ...] = (
    Validated(
        answer="time",
        gpu="h100-500w",
        worlds=(8, 128),
        parameters=(6 * BILLION, 9 * BILLION),
        band=0.05,
    ),
    Validated(
        answer="time",
        gpu="h100",
        worlds=(64, 128),
        parameters=(6 * BILLION, 75 * BILLION),
        band=0.07,
    ),
    Validated(
        answer="time",
        gpu="a100-80",
        worlds=(64, 256),
        parameters=(6 * BILLION, 75 * BILLION),
        band=0.09,
    ),
    Validated(
        answer="time",
        gpu="a100-80",
        worlds=(128, 512),
        parameters=(75 * BILLION, 180 * BILLION),
        band=0.18,
    ),
)
"""Published runs: `benchmarks/published_runs.py`. Bands are the largest errors. The profiles were settled with these rows in
view, so other runs may be off by more."""


@dataclass(frozen=True, slots=True)
class Band:
    """How far an answer may be off."""

    relative: float | None
    """A share of it; None if it is not known."""
    is_validated: bool

    def around(self, seconds: float) -> tuple[float, float] | None:
        """Return the least and the most that an answer stands for."""
        if self.relative is None:
            return None
        return seconds * (1 - self.relative), seconds * (1 + self.relative)

    def __str__(self) -> str:
        """Return it for people."""
        if self.relative is None:
            return "error not measured yet"
        text = f"\u00b1 {100 * self.relative:.0f} %"
        return text if self.is_validated else f"{text} by the profile"


def band_of(planned: PlannedStep, answer: Answer, parameters: int) -> Band:
    """Return the band of an answer about a model with so many parameters."""
    for each in VALIDATED:
        if (
            each.answer == answer
            and each.gpu == planned.machine.name
            and each.worlds[0] <= planned.world <= each.worlds[1]
            and each.parameters[0] <= parameters <= each.parameters[1]
        ):
            return Band(each.band, is_validated=True)
    return Band(_band_of_time(planned) if answer == "time" else None, is_validated=False)


def _band_of_time(planned: PlannedStep) -> float | None:
    """Return the mean band of the profile's sections, weighted by the time that each decides."""
    bands, playback = planned.machine.bands, planned.playback
    if not bands or not playback.seconds:
        return None
    is_on_one_host = planned.world <= planned.machine.links.devices_per_host
    wire = "links" if is_on_one_host else "network"
    weights: dict[str, float] = {}
    for kind, seconds in playback.compute.items():
        section = COMPUTE_SECTIONS.get(kind, wire)
        weights[section] = weights.get(section, 0.0) + seconds
    for reason, seconds in playback.idle.items():
        section = IDLE_SECTIONS.get(reason, wire)
        weights[section] = weights.get(section, 0.0) + seconds
    total = sum(weights.values())
    worst = max(bands.values())
    return sum(bands.get(name, worst) * part for name, part in weights.items()) / total
