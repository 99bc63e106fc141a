"""Whether the waits for communication that `fullshard plan` predicts are those that real CPU ranks have.

The script starts its own processes, which talk over gloo. They measure the machine together (`calibrate`), train, and
record traces. Then the same steps are planned for the measured machine. The machine should be quiet. Other processes
make steps slower at times and never faster, so of several rounds of steps the fastest counts.

    python benchmarks/plan_ranks.py --ranks 2
    python benchmarks/plan_ranks.py --ranks 2 4 --rounds 5 --json benchmarks/results/plan-ranks.json

exposed     time in which a rank stands still for gathers and reductions, of a step: mean over ranks and steps
share       of the step. It is what a user wants to know, and what a noisy machine leaves
in calls    the part of the share that is within the calls of collectives, where ranks meet
predicted   the same of the plan
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
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
from fullshard.programs.plan_tool.host_steps import measure_steps
from fullshard.programs.plan_tool.machine import Machine
from fullshard.programs.plan_tool.planned_step import plan_step
from fullshard.programs.plan_tool.profile_file import load_profile, to_toml
from fullshard.programs.plan_tool.training_step import TrainingStep
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.model_source import open_model
from fullshard.programs.train.processes import run_in_processes
from fullshard.tracing.schema import COLLECTIVES, Trace, parse_trace

COLUMNS = (
    *("ranks", "width", "step ms", "predicted", "exposed ms", "predicted"),
    *("share", "predicted", "in calls", "predicted"),
)
CPU = torch.device("cpu")
WARM_UP = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every rank is told."""

    rank: int
    ranks: int
    folder: Path
    widths: Sequence[int]
    rounds: int
    steps: int


def config_of(ranks: int, width: int) -> RunConfig:
    """Return the run: few layers, so that a step takes a fraction of a second on a core."""
    run = RunConfig()
    return replace(
        run,
        model=replace(run.model, layers=6, width=width, heads=4),
        data=replace(run.data, context=64),
        train=replace(run.train, batch=4 * ranks),
    )


def run_rank(job: Job) -> None:
    """Be one rank: measure the machine with the others, train, and leave traces."""
    torch.set_num_threads(1)
    host = measure_steps(CPU)
    store = dist.FileStore(str(job.folder / "store"), job.ranks)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.ranks)
    machine = calibrate(device=CPU, host=host)
    if job.rank == 0:
        (job.folder / "profile.toml").write_text(to_toml(machine))
    for width in job.widths:
        train(job, width)
    dist.barrier()
    dist.destroy_process_group()


def train(job: Job, width: int) -> None:
    """Take steps, and leave a trace of each round."""
    run = config_of(job.ranks, width)
    step = TrainingStep(run, job.ranks, open_model(run), CPU)
    with torch.no_grad():
        for parameter in step.model.module.parameters():
            parameter.fill_(0.01)
    for _ in range(WARM_UP):
        step.take()
    for index in range(job.rounds):
        with trace(step.model.module, traces_of(job.folder, width, index)) as recording:
            for _ in range(job.steps):
                step.take()
                recording.step()


def traces_of(folder: Path, width: int, index: int) -> Path:
    """Return the folder for the traces of a round."""
    return folder / f"width-{width}" / f"round-{index}"


class Times(NamedTuple):
    """Milliseconds of a step, of its waits, and of those within the calls of collectives."""

    step_ms: float
    exposed_ms: float
    called_ms: float


def times(found: Trace) -> Times:
    """Return the means over the steps of a trace."""
    steps = [span for span in found.spans if span.kind == "step"]
    waits = [span for span in found.spans if span.kind == "wait"]
    # A collective begins with its call.
    begins = {span.start_us for span in found.spans if span.kind in COLLECTIVES}
    called = sum(span.duration_us for span in waits if span.start_us in begins)
    exposed = sum(span.duration_us for span in waits)
    whole = fmean(span.duration_us for span in steps)
    return Times(whole / 1e3, exposed / len(steps) / 1e3, called / len(steps) / 1e3)


def planned_times(ranks: int, width: int, machine: Machine) -> Times:
    """Return the times of the plan."""
    planned = plan_step(config_of(ranks, width), ranks, machine)
    assert planned.trace is not None, "only estimates have none"
    return times(planned.trace)


def measured_times(job: Job, width: int) -> Times:
    """Return the times of the fastest round, means over its ranks."""
    rounds = []
    for index in range(job.rounds):
        paths = traces_of(job.folder, width, index).iterdir()
        found = [times(parse_trace(json.loads(path.read_text()))) for path in paths]
        rounds.append(Times(*map(fmean, zip(*found, strict=True))))
    return min(rounds)


def compare(
    ranks: int, widths: Sequence[int], rounds: int, steps: int
) -> Iterator[dict[str, float]]:
    """Train on some ranks, plan the same, and yield the rows of the table."""
    with tempfile.TemporaryDirectory() as name:
        jobs = [
            Job(
                rank=rank,
                ranks=ranks,
                folder=Path(name),
                widths=widths,
                rounds=rounds,
                steps=steps,
            )
            for rank in range(ranks)
        ]
        run_in_processes(run_rank, jobs)
        machine = load_profile(str(Path(name) / "profile.toml"))
        for width in widths:
            real, planned = measured_times(jobs[0], width), planned_times(ranks, width, machine)
            yield {
                "ranks": ranks,
                "width": width,
                "step_ms": real.step_ms,
                "planned_step_ms": planned.step_ms,
                "exposed_ms": real.exposed_ms,
                "planned_exposed_ms": planned.exposed_ms,
                "share": real.exposed_ms / real.step_ms,
                "planned_share": planned.exposed_ms / planned.step_ms,
                "called_share": real.called_ms / real.step_ms,
                "planned_called_share": planned.called_ms / planned.step_ms,
            }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each number of ranks and each width."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="of each round")
    parser.add_argument("--json", type=Path, help="write the rows to a file, too")
    options = parser.parse_args(arguments)
    rows = [
        row
        for ranks in options.ranks
        for row in compare(ranks, options.width, options.rounds, options.steps)
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
