"""Whether the memory and the time that `fullshard plan` predicts are those that a step then takes.

One process is rank 0 of a `fake` group on a GPU, as in step.py, and takes the steps that a plan records (`TrainingStep`).
Each configuration has a process of its own, since what one leaves in the allocator would be the next one's. Measuring
and planning are apart: a file of measurements can be compared with plans on any machine.

The host of a shared machine is faster in one minute than in the next, and so are steps that wait for it. With `--along`, the small
steps by which `fullshard plan calibrate` knows the host take turns with the steps of each configuration, and the plan is made
with the host's times that follow from them. So the plan is judged, and not the minute.

    python benchmarks/plan_steps.py benchmarks/results/plan-steps-h200.json --measure      # on a GPU, four minutes
    python benchmarks/plan_steps.py benchmarks/results/plan-steps-h200.json                # compare; a CPU is enough
    python benchmarks/plan_steps.py FILE --profile calibrated.toml --only large            # another profile, some rows
    python benchmarks/plan_steps.py FILE --measure --along --only medium                   # then compare with --along, too

allocated     most bytes of tensors at a time, within the second step
reserved      most that the caching allocator has taken from the device by then
gradients     device time of forward and backward of all microbatches: the median, once the device has been busy with them for
              1.5 s. No optimizer runs between them
step          the same with clipping and the optimizer, median of six steps after that
off           predicted over measured, less one. At most 5 % of allocated, 10 % of reserved and `--time-limit` of the
              gradients' time are promised; it exits 1 if one is further off
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

# What is measured, and named in the header, is the checkout that this file is in.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import header, headline, markdown, write_json
from fullshard.programs.plan_tool.device_steps import (
    seconds_of_gradients,
    seconds_on_device,
    steady_seconds,
)
from fullshard.programs.plan_tool.host_steps import (
    WORLD,
    SmallStep,
    SmallSteps,
    SmallStepTurns,
    fitted_host,
    recorded_steps,
    typical_seconds,
)
from fullshard.programs.plan_tool.machine import GIB, MILLI, Machine
from fullshard.programs.plan_tool.planned_step import plan_step
from fullshard.programs.plan_tool.profile_file import load_profile
from fullshard.programs.plan_tool.program import Entry
from fullshard.programs.plan_tool.training_step import TrainingStep
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.config_file import read_config
from fullshard.programs.train.model_source import open_model
from fullshard.torch_border import fake_process_group

PROMISED = {"allocated": 0.05, "reserved": 0.10}
UNITS = {
    "allocated": ("GiB", GIB),
    "reserved": ("GiB", GIB),
    "gradients": ("ms", MILLI),
    "step": ("ms", MILLI),
}
TIMED_STEPS = 6
TURNS, TURN_ROUNDS, TURN_LOAD_S, TURN_S = 5, 5, 0.2, 0.8
"""With small steps in between: how many turns, rounds of small steps in each, and seconds of a turn of the configuration."""
SMALL = ("plain", "recomputed", "selective")
"""Names of the small steps' seconds in the figures."""

BF16 = "compute.precision=bf16"
SIZES = {
    "medium": ["model.size=medium", "model.vocabulary=32000", "data.context=1024"],
    "large": ["model.size=large", "model.vocabulary=32000", "data.context=2048"],
    "wide": [
        "model.layers=12",
        "model.width=4096",
        "model.heads=32",
        "model.vocabulary=128256",
        "data.context=4096",
    ],
}
"""0.16, 1.3 and 3.5 billion parameters."""
ROWS = {"medium": 8, "large": 4, "wide": 1}
"""Windows of a rank."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A run, by what differs from the built-in defaults."""

    size: str
    settings: tuple[str, ...] = ()
    world: int = 8

    def config(self) -> RunConfig:
        """Return the whole."""
        batch = f"train.batch={ROWS[self.size] * self.world}"
        return read_config(None, [*SIZES[self.size], BF16, batch, *self.settings])


RECOMPUTED = "compute.checkpoint_activations=blocks"
SELECTIVE = "compute.checkpoint_activations=selective"
CONFIGURATIONS = {
    **{size: Configuration(size) for size in SIZES},
    **{f"{size}-recomputed": Configuration(size, (RECOMPUTED,)) for size in SIZES},
    **{f"{size}-selective": Configuration(size, (SELECTIVE,)) for size in SIZES},
    "medium-64": Configuration("medium", world=64),
    "large-64": Configuration("large", world=64),
    "wide-recomputed-64": Configuration("wide", (RECOMPUTED,), 64),
    "large-kept": Configuration("large", ("sharding.reshard_after_forward=false",)),
    "large-no-prefetch": Configuration("large", ("sharding.prefetch=0",)),
    "large-prefetch-3": Configuration("large", ("sharding.prefetch=3",)),
    "large-hsdp": Configuration("large", ("sharding.replicas=2",)),
    "large-hsdp-64": Configuration("large", ("sharding.replicas=8",), 64),
    "large-wire": Configuration("large", ("compute.wire=bf16",)),
    "large-fp32": Configuration("large", ("compute.precision=fp32",)),
    "large-accumulated": Configuration("large", ("train.accumulate=2",)),
    "large-sgd": Configuration("large", ("optimizer.name=sgd",)),
    "large-muon": Configuration("large", ("optimizer.name=muon",)),
    "large-adamw8bit": Configuration("large", ("optimizer.name=adamw8bit",)),
    "large-not-flat": Configuration("large", ("optimizer.flat=false",)),
}


Figures = dict[str, float]
"""Bytes and seconds by the names of `UNITS`, and of `SMALL` if small steps were measured along."""


def predicted(configuration: Configuration, machine: Machine) -> Figures:
    """Return what the plan says for a rank of the fake group."""
    planned = plan_step(configuration.config(), configuration.world, machine.with_fake_group())
    return {
        "allocated": planned.memory.allocated,
        "reserved": planned.memory.reserved,
        "gradients": planned.playback.gradient_seconds,
        "step": planned.seconds,
    }


class RowSteps:
    """The steps of a configuration, on the GPU of this process; there must be a process group of its ranks."""

    def __init__(self, configuration: Configuration) -> None:
        """Take two steps, and note the peaks of the second."""
        config, device = configuration.config(), torch.device("cuda")
        torch.manual_seed(0)
        self._step = step = TrainingStep(config, configuration.world, open_model(config), device)
        step.randomize()
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            step.take()
        torch.cuda.synchronize()
        self.allocated = torch.cuda.max_memory_allocated()
        self.reserved = torch.cuda.max_memory_reserved()
        step.randomize()  # updates have made other weights of them, some far larger

    def gradients(self, **how_long: float) -> float:
        """Return the seconds of forward and backward."""
        return steady_seconds(lambda: seconds_of_gradients(self._step), **how_long)

    def whole(self) -> float:
        """Return the seconds of whole steps."""
        return statistics.median(seconds_on_device(self._step.take) for _ in range(TIMED_STEPS))


Serve = Callable[[Connection], None]


def serve_row(configuration: Configuration, pipe: Connection) -> None:
    """Take steps of a configuration: send the peaks, then a time for each word that is received."""
    with fake_process_group(configuration.world):
        row = RowSteps(configuration)
        pipe.send({"allocated": row.allocated, "reserved": row.reserved})
        for word in iter(pipe.recv, "end"):
            if word == "turn":
                pipe.send(row.gradients(load_s=TURN_LOAD_S, timed_s=TURN_S))
            else:
                pipe.send(row.whole() if word == "step" else row.gradients())


def serve_small_steps(pipe: Connection) -> None:
    """Take small steps of a calibration: send the host's seconds of some rounds for each word that is received."""
    device = torch.device("cuda")
    with fake_process_group(WORLD):
        small = SmallStepTurns(device)
        for _ in iter(pipe.recv, "end"):
            pipe.send(small.take(TURN_ROUNDS))


def _serve(serve: Serve, pipe: Connection) -> None:
    try:
        serve(pipe)
    except Exception:
        traceback.print_exc()


@contextmanager
def served(serve: Serve) -> Iterator[Connection]:
    """Serve in a process of its own; yield the pipe to it. It fails with EOFError if the process does.

    The process is forked, so that torch is imported once. So this one must not touch the GPU. It is always told to end: as it has
    both ends of the pipe, it would not notice that this one is gone.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(serve, theirs))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        with suppress(ConnectionError):  # it has failed
            ours.send("end")
        ours.close()
        process.join()


def asked(pipe: Connection, word: str) -> Any:
    """Send a word, and return the answer."""
    pipe.send(word)
    return pipe.recv()


def measured(name: str, small: Connection | None) -> Figures | None:
    """Measure a configuration, with ``small`` in turn with small steps; None if it failed, for lack of memory or otherwise."""
    try:
        with served(partial(serve_row, CONFIGURATIONS[name])) as row:
            found: Figures = row.recv()
            if small is None:
                found["gradients"] = asked(row, "gradients")
            else:
                rounds, turns = [], []
                for _ in range(TURNS):
                    rounds += asked(small, "turn")
                    turns.append(asked(row, "turn"))
                rounds += asked(small, "turn")
                found["gradients"] = statistics.median(turns)
                found.update(zip(SMALL, typical_seconds(rounds), strict=True))
            found["step"] = asked(row, "step")
    except (EOFError, ConnectionError):
        return None
    return found


def measure(
    file: Path, names: Sequence[str], commit: str | None, arguments: Any, *, along: bool
) -> int:
    """Write the figures of all configurations into the file; return 1 if some could not be measured."""
    results = []
    with served(serve_small_steps) if along else nullcontext() as small:
        for name in names:
            found = measured(name, small)
            print(f"{name}: {found or 'failed'}", file=sys.stderr, flush=True)
            results.append({"name": name, **asdict(CONFIGURATIONS[name]), "measured": found})
    write_json(file, header("plan_steps.py", torch.device("cuda"), commit, arguments), results)
    return int(any(each["measured"] is None for each in results))


def with_host_of(machine: Machine, truth: Figures, entries: Sequence[list[Entry]]) -> Machine:
    """Return a machine whose host is as fast as it was during a measurement, by the small steps in between."""
    steps = SmallSteps(
        *(SmallStep(truth[kind], each) for kind, each in zip(SMALL, entries, strict=True))
    )
    times: dict[str, Any] = fitted_host(machine, steps)
    return replace(machine, host=replace(machine.host, **times))


def cells_of(name: str, plan: Figures, truth: Figures) -> list[str]:
    """Return the cells of a configuration."""
    cells = [name, str(CONFIGURATIONS[name].world)]
    for kind, (_, unit) in UNITS.items():
        off = plan[kind] / truth[kind] - 1
        cells += [f"{truth[kind] / unit:.2f}", f"{plan[kind] / unit:.2f}", f"{off:+.1%}"]
    return cells


def compare(
    file: Path, names: Sequence[str], profile: str, time_limit: float, *, along: bool
) -> int:
    """Plan what was measured, print both, and return 1 if something is further off than promised."""
    written = json.loads(file.read_text())
    machine, promised = load_profile(profile), {**PROMISED, "gradients": time_limit}
    entries = recorded_steps() if along else []
    rows, broken = [], []
    for row in written["results"]:
        name, truth = row["name"], row["measured"]
        if name not in names or truth is None:
            continue
        plan = predicted(
            CONFIGURATIONS[name], with_host_of(machine, truth, entries) if along else machine
        )
        rows.append(cells_of(name, plan, truth))
        broken += [
            f"{name}: {kind} is {plan[kind] / truth[kind] - 1:+.1%} off, {most:.0%} are promised"
            for kind, most in promised.items()
            if abs(plan[kind] / truth[kind] - 1) > most
        ]
    print(f"Measured: {headline(written['header'])}. Planned with the profile {machine.name}.\n")
    columns = ["configuration", "world"]
    for kind, (unit, _) in UNITS.items():
        columns += [f"{kind} {unit}", "predicted", "off"]
    print(markdown(columns, rows))
    print("\n".join(["", *broken]))
    return int(bool(broken))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("file", type=Path, help="the measurements")
    add("--measure", action="store_true", help="write the file; needs a GPU")
    add(
        "--along",
        action="store_true",
        help="let small steps of a calibration take turns with each configuration",
    )
    add("--only", action="append", choices=list(CONFIGURATIONS), help="may be repeated")
    add("--profile", default="h200", help="name or file of the profile to plan with")
    add("--time-limit", type=float, default=0.2, help="share by which times may be off")
    add("--commit", help="name of the measured commit, where the checkout has no git")
    options = parser.parse_args(arguments)
    names = options.only or list(CONFIGURATIONS)
    if options.measure:
        return measure(options.file, names, options.commit, arguments, along=options.along)
    return compare(options.file, names, options.profile, options.time_limit, along=options.along)


if __name__ == "__main__":
    sys.exit(main())
