"""The host's times, by small steps that wait for nothing but the host.

An operation in a loop takes half of what it takes in a model, whose code and data are not all in the caches. So `measure_steps`
takes steps of a small decoder, as rank 0 of a fake group. `fitted_host` corrects the times of a profile until its plan
of these steps says what was measured: it multiplies all times by one factor, then finds what recomputation and its policies add.

On a CPU the host also computes. There a second, wider decoder tells the time of operations from the time of their arithmetic: the
narrow one spends most of its time on operations, the wide one on arithmetic. Two steps give two factors.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from fullshard.programs.plan_tool.device_steps import measure_busy_step
from fullshard.programs.plan_tool.machine import MICRO, Machine
from fullshard.programs.plan_tool.program import Entry, HostWork, HostWorkKind, Kernel, Launch
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
CPU_WORLD = 1
"""Nothing is sent: what collectives cost is measured with real ranks."""
CPU_SETTINGS = (
    *("model.layers=4", "model.heads=4", "model.vocabulary=512"),
    *("data.context=32", "compute.precision=fp32"),
)
NARROW = ("model.width=64", "train.batch=1")
WIDE = ("model.width=384", "train.batch=8")
RECOMPUTATIONS = ("none", "blocks", "selective")
WARM_UP, ROUNDS = 3, 45
LEAST_FACTOR = 0.1
"""Noise may ask for less, also for a negative one."""

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
    wide: SmallStep | None = None
    """A plain step of the wide decoder, on a CPU."""
    busy_seconds: float | None = field(default=None, kw_only=True)
    """Time of a step that keeps a GPU busy; None if it was not measured."""


@dataclass(frozen=True, slots=True)
class FittedHost:
    """Facts about a host, from the small steps."""

    times: dict[str, float]
    """Times by their names in a profile."""
    compute: float | None
    """Time of a kernel in a step, relative to the profile; None where the host does not compute."""


class SmallStepTurns:
    """Small steps of all decoders, which are taken in turn.

    In turn, since a shared host is slower for a while, and since a step that follows one of its own kind finds its code and data
    in the caches. A layer of a large model does not.
    """

    def __init__(self, device: torch.device) -> None:
        """Build the decoders; there must be a process group of `world_of` ranks."""
        self._device = device
        self._steps = [
            TrainingStep(config, world_of(device), open_model(config), device)
            for config in small_configs(is_cpu=device.type == "cpu")
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


def world_of(device: torch.device) -> int:
    """Return of how many ranks the group of small steps pretends to be."""
    return CPU_WORLD if device.type == "cpu" else WORLD


def measure_steps(device: torch.device) -> SmallSteps:
    """Take small steps of all decoders in turn, and return what was measured.

    There must be no process group yet, as measuring and recording a step need one of their own.
    """
    is_cpu = device.type == "cpu"
    with fake_process_group(world_of(device)):
        rounds = SmallStepTurns(device).take(ROUNDS)
    entries = recorded_steps(is_cpu=is_cpu)
    found = SmallSteps(*map(SmallStep, typical_seconds(rounds), entries))
    return found if is_cpu else replace(found, busy_seconds=measure_busy_step(device))


def small_configs(*, is_cpu: bool) -> list[RunConfig]:
    """Return the runs of the small steps, in the order of `SmallSteps`."""
    settings = (*CPU_SETTINGS, *NARROW) if is_cpu else SETTINGS
    found = [
        read_config(None, [*settings, f"compute.checkpoint_activations={each}"])
        for each in RECOMPUTATIONS
    ]
    return [*found, read_config(None, [*CPU_SETTINGS, *WIDE])] if is_cpu else found


def _seconds(step: TrainingStep, device: torch.device) -> float:
    """Take a step; return the seconds until the host has issued forward and backward, from an idle device.

    On a CPU these are seconds of the processor, so other processes do not count.
    """
    is_cpu = device.type == "cpu"
    clock = time.thread_time if is_cpu else time.perf_counter
    if not is_cpu:
        torch.accelerator.synchronize(device)
    begin = clock()
    step.compute_gradients()
    seconds = clock() - begin
    step.update()
    return seconds


def fitted_host(machine: Machine, measured: SmallSteps) -> FittedHost:
    """Return the times with which plans of the small steps take what was measured."""
    fake, plain, wide = machine.with_fake_group(), measured.plain, measured.wide
    if wide is None:
        factor, compute = plain.seconds / _host_seconds(fake, plain), 0.0
    else:
        factor, compute = _factors(fake, plain, wide)
    # The steps of a CPU have no collectives.
    names = [name for name in SCALED if wide is None or name != "collective_us"]
    found = {name: getattr(machine.host, name) * factor for name in names}

    def left(step: SmallStep, kind: HostWorkKind, known: float) -> float:
        """Return the microseconds of each work of a kind that the operations do not explain."""
        count = Counter(entry.kind for entry in step.entries if isinstance(entry, HostWork))[kind]
        operations = factor * _host_seconds(fake, step)
        explained = operations + compute * _compute_seconds(fake, step) + known
        return max(0.0, step.seconds - explained) / MICRO / count

    found["checkpoint_us"] = left(measured.recomputed, "checkpoint", 0.0)
    checkpoints = sum(_is(entry, "checkpoint") for entry in measured.selective.entries)
    known = checkpoints * found["checkpoint_us"] * MICRO
    found["decision_us"] = left(measured.selective, "decision", known)
    return FittedHost(found, None if wide is None else compute)


def _factors(machine: Machine, narrow: SmallStep, wide: SmallStep) -> tuple[float, float]:
    """Return the factors of operations and of arithmetic that explain the seconds of two steps."""
    (h1, k1), (h2, k2) = (
        (_host_seconds(machine, step), _compute_seconds(machine, step)) for step in (narrow, wide)
    )
    t1, t2 = narrow.seconds, wide.seconds
    determinant = h1 * k2 - h2 * k1
    host, compute = (t1 * k2 - t2 * k1) / determinant, (h1 * t2 - h2 * t1) / determinant
    return max(LEAST_FACTOR, host), max(LEAST_FACTOR, compute)


def recorded_steps(*, is_cpu: bool) -> list[list[Entry]]:
    """Return the host's work in forward and backward of the small steps, in the order of `SmallSteps`."""
    return [_gradient_entries(config, is_cpu=is_cpu) for config in small_configs(is_cpu=is_cpu)]


def _gradient_entries(config: RunConfig, *, is_cpu: bool) -> list[Entry]:
    world = CPU_WORLD if is_cpu else WORLD
    program = record_step(config, world, open_model(config), has_streams=not is_cpu).program
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


def _compute_seconds(machine: Machine, step: SmallStep) -> float:
    """Return the time of the kernels of a step."""
    return sum(
        machine.kernel_seconds(entry.work)
        for entry in step.entries
        if isinstance(entry, Launch) and isinstance(entry.work, Kernel)
    )


def _is(entry: Entry, kind: HostWorkKind) -> bool:
    return isinstance(entry, HostWork) and entry.kind == kind
