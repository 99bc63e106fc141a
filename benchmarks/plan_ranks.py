"""Whether the waits for communication that `fullshard plan` foretells are those that real CPU ranks have.

The script starts its own processes, which talk over gloo. They measure the machine together (`calibrate`), train, and
record traces. Then the same step is planned for the measured machine.

    python benchmarks/plan_ranks.py --ranks 2
    python benchmarks/plan_ranks.py --ranks 2 4 --json benchmarks/results/plan-ranks.json

exposed     time in which a rank stands still for gathers and reductions, of a step: mean over ranks and steps
share       of the step. It is what a user wants to know, and what a noisy machine leaves
foretold    the same of the plan
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
import torch.distributed as dist

# What is measured, and named in the header, is the checkout that this file is in.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import header, headline, markdown, write_json
from fullshard import trace
from fullshard.programs.plan_tool.calibrate import calibrate
from fullshard.programs.plan_tool.machine import Machine
from fullshard.programs.plan_tool.planned_step import plan_step
from fullshard.programs.plan_tool.profile_file import load_profile, to_toml
from fullshard.programs.plan_tool.training_step import TrainingStep
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.model_source import open_model
from fullshard.programs.train.processes import run_in_processes
from fullshard.tracing.schema import Trace, parse_trace

COLUMNS = ("ranks", "width", "step ms", "foretold", "exposed ms", "foretold", "share", "foretold")
CPU = torch.device("cpu")
WARM_UP = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every rank is told."""

    rank: int
    ranks: int
    folder: Path
    steps: int
    width: int

    def config(self) -> RunConfig:
        """Return the run: few layers, so that a step takes a fraction of a second on a core."""
        run = RunConfig()
        return replace(
            run,
            model=replace(run.model, layers=6, width=self.width, heads=4),
            data=replace(run.data, context=64),
            train=replace(run.train, batch=4 * self.ranks),
        )


def run_rank(job: Job) -> None:
    """Be one rank: measure the machine with the others, train, and leave a trace."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(job.folder / "store"), job.ranks)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.ranks)
    machine = calibrate(device=CPU)
    if job.rank == 0:
        (job.folder / "profile.toml").write_text(to_toml(machine))
    run = job.config()
    step = TrainingStep(run, job.ranks, open_model(run), CPU)
    with torch.no_grad():
        for parameter in step.model.module.parameters():
            parameter.fill_(0.01)
    for _ in range(WARM_UP):
        step.take()
    with trace(step.model.module, job.folder / "traces") as recording:
        for _ in range(job.steps):
            step.take()
            recording.step()
    dist.barrier()
    dist.destroy_process_group()


class Times(NamedTuple):
    """Milliseconds of a step, and of its waits."""

    step_ms: float
    exposed_ms: float


def times(found: Trace) -> Times:
    """Return the means over the steps of a trace."""
    steps = [span for span in found.spans if span.kind == "step"]
    waits = sum(span.duration_us for span in found.spans if span.kind == "wait")
    return Times(fmean(span.duration_us for span in steps) / 1e3, waits / len(steps) / 1e3)


def planned_times(job: Job, machine: Machine) -> Times:
    """Return the times of the plan."""
    planned = plan_step(job.config(), job.ranks, machine)
    assert planned.trace is not None, "only estimates have none"
    return times(planned.trace)


def compare(ranks: int, width: int, steps: int) -> dict[str, float]:
    """Train on some ranks, plan the same, and return a row of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = [
            Job(rank=rank, ranks=ranks, folder=folder, steps=steps, width=width)
            for rank in range(ranks)
        ]
        run_in_processes(run_rank, jobs)
        machine = load_profile(str(folder / "profile.toml"))
        found = [
            times(parse_trace(json.loads(path.read_text())))
            for path in (folder / "traces").iterdir()
        ]
    step, exposed = (fmean(values) for values in zip(*found, strict=True))
    planned_step, planned_exposed = planned_times(jobs[0], machine)
    return {
        "ranks": ranks,
        "width": width,
        "step_ms": step,
        "planned_step_ms": planned_step,
        "exposed_ms": exposed,
        "planned_exposed_ms": planned_exposed,
        "share": exposed / step,
        "planned_share": planned_exposed / planned_step,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each number of ranks and each width."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the rows to a file, too")
    options = parser.parse_args(arguments)
    rows = [
        compare(ranks, width, options.steps) for ranks in options.ranks for width in options.width
    ]
    cells = [
        [str(row["ranks"]), str(row["width"])]
        + [f"{row[key]:.1f}" for key in list(row)[2:6]]
        + [f"{row[key]:.0%}" for key in list(row)[6:]]
        for row in rows
    ]
    head = header("plan_ranks.py", CPU, None, arguments)
    print(headline(head), markdown(COLUMNS, cells), sep="\n\n")
    write_json(options.json, head, rows)


if __name__ == "__main__":
    main()
