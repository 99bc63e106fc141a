"""Findings about the recorded steps: waits, the wire, groups, memory. All thresholds are constants here."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median

from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.findings import Finding
from fullshard.programs.report.remedies import (
    SMALL_GROUP_BYTES,
    bytes_take_time,
    deeper_prefetch,
    fewer_groups,
    flat_optimizer,
    given,
    half_of_the_bytes,
    is_flat,
    keep_gathered,
    larger_batch,
    less_padding,
    look,
    narrow_wire,
    release_after_forward,
    replicas,
    smaller_beginning,
    smaller_groups,
    unshard_early,
)
from fullshard.programs.report.replay import MAX_DEPTH
from fullshard.programs.report.timeline import WaitTimes, mean_duration_us
from fullshard.programs.report.units import count, duration, share, size
from fullshard.tracing.schema import COLLECTIVES, Span

HIDDEN_BELOW = 0.01
"""Exposed communication below this share of a step needs no action: steps vary by more."""

WORTH_REPORTING = 0.01
"""A single cause is reported from this share of the step on."""

HELPS_FROM = 0.3
"""A deeper prefetch, which costs memory, is recommended if it removes at least this share of the waits for gathers."""

NEARLY_ALL = 0.8
"""A smaller depth is preferred if it removes this share of what the best depth removes: it costs less memory."""

WIRE_BOUND = 0.8
"""The wire is the bottleneck if gathers take at least this share of the time of compute."""

SLOW_GATHER = 4.0
"""A gather is slow if it takes this many times as long as gathers of groups of its size."""

MANY_SMALL = 0.5
"""Merging groups is recommended if at least this share of them is small."""

PADDING = 0.05
"""Padding is reported from this share of all stored and sent elements on."""

HELD_AT_ONCE = 0.75
"""If this share of all parameters is gathered at the same time, sharding saves little of their memory."""

OUTSIDE = 0.35
"""Time outside of forward and backward is reported from this share of the step on."""


def find_in_steps(analysis: Analysis) -> Iterator[Finding]:
    """Yield all findings about the recorded steps; none if nothing was recorded."""
    if not analysis.steps:
        return
    yield from _first_gather(analysis)
    yield from _gather_waits(analysis)
    yield from _reduction_waits(analysis)
    yield from _straggler(analysis)
    yield from _small_groups(analysis)
    yield from _padding(analysis)
    yield from _held_at_once(analysis)
    yield from _outside(analysis)
    yield from _hidden(analysis)


def _first_gather(analysis: Analysis) -> Iterator[Finding]:
    wait = _first_wait(analysis)
    if wait is None or wait.mean_us < WORTH_REPORTING * analysis.step_us:
        return
    part = wait.mean_us / analysis.step_us
    yield Finding(
        kind="first gather",
        title=f"The step begins with {duration(wait.mean_us)} of waiting for the gather of `{wait.group}`",
        text=f"That is {share(part)} of the step. Nothing computes before the first gather is "
        f"there, so no prefetch can hide it. {_slowness(analysis, wait.group)}",
        amount=part,
        remedies=given(smaller_beginning(analysis, wait.group), unshard_early(analysis)),
        cost_share=part,
    )


def _first_wait(analysis: Analysis) -> WaitTimes | None:
    """Return the wait for the first gather of a step."""
    first = next((gather for step in analysis.judged for gather in step.of("gather")), None)
    if first is None:
        return None
    key = (first.group, first.phase, "gather")
    waits = (
        wait for wait in analysis.judged_waits if (wait.group, wait.phase, wait.awaited) == key
    )
    return next(waits, None)


def _gather_waits(analysis: Analysis) -> Iterator[Finding]:
    first = _first_wait(analysis)
    waits = [wait for wait in analysis.judged_waits if wait.awaited == "gather" and wait != first]
    total = sum(wait.mean_us for wait in waits)
    cost = total / analysis.step_us
    if cost < WORTH_REPORTING:
        return
    longest = waits[0]
    where = f"`{longest.group}` waits {duration(longest.mean_us)} for its gather in {longest.phase}"
    text = (
        f"Compute stands still for {duration(total)} a step, {share(cost)} of it, for gathers after the first"
        f"{_and_others(waits)}. {_slowness(analysis, longest.group)}"
    )
    depth = _helpful_depth(analysis)
    remedy = None if depth is None else deeper_prefetch(analysis, depth)
    if depth is None or remedy is None or analysis.prefetch is None:
        yield _no_depth_helps(analysis, where, text, cost, helpful=depth)
        return
    left = analysis.waits_at(depth)
    left_here = left.get((longest.group, longest.phase), 0.0)
    left_in_all = sum(left.values()) - (left.get((first.group, first.phase), 0.0) if first else 0.0)
    more = (depth - analysis.prefetch) * max(g.gathered_bytes for g in analysis.groups.values())
    yield Finding(
        kind="gathers",
        title=f"{where}: prefetch depth {depth} would "
        + ("hide it" if left_here < 0.1 * longest.mean_us else f"leave {duration(left_here)}"),
        text=text
        + f"Replayed with gathers issued {depth} groups ahead instead of {analysis.prefetch}, "
        f"{duration(left_in_all)} a step remain, for up to {size(more)} more memory.",
        amount=cost,
        remedies=(remedy,),
        cost_share=cost,
    )


def _and_others(waits: list[WaitTimes]) -> str:
    named = [f"`{wait.group}` in {wait.phase} {duration(wait.mean_us)}" for wait in waits[1:4]]
    more = len(waits) - 1 - len(named)
    if not named:
        return ""
    return "; after the longest: " + ", ".join(named) + (f" and {more} more" if more else "")


def _slowness(analysis: Analysis, name: str) -> str:
    """Return a sentence if the group's gather is slow, compared with groups of about its size."""
    gathers = _gathers_by_group(analysis)
    if name not in gathers:
        return ""
    own_bytes = gathers[name][0].nbytes
    alike = [
        mean_duration_us(spans)
        for group, spans in gathers.items()
        if group != name and own_bytes / 2 <= spans[0].nbytes <= own_bytes * 2
    ]
    own = mean_duration_us(gathers[name])
    if len(alike) < 2 or own < SLOW_GATHER * median(alike):
        return ""
    return f"Its gather takes {duration(own)}; those of groups of its size take {duration(median(alike))}. "


def _gathers_by_group(analysis: Analysis) -> dict[str, list[Span]]:
    gathers: dict[str, list[Span]] = {}
    for step in analysis.judged:
        for gather in step.of("gather"):
            gathers.setdefault(gather.group, []).append(gather)
    return gathers


def _helpful_depth(analysis: Analysis) -> int | None:
    """Return the smallest depth that removes nearly all that any depth can; None if that is too little."""
    used = analysis.prefetch
    if used is None or not analysis.groups:
        return None
    left = {d: sum(analysis.waits_at(d).values()) for d in range(used, max(used, MAX_DEPTH) + 1)}
    gain = left[used] - min(left.values())
    if gain <= HELPS_FROM * left[used]:
        return None
    return next(depth for depth, waits in left.items() if left[used] - waits >= NEARLY_ALL * gain)


def _no_depth_helps(
    analysis: Analysis, where: str, text: str, cost: float, *, helpful: int | None
) -> Finding:
    steps = analysis.judged
    wire_us = fmean(step.lane("gather").wire_us for step in steps)
    compute_us = fmean(step.compute_us("forward", "backward") for step in steps)
    title = where
    if analysis.prefetch is None:
        text += (
            "A replay of the step does not give the measured waits, so nothing is predicted for another prefetch "
            "depth. "
        )
    elif helpful is not None:
        text += f"Prefetch depth {helpful} would help. `fully_shard` has that option; the wrapper does not. "
    else:
        text += f"No prefetch depth up to {MAX_DEPTH} would remove much of it. "
        if wire_us >= WIRE_BOUND * compute_us:
            title = f"The wire is the bottleneck: {where}"
    text += f"Gathers are on the wire for {duration(wire_us)} a step; forward and backward compute for {duration(compute_us)}."
    return Finding(
        kind="gathers",
        title=title,
        text=text,
        amount=cost,
        remedies=given(
            larger_batch(analysis, per="gather"),
            half_of_the_bytes(analysis),
            keep_gathered(analysis),
            replicas(analysis) if bytes_take_time(analysis, "gather") else None,
        ),
        cost_share=cost,
    )


def _reduction_waits(analysis: Analysis) -> Iterator[Finding]:
    waits = [
        wait for wait in analysis.judged_waits if wait.awaited == "reduction" and wait.mean_us > 0
    ]
    total = sum(wait.mean_us for wait in waits)
    cost = total / analysis.step_us
    if cost < WORTH_REPORTING:
        return
    yield Finding(
        kind="reductions",
        title=f"Compute waits {duration(total)} for reductions, {share(cost)} of the step",
        text=f"The longest is that of `{waits[0].group}` with {duration(waits[0].mean_us)}. Reductions at the end of "
        "backward have no compute left to overlap with.",
        amount=cost,
        remedies=given(
            narrow_wire(analysis),
            smaller_beginning(analysis, waits[0].group),
            larger_batch(analysis, per="reduction"),
        ),
        cost_share=cost,
    )


def _straggler(analysis: Analysis) -> Iterator[Finding]:
    late = analysis.straggler
    if late is None:
        return
    exposed = fmean(step.exposed_us for step in analysis.steps if step.rank != late.rank)
    # Time on the wire that compute hides costs nothing.
    lost_us = min(late.waited_us, exposed)
    part = lost_us / analysis.step_us
    yield Finding(
        kind="late rank",
        title=f"Rank {late.rank} comes later than the others, which wait up to {duration(lost_us)} a step for it",
        text=f"{share(late.share)} of the time that ranks waited for each other was spent on this rank. Their waits "
        f"look like a slow wire; the other findings use the times of rank {late.rank} alone.",
        amount=part,
        remedies=(
            look(
                f"Look at rank {late.rank}'s machine: clocks, temperature, other processes, its data loading"
            ),
            look("Give all ranks the same work: batches of equal length"),
        ),
        cost_share=part,
    )


def _small_groups(analysis: Analysis) -> Iterator[Finding]:
    groups = analysis.groups.values()
    small = [group for group in groups if 0 < group.gathered_bytes < SMALL_GROUP_BYTES]
    if len(small) < 4 or len(small) < MANY_SMALL * len(groups):
        return
    remedy = fewer_groups(analysis)
    if remedy is None:  # some models have no larger groups
        return
    names = {group.name for group in small}
    spans = [
        span for step in analysis.judged for span in step.of(*COLLECTIVES) if span.group in names
    ]
    if not spans:
        return
    # The part of a wait beyond the time of a usual collective of these groups has another cause.
    usual_us = median(span.duration_us for span in spans)
    waited = sum(
        min(wait.mean_us, usual_us) for wait in analysis.judged_waits if wait.group in names
    )
    if waited < WORTH_REPORTING * analysis.step_us:
        return
    yield Finding(
        kind="small groups",
        title=f"{len(small)} of {len(groups)} groups are smaller than {size(SMALL_GROUP_BYTES)}: their time is mostly latency",
        text=f"Compute waits {duration(waited)} a step for them, not counting what is unusually long. Fewer and larger groups send "
        "the same bytes in fewer calls.",
        amount=waited / analysis.step_us,
        remedies=(remedy,),
        cost_share=waited / analysis.step_us,
    )


def _padding(analysis: Analysis) -> Iterator[Finding]:
    groups = analysis.groups.values()
    padded = sum(group.padded_numel for group in groups)
    part = 1 - sum(group.numel for group in groups) / padded if padded else 0.0
    if part < PADDING:
        return
    worst = max(groups, key=lambda group: group.padded_numel - group.numel)
    why = (
        "Parameters are cut regardless of rows, into equal pieces."
        if is_flat(analysis)
        else f"Rows are kept whole, so a parameter with few rows is padded up to {worst.world} ranks."
    )
    yield Finding(
        kind="padding",
        title=f"{share(part)} of what is stored and sent is padding",
        text=f"Most of it is in `{worst.name}`: {count(worst.padded_numel - worst.numel)} of {count(worst.padded_numel)} elements. "
        + why,
        amount=part,
        remedies=less_padding(analysis),
        cost_share=part * analysis.exposed_share,
    )


def _held_at_once(analysis: Analysis) -> Iterator[Finding]:
    whole, peak = analysis.gathered_bytes, analysis.gathered_peak
    if len(analysis.groups) < 3 or not whole or peak < HELD_AT_ONCE * whole:
        return
    yield Finding(
        kind="gathered at once",
        title=f"{share(min(1.0, peak / whole))} of the parameters are gathered at the same time",
        text=f"At the peak {size(peak)} of {size(whole)} are unsharded; sharding then saves only the memory of "
        "gradients and optimizer state.",
        amount=peak / whole,
        remedies=given(release_after_forward(analysis), smaller_groups(analysis)),
    )


def _outside(analysis: Analysis) -> Iterator[Finding]:
    outside = sum(step.compute_us("outside") for step in analysis.steps) / len(analysis.steps)
    part = outside / analysis.step_us
    if part < OUTSIDE:
        return
    yield Finding(
        kind="outside",
        title=f"{share(part)} of the step is outside of forward and backward",
        text=f"Loss, optimizer, clipping, data and all other work of the program take {duration(outside)} a step. "
        "Sharding can change only the optimizer's part of it.",
        amount=part,
        remedies=given(flat_optimizer(analysis)),
        cost_share=part - OUTSIDE,
    )


def _hidden(analysis: Analysis) -> Iterator[Finding]:
    if analysis.exposed_share < HIDDEN_BELOW:
        yield Finding(
            kind="hidden",
            title=f"Communication is hidden: {share(analysis.exposed_share)} of the step is exposed",
            text=f"Of {duration(analysis.step_us)} a step compute stands still for "
            f"{duration(analysis.exposed_share * analysis.step_us)}.",
            amount=analysis.exposed_share,
            severity="good",
        )
