"""Scaling of a step: the same work for each GPU, on more and more of them, fully sharded and with a replica on each host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from fullshard.errors import size_text
from fullshard.programs.console.tables import counted
from fullshard.programs.plan_tool.changes import (
    ACCUMULATE,
    BATCH,
    DIVIDED_STATE,
    RECOMPUTE,
    RECOMPUTED,
    REPLICAS,
    changed,
)
from fullshard.programs.plan_tool.parallel_plans import Planner, one_by_one
from fullshard.programs.plan_tool.planned_step import PlannedStep, held_bytes
from fullshard.programs.plan_tool.planning import attempted, estimated
from fullshard.programs.plan_tool.question import Question
from fullshard.programs.plan_tool.search import WORTHWHILE, Search, Told
from fullshard.programs.train.model_argument import MAX_WORLD
from fullshard.programs.train.model_source import ModelSource

MOST_GUESSES = 6
"""Number of guesses of the smallest number of GPUs."""

POINTS = 4
"""Most numbers of GPUs that are tried beyond one host."""


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """A number of GPUs."""

    world: int
    full: PlannedStep
    """Sharded over all of them."""
    replicated: PlannedStep | None
    """A replica on each host; None on one host, where that is the same."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """Steps on more and more GPUs."""

    points: Sequence[ScalePoint]
    failed: Sequence[str] = ()
    """Sentences about those without a plan, and why."""


def worlds_up_to(world: int, per_host: int) -> list[int]:
    """Return 1, one host, and numbers of hosts up to about `world` in equal ratios, whole hosts each."""
    found = {1, min(world, per_host)}
    hosts = world // per_host
    for index in range(1, POINTS + 1):
        found.add(per_host * max(1, round(hosts ** (index / POINTS))) if hosts > 1 else 1)
    return sorted(each for each in found if each <= world)


def scaling(
    question: Question,
    source: ModelSource,
    told: Told = lambda done, total, what: None,
    planner: Planner | None = None,
    *,
    most: int = 0,
) -> Scaling:
    """Return steps of more and more GPUs, each with as many windows as a GPU has now.

    Args:
        question: The given run.
        source: Its model.
        told: Is told about the progress.
        planner: Makes the plans; None for one after the other.
        most: GPUs, if more than the question has.
    """
    per_host = question.machine.links.devices_per_host
    worlds = worlds_up_to(max(question.world, most), per_host)
    beyond_host = [world for world in worlds if world > per_host]
    asked = [_asked(question, world, replicas=1) for world in worlds]
    asked += [_asked(question, world, replicas=world // per_host) for world in beyond_host]
    steps = (planner or one_by_one(source))(partial(attempted, estimated), asked)
    found: dict[tuple[int, bool], PlannedStep] = {}
    failed = []
    for index, each in enumerate(asked):
        is_replicated = each.config.sharding.replicas > 1
        name = counted(each.world, "GPU") + (" (HSDP)" if is_replicated else "")
        told(index, len(asked), name)
        step = next(steps)
        if isinstance(step, str):
            failed.append(f"{name}: {step}")
        else:
            found[each.world, is_replicated] = step
    points = [
        ScalePoint(world, found[world, False], found.get((world, True)))
        for world in worlds
        if (world, False) in found
    ]
    return Scaling(points, failed)


def _asked(question: Question, world: int, *, replicas: int) -> Question:
    """Return the question for another number of GPUs, with as many windows for each."""
    rows = question.config.train.batch // question.world
    values = {REPLICAS: replicas, DIVIDED_STATE: False, BATCH: rows * world}
    return replace(question, config=changed(question.config, values), world=world)


def fewest_gpus(question: Question, planner: Planner) -> PlannedStep | str | None:
    """Return the step on the smallest number of GPUs on which the model can be trained with windows of this length.

    Each GPU has one window, all blocks are recomputed, and shards are divided among all GPUs. None if a window takes too much
    memory on any number of GPUs; the error if there is no plan.
    """
    there = question.machine.usable_bytes
    (step,) = _frugal_steps(question, [question.world], planner)
    if isinstance(step, str):
        return step
    held = held_bytes(step) * question.world
    rest = step.memory.reserved - held // question.world
    if rest >= there:
        return None
    known: dict[int, PlannedStep] = {step.world: step}
    # Held memory shrinks with the number of GPUs. Padding and fragments do not, so neighbours are planned, too.
    guess = max(1, -(-held // (there - rest)))
    for _ in range(MOST_GUESSES):
        size = next_size(guess, question.machine.links.devices_per_host)
        before = size_before(size, question.machine.links.devices_per_host)
        if size > MAX_WORLD:
            return None
        wanted = [each for each in (before, size) if each and each not in known]
        for world, answer in zip(wanted, _frugal_steps(question, wanted, planner), strict=True):
            if isinstance(answer, str):
                return answer
            known[world] = answer
        if known[size].fits and not (before and known[before].fits):
            return known[size]
        guess = before if known[size].fits else size + 1
    return None


def _frugal_steps(
    question: Question, worlds: Sequence[int], planner: Planner
) -> list[PlannedStep | str]:
    """Return steps, or errors, with what takes the least memory on so many GPUs."""
    values = {REPLICAS: 1, DIVIDED_STATE: False, RECOMPUTE: RECOMPUTED[-1], ACCUMULATE: 1}
    asked = [
        replace(question, config=changed(question.config, {**values, BATCH: world}), world=world)
        for world in worlds
    ]
    return list(planner(partial(attempted, estimated), asked))


def next_size(world: int, per_host: int) -> int:
    """Return the smallest usual number of GPUs that is not below a number: powers of two on a host, then whole hosts."""
    if world > per_host:
        return -(-world // per_host) * per_host
    return min(1 << (world - 1).bit_length(), per_host)


def size_before(size: int, per_host: int) -> int:
    """Return the usual number of GPUs below one of them; 0 if that is the smallest."""
    if size > per_host:
        return size - per_host
    return size // 2 if size & (size - 1) == 0 else 1 << (size.bit_length() - 1)


def crossover_text(points: Sequence[ScalePoint]) -> str:
    """Say from how many GPUs on a replica on each host is faster and fits, and why."""
    pairs = [(each, each.replicated) for each in points if each.replicated is not None]
    if not pairs:
        return "All GPUs are on one host, where every gather is fast."
    faster = [
        (point, replicated)
        for point, replicated in pairs
        if replicated.tokens_per_second >= WORTHWHILE * point.full.tokens_per_second
    ]
    for point, replicated in faster:
        if replicated.fits:
            return _crossing(point, replicated)
    if faster:
        point, replicated = faster[0]
        held = held_bytes(replicated)
        return (
            f"A replica on each host (HSDP) would be faster from about {point.world:,} GPUs on, and does not fit: of its "
            f"{size_text(replicated.memory.reserved)} on each GPU, {size_text(held)} are parameters, gradients and optimizer "
            "state, which are then divided among the GPUs of one host only."
        )
    last, replicated = pairs[-1]
    reductions = replicated.playback.idle["reduction"] - last.full.playback.idle["reduction"]
    fits = "" if replicated.fits else " They would not fit, either."
    return (
        f"Full sharding is faster up to {last.world:,} GPUs: gathers over all hosts are hidden behind compute, and replicas "
        f"would have to reduce every gradient once more, between hosts ({_ms(reductions)} more of waits for reductions).{fits}"
    )


def _crossing(point: ScalePoint, replicated: PlannedStep) -> str:
    full, other = point.full.playback.idle, replicated.playback.idle
    return (
        f"From about {point.world:,} GPUs on, a replica on each host (HSDP) is faster. With full sharding every gather and every reduction "
        f"goes through all hosts, and a ring of {point.world:,} GPUs has as many hops: compute waits {_ms(full['gather'])} for gathers and "
        f"{_ms(full['reduction'])} for reductions. With replicas it waits {_ms(other['gather'])} and {_ms(other['reduction'])}: their "
        f"gathers stay within a host, and their reductions do but for an all-reduce of each shard."
    )


def recommended_text(question: Question, found: Search) -> str:
    """Say how the best configuration that was found is sharded, so that the curves are read beside it."""
    best = found.best[0].step.config if found.fits else question.config
    replicas = best.sharding.replicas
    if replicas == 1:
        how = "is sharded over all GPUs"
    else:
        how = f"has {replicas} replicas of {question.world // replicas} GPUs"
    return f"The best configuration that was found for {question.world:,} GPUs {how}; the curves are of the one that was asked for."


def _ms(seconds: float) -> str:
    return f"{1e3 * max(0.0, seconds):,.3g} ms"
