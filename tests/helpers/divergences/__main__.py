"""Run kinds of divergence and print them as a table in Markdown.

python -m tests.helpers.divergences [PART OF A NAME ...] [--backend stand-in] [--ranks 4] [--details]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from tests.helpers.divergences import all_kinds, outcome, plan_operations
from tests.helpers.rank_programs import Results, no_preparation, start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="run only kinds with one of these in their names")
    parser.add_argument("--details", action="store_true", help="show how every rank ended")
    parser.add_argument(
        "--tear-down", action="store_true", help="let all ranks tear down their interpreters"
    )
    parser.add_argument(
        "--control", action="store_true", help="let no rank diverge: all must end well"
    )
    parser.add_argument("--backend", choices=("gloo", "stand-in", "nccl"), default="gloo")
    parser.add_argument(
        "--ranks", type=int, default=0, help="at least so many, also where a kind needs fewer"
    )
    arguments = parser.parse_args()
    kinds = {
        name: kind.on(arguments.backend, arguments.ranks)
        for name, kind in all_kinds().items()
        if kind.why_not_on(arguments.backend) is None
        and (not arguments.parts or any(part in name for part in arguments.parts))
    }
    if arguments.control:
        kinds = {name: kind.without_divergence() for name, kind in kinds.items()}
    began = time.monotonic()
    print("| kind | API | ranks | odd rank | seconds | message |")
    print("|---|---|---|---|---|---|")
    failed = []
    with tempfile.TemporaryDirectory(prefix="fullshard-divergences-") as folder:
        jobs = {name: kind.job for name, kind in kinds.items()}
        if arguments.tear_down:
            jobs = {name: replace(job, tears_down=True) for name, job in jobs.items()}
        # With a GPU, planning would use it, and the runner must not: its ranks are forked from it.
        prepare = no_preparation if arguments.backend == "nccl" else plan_operations
        runner = start(jobs, Path(folder), prepare)
        for name, kind in kinds.items():
            result = Results(Path(folder)).wait(name, 600)
            others = [rank for rank in range(kind.job.ranks) if rank != kind.job.odd]
            seconds = max(result.seconds(rank) for rank in others)
            messages = [result.ends[rank].message for rank in others]
            first = (messages[0].splitlines() or [""])[0].replace("|", "/")
            odd = outcome(result.ends[max(kind.job.odd, 0)])
            print(
                f"| {name} | {kind.api} | {kind.job.ranks} | {odd} | {seconds:.1f} | {first} |",
                flush=True,
            )
            problems = kind.problems(result)
            failed += [f"{name}: {problem}" for problem in problems]
            if arguments.details:
                for rank, end in enumerate(result.ends):
                    print(
                        f"  rank {rank}: {outcome(end)} after {result.seconds(rank):.1f} s: {end.message}"
                    )
                    if problems:
                        print("    " + end.stderr.replace("\n", "\n    "))
        runner.join()
    print(f"\n{len(kinds)} kinds in {time.monotonic() - began:.1f} s.", *failed, sep="\n")


if __name__ == "__main__":
    main()
