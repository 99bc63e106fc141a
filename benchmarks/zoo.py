"""Show which language models of the installed transformers train with fullshard, and whether they have torch's numbers.

    python -m benchmarks.zoo                                    # all classes, float32
    python -m benchmarks.zoo --real-life                        # bf16, recomputation, 2 microbatches, clipping, writes
    python -m benchmarks.zoo --compile                          # compiled layers (aot_eager)
    python -m benchmarks.zoo --only T5ForConditionalGeneration  # these classes, also if they are in the file

Every causal, masked and sequence-to-sequence class is built small (`zoo_models.py`) and trained for three steps of AdamW on
two gloo ranks, its layers and its root sharded: without FSDP, with both APIs of torch, and with both of fullshard. Rows are
added to a file of JSON lines. A second run goes on where the first one ended. A class of which a rank dies or hangs gets a
row that says so, and the next one is trained by new ranks.

The verdict of an API compares losses and gradient norms with those of the same API of torch; if torch fails, with those of
training without FSDP.

    equal    the same bits, also of all weights after the last step
    close    losses and gradient norms equal to 1e-5
    differs  by more
    fails    raises, hangs, or ends the process

torch's FSDP2 puts a node before each layer, which adds up what the layer contributes to the gradients of its inputs before
others add theirs. So sums of three or more gradients have other last bits than in training without FSDP, which fullshard's
have. A `fully_shard` without torch's bits is trained once more with such nodes, and compared again.

A row is bad, and the exit status 1, if fullshard fails where torch trains, or if its numbers differ by more than rounding
from torch's and from those of training without FSDP, too.
"""

import argparse
import importlib.metadata
import itertools
import json
import math
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))

from benchmarks.client_ranks import Engine, Job, Outcome, Ranks, first_error
from benchmarks.clients import largest_difference

PROGRAM = "benchmarks.zoo_training"
WORLD = 2
JOB_TIMEOUT_S = 120.0
CLOSE = 1e-5
BF16_ROUNDING = 2e-2
"""What another order of sums may change in bf16."""
RESULTS = Path(__file__).parent / "results" / "zoo-cpu.jsonl"
SHARDED = ("fully_shard", "wrapper")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What became of a class with one API of one library."""

    text: str
    """`equal`, `close`, `differs` or `fails`."""
    against: str
    """Whose numbers it is compared with: torch's, or those without FSDP."""
    difference: float | None = 0.0
    """The largest relative one, of losses and gradient norms; None for NaN, and where nothing was trained."""
    error: str = ""

    def __str__(self) -> str:
        if self.text == "fails":
            return f"fails: {self.error}"
        if self.text == "equal":
            return "equal"
        if self.difference is None:
            return f"{self.text} (NaN)"
        return f"{self.text} ({f'{self.difference:.0e}' if self.difference else 'weights only'})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One class in one mode."""

    name: str
    kind: str
    mode: str
    versions: str
    left_out: str = ""
    """Why it cannot be trained here, with any FSDP or without."""
    verdicts: dict[str, Verdict]
    """By API, fullshard's; none if the class was left out."""
    torch_verdicts: dict[str, Verdict]
    """By API, torch's, compared with training without FSDP."""
    alone: dict[str, Verdict]
    """By API, fullshard's, compared with training without FSDP."""
    in_torchs_order: Verdict | None = None
    """Of `fully_shard`, if its bits are not torch's: fullshard with torch's nodes before layers, against torch."""
    bad: list[str]
    """What is wrong with fullshard."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes it another row."""
        return self.name, self.mode, self.versions

    def as_json(self) -> str:
        """Return a line for the file: what is not as usual of each verdict."""
        usual = {"difference": 0.0, "error": ""}
        return json.dumps(
            asdict(
                self, dict_factory=lambda pairs: {k: v for k, v in pairs if usual.get(k, ...) != v}
            )
        )


# --- one class -----------------------------------------------------------------------------------------


class Zoo:
    """The ranks of both libraries, and how they train."""

    def __init__(
        self,
        folder: Path,
        *,
        real_life: bool = False,
        compiled: bool = False,
        program: str = PROGRAM,
        job_timeout_s: float = JOB_TIMEOUT_S,
    ) -> None:
        self._program = program
        self._arguments = (
            *(("--real-life",) if real_life else ()),
            *(("--compile",) if compiled else ()),
        )
        self.mode = " ".join(
            (
                "real life" if real_life else "plain",
                *(("compiled",) if compiled else ()),
            )
        )
        self._tolerance = BF16_ROUNDING if real_life else CLOSE
        self._ranks: dict[Engine, Ranks] = {
            engine: Ranks(engine, WORLD, "cpu", folder, [program], job_timeout_s)
            for engine in ("torch", "fullshard")
        }

    def close(self) -> None:
        """End all ranks."""
        for ranks in self._ranks.values():
            ranks.close()

    def examine(self, name: str, kind: str, versions: str) -> Row:
        """Train a class in every way and compare."""
        unsharded = self._train("torch", name, "unsharded")
        error = first_error(unsharded)
        verdicts: dict[str, Verdict] = {}
        torch_verdicts: dict[str, Verdict] = {}
        alone: dict[str, Verdict] = {}
        in_torchs_order: Verdict | None = None
        bad: list[str] = []
        for api in SHARDED if not error else ():
            theirs = self._train("torch", name, api)
            ours = self._train("fullshard", name, api)
            torch_verdicts[api] = judge("no FSDP", unsharded, theirs)
            alone[api] = judge("no FSDP", unsharded, ours)
            if torch_verdicts[api].text == "fails":
                verdicts[api] = alone[api]
            else:
                verdicts[api] = judge("torch", theirs, ours)
            judged = verdicts[api]
            if (
                api == "fully_shard"
                and judged.against == "torch"
                and judged.text in ("close", "differs")
            ):
                joined = self._train("fullshard", name, api, "--join-inputs")
                judged = in_torchs_order = judge("torch", theirs, joined)
            bad += [
                f"{api}: {each}"
                for each in faults(judged, torch_verdicts[api], alone[api], self._tolerance)
            ]
        return Row(
            name=name,
            kind=kind,
            mode=self.mode,
            versions=versions,
            left_out=error or "",
            verdicts=verdicts,
            torch_verdicts=torch_verdicts,
            alone=alone,
            in_torchs_order=in_torchs_order,
            bad=bad,
        )

    def _train(self, engine: Engine, name: str, api: str, *options: str) -> list[Outcome]:
        arguments = (name, "--api", api, *self._arguments, *options)
        job = Job(program=self._program, arguments=arguments)
        outcomes = self._ranks[engine].run(job)
        for outcome in outcomes:
            if api != "unsharded" and not outcome.error and outcome.engines != (engine,):
                raise RuntimeError(f"{name} was sharded by {outcome.engines}, not by {engine}")
        return outcomes


def judge(against: str, expected: Sequence[Outcome], found: Sequence[Outcome]) -> Verdict:
    """Compare numbers of all ranks and steps, and bits of the final weights."""
    if error := first_error(found):
        return Verdict(text="fails", against=against, difference=None, error=error)
    numbers = [[outcome.losses for outcome in side] for side in (expected, found)]
    worst = largest_difference(*numbers)
    same_weights = [each.saved for each in expected] == [each.saved for each in found]
    text = (
        "equal"
        if worst == 0 and same_weights
        else "close"
        if worst <= CLOSE  # which NaN is not
        else "differs"
    )
    return Verdict(text=text, against=against, difference=None if math.isnan(worst) else worst)


def faults(ours: Verdict, torchs: Verdict, alone: Verdict, tolerance: float) -> list[str]:
    """Return what is wrong with fullshard.

    Args:
        ours: fullshard's verdict.
        torchs: torch's, against training without FSDP.
        alone: fullshard's against training without FSDP.
        tolerance: How far it may differ from that.
    """
    if ours.text == "fails":
        return [] if torchs.text == "fails" else [str(ours)]
    near = alone.difference is not None and alone.difference <= tolerance
    if ours.text in ("equal", "close") or near:
        return []
    return [f"{ours} from {ours.against}"]


# --- all classes ---------------------------------------------------------------------------------------


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file; the last of those with the same key counts."""
    rows: dict[tuple[str, str, str], Row] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        read: dict[str, Any] = json.loads(line)
        for column in ("verdicts", "torch_verdicts", "alone"):
            read[column] = {api: Verdict(**fields) for api, fields in read[column].items()}
        if read["in_torchs_order"]:
            read["in_torchs_order"] = Verdict(**read["in_torchs_order"])
        row = Row(**read)
        rows[row.key] = row
    return list(rows.values())


COLUMNS = (
    *("mode", "api", "classes", "fullshard trains", "torch trains"),
    *("torch's bits", "with torch's nodes", "to 1e-5", "by more"),
    *("fullshard: bits without FSDP", "torch: bits without FSDP"),
)


def summary(rows: Sequence[Row]) -> Iterable[str]:
    """Yield the table of all modes in markdown, the rows that are not equal, and the classes that were left out."""
    yield from table(COLUMNS, (counts(rows, mode, api) for mode, api in sections(rows)))
    yield ""
    header = ("class", "mode", "api", "against torch", "against no FSDP", "torch against no FSDP")
    yield from table(header, (cells for row in rows for cells in not_equal(row)))
    yield ""
    yield "Left out:"
    yield from (f"- {row.name} ({row.mode}): {row.left_out}" for row in rows if row.left_out)


def sections(rows: Sequence[Row]) -> Iterable[tuple[str, str]]:
    """Yield modes and APIs."""
    return itertools.product(dict.fromkeys(row.mode for row in rows), SHARDED)


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterable[str]:
    """Yield a table in markdown."""
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for cells in lines:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def counts(rows: Sequence[Row], mode: str, api: str) -> list[str]:
    """Return the cells of one mode and API."""
    trained = [row for row in rows if row.mode == mode and api in row.verdicts]
    both = Counter(
        row.verdicts[api].text for row in trained if row.verdicts[api].against == "torch"
    )
    joined = sum(
        api == "fully_shard"
        and row.in_torchs_order is not None
        and row.in_torchs_order.text == "equal"
        for row in trained
    )
    alone = [
        Counter(each[api].text for each in side)
        for side in ([row.alone for row in trained], [row.torch_verdicts for row in trained])
    ]
    trains = [len(trained) - each["fails"] for each in alone]
    numbers = (
        *(len(trained), *trains, both["equal"], joined, both["close"], both["differs"]),
        *(each["equal"] for each in alone),
    )
    return [mode, api, *map(str, numbers)]


def not_equal(row: Row) -> Iterable[list[str]]:
    """Yield the cells of a class where it does not have torch's bits, for each such API."""
    for api, verdict in row.verdicts.items():
        if verdict.text == "equal" and verdict.against == "torch":
            continue
        against = str(verdict) if verdict.against == "torch" else "-"
        if row.in_torchs_order and api == "fully_shard":
            against += f"; with torch's nodes {row.in_torchs_order}"
        alone, torchs = row.alone[api], row.torch_verdicts[api]
        yield [row.name, row.mode, api, against, str(alone), str(torchs)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing in the file, print the tables and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real-life", action="store_true")
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="train these classes, anew")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file of rows")
    parser.add_argument("--folder", type=Path, help="keep here what the ranks print")
    options = parser.parse_args(arguments)
    from benchmarks.zoo_models import class_names  # transformers: `--help` and tests do without

    kinds = class_names()
    if unknown := set(options.only or ()) - set(kinds):
        parser.error(f"transformers has no such classes: {', '.join(sorted(unknown))}")
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers")
    )
    folder = options.folder or Path(tempfile.mkdtemp(prefix="fullshard-zoo-"))
    folder.mkdir(parents=True, exist_ok=True)
    zoo = Zoo(folder, real_life=options.real_life, compiled=options.compile)
    known = {row.key for row in read_rows(options.json)}
    wanted = options.only or [name for name in kinds if (name, zoo.mode, versions) not in known]
    print(f"{versions}; {zoo.mode}; {len(wanted)} of {len(kinds)} classes to train", flush=True)
    try:
        with options.json.open("a") as file:
            for number, name in enumerate(wanted, 1):
                since = time.monotonic()
                row = zoo.examine(name, kinds[name], versions)
                print(row.as_json(), file=file, flush=True)
                told = row.left_out and f"left out: {row.left_out}"
                told = told or "; ".join(f"{api} {each}" for api, each in row.verdicts.items())
                took = time.monotonic() - since
                print(f"{number}/{len(wanted)} {name}: {told} ({took:.1f} s)", flush=True)
    finally:
        zoo.close()
        if not options.folder:
            shutil.rmtree(folder, ignore_errors=True)
    rows = [row for row in read_rows(options.json) if row.versions == versions]
    print("", *summary(rows), "", sep="\n")
    asked = [row for row in rows if row.mode == zoo.mode and (row.name in (options.only or kinds))]
    wrong = [f"{row.name}: {'; '.join(row.bad)}" for row in asked if row.bad]
    print(f"{len(asked)} rows of this mode, {len(wrong)} bad", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
