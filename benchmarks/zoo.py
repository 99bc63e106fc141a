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

A row is bad, and the exit status 1, if fullshard fails where torch trains, or if its numbers differ by more than rounding
from torch's and from those of training without FSDP, too.
"""

import argparse
import importlib.metadata
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
BF16_ROUNDING = 5e-2
"""What bf16 may change against training without FSDP, which is in float32."""
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
            bad += [
                f"{api}: {each}"
                for each in faults(verdicts[api], torch_verdicts[api], alone[api], self._tolerance)
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
            bad=bad,
        )

    def _train(self, engine: Engine, name: str, api: str) -> list[Outcome]:
        job = Job(program=self._program, arguments=(name, "--api", api, *self._arguments))
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
        row = Row(**read)
        rows[row.key] = row
    return list(rows.values())


def summary(rows: Sequence[Row]) -> Iterable[str]:
    """Yield the table of all modes in markdown, and the rows that are not equal."""
    yield "| mode | API | classes | equal | close | differs | fails | torch trains |"
    yield "|---|---|---|---|---|---|---|---|"
    for mode in dict.fromkeys(row.mode for row in rows):
        for api in SHARDED:
            trained = [row for row in rows if row.mode == mode and api in row.verdicts]
            counts = Counter(row.verdicts[api].text for row in trained)
            torchs = sum(row.torch_verdicts[api].text != "fails" for row in trained)
            cells = (counts[text] for text in ("equal", "close", "differs", "fails"))
            yield f"| {mode} | {api} | {len(trained)} | {' | '.join(map(str, cells))} | {torchs} |"
    yield ""
    yield "| class | mode | API | fullshard against torch | fullshard against no FSDP | torch against no FSDP |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        for api, verdict in row.verdicts.items():
            if verdict.text != "equal" or row.torch_verdicts[api].text == "fails":
                cells_of_row = (
                    *(row.name, row.mode, api),
                    str(verdict) if verdict.against == "torch" else "-",
                    *(str(row.alone[api]), str(row.torch_verdicts[api])),
                )
                yield f"| {' | '.join(cell.replace('|', '/') for cell in cells_of_row)} |"
    yield ""
    yield "Left out:"
    yield from (f"- {row.name} ({row.mode}): {row.left_out}" for row in rows if row.left_out)


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
