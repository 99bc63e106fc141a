"""The host's times, by small steps that wait for nothing but the host.

An operation in a loop takes half of what it takes in a model, whose code and data are not all in the caches. So steps of a
small decoder are taken, by rank 0 of a fake group, and the profile's times are corrected until its plan of these steps says
what was measured: all times by one factor, and then what recomputation and its policies add.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
WARM_UP, STEPS, ROUNDS = 3, 15, 3

SCALED = ("launch_us", "kernel_us", "collective_us", "event_us", "hook_us")


@dataclass(frozen=True, slots=True)
class HostSeconds:
    """How long the host took for forward and backward of the small steps."""

    plain: float
    recomputed: float
    selective: float


def measure_steps(device: torch.device) -> HostSeconds:
    """Take small steps on an accelerator, in turns, as a shared host is slower for a while; there must be no process group yet."""
    rounds = [
        [_measured(small_config(each), device) for each in RECOMPUTATIONS] for _ in range(ROUNDS)
    ]
    return HostSeconds(*map(statistics.median, zip(*rounds, strict=True)))


def small_config(recomputation: str) -> RunConfig:
    """Return the run of the small steps."""
    return read_config(None, [*SETTINGS, f"compute.checkpoint_activations={recomputation}"])


def _measured(config: RunConfig, device: torch.device) -> float:
    """Return the median seconds until the host has issued forward and backward, from an idle device."""
    samples = []
    with fake_process_group(WORLD):
        step = TrainingStep(config, WORLD, open_model(config), device)
        for _ in range(WARM_UP + STEPS):
            torch.accelerator.synchronize(device)
            begin = time.perf_counter()
            step.compute_gradients()
            samples.append(time.perf_counter() - begin)
            step.update()
    return statistics.median(samples[WARM_UP:])


def fitted_host(machine: Machine, measured: HostSeconds) -> dict[str, float]:
    """Return the host's times with which plans of the small steps take what was measured, by their names in a profile."""
    plain, recomputed, selective = (gradient_entries(small_config(each)) for each in RECOMPUTATIONS)
    fake = machine.with_fake_group()
    factor = measured.plain / _seconds(fake, plain)
    found = {name: getattr(machine.host, name) * factor for name in SCALED}

    def left(entries: Sequence[Entry], seconds: float, kind: HostWorkKind, known: float) -> float:
        """Return the microseconds of each work of a kind that the operations do not explain."""
        count = Counter(entry.kind for entry in entries if isinstance(entry, HostWork))[kind]
        explained = factor * _seconds(fake, entries) + known
        return max(0.0, seconds - explained) / MICRO / count

    found["checkpoint_us"] = left(recomputed, measured.recomputed, "checkpoint", 0.0)
    checkpoints = sum(_is(entry, "checkpoint") for entry in selective)
    known = checkpoints * found["checkpoint_us"] * MICRO
    found["decision_us"] = left(selective, measured.selective, "decision", known)
    return found


def gradient_entries(config: RunConfig) -> list[Entry]:
    """Return what the host does in forward and backward of a step."""
    program = record_step(config, WORLD, open_model(config)).program
    entries = []
    for entry in program.entries[program.begin : program.end]:
        if isinstance(entry, Launch) and entry.phase == "optimizer":
            break
        entries.append(entry)
    return entries


def _seconds(machine: Machine, entries: Sequence[Entry]) -> float:
    """Return the host's time for entries, without what recomputation costs beside its operations."""
    return sum(
        machine.host_seconds(entry)
        for entry in entries
        if not (_is(entry, "checkpoint") or _is(entry, "decision"))
    )


def _is(entry: Entry, kind: HostWorkKind) -> bool:
    return isinstance(entry, HostWork) and entry.kind == kind
