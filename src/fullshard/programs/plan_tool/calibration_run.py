"""`fullshard plan calibrate`: the ranks that measure, and the run by whose trace the profile is corrected."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from fullshard.errors import ConfigurationError
from fullshard.programs.plan_tool.calibrate import calibrate, calibrate_from_trace
from fullshard.programs.plan_tool.host_steps import measure_steps
from fullshard.programs.plan_tool.machine import Machine
from fullshard.programs.plan_tool.run_plan import planned_run
from fullshard.programs.report.run_files import Run, read_run

NO_GPU = (
    "A profile is that of a GPU, and torch finds none on this machine. Run fullshard plan calibrate on the machine that will train. "
    "A plan by itself needs no GPU: fullshard plan MODEL --gpu h100."
)


def calibrated(
    *, quick: bool, base: str | None, run: Path | None, report: Callable[[str], None]
) -> Machine | None:
    """Measure this machine; under torchrun, with all its ranks.

    Args:
        quick: Measure less.
        base: The profile for what is not measured.
        run: A folder whose traces correct the profile.
        report: Is given a line for each thing that is measured, on the first rank.

    Returns:
        The profile on the first rank; None on others.
    """
    measured = None if run is None else _traced(run)
    # All ranks of a host at once, as they train, and before they are a process group.
    host = measure_steps(_device())
    with _ranks() as (rank, device):
        said = report if rank == 0 else _say_nothing
        machine = calibrate(device=device, base=base, quick=quick, host=host, report=said)
    if rank != 0:
        return None
    if run is None or measured is None:
        return machine
    predicted = planned_run(run, measured, machine).trace
    return calibrate_from_trace(machine, measured.traces[0], predicted, report=report)


def _say_nothing(text: str) -> None:
    """Leave it to the first rank."""


def _traced(run: Path) -> Run:
    """Return a run that has traces, or raise."""
    found = read_run(run)
    if not found.traces:
        raise ConfigurationError(
            f"A profile is corrected by traces, and {run} has none. The trainer records them with trace.steps."
        )
    return found


def _device() -> torch.device:
    """Return the GPU that this process measures, and let it be the current one; ConfigurationError if there is none."""
    if not torch.cuda.is_available():
        raise ConfigurationError(NO_GPU)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


@contextmanager
def _ranks() -> Iterator[tuple[int, torch.device]]:
    """Join the ranks that torchrun has started, if it has."""
    device = _device()
    if "RANK" not in os.environ:
        yield 0, device
        return
    dist.init_process_group("nccl")
    try:
        yield dist.get_rank(), device
    finally:
        dist.destroy_process_group()
