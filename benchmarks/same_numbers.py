"""Compare two checkouts of fullshard bit for bit: losses, gradients, parameters and state dicts.

    python benchmarks/same_numbers.py OLD_CHECKOUT NEW_CHECKOUT
    python benchmarks/same_numbers.py OLD_CHECKOUT --save old.json       # once
    python benchmarks/same_numbers.py NEW_CHECKOUT --against old.json    # as often as one likes
    python benchmarks/same_numbers.py OLD_CHECKOUT NEW_CHECKOUT --device cuda

Each configuration (`--list`) is trained for a few steps by ranks that import fullshard from the ``src`` of one
checkout; the program they run is this checkout's. On the CPU they are real gloo ranks. On a GPU there is one
NCCL rank. On both, one process is also rank 0 of a group of 8 whose other ranks echo it (`echo_group.py`).

A row says equal, or the first step and tensor whose bits differ. The exit status is 1 if there is one that
differs or fails.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.number_rank import Job
from benchmarks.number_settings import CONFIGURATIONS, ECHO
from benchmarks.report import commit_of, hardware, markdown

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ("echo_group.py", "number_models.py", "number_rank.py", "number_settings.py")
"""Files on which the numbers depend, besides fullshard."""
RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Some machines advertise AMX and do not allow it.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTHONDONTWRITEBYTECODE": "1",
}
WORLDS = {"cpu": (1, 2, 3, 4, ECHO), "cuda": (1, ECHO)}
PATIENCE_S = 300.0
"""How long all ranks may take for one configuration."""
POLL_S = 0.3
ERROR_LINES = 12
"""Lines of a failed rank's output that are shown."""


class CannotCompareError(Exception):
    """What was asked for makes no sense; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One configuration, trained by one world of one checkout."""

    digests: list[list[list[str]]]
    """By rank: what it is, and its digest."""
    error: str | None = None


Numbers = dict[str, Outcome]
"""By configuration and world: "fully_shard.plain, 2 ranks"."""


# --- training ------------------------------------------------------------------------------------------


def world_name(size: int) -> str:
    """Name a world in tables."""
    return f"{size} in one process" if size == ECHO else f"{size} rank" + "s" * (size > 1)


def row_name(name: str, size: int) -> str:
    """Name a configuration in a world."""
    return f"{name}, {world_name(size)}"


def choose(device: str, only: Sequence[str], ranks: Sequence[int]) -> list[str]:
    """Return the names of the rows that were asked for; an empty list of parts or ranks means all."""
    chosen = [
        row_name(name, size)
        for size in WORLDS[device]
        for name, configuration in CONFIGURATIONS.items()
        if size in configuration.worlds
        and (not only or any(part in name for part in only))
        and (not ranks or size in ranks)
    ]
    if not chosen:
        raise CannotCompareError("No configuration has such a name and so many ranks; see --list.")
    return chosen


def train_checkout(checkout: Path, device: str, chosen: Sequence[str]) -> Numbers:
    """Train the rows of these names, one world after the other, and return what the ranks found."""
    source = checkout.resolve() / "src"
    if not (source / "fullshard" / "__init__.py").is_file():
        raise CannotCompareError(f"{checkout} is no checkout of fullshard: it has no src/fullshard")
    numbers: Numbers = {}
    for size in WORLDS[device]:
        names = [name for name in CONFIGURATIONS if row_name(name, size) in chosen]
        for name, outcome in train_world(source, device, size, names).items():
            numbers[row_name(name, size)] = outcome
    return numbers


def train_world(source: Path, device: str, size: int, names: Sequence[str]) -> Numbers:
    """Train configurations one after the other; when one fails, go on after it with new ranks."""
    done: Numbers = {}
    while waiting := [name for name in names if name not in done]:
        with tempfile.TemporaryDirectory() as folder:
            jobs = [
                Job(
                    source=str(source),
                    folder=folder,
                    names=tuple(waiting),
                    rank=rank,
                    size=size,
                    backend="echo" if size == ECHO else "nccl" if device == "cuda" else "gloo",
                    device=device,
                )
                for rank in range(1 if size == ECHO else size)
            ]
            error = run_ranks(jobs, f"{source.parent}, {world_name(size)}")
            found = [read_output(job) for job in jobs]
        for name in waiting:
            if all(name in by_name for by_name in found):
                done[name] = Outcome(digests=[by_name[name] for by_name in found])
            elif error:
                done[name] = Outcome(digests=[], error=error)
                break
    return done


def read_output(job: Job) -> dict[str, list[list[str]]]:
    """Read what a rank wrote; a last line that it had no time to end is left out."""
    text = job.output.read_text() if job.output.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {line["name"]: line["digests"] for line in lines}


def count_lines(job: Job) -> int:
    """Return how many configurations a rank has trained."""
    return job.output.read_bytes().count(b"\n") if job.output.exists() else 0


def run_ranks(jobs: Sequence[Job], label: str) -> str | None:
    """Run the ranks of one world to their end; return what went wrong, or None."""
    total, seen, since = len(jobs[0].names), 0, time.monotonic()
    with started(jobs) as ranks:
        while True:
            codes = [rank.poll() for rank in ranks]
            failed = [number for number, code in enumerate(codes) if code]
            if failed:
                return f"rank {failed[0]}: {last_lines(jobs[failed[0]])}"
            count = min(count_lines(job) for job in jobs)
            if count > seen:
                if count == total or count // 10 > seen // 10:
                    print(
                        f"{label}: {count} of {total} configurations", file=sys.stderr, flush=True
                    )
                seen, since = count, time.monotonic()
            if all(code == 0 for code in codes):
                return None if count == total else "its ranks ended before it was trained"
            if time.monotonic() - since > PATIENCE_S:
                return f"nothing happened for {PATIENCE_S:.0f} s"
            time.sleep(POLL_S)


@contextmanager
def started(jobs: Sequence[Job]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a process for each job, and end those that are left."""
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for job in jobs:
            environment = {**os.environ, **RANK_ENVIRONMENT, "PYTHONPATH": job.source}
            command = [sys.executable, "-m", "benchmarks.number_rank", json.dumps(asdict(job))]
            with error_file(job).open("wb") as printed:
                rank = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.PIPE,  # closes when this process ends, however it does
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                )
            ranks.append(rank)
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def error_file(job: Job) -> Path:
    """Return the file with what a rank printed."""
    return Path(job.folder) / f"rank_{job.rank}.txt"


def last_lines(job: Job) -> str:
    """Return the end of what a rank printed."""
    lines = error_file(job).read_text(errors="replace").strip().splitlines()
    return "\n".join(lines[-ERROR_LINES:]) or "it printed nothing"


# --- comparing -----------------------------------------------------------------------------------------


def first_difference(old: Outcome, new: Outcome) -> str | None:
    """Say where two outcomes first differ, or return None."""
    for which, outcome in (("old", old), ("new", new)):
        if outcome.error:
            return f"fails in the {which} checkout"
    found = []
    for rank, (before, after) in enumerate(zip(old.digests, new.digests, strict=True)):
        pairs = zip([*before, ["nothing", ""]], [*after, ["nothing", ""]], strict=False)
        for place, (one, other) in enumerate(pairs):
            if list(one) != list(other):
                name = one[0] if one[0] == other[0] else f"{one[0]} became {other[0]}"
                found.append((place, rank, name))
                break
    if not found:
        return None
    _, rank, name = min(found)  # the earliest in training, whichever rank had it
    return f"{name} (rank {rank}; ranks that differ: {', '.join(str(each[1]) for each in found)})"


def compare(old: Mapping[str, Outcome], new: Mapping[str, Outcome]) -> list[tuple[str, str]]:
    """Return a row for each configuration and world: its name, and equal or what differs."""
    rows = []
    for name in {**old, **new}:
        if name in old and name in new:
            rows.append((name, first_difference(old[name], new[name]) or "equal"))
        else:
            rows.append((name, f"only in the {'old' if name in old else 'new'} numbers"))
    return rows


def report(rows: Sequence[tuple[str, str]], numbers: Sequence[Mapping[str, Outcome]]) -> int:
    """Print the table and the errors; return the exit status."""
    cells = [(*name.rsplit(", ", 1), verdict) for name, verdict in rows]
    print(markdown(("configuration", "ranks", "bits"), cells))
    for outcomes in numbers:
        for name, outcome in outcomes.items():
            if outcome.error:
                print(f"\n{name}: {outcome.error}")
    different = sum(verdict != "equal" for _, verdict in rows)
    print(f"\n{len(rows) - different} of {len(rows)} equal")
    return 1 if different else 0


# --- files ---------------------------------------------------------------------------------------------


def conditions(device: str) -> dict[str, str]:
    """Say what must be the same for numbers to be comparable."""
    program = b"".join((ROOT / "benchmarks" / name).read_bytes() for name in PROGRAM)
    torch.set_num_threads(1)  # as the ranks have
    return {
        "torch": str(torch.__version__),
        "device": hardware(torch.device(device)),
        "program": hashlib.sha256(program).hexdigest()[:24],
    }


def save(
    file: Path, checkout: Path, made_under: Mapping[str, str], numbers: Mapping[str, Outcome]
) -> None:
    """Write numbers and their conditions."""
    plain = {name: asdict(outcome) for name, outcome in numbers.items()}
    head = {"commit": commit_of(checkout), "conditions": made_under}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**head, "numbers": plain}) + "\n")
    print(f"{len(numbers)} rows of {checkout} at {head['commit']} are in {file}")


def read(file: Path, here: Mapping[str, str], chosen: Sequence[str]) -> Numbers:
    """Read numbers, if they can be compared with those that are made under the conditions here."""
    try:
        content = json.loads(file.read_text())
        saved, numbers = content["conditions"], content["numbers"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CannotCompareError(f"{file} has no numbers that --save wrote: {error!r}") from error
    differing = [key for key in here if saved.get(key) != here[key]]
    if differing:
        facts = "; ".join(f"{key}: {saved.get(key)} there, {here[key]} here" for key in differing)
        raise CannotCompareError(
            f"The numbers in {file} (commit {content.get('commit')}) were made under other conditions, so "
            f"differing bits would mean nothing. {facts}. Save them again here (program: the files "
            f"{', '.join(PROGRAM)} of this checkout)."
        )
    return {name: Outcome(**numbers[name]) for name in chosen if name in numbers}


# --- command line --------------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("checkouts", nargs="*", type=Path, metavar="CHECKOUT", help="the old one, then the new one")
    add("--save", type=Path, metavar="FILE", help="write the numbers of the only checkout")
    add("--against", type=Path, metavar="FILE", help="compare the only checkout with saved numbers")
    add("--device", choices=list(WORLDS), default="cpu")
    add(
        "--only", nargs="+", default=[], metavar="PART", help="configurations with this in the name"
    )
    add(
        "--ranks",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help=f"worlds; {ECHO}: in one process",
    )
    add("--list", action="store_true", help="print the chosen configurations and worlds, and end")
    options = parser.parse_args(arguments)
    expected = 0 if options.list else 1 if options.save or options.against else 2
    if len(options.checkouts) != expected or (options.save and options.against):
        parser.error("give two checkouts, or one and either --save or --against")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU; torch finds none here")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, compare and print; return the exit status."""
    options = parse_arguments(arguments)
    device = options.device
    here = conditions(device)  # before the files it reads can change
    try:
        chosen = choose(device, options.only, options.ranks)
        if options.list:
            print("\n".join(chosen))
            return 0
        old = read(options.against, here, chosen) if options.against else None
        numbers = [train_checkout(checkout, device, chosen) for checkout in options.checkouts]
    except CannotCompareError as error:
        print(f"same_numbers.py: {error}", file=sys.stderr)
        return 2
    if options.save:
        save(options.save, options.checkouts[0], here, numbers[0])
        failed = [(name, "fails") for name, outcome in numbers[0].items() if outcome.error]
        return report(failed, numbers) if failed else 0
    if old is not None:
        numbers.insert(0, old)
    return report(compare(*numbers), numbers)


if __name__ == "__main__":
    sys.exit(main())
