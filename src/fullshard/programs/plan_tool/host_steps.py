"""The host's times, by small steps that wait for nothing but the host.

An operation in a loop takes half of what it takes in a model, whose code and data are not all in the caches. So `measure_steps`
takes steps of a small decoder, as rank 0 of a fake group. `fitted_host` corrects the times of a profile until its plan
of these steps says what was measured: it multiplies all times by one factor, then finds what recomputation and its policies add.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fullshard.programs.plan_tool.device_steps import measure_busy_step
from fullshard.programs.plan_tool.machine import MICRO, Machine
from fullshard.programs.plan_tool.program import Entry, HostWork, HostWorkKind, Launch
from fullshard.programs.plan_tool.step_program import record_step
from fullshard.programs.plan_tool.training_step import TrainingStep
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.config_file import read_config
from fullshard.programs.train.model_source import open_model
from fullshard.torch_border import fake_process_group

WORLD = 8
SETTINGS = (
    *("model.layers=4", "model.width=256", "model.heads=4", "model.vocabulary=512"),
    *("data.context=64", f"train.batch={WORLD}", "compute.precision=bf16"),
)
RECOMPUTATIONS = ("none", "blocks", "selective")
WARM_UP, ROUNDS = 3, 45

SCALED = ("launch_us", "kernel_us", "collective_us", "event_us", "hook_us")


@dataclass(frozen=True, slots=True)
class SmallStep:
    """Forward and backward of a small step."""

    seconds: float
    """The host's time."""
    entries: Sequence[Entry]
    """The host's work, as recorded."""


@dataclass(frozen=True, slots=True)
class SmallSteps:
    """The measured steps."""

    plain: SmallStep
    recomputed: SmallStep
    selective: SmallStep
    busy_seconds: float | None = field(default=None, kw_only=True)
    """Time of a step that keeps a GPU busy; None if it was not measured."""


class SmallStepTurns:
    """Small steps of all decoders, which are taken in turn.

    In turn, since a shared host is slower for a while, and since a step that follows one of its own kind finds its code and data
    in the caches. A layer of a large model does not.
    """

    def __init__(self, device: torch.device) -> None:
        """Build the decoders; there must be a process group of `WORLD` ranks."""
        self._device = device
        self._steps = [
            TrainingStep(config, WORLD, open_model(config), device) for config in small_configs()
        ]
        self.take(WARM_UP)

    def take(self, rounds: int) -> list[list[float]]:
        """Take one step of each decoder in each round; return the host's seconds, by round."""
        return [[_seconds(step, self._device) for step in self._steps] for _ in range(rounds)]


def typical_seconds(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Return the seconds of each decoder's step.

    What recomputation costs is a small difference of two steps. So steps are compared within rounds.
    """
    plain = statistics.median(each[0] for each in rounds)
    ratios = [[seconds / each[0] for seconds in each] for each in rounds]
    return [plain * statistics.median(each) for each in zip(*ratios, strict=True)]


def measure_steps(device: torch.device) -> SmallSteps:
    """Take small steps of all decoders in turn, and return what was measured.

    There must be no process group yet, as measuring and recording a step need one of their own.
    """
    with fake_process_group(WORLD):
        rounds = SmallStepTurns(device).take(ROUNDS)
    found = map(SmallStep, typical_seconds(rounds), recorded_steps())
    return SmallSteps(*found, busy_seconds=measure_busy_step(device))


def small_configs() -> list[RunConfig]:
    """Return the runs of the small steps, in the order of `SmallSteps`."""
    return [
        read_config(None, [*SETTINGS, f"compute.checkpoint_activations={each}"])
        for each in RECOMPUTATIONS
    ]


def _seconds(step: TrainingStep, device: torch.device) -> float:
    """Take a step; return the seconds until the host has issued forward and backward, from an idle device."""
    torch.accelerator.synchronize(device)
    begin = time.perf_counter()
    step.compute_gradients()
    seconds = time.perf_counter() - begin
    step.update()
    return seconds


def fitted_host(machine: Machine, measured: SmallSteps) -> dict[str, float]:
    """Return the times of the host, by their names in a profile, with which plans of the small steps take what was measured."""
    fake, plain = machine.with_fake_group(), measured.plain
    factor = plain.seconds / _host_seconds(fake, plain)
    found = {name: getattr(machine.host, name) * factor for name in SCALED}

    def left(step: SmallStep, kind: HostWorkKind, known: float) -> float:
        """Return the microseconds of each work of a kind that the operations do not explain."""
        count = Counter(entry.kind for entry in step.entries if isinstance(entry, HostWork))[kind]
        explained = factor * _host_seconds(fake, step) + known
        return max(0.0, step.seconds - explained) / MICRO / count

    found["checkpoint_us"] = left(measured.recomputed, "checkpoint", 0.0)
    checkpoints = sum(_is(entry, "checkpoint") for entry in measured.selective.entries)
    known = checkpoints * found["checkpoint_us"] * MICRO
    found["decision_us"] = left(measured.selective, "decision", known)
    return found


def recorded_steps() -> list[list[Entry]]:
    """Return the host's work in forward and backward of the small steps, in the order of `SmallSteps`."""
    return [_gradient_entries(config) for config in small_configs()]


def _gradient_entries(config: RunConfig) -> list[Entry]:
    program = record_step(config, WORLD, open_model(config)).program
    entries = []
    for entry in program.entries[program.begin : program.end]:
        if isinstance(entry, Launch) and entry.phase == "optimizer":
            break
        entries.append(entry)
    return entries


def _host_seconds(machine: Machine, step: SmallStep) -> float:
    """Return the host's time for a step, without what recomputation costs beside its operations."""
    return sum(
        machine.host_seconds(entry)
        for entry in step.entries
        if not (isinstance(entry, HostWork) and entry.kind != "hook")
    )


def _is(entry: Entry, kind: HostWorkKind) -> bool:
    return isinstance(entry, HostWork) and entry.kind == kind
