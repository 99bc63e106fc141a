"""The device's times in a step, by a step that waits for nothing but the device.

A GPU's clock depends on the power that it draws, and kernels of a step share the device with gathers. So kernels in a loop do not take
what they take in a model. `measure_busy_step` takes a step of a decoder that is wide enough to keep a GPU busy, as rank
0 of a fake group. `device_factor` then finds how much longer or shorter kernels take there than a profile says.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from fullshard.programs.plan_tool.machine import MILLI, Machine
from fullshard.programs.plan_tool.playback import play
from fullshard.programs.plan_tool.step_program import record_step
from fullshard.programs.plan_tool.training_step import TrainingStep
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.config_file import read_config
from fullshard.programs.train.model_source import open_model
from fullshard.torch_border import fake_process_group

WORLD = 8
SETTINGS = (
    *("model.layers=6", "model.width=2048", "model.heads=16", "model.vocabulary=32000"),
    *("data.context=2048", f"train.batch={4 * WORLD}", "compute.precision=bf16"),
)
LOAD_S, TIMED_S, LEAST_STEPS = 1.5, 1.5, 5
"""Seconds of steps before the timing, seconds of the timing, and the least number of timed steps."""
PLAYS = 3
"""Number of corrections of the factor: the host's share of the step does not change with it."""
LEAST, MOST = 0.8, 1.25
"""Bounds of the factor. Beyond them something else is wrong."""
MOST_IDLE = 0.15
"""Share of the step for which the device may wait for the host."""


def busy_config() -> RunConfig:
    """Return the run whose step keeps a GPU busy."""
    return read_config(None, SETTINGS)


def measure_busy_step(device: torch.device) -> float | None:
    """Return the device's seconds for forward and backward; None if its memory is too small.

    There must be no process group yet.
    """
    config = busy_config()
    try:
        with fake_process_group(WORLD):
            step = TrainingStep(config, WORLD, open_model(config), device)
            step.randomize()
            return steady_seconds(lambda: seconds_of_gradients(step))
    except torch.OutOfMemoryError:
        return None


def steady_seconds(
    seconds_of_step: Callable[[], float], *, load_s: float = LOAD_S, timed_s: float = TIMED_S
) -> float:
    """Return the median of a step's seconds once the device has been busy for a while.

    A GPU that comes from rest is mostly faster for a moment: an H200 by 3 to 5 %, in steps of 0.1 s.
    """
    begin, timed = time.monotonic(), list[float]()
    while time.monotonic() < begin + load_s:
        seconds_of_step()
    while len(timed) < LEAST_STEPS or time.monotonic() < begin + load_s + timed_s:
        timed.append(seconds_of_step())
    return statistics.median(timed)


def seconds_of_gradients(step: TrainingStep) -> float:
    """Return the device's seconds for forward and backward of a step, whose gradients are dropped."""
    seconds = seconds_on_device(step.compute_gradients)
    step.optimizer.zero_grad()
    return seconds


def seconds_on_device(call: Callable[[], object]) -> float:
    """Return the seconds from an idle GPU to the end of what a call issues to the current stream."""
    event: Any = torch.cuda.Event  # its constructor has no types
    begin, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * MILLI


def device_factor(seconds: float, slower: Callable[[float], Machine]) -> float:
    """Return how much longer kernels take in a step than a profile says.

    Args:
        seconds: The result of `measure_busy_step`.
        slower: Returns the profile with kernels that take longer by a factor.
    """
    config = busy_config()
    program = record_step(config, WORLD, open_model(config)).program
    factor = 1.0
    for _ in range(PLAYS):
        played = play(program, slower(factor).with_fake_group())
        if played.idle["host"] > MOST_IDLE * played.gradient_seconds:
            return 1.0  # it says more about the host
        factor = min(MOST, max(LEAST, factor * seconds / played.gradient_seconds))
    return factor
