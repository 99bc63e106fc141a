"""Errors to expect of an answer, and the places where they were measured.

    time        from published runs of the same GPU, size and number of GPUs. Elsewhere from the bands of the profile's sections,
                each weighted by its seconds: that says how well the parts are known, not how well the whole was predicted
    memory      from steps that were planned and measured. It depends on torch's kernels and allocator more than on the GPU, so
                elsewhere the same band stands, and the answer says that it was not measured there

`VALIDATED` has all comparisons of plans with measured runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from fullshard.programs.plan_tool.planned_step import PlannedStep

Answer = Literal["allocated", "reserved", "time"]
"""Allocated: what tensors take at the peak. Reserved: what the allocator takes from the device for them."""

Basis = Literal["runs", "profile", "others", "host"]
"""Origins of bands: runs like this one, the sections of the profile, runs that are not like this one, or steps that
waited for the host."""

HOST_SHARE = 0.1
"""Least share of waits for the host at which the host decides how far a time is off."""
HOST_BAND = 0.43
"""The largest error of a step that waits for the host: 12 layers of width 768 on an H200. The host sections of shipped profiles
were measured before backward ran on the calling thread."""
MEASURED_HERE = "calibrated"
"""The name of profiles that `fullshard plan calibrate` writes."""

PLUS_MINUS = "\u00b1 "

MILLION = 10**6
BILLION = 10**9

IDLE_SECTIONS = {"host": "host", "other": "host", "copy": "offload", "update": "offload"}
"""Sections of a profile that decide how long compute waits, by the reason of the wait. Others wait for links or network."""
COMPUTE_SECTIONS = {
    "matmul": "matmul",
    "attention": "attention",
    "memory": "traffic",
    "transfer": "offload",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Validated:
    """A range of runs that were planned and measured."""

    answer: Answer
    gpu: str
    """The name of a profile."""
    worlds: tuple[int, int]
    """The fewest and the most ranks."""
    parameters: tuple[int, int]
    """Elements of the smallest and of the largest model."""
    band: float
    """The largest relative error of the plans."""


MEMORY_BANDS: dict[Answer, float] = {"allocated": 0.01, "reserved": 0.06}
"""Steps on an H200: `benchmarks/plan_steps.py` with the measurements of `benchmarks/results/plan-steps-h200.json`."""

VALIDATED: tuple[Validated, ...] = (
    Validated(
        answer="time",
        gpu="h100-500w",
        worlds=(8, 128),
        parameters=(6 * BILLION, 9 * BILLION),
        band=0.08,
    ),
    Validated(
        answer="time",
        gpu="h100",
        worlds=(8, 128),
        parameters=(700 * MILLION, 75 * BILLION),
        band=0.19,
    ),
    Validated(
        answer="time",
        gpu="a100-80",
        worlds=(8, 256),
        parameters=(BILLION, 75 * BILLION),
        band=0.09,
    ),
    Validated(
        answer="time",
        gpu="a100-80",
        worlds=(128, 512),
        parameters=(75 * BILLION, 180 * BILLION),
        band=0.18,
    ),
    *(
        Validated(
            answer=answer,
            gpu="h200",
            worlds=(8, 64),
            parameters=(130 * MILLION, 7 * BILLION),
            band=band,
        )
        for answer, band in MEMORY_BANDS.items()
    ),
)
"""Times: published runs (`benchmarks/published_runs.py`). Memory: 24 steps on an H200, and 7 of larger models
(`benchmarks/results/targets-h200.json`). Bands are the largest errors, but for two runs whose replicas did something else. The profiles
were settled with most of these rows in view, so other runs may be off by more."""


@dataclass(frozen=True, slots=True)
class Band:
    """The error to expect of an answer."""

    relative: float | None
    """A share of it; None if it is not known."""
    basis: Basis

    @property
    def is_validated(self) -> bool:
        """Whether runs like this one were planned and measured."""
        return self.basis == "runs"

    @property
    def percent(self) -> str:
        """The share for people."""
        return (
            "error not known"
            if self.relative is None
            else f"{PLUS_MINUS}{100 * self.relative:.0f} %"
        )

    def __str__(self) -> str:
        """Return it for people, with where it comes from if that is not runs like this one."""
        if self.relative is None:
            return self.percent
        notes: dict[Basis, str] = {
            "profile": " by the profile",
            "others": " in other runs",
            "host": " as it waits for the host",
        }
        return self.percent + notes.get(self.basis, "")


Bands: TypeAlias = Mapping[Answer, Band]


def bands_of(planned: PlannedStep, parameters: int) -> Bands:
    """Return the bands of all answers about a model with so many parameters."""
    return {answer: band_of(planned, answer, parameters) for answer in get_args(Answer)}


def band_of(planned: PlannedStep, answer: Answer, parameters: int) -> Band:
    """Return the band of an answer about a model with so many parameters."""
    config, machine = planned.config, planned.machine
    if answer != "time" and config.compute.compile == "blocks":
        # What compiled blocks keep is the profile's assumption.
        return Band(None, "others")
    if answer == "time" and host_is_outdated(planned):
        return Band(max(HOST_BAND, _band_of_time(planned) or 0.0), "host")
    # No measured run had experts.
    is_measured = not planned.has_experts and (answer != "time" or not config.sharding.offload)
    for each in VALIDATED:
        if (
            is_measured
            and each.answer == answer
            and each.gpu == machine.name
            and each.worlds[0] <= planned.world <= each.worlds[1]
            and each.parameters[0] <= parameters <= each.parameters[1]
        ):
            return Band(each.band, "runs")
    if answer == "time":
        return Band(_band_of_time(planned), "profile")
    return Band(_widest(answer), "others")


def host_is_outdated(planned: PlannedStep) -> bool:
    """Return whether the host decides how long a step takes, by times that were measured with an earlier engine."""
    is_shipped = planned.machine.name != MEASURED_HERE
    return is_shipped and planned.playback.idle.get("host", 0.0) >= HOST_SHARE * planned.seconds


def _widest(answer: Answer) -> float:
    return max(each.band for each in VALIDATED if each.answer == answer)


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
