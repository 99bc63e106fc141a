"""Show which clients of FSDP work with fullshard: run, losses, save, resume, and checkpoints that cross from torch and back.

    python -m benchmarks.clients                              # two gloo ranks, every client that is installed
    python -m benchmarks.clients --device cuda --world 1      # one NCCL rank
    python -m benchmarks.clients --only accelerate            # rows with this in the name

Each row is a program of `examples/clients` with options. It is trained for five steps by ranks of torch and by ranks on
which `fullshard.install` was called, and saved after the third. Then each resumes its own checkpoint and that of the
other; the losses of the last two steps must come out again. Where torch's FSDP itself fails (FSDP1 on a CPU), losses
are compared with one process without FSDP, and its own error stands in the row. The exit status is 1 if a cell is bad
and the row does not name it as a known bug of others.
"""

import argparse
import importlib.metadata
import importlib.util
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))

from benchmarks.client_ranks import Engine, Job, Outcome, Ranks, first_error
from benchmarks.client_rows import ROWS, Row

CLIENTS = ("accelerate", "transformers", "peft", "trl", "lightning", "torchtitan", "torchao")
STEPS, SAVED = 5, 3
COLUMNS = (
    "client",
    "API",
    "options",
    "runs",
    "torch's losses",
    "save",
    "resume",
    "torch to fullshard",
    "fullshard to torch",
)
TORCH_ERROR = "torch's error"
"""A cell for the text below the table."""


class RowFailedError(Exception):
    """A job of a row failed; the message is the error of the first rank that had one."""


@dataclass(kw_only=True)
class Cell:
    """A verdict."""

    text: str
    good: bool


Cells = dict[str, Cell]
"""By column."""


class Bench:
    """The worlds of both engines, and the folder of their checkpoints and of what they print."""

    def __init__(self, device: str, world: int, folder: Path, rows: Sequence[Row]) -> None:
        self._device, self._world, self.folder = device, world, folder
        self._programs = sorted({row.program for row in rows})
        self._worlds: dict[tuple[Engine, int], Ranks] = {}

    def run(self, row: Row, engine: Engine, *arguments: str) -> list[Outcome]:
        """Run a row's program and return the outcomes by rank; an error of any rank is raised."""
        size = 1 if "--unsharded" in arguments else row.world or self._world
        ranks = self._worlds.setdefault(
            (engine, size), Ranks(engine, size, self._device, self.folder, self._programs)
        )
        job = Job(
            program=row.program, arguments=(*row.arguments, "--steps", str(STEPS), *arguments)
        )
        outcomes = ranks.run(job)
        if error := first_error(outcomes):
            raise RowFailedError(error)
        for outcome in outcomes:
            if "--unsharded" not in arguments and outcome.engines != (engine,):
                raise RowFailedError(f"the model was sharded by {outcome.engines or 'nobody'}")
        return outcomes

    def close(self) -> None:
        """End all ranks."""
        for ranks in self._worlds.values():
            ranks.close()


def examine(bench: Bench, row: Row) -> Cells:
    """Run all jobs of a row and return its cells."""
    folder = bench.folder / row.name.replace(" ", "_")
    folders: dict[Engine, Path] = {"torch": folder / "torch", "fullshard": folder / "fullshard"}

    def train(engine: Engine) -> list[Outcome]:
        return bench.run(row, engine, "--folder", str(folders[engine]), "--save-after", str(SAVED))

    def resume(engine: Engine, source: Engine) -> Cell:
        if source not in trained or (engine == "torch" and torch_error):
            return Cell(text="torch fails", good=True)
        try:
            outcomes = bench.run(
                row,
                engine,
                *("--resume", str(folders[source]), "--save-after", str(SAVED)),
                *("--folder", str(folder / f"{engine}_from_{source}")),
            )
        except RowFailedError as error:
            return Cell(text=str(error), good=False)
        expected = [outcome.losses[SAVED * row.numbers_per_step :] for outcome in trained[source]]
        return compare(expected, [outcome.losses for outcome in outcomes], row.tolerance)

    trained: dict[Engine, list[Outcome]] = {}
    torch_error = ""
    try:
        trained["torch"] = train("torch")
    except RowFailedError as error:
        torch_error = str(error)
    try:
        trained["fullshard"] = train("fullshard")
    except RowFailedError as error:
        return {"runs": Cell(text=str(error), good=False)}
    cells = {"runs": Cell(text="yes", good=True)}
    if torch_error:
        cells |= against_one_process(bench, row, trained["fullshard"], torch_error)
    else:
        cells |= against(trained["torch"], trained["fullshard"], row.tolerance)
    if not any(folders["fullshard"].rglob("*")):
        cells["save"] = Cell(text="no file", good=False)
    cells["resume"] = resume("fullshard", "fullshard")
    if not cells["resume"].good and not torch_error:
        # Whose bug is it? What torch does with its own checkpoint says so.
        own = resume("torch", "torch")
        cells["resume"].text += "; torch: " + ("right" if own.good else own.text)
    cells["torch to fullshard"] = resume("fullshard", "torch")
    cells["fullshard to torch"] = resume("torch", "fullshard")
    return cells


def against(expected: Sequence[Outcome], found: Sequence[Outcome], tolerance: float) -> Cells:
    """Compare losses, and what was saved."""
    same = compare(
        [outcome.saved for outcome in expected[:1]] if expected[0].saved else [[1.0]],
        [outcome.saved for outcome in found[:1]] if found[0].saved else [[1.0]],
        tolerance,
    )
    return {
        "torch's losses": compare(
            [outcome.losses for outcome in expected],
            [outcome.losses for outcome in found],
            tolerance,
        ),
        "save": Cell(text="yes" if same.good else f"another model: {same.text}", good=same.good),
    }


def against_one_process(
    bench: Bench, row: Row, sharded: Sequence[Outcome], torch_error: str
) -> Cells:
    """Compare with the same steps in one process, since torch's FSDP cannot take them."""
    folder = bench.folder / "one_process" / row.name.replace(" ", "_")
    try:
        single = bench.run(row, "torch", "--unsharded", "--folder", str(folder))
    except RowFailedError as error:
        return {"torch's losses": Cell(text=f"one process: {error}", good=False)}
    by_step = zip(*(outcome.losses for outcome in sharded), strict=True)
    means = [sum(losses) / len(losses) for losses in by_step]
    cells = against(single, [Outcome(losses=means, saved=sharded[0].saved)], row.tolerance)
    losses = cells["torch's losses"]
    losses.text = f"{losses.text} to one process; torch: {torch_error.split(':')[0]}"
    return {**cells, TORCH_ERROR: Cell(text=torch_error, good=True)}


def compare(
    expected: Sequence[Sequence[float]], found: Sequence[Sequence[float]], tolerance: float
) -> Cell:
    """Compare losses by rank and step."""
    lengths = [[len(losses) for losses in side] for side in (expected, found)]
    if lengths[0] != lengths[1] or not all(lengths[0]):
        return Cell(text=f"steps {lengths[1]}, not {lengths[0]}", good=False)
    worst = largest_difference(expected, found)
    good = worst <= tolerance  # which no NaN is
    return Cell(text="equal" if worst == 0 else f"{'' if good else 'NO: '}{worst:.0e}", good=good)


def largest_difference(
    expected: Sequence[Sequence[float]], found: Sequence[Sequence[float]]
) -> float:
    """Return the largest relative difference of numbers by rank and step; NaN if there is one."""
    differences = [
        abs(one - other) / max(abs(one), 1e-9)
        for by_rank in zip(expected, found, strict=True)
        for one, other in zip(*by_rank, strict=True)
    ]
    return next((each for each in differences if math.isnan(each)), max(differences))


# --- the table -----------------------------------------------------------------------------------------


def choose(device: str, only: Sequence[str]) -> list[Row]:
    """Return the rows that were asked for and can be run here; say why others cannot."""
    chosen = []
    for row in ROWS:
        if only and not any(part.lower() in row.name.lower() for part in only):
            continue
        missing = [name for name in row.needs if importlib.util.find_spec(name) is None]
        if missing:
            print(f"left out, {', '.join(missing)} is not installed: {row.name}", file=sys.stderr)
        elif device in row.devices:
            chosen.append(row)
    return chosen


def verdicts(row: Row, cells: Mapping[str, Cell]) -> list[str]:
    """Return what goes wrong with a row and is not known."""
    return [
        f"{row.name}: {column}: {cell.text}"
        for column, cell in cells.items()
        if not cell.good and column not in row.known
    ]


def line(row: Row, cells: Mapping[str, Cell]) -> str:
    """Return a row of the table, in markdown."""
    texts = []
    for column in COLUMNS[3:]:
        text = cells[column].text if column in cells else "-"
        known = row.known.get(column)
        texts.append(f"{known} ({text})" if known and not cells[column].good else text)
    cleaned = [text.replace("|", "/") for text in texts]
    return f"| {' | '.join((row.client, row.api, row.options, *cleaned))} |"


def versions() -> str:
    """Name the versions of everything that takes part."""
    found = []
    for name in ("torch", *CLIENTS):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--world", type=int, default=2, help="ranks of each engine")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PART", help="rows with this in the name"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="keep checkpoints and what ranks print here, for a look at a bad cell",
    )
    options = parser.parse_args(arguments)
    rows = choose(options.device, options.only)
    print(f"{versions()}; {options.world} ranks, {options.device}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    wrong, torch_errors = [], set()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="fullshard-clients-"))
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.device, options.world, folder, rows)
    try:
        for row in rows:
            since = time.monotonic()
            cells = examine(bench, row)
            wrong += verdicts(row, cells)
            if TORCH_ERROR in cells:
                torch_errors.add(cells[TORCH_ERROR].text)
            print(line(row, cells), flush=True)
            print(f"{row.name}: {time.monotonic() - since:.0f} s", file=sys.stderr, flush=True)
    finally:
        bench.close()
        if not options.folder:
            shutil.rmtree(folder, ignore_errors=True)
    if torch_errors:
        print("\nWhere torch itself fails, it says:", *sorted(torch_errors), sep="\n- ")
    print(f"\n{len(rows)} rows, {len(wrong)} bad cells", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
