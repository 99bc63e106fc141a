"""The project's performance targets, measured: one row per target, met or missed.

    python benchmarks/targets.py                    # the rows that this machine can measure
    python benchmarks/targets.py --rows host-tiny gloo
    python benchmarks/targets.py --profile traces   # and a trace of every model with a missed target

All are ratios between contestants of one run over the `fake` group (rows named gloo: real ranks).
`measured` is the median of the ratios within interleaved rounds, with the interquartile range of the
rounds; `of medians` and `of lower quartiles` are the same ratio over all samples (see estimate.py).
Memory is measured once, with each contestant alone.

    step-*       forward and backward, device time
    host-*       host time of forward and backward beyond unsharded's, on one core; on the CPU the processor
                 time, in which both sides have the fake group's copies. `own` leaves the collectives out
    optimizer-*  AdamW over the sharded parameters, over plain tensors of the same shards
    memory-*     peak of forward and backward, allocated or reserved, over FSDP2's
    gloo         whole steps on two CPU ranks; `cost` is the processor time of both ranks
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

# What is measured, and named in the header, is the checkout that this file is in.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import gloo_step
from benchmarks.contestants import Setting, join_fake_group
from benchmarks.estimate import Formula, Ratio, Typical, over
from benchmarks.measure import PLAIN_SHARDS, Comparison, Effort, Quantity, Record
from benchmarks.profiling import profiler_of
from benchmarks.report import header, headline, markdown, remarks, write_json
from benchmarks.transformer import PRESETS

OURS, RIVAL = "fullshard", "fsdp2"
COLUMNS = (
    "what",
    "row",
    "FSDP2",
    "target",
    "measured",
    "of medians",
    "of lower quartiles",
    "met",
)

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One comparison, from which one or more rows are read."""

    preset: str
    world: int
    device: Device
    contestants: tuple[str, ...]
    rounds: int
    steps: int
    optimizer: bool = False
    compiler: str | None = None
    """Backend of torch.compile for the blocks; None: they are not compiled."""
    one_core: bool = False
    """With all threads on one core: see `on_one_core`."""
    real_ranks: bool = False
    """Over gloo, in processes of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A row's figure."""

    value: float
    ratio: Ratio | None = None
    """How it came from samples; None for memory."""


Reading = Callable[[Mapping[str, Record], int], Measured | None]
"""Computes a row from a run's records and its number of rounds; None if it was not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One row of the table."""

    run: str
    """Key in `RUNS`."""
    what: str
    today: str
    """What FSDP2 had when the target was set."""
    at_most: float | None
    """None: only shown, to explain another row."""
    read: Reading


ALL = ("unsharded", RIVAL, OURS)
RUNS: Mapping[str, Run] = {
    "12x768": Run(
        preset="12x768",
        world=8,
        device="cuda",
        contestants=ALL,
        # Ours is about as fast in all steps of a turn, but not in the next turn. So there are many short ones.
        rounds=120,
        steps=1,
        optimizer=True,
        one_core=True,
    ),
    "1.2b": Run(preset="1.2b", world=8, device="cuda", contestants=ALL, rounds=12, steps=4),
    "3.8b": Run(preset="3.8b", world=8, device="cuda", contestants=ALL, rounds=12, steps=4),
    "7b": Run(preset="7b", world=64, device="cuda", contestants=ALL[1:], rounds=10, steps=4),
    "tiny": Run(
        preset="tiny",
        world=8,
        device="cpu",
        contestants=ALL,
        rounds=60,
        steps=2,
        optimizer=True,
    ),
    "12x768-compiled": Run(
        preset="12x768",
        world=8,
        device="cuda",
        contestants=(*ALL, "wrapper"),
        rounds=60,
        steps=1,
        compiler="inductor",
        one_core=True,
    ),
    "1.2b-compiled": Run(
        preset="1.2b",
        world=8,
        device="cuda",
        contestants=(*ALL, "fused"),
        rounds=12,
        steps=4,
        compiler="inductor",
    ),
    "3.8b-compiled": Run(
        preset="3.8b",
        world=8,
        device="cuda",
        contestants=(*ALL, "fused"),
        rounds=12,
        steps=4,
        compiler="inductor",
    ),
    "tiny-compiled": Run(
        preset="tiny",
        world=8,
        device="cpu",
        contestants=(*ALL, "wrapper"),
        rounds=60,
        steps=2,
        compiler="aot_eager",
    ),
    "gloo": Run(
        preset="small",
        world=2,
        device="cpu",
        contestants=ALL[1:],
        rounds=40,
        steps=2,
        real_ranks=True,
    ),
}


def extra_host(*, own: bool, ours: str = OURS) -> Reading:
    """Host time beyond unsharded's, ours over FSDP2's; `own` without what passes within collectives."""

    def extra(name: str, typical: Typical) -> float:
        collective = typical(name, "collective_s") if own else 0.0
        return typical(name, "host_s") - collective - typical("unsharded", "host_s")

    return in_time(lambda typical: (extra(ours, typical), extra(RIVAL, typical)))


def times(quantity: Quantity, reference: str, ours: str = OURS) -> Reading:
    """A quantity of ours over that of `reference`."""
    return in_time(over(ours, reference, quantity))


def in_time(formula: Formula) -> Reading:
    """Read a row from samples."""

    def read(records: Mapping[str, Record], num_rounds: int) -> Measured:
        ratio = Ratio.of(formula, records, num_rounds)
        return Measured(value=ratio.by_round.median, ratio=ratio)

    return read


def in_memory(peak: Literal["peak_allocated_bytes", "peak_reserved_bytes"]) -> Reading:
    """Read a row from peaks of memory."""

    def read(records: Mapping[str, Record], num_rounds: int) -> Measured | None:
        ours, rival = records[OURS].memory, records[RIVAL].memory
        if ours is None or rival is None:
            return None
        return Measured(value=getattr(ours, peak) / getattr(rival, peak))

    return read


def memory_targets(run: str) -> dict[str, Target]:
    """Both peaks of one model."""
    return {
        f"memory-{run}": Target(
            run=run,
            what=f"peak allocated / FSDP2's, {run}",
            today="1",
            at_most=1.0,
            read=in_memory("peak_allocated_bytes"),
        ),
        f"reserved-{run}": Target(
            run=run,
            what=f"peak reserved / FSDP2's, {run}",
            today="1",
            at_most=0.95,
            read=in_memory("peak_reserved_bytes"),
        ),
    }


TARGETS: Mapping[str, Target] = {
    "step-1.2b": Target(
        run="1.2b",
        what="forward+backward / unsharded, 1.2 B, batch 4 x 2048, world 8",
        today="1.10",
        at_most=1.05,
        read=times("forward_backward_s", "unsharded"),
    ),
    "step-3.8b": Target(
        run="3.8b",
        what="forward+backward / unsharded, 3.8 B, batch 2 x 2048, world 8",
        today="1.16",
        at_most=1.07,
        read=times("forward_backward_s", "unsharded"),
    ),
    "step-7b": Target(
        run="7b",
        what="forward+backward / FSDP2's, 7 B, batch 1 x 4096, world 64",
        today="1",
        at_most=0.97,
        read=times("forward_backward_s", RIVAL),
    ),
    "host-12x768": Target(
        run="12x768",
        what="extra host time / FSDP2's, 12 x 768, batch 1 x 512, world 8",
        today="1",
        at_most=0.33,
        read=extra_host(own=False),
    ),
    "own-12x768": Target(
        run="12x768",
        what="... without the fake group's calls",
        today="1",
        at_most=None,
        read=extra_host(own=True),
    ),
    "optimizer-12x768": Target(
        run="12x768",
        what="AdamW / plain tensors of the same shards, 12 x 768, world 8",
        today="3 to 4",
        at_most=1.3,
        read=times("optimizer_s", PLAIN_SHARDS),
    ),
    "torch-optimizer-12x768": Target(
        run="12x768",
        what="torch.optim.AdamW on its parameters / plain tensors, 12 x 768, world 8",
        today="2 to 4",
        at_most=1.5,
        read=times("torch_optimizer_s", PLAIN_SHARDS),
    ),
    **memory_targets("12x768"),
    **memory_targets("1.2b"),
    **memory_targets("3.8b"),
    **memory_targets("7b"),
    "host-tiny": Target(
        run="tiny",
        what="extra host time / FSDP2's, CPU, 12 x 64, batch 1 x 64, world 8",
        today="1",
        at_most=0.33,
        read=extra_host(own=False),
    ),
    "own-tiny": Target(
        run="tiny",
        what="... without the fake group's copies",
        today="1",
        at_most=None,
        read=extra_host(own=True),
    ),
    "optimizer-tiny": Target(
        run="tiny",
        what="AdamW / plain tensors of the same shards, CPU, 12 x 64, world 8",
        today="n/a",
        at_most=None,
        read=times("optimizer_s", PLAIN_SHARDS),
    ),
    "torch-optimizer-tiny": Target(
        run="tiny",
        what="torch.optim.AdamW on its parameters / plain tensors, CPU, 12 x 64, world 8",
        today="n/a",
        at_most=None,
        read=times("torch_optimizer_s", PLAIN_SHARDS),
    ),
    "step-1.2b-compiled": Target(
        run="1.2b-compiled",
        what="forward+backward / unsharded, compiled blocks, 1.2 B",
        today="1.09",
        at_most=1.04,
        read=times("forward_backward_s", "unsharded"),
    ),
    "fused-1.2b-compiled": Target(
        run="1.2b-compiled",
        what="... with fuse_gradients",
        today="1.09",
        at_most=None,
        read=times("forward_backward_s", "unsharded", "fused"),
    ),
    "step-3.8b-compiled": Target(
        run="3.8b-compiled",
        what="forward+backward / unsharded, compiled blocks, 3.8 B",
        today="1.17",
        at_most=None,
        read=times("forward_backward_s", "unsharded"),
    ),
    "fused-3.8b-compiled": Target(
        run="3.8b-compiled",
        what="... with fuse_gradients",
        today="1.17",
        at_most=1.06,
        read=times("forward_backward_s", "unsharded", "fused"),
    ),
    "host-12x768-compiled": Target(
        run="12x768-compiled",
        what="extra host time / FSDP2's, compiled blocks, 12 x 768",
        today="1",
        at_most=0.25,
        read=extra_host(own=False),
    ),
    "wrapper-12x768-compiled": Target(
        run="12x768-compiled",
        what="... of the wrapper",
        today="1",
        at_most=0.25,
        read=extra_host(own=False, ours="wrapper"),
    ),
    "host-tiny-compiled": Target(
        run="tiny-compiled",
        what="extra host time / FSDP2's, compiled blocks, CPU, 12 x 64",
        today="1",
        at_most=0.33,
        read=extra_host(own=False),
    ),
    "wrapper-tiny-compiled": Target(
        run="tiny-compiled",
        what="... of the wrapper",
        today="1",
        at_most=0.33,
        read=extra_host(own=False, ours="wrapper"),
    ),
    "gloo": Target(
        run="gloo",
        what="step with AdamW / FSDP2's, 2 CPU ranks over gloo, 6 x 192, batch 2 x 64",
        today="1",
        at_most=0.85,
        read=times("step_s", RIVAL),
    ),
    "gloo-cost": Target(
        run="gloo",
        what="... processor time of both ranks",
        today="1",
        at_most=None,
        read=times("step_processor_s", RIVAL),
    ),
}


def measure_on_ranks(run: Run) -> dict[str, Record]:
    """Measure a run on real ranks."""
    job = gloo_step.Job(
        names=run.contestants,
        shape=PRESETS[run.preset],
        ranks=run.world,
        rounds=run.rounds,
        steps=run.steps,
    )
    return gloo_step.measure(job)


@contextmanager
def compared_on_fake_group(run: Run) -> Iterator[Comparison]:
    """Measure a run over the fake group; within the block its contestants are still there."""
    on_cuda = run.device == "cuda"
    setting = Setting(
        shape=PRESETS[run.preset],
        device=torch.device("cuda", 0) if on_cuda else torch.device("cpu"),
        world=run.world,
        precision="bf16" if on_cuda else "fp32",
        master="fp32",
        compiler=run.compiler,
    )
    effort = Effort(
        rounds=run.rounds,
        steps=run.steps,
        warmup=3,
        isolate=False,
        optimizer=run.optimizer,
        parts=("collective_s",),
    )
    be_in_fake_world(run.world)
    comparison = Comparison(run.contestants, setting, effort)
    with on_one_core() if run.one_core else nullcontext():
        comparison.prepare()
        gc.collect()
        gc.freeze()  # what was built stays for now, and is not searched before every turn
        for turn in range(run.rounds):
            comparison.take_round(turn)
        gc.unfreeze()
        yield comparison
    comparison.close()


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keep all threads of this process on one core, where the system can.

    Cores of a shared host differ by half: by what others do on the same chip. On one core, all contestants meet the
    same, in forward and in backward, whichever threads they run them on.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    _keep_on({max(allowed)})  # the first core often has the system's own work
    try:
        yield
    finally:
        _keep_on(allowed)


def _keep_on(cores: Collection[int]) -> None:
    """Let all threads there are, and those that they start, run on these cores."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended since
            os.sched_setaffinity(int(thread.name), cores)


def be_in_fake_world(size: int) -> None:
    """Be in a fake group of a size: the same one for runs of the same size that follow each other.

    DTensor remembers results by mesh, and meshes of two groups of the same size are equal to it.
    """
    if dist.is_initialized() and dist.get_world_size() != size:
        dist.destroy_process_group()
    if not dist.is_initialized():
        join_fake_group(size)


def rows_of(key: str, run: Run, records: Mapping[str, Record]) -> dict[str, Measured | None]:
    """Compute the rows of one run; None where a contestant did not finish."""
    if any(record.status != "measured" for record in records.values()):
        return {row: None for row, target in TARGETS.items() if target.run == key}
    return {
        row: target.read(records, run.rounds)
        for row, target in TARGETS.items()
        if target.run == key
    }


def verdict(target: Target, measured: Measured | None) -> str:
    """Say whether a target is met."""
    if measured is None:
        return "not measured"
    if target.at_most is None:
        return ""
    return "yes" if measured.value <= target.at_most else "no"


def cells(row: str, measured: Measured | None) -> tuple[str, ...]:
    """Write one row in the order of COLUMNS."""
    target = TARGETS[row]
    figures = ["n/a", "", ""]
    if measured is not None:
        figures[0] = f"{measured.value:.3f}"
        if measured.ratio is not None:
            figures[0] += f" [{measured.ratio.by_round.iqr:.3f}]"
            figures[1] = f"{measured.ratio.of_medians:.3f}"
            figures[2] = f"{measured.ratio.of_lower_quartiles:.3f}"
    bound = "" if target.at_most is None else f"<= {target.at_most}"
    return (target.what, row, target.today, bound, *figures, verdict(target, measured))


def measured_here(run: Run) -> bool:
    """Whether this machine has what the run needs."""
    return run.device == ("cuda" if torch.cuda.is_available() else "cpu")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; without `--rows`, all rows of this machine's device are chosen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    here = [row for row, target in TARGETS.items() if measured_here(RUNS[target.run])]
    add("--rows", nargs="+", choices=list(TARGETS), default=here, metavar="ROW")
    add("--rounds", type=int, help="turns of each contestant, instead of each run's own number")
    add("--all-cores", action="store_true", help="keep no run on one core")
    add("--json", type=Path, metavar="FILE", help="write samples and rows")
    add("--profile", type=Path, metavar="DIR", help="trace the models whose targets are missed")
    add("--commit", help="name of the measured commit, where the checkout has no git")
    add(
        "--rehearse",
        action="store_true",
        help="try every run with the tiny model on the CPU; the figures mean nothing",
    )
    return parser.parse_args(arguments)


def chosen_runs(options: argparse.Namespace) -> dict[str, Run]:
    """Find the runs behind the chosen rows, as the options change them."""
    runs = {TARGETS[row].run: RUNS[TARGETS[row].run] for row in options.rows}
    if options.rounds is not None:
        runs = {key: replace(run, rounds=options.rounds) for key, run in runs.items()}
    if options.all_cores:
        runs = {key: replace(run, one_core=False) for key, run in runs.items()}
    if options.rehearse:
        runs = {key: replace(run, preset="tiny", device="cpu") for key, run in runs.items()}
    return runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen rows and print the table; 1 if a contestant failed."""
    options = parse_arguments(arguments)
    runs = chosen_runs(options)
    on_cuda = any(run.device == "cuda" for run in runs.values())
    if not on_cuda:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    head = header(
        "targets.py", torch.device("cuda" if on_cuda else "cpu"), options.commit, arguments
    )
    begin = time.monotonic()
    rows: dict[str, Measured | None] = {}
    all_records: dict[str, Mapping[str, Record]] = {}
    for key, run in runs.items():
        print(f"[{time.monotonic() - begin:4.0f} s] {key}", file=sys.stderr, flush=True)
        if run.real_ranks:
            all_records[key] = measure_on_ranks(run)
            rows |= rows_of(key, run, all_records[key])
            continue
        with compared_on_fake_group(run) as comparison:
            all_records[key] = comparison.records
            found = rows_of(key, run, comparison.records)
            missed = any(verdict(TARGETS[row], found[row]) == "no" for row in found)
            if options.profile is not None and missed:
                comparison.visit(profiler_of(options.profile, key, comparison.setting.device))
            rows |= found
    if dist.is_initialized():
        dist.destroy_process_group()
    shown = {row: rows[row] for row in TARGETS if row in options.rows}
    write_json(
        options.json,
        head,
        {
            "rows": {
                row: {
                    "target": TARGETS[row].at_most,
                    "met": verdict(TARGETS[row], measured),
                    **(asdict(measured) if measured is not None else {}),
                }
                for row, measured in shown.items()
            },
            "runs": {key: asdict(run) for key, run in runs.items()},
            "records": {
                key: {name: asdict(record) for name, record in records.items()}
                for key, records in all_records.items()
            },
        },
    )
    print(f"\n{headline(head)}\n")
    print(markdown(COLUMNS, [cells(row, measured) for row, measured in shown.items()]))
    every = [record for records in all_records.values() for record in records.values()]
    print("\n".join(remarks(every)))
    return int(any(record.status == "failed" for record in every))


if __name__ == "__main__":
    raise SystemExit(main())
