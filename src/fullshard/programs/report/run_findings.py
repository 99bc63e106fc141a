"""Findings about the whole run, from the metrics of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from statistics import median, quantiles

from fullshard.errors import ranks_text
from fullshard.programs.report.findings import Finding, Remedy
from fullshard.programs.report.remedies import (
    clip,
    given,
    look,
    lower_rate,
    recompute,
    skip_bad_steps,
    smaller_microbatches,
)
from fullshard.programs.report.run_files import Run
from fullshard.programs.report.units import duration, size
from fullshard.programs.run_events import BadStep, Stall, Step

WARM_UP_STEPS = 5
"""The first steps allocate, compile and fill caches, so they are no measure of the run's speed."""

SLOWER_BY = 0.1
"""A run has become slower if the median step of a start's last quarter is longer than that of its first by this share."""

MOST_STALLED = 3
"""Most ranks, or sets of ranks, that are named as keeping others waiting."""

SPIKE_WINDOW = 25
"""Steps before a step whose losses say what loss to expect."""

UNEVEN = 0.1
"""Shards are uneven if a rank holds more than the mean by this share: memory and time follow the largest."""

RISEN = 3.0
"""A run diverges if the gradient norm before a bad step is this many times the median of that window."""

SPIKE = 8.0
"""A loss is a spike if it exceeds the median of that window by this many typical distances."""


def find_in_training(run: Run) -> Iterator[Finding]:
    """Yield findings about bad steps, slow ranks, spikes of the loss, and steps that become slower."""
    yield from _bad_steps(run)
    yield from _stalls(run)
    yield from _spikes(run)
    yield from _slowing_down(run)


def find_uneven_shards(run: Run) -> Iterator[Finding]:
    """Yield a finding if some rank holds much more of the parameters than the others, which metrics alone tell."""
    start = run.metrics.start
    held = () if start is None else start.rank_bytes
    if len(held) < 2 or not sum(held):
        return
    most, mean = max(held), sum(held) / len(held)
    if most <= (1 + UNEVEN) * mean:
        return
    largest = [rank for rank, nbytes in enumerate(held) if nbytes == most]
    text = (
        f"{ranks_text(largest)} {'hold' if len(largest) > 1 else 'holds'} {size(most)}, the mean is {size(mean)}, and the least "
        f"{size(min(held))}. Whole rows of a parameter go to a rank, and {len(held)} ranks do not divide them evenly. Gradients and "
        "optimizer state are divided the same way, and all ranks wait for the largest."
    )
    if run.setting("sharding", "api") == "fsdp2":
        text += ' `sharding.api = "fsdp1"` divides parameters regardless of rows.'
    yield Finding(
        kind="uneven shards",
        title=f"Shards are uneven: the largest is {most / mean:.2g} times the mean",
        text=text,
        amount=most / mean - 1,
    )


def _bad_steps(run: Run) -> Iterator[Finding]:
    """Yield a finding about steps whose numbers were bad, and one about steps in which a rank failed."""
    for kind, found in (
        ("bad steps", [each for each in run.metrics.bad_steps if not each.traceback]),
        ("failed steps", [each for each in run.metrics.bad_steps if each.traceback]),
    ):
        if not found:
            continue
        first, num = found[0], len(found)
        noun = "step" if num == 1 else "steps"
        yield Finding(
            kind=kind,
            title=f"{num} {kind.split()[0]} {noun}: step {first.step}, {first.what or 'trouble'}; "
            f"action: {str(first.action) or 'none'}",
            text=(
                "Loss or gradient norm were not finite, or above the limit,"
                if kind == "bad steps"
                else "A rank raised an exception, whose traceback is in `metrics.jsonl`,"
            )
            + f" in {noun} {', '.join(str(each.step) for each in found[:10])}"
            + (" and later." if num > 10 else "."),
            amount=num + _steps_lost(run, found),
            remedies=_against_bad_numbers(run, first.step)
            if kind == "bad steps"
            else _against_failures(run, found),
            severity="bad",
            cost_share=1.0,
        )


def _steps_lost(run: Run, found: list[BadStep]) -> int:
    """Return how many steps the run has not taken because a bad one stopped it."""
    start, steps = run.metrics.start, run.metrics.steps
    is_stopped = not run.metrics.is_finished and found[-1].action == "stop"
    if start is None or not steps or not is_stopped or found[-1].step < steps[-1].step:
        return 0
    return max(0, start.steps - steps[-1].step)


def _against_bad_numbers(run: Run, first: int) -> tuple[Remedy, ...]:
    if _diverges(run, first):
        return given(lower_rate(run), clip(run))
    return given(skip_bad_steps(run), look(f"Look at the data of step {first}"))


def _diverges(run: Run, step: int) -> bool:
    """Say whether gradients had grown before a step, so that the run is at fault and not the step's data."""
    norms = [s.grad_norm for s in run.metrics.steps if s.step < step and isfinite(s.grad_norm)]
    usual = norms[-1 - SPIKE_WINDOW : -1]
    return bool(usual) and norms[-1] > RISEN * median(usual)


def _against_failures(run: Run, found: list[BadStep]) -> tuple[Remedy, ...]:
    if not any("out of memory" in f"{each.what} {each.traceback}".lower() for each in found):
        return (look("Look at the traceback of the first of them in `metrics.jsonl`"),)
    return given(smaller_microbatches(run), recompute(run))


def _stalls(run: Run) -> Iterator[Finding]:
    """Yield a finding for each rank, or set of ranks, that kept others waiting: the longest first."""
    by_ranks: dict[tuple[int, ...], list[Stall]] = {}
    for stall in run.metrics.stalls:
        by_ranks.setdefault(stall.ranks, []).append(stall)
    run_s = sum(step.step_s for step in run.metrics.steps if step.step_s > 0)
    found = sorted(by_ranks.items(), key=lambda each: -_seconds(each[1]))
    for ranks, stalls in found[:MOST_STALLED]:
        longest = max(stalls, key=lambda stall: _seconds([stall]))
        name, times = ranks_text(ranks), len(stalls)
        total, most = duration(1e6 * _seconds(stalls)), duration(1e6 * _seconds([longest]))
        often = f"once, for {total}" if times == 1 else f"{times} times, {total} in all"
        yield Finding(
            kind="stalls",
            title=f"{name[0].upper()}{name[1:]} kept others waiting {often}",
            text=("The wait" if times == 1 else f"The longest wait took {most} and")
            + f" ended in step {longest.step}. "
            f"In it, {'the rank' if len(ranks) == 1 else 'the first of them'} was here: {longest.where or 'unknown'}.",
            amount=_seconds(stalls),
            remedies=(
                look(
                    "Look at that line: all ranks wait for work that one rank does alone. Data can be read ahead, "
                    "files can be "
                    "written in the background, compiled code can be cached"
                ),
                look(
                    "If the line is in a layer, look at that rank's device and its host: clocks, memory, other programs"
                ),
            ),
            cost_share=min(1.0, _seconds(stalls) / run_s) if run_s else 0.0,
        )


def _seconds(stalls: list[Stall]) -> float:
    return sum(stall.seconds for stall in stalls if stall.seconds > 0)


def _spikes(run: Run) -> Iterator[Finding]:
    steps = run.metrics.steps
    found = [(step, expected) for step, expected in _unexpected_losses(steps)]
    if not found:
        return
    worst, expected = max(found, key=lambda each: each[0].loss - each[1])
    yield Finding(
        kind="loss jumps",
        title=f"The loss jumps to {worst.loss:.3g} at step {worst.step}, where {expected:.3g} was expected",
        text=f"{len(found)} of {len(steps)} steps are far above the {SPIKE_WINDOW} steps before them.",
        amount=len(found),
        remedies=(
            look(f"Look at the data of step {worst.step}, and at the gradient norm before it"),
        ),
        severity="bad",
        cost_share=0.5,
    )


def _unexpected_losses(steps: tuple[Step, ...]) -> Iterator[tuple[Step, float]]:
    window: list[float] = []
    for step in steps:
        if not isfinite(step.loss):
            continue
        if len(window) == SPIKE_WINDOW:
            expected = median(window)
            # The typical distance, but never so small that a flat curve has spikes.
            distance = max(median(abs(loss - expected) for loss in window), 0.01 * abs(expected))
            if step.loss - expected > SPIKE * distance:
                yield step, expected
            window.pop(0)
        window.append(step.loss)


def _slowing_down(run: Run) -> Iterator[Finding]:
    """Yield a finding about the start whose steps became slower most.

    Only steps of one start are compared: they have the same ranks, devices and settings.
    """
    found = [each for _, steps in run.metrics.by_start if (each := _slow_down(steps))]
    if not found:
        return
    first, last, begin, end = max(found, key=lambda each: each[1] / each[0])
    yield Finding(
        kind="slower",
        title=f"The run becomes slower: {duration(first * 1e6)} a step at first, {duration(last * 1e6)} at the end",
        text=f"Medians of the first and the last quarter of steps {begin} to {end}, which one start has taken, without the first "
        f"{WARM_UP_STEPS}. Three quarters of the later steps took longer than three quarters of the earlier ones.",
        amount=last / first - 1,
        remedies=(
            look(
                "Look for what grows or shares the machine: memory, clocks and temperature, data loading, other "
                "programs"
            ),
        ),
        cost_share=1 - first / last,
    )


def _slow_down(steps: tuple[Step, ...]) -> tuple[float, float, int, int] | None:
    """Return the median times of the first and the last quarter, and the first and the last step; None if not slower.

    Steps vary, so the medians must differ by more than the times within a quarter do.
    """
    timed = [step for step in steps if step.step_s > 0][WARM_UP_STEPS:]
    quarter = len(timed) // 4
    if quarter < WARM_UP_STEPS:
        return None
    early, late = (
        quantiles((step.step_s for step in part), n=4, method="inclusive")
        for part in (timed[:quarter], timed[-quarter:])
    )
    if late[1] < (1 + SLOWER_BY) * early[1] or late[0] <= early[2]:
        return None
    return early[1], late[1], timed[0].step, timed[-1].step
