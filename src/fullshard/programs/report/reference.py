"""All findings and all remedies, as the tables in docs/report.md. A test compares them, and applies each remedy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fullshard.programs.report import analysis, run_findings, step_findings
from fullshard.programs.report.remedies import REMEDIES, SMALL_GROUP_BYTES
from fullshard.programs.report.replay import MAX_DEPTH
from fullshard.programs.report.units import share, size

_WORTH = share(step_findings.WORTH_REPORTING)


class FindingKind(NamedTuple):
    """A kind of finding: its condition, and the kinds of remedies that it may have."""

    when: str
    remedies: tuple[str, ...]


FINDINGS: dict[str, FindingKind] = {
    "first gather": FindingKind(
        f"the wait for the first gather of a step is {_WORTH} of it: nothing can hide it",
        ("plan", "unshard early"),
    ),
    "gathers": FindingKind(
        f"waits for other gathers are {_WORTH} of the step. A deeper prefetch is the remedy if a replay at some depth up to "
        f"{MAX_DEPTH} removes {share(step_findings.HELPS_FROM)} of the waits; the other remedies are for waits that no depth removes. "
        f"The wire is called the bottleneck if gathers take {share(step_findings.WIRE_BOUND)} of the time of compute",
        (
            "deeper prefetch",
            "larger batch",
            "half of the bytes",
            "keep gathered",
            "replicas",
        ),
    ),
    "reductions": FindingKind(
        f"waits for reductions are {_WORTH} of the step",
        ("narrow wire", "plan", "larger batch"),
    ),
    "late rank": FindingKind(
        f"others wait {share(analysis.LATE_BY)} of the step for one rank; in {share(analysis.LATE_STEPS)} of the steps "
        f"they wait most for this rank; and {share(analysis.LATE_SHARE)} of the time that ranks wait for each other is "
        "for this rank",
        ("look",),
    ),
    "small groups": FindingKind(
        f"{share(step_findings.MANY_SMALL)} of the groups, and at least four, are below {size(SMALL_GROUP_BYTES)}, their usual waits "
        f"are {_WORTH} of the step, and there is a remedy",
        ("plan",),
    ),
    "padding": FindingKind(
        f"{share(step_findings.PADDING)} of the elements are padding",
        ("replicas", "cut regardless of rows", "balanced placement"),
    ),
    "uneven shards": FindingKind(
        f"a rank holds {share(run_findings.UNEVEN)} more of the parameters than the mean, as the metrics say; and no padding was found",
        (),
    ),
    "gathered at once": FindingKind(
        f"{share(step_findings.HELD_AT_ONCE)} of the parameters, of three groups or more, are gathered at the same "
        "time",
        ("release after forward", "smaller groups"),
    ),
    "outside": FindingKind(
        f"{share(step_findings.OUTSIDE)} of the step is outside of forward and backward",
        ("flat optimizer",),
    ),
    "hidden": FindingKind(
        f"less than {share(step_findings.HIDDEN_BELOW)} of the step is exposed: all is well", ()
    ),
    "bad steps": FindingKind(
        "loss or gradient norm were not finite, or above `train.max_norm`",
        ("skip bad steps", "look", "lower rate", "clip"),
    ),
    "failed steps": FindingKind(
        "a rank has raised an exception, and `train.on_error` is `skip`",
        ("smaller microbatches", "recompute", "look"),
    ),
    "stalls": FindingKind(
        "the watchdog noticed that others waited for ranks for 5 seconds or more ([divergence.md](divergence.md))",
        ("look",),
    ),
    "loss jumps": FindingKind(
        f"a loss is {run_findings.SPIKE:g} typical distances above the median of the {run_findings.SPIKE_WINDOW} steps before it",
        ("look",),
    ),
    "slower": FindingKind(
        f"of the steps of one start, the median of the last quarter is {share(run_findings.SLOWER_BY)} above that of the first, and "
        "three quarters of the later steps took longer than three quarters of the earlier ones",
        ("look",),
    ),
}
"""Kinds of findings, by name."""


def markdown() -> str:
    """Return both tables as Markdown."""
    findings = [
        (kind, each.when, ", ".join(each.remedies) or "none") for kind, each in FINDINGS.items()
    ]
    remedies = [(kind, *texts) for kind, texts in REMEDIES.items()]
    return "\n".join(
        (
            *_table(("finding", "when", "remedies"), findings),
            "",
            *_table(("remedy", "what it changes", "given if"), remedies),
            "",
        )
    )


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [headings, ("---",) * len(headings), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


if __name__ == "__main__":
    print(markdown(), end="")
