"""Time of whole training steps on real CPU ranks that talk over gloo.

The script starts its own processes. Each builds all contestants; in a round every contestant takes its
turn of a few steps (forward, backward, AdamW), at the same time on all ranks.

    python benchmarks/gloo_step.py
    python benchmarks/gloo_step.py --preset tiny --ranks 2 --contestants fsdp2 fullshard

step        from a barrier until the slowest rank is done. Here ranks also wait for each other and for
            the machine, which must have a free core per rank for this figure to mean something
processor   time that all threads of all ranks computed, waiting not counted: what a step costs
unmet       fullshard whose ranks do not agree on each collective before they call it
unsharded   trains on each rank for itself, without communication
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

# What is measured, and named in the header, is the checkout that this file is in.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contestants import BUILDERS, RIVALS, Contestant, Setting, Unavailable, build
from benchmarks.estimate import Ratio, Spread, over
from benchmarks.measure import Quantity, Record, collector_paused
from benchmarks.profiling import profiler_of
from benchmarks.report import header, headline, markdown, milliseconds, remarks, write_json
from benchmarks.transformer import PRESETS, Shape
from fullshard.divergence.journal import RULES
from fullshard.programs.train.processes import run_in_processes

COLUMNS = ("contestant", "step ms", "x rival", "processor ms", "x rival")
QUANTITIES: tuple[Quantity, Quantity] = ("step_s", "step_processor_s")
DEFAULT_CONTESTANTS = ("unsharded", "fsdp2", "fullshard", "fsdp1", "wrapper")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every rank is told."""

    names: tuple[str, ...]
    shape: Shape
    ranks: int
    rounds: int
    steps: int
    profile: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One rank of a job."""

    rank: int
    folder: Path
    """Where the ranks meet, and where rank 0 leaves the records."""
    job: Job

    @property
    def records(self) -> Path:
        """The file with what was measured, by contestant."""
        return self.folder / "records.json"


def measure(job: Job) -> dict[str, Record]:
    """Run the job on its ranks and return what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        places = [Place(rank=rank, folder=Path(folder), job=job) for rank in range(job.ranks)]
        run_in_processes(run_rank, places)
        written = json.loads(places[0].records.read_text())
    return {name: Record(**record) for name, record in written.items()}


def run_rank(place: Place) -> None:
    """Be one rank, from the process group's beginning to its end."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(place.folder / "store"), place.job.ranks)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.job.ranks)
    records = compare(place.job)
    if place.rank == 0:
        written = {name: asdict(record) for name, record in records.items()}
        place.records.write_text(json.dumps(written))
    dist.barrier()
    dist.destroy_process_group()


def compare(job: Job) -> dict[str, Record]:
    """Take part in a job as a rank of the default group; all ranks return the same."""
    setting = Setting(
        shape=job.shape,
        device=torch.device("cpu"),
        world=job.ranks,
        precision="fp32",
        master="fp32",
    )
    records = {name: Record(name=name) for name in job.names}
    present: dict[str, Contestant] = {}
    for name, record in records.items():
        try:
            present[name] = build(name, setting)
        except Unavailable as error:  # on all ranks alike
            record.status, record.reason = "skipped", str(error)
            continue
        present[name].check()
    for turn in range(job.rounds):
        names = list(present)
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            RULES.by_backend = name != "unmet"
            take_turn(present[name], records[name], job.steps)
    if job.profile is not None:
        look = profiler_of(job.profile / f"rank{dist.get_rank()}", "gloo", setting.device)
        for contestant in present.values():
            look(contestant)
    return records


def take_turn(contestant: Contestant, record: Record, steps: int) -> None:
    """Time one contestant's steps of one round; the first one is not counted."""

    def step() -> None:
        contestant.zero_grad()
        contestant.forward_backward()
        contestant.optimizer.step()

    times = []
    with collector_paused():
        step()
        for _ in range(steps):
            dist.barrier()
            start, start_processor = time.perf_counter(), time.process_time()
            step()
            times.append((time.perf_counter() - start, time.process_time() - start_processor))
    own = torch.tensor(times, dtype=torch.float64)
    of_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, own)
    for walls, processors in torch.stack(of_ranks, -1):  # by step, then by rank
        record.add("step_s", float(walls.max()))
        record.add("step_processor_s", float(processors.sum()))


def table(job: Job, records: Mapping[str, Record]) -> str:
    """Write the result: what it was, the table, remarks."""

    def cells(record: Record) -> tuple[str, ...]:
        rival = RIVALS.get(record.name, "fsdp2")
        texts = [record.name]
        for quantity in QUANTITIES:
            texts.append(milliseconds(Spread.of(record.samples[quantity])))
            if rival in records and records[rival].status == "measured":
                ratio = Ratio.of(over(record.name, rival, quantity), records, job.rounds)
                texts.append(f"{ratio.by_round.median:.3f} [{ratio.by_round.iqr:.3f}]")
            else:
                texts.append("n/a")
        return tuple(texts)

    rows = [cells(record) for record in records.values() if record.status == "measured"]
    shape = job.shape
    parts = [
        f"{shape.layers} layers x {shape.width} wide, {shape.num_groups} groups, vocabulary {shape.vocab}, "
        f"batch {shape.batch} x {shape.context} on each of {job.ranks} ranks, fp32. Medians [interquartile "
        f"range] of {job.rounds} interleaved rounds x {job.steps} steps; ratios are medians of the rounds'.",
        markdown(COLUMNS, rows),
        "\n".join(remarks(records.values())),
    ]
    return "\n\n".join(part for part in parts if part)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", choices=list(PRESETS), default="small", help="model size (default small)")
    add("--ranks", type=int, default=2, help="processes (default 2)")
    add("--contestants", nargs="+", choices=list(BUILDERS), default=list(DEFAULT_CONTESTANTS))
    add("--rounds", type=int, default=24, help="turns of each contestant (default 24)")
    add("--steps", type=int, default=2, help="timed steps of each turn (default 2)")
    add("--json", type=Path, metavar="FILE", help="write samples")
    add("--profile", type=Path, metavar="DIR", help="write a trace of one step of each contestant")
    add("--commit", help="name of the measured commit, where the checkout has no git")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, then print the table."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)  # as the ranks have, for the header
    job = Job(
        names=tuple(dict.fromkeys(options.contestants)),
        shape=PRESETS[options.preset],
        ranks=options.ranks,
        rounds=options.rounds,
        steps=options.steps,
        profile=options.profile,
    )
    head = header("gloo_step.py", torch.device("cpu"), options.commit, arguments)
    records = measure(job)
    results = {
        "preset": options.preset,
        "ranks": job.ranks,
        "rounds": job.rounds,
        "steps": job.steps,
        "contestants": {name: asdict(record) for name, record in records.items()},
    }
    write_json(options.json, head, results)
    print(f"\n{headline(head)}\n\n{table(job, records)}")


if __name__ == "__main__":
    main()
