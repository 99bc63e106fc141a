"""How a step scales: the same work for each GPU, on more and more of them, fully sharded and with a replica on each host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fullshard.programs.plan_tool.changes import (
    DIVIDED_STATE,
    RECOMPUTE,
    RECOMPUTED,
    REPLICAS,
    changed,
)
from fullshard.programs.plan_tool.parallel_plans import Planner, one_by_one
from fullshard.programs.plan_tool.planned_step import PlannedStep
from fullshard.programs.plan_tool.planning import estimated
from fullshard.programs.plan_tool.question import Question
from fullshard.programs.plan_tool.search import Told
from fullshard.programs.train.model_argument import MAX_WORLD
from fullshard.programs.train.model_source import ModelSource

DOUBLINGS = 6
"""So often the number of GPUs is doubled until a step fits."""

POINTS = 4
"""So many numbers of GPUs are tried beyond one host."""


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """A number of GPUs."""

    world: int
    full: PlannedStep
    """Sharded over all of them."""
    replicated: PlannedStep | None
    """A replica on each host; None on one host, where that is the same."""


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
) -> list[ScalePoint]:
    """Return steps of more and more GPUs, each with as many windows as a GPU has now.

    Args:
        question: What is given.
        source: Its model.
        told: Is told about the progress.
        planner: Makes the plans; None for one after the other.

    Raises:
        ConfigurationError: the model has no plan.
    """
    per_host = question.machine.links.devices_per_host
    worlds = worlds_up_to(question.world, per_host)
    beyond_host = [world for world in worlds if world > per_host]
    asked = [_asked(question, world, replicas=1) for world in worlds]
    asked += [_asked(question, world, replicas=world // per_host) for world in beyond_host]
    steps = (planner or one_by_one(source))(estimated, asked)
    found = []
    for index, each in enumerate(asked):
        replicas = each.config.sharding.replicas
        told(index, len(asked), f"{each.world:,} GPUs" + (" (HSDP)" if replicas > 1 else ""))
        found.append(next(steps))
    replicated = dict(zip(beyond_host, found[len(worlds) :], strict=True))
    return [
        ScalePoint(world, full, replicated.get(world))
        for world, full in zip(worlds, found, strict=False)
    ]


def _asked(question: Question, world: int, *, replicas: int) -> Question:
    """Return the question for another number of GPUs, with as many windows for each."""
    rows = question.config.train.batch // question.world
    values = {REPLICAS: replicas, DIVIDED_STATE: False, "train.batch": rows * world}
    return replace(question, config=changed(question.config, values), world=world)


def enough_gpus(question: Question, given: PlannedStep, planner: Planner) -> PlannedStep | None:
    """Return the step on twice as many GPUs, or four times and so on, that fits; None if none does.

    Every GPU keeps its windows. Blocks are recomputed only where it does not fit otherwise.
    """
    held = sum(given.memory.at_peak.get(kind, 0) for kind in ("parameters", "optimizer"))
    for doublings in range(1, DOUBLINGS + 1):
        world = question.world << doublings
        if world > MAX_WORLD or held >> doublings > question.machine.usable_bytes:
            continue
        asked = _asked(question, world, replicas=question.config.sharding.replicas)
        recomputed = changed(asked.config, {RECOMPUTE: RECOMPUTED[-1]})
        steps = planner(estimated, [asked, replace(asked, config=recomputed)])
        for step in steps:
            if step.fits:
                return step
    return None


def crossover_text(points: Sequence[ScalePoint]) -> str:
    """Say from how many GPUs on a replica on each host is faster, and why."""
    pairs = [(each, each.replicated) for each in points if each.replicated is not None]
    if not pairs:
        return "All GPUs are on one host, where every gather is fast."
    for point, replicated in pairs:
        if replicated.tokens_per_second > point.full.tokens_per_second:
            return _crossing(point, replicated)
    last, replicated = pairs[-1]
    reductions = replicated.playback.idle["reduction"] - last.full.playback.idle["reduction"]
    return (
        f"Full sharding is faster up to {last.world:,} GPUs: gathers over all hosts are hidden behind compute, and replicas "
        f"would have to reduce every gradient once more, between hosts ({_ms(reductions)} more of waits for reductions)."
    )


def _crossing(point: ScalePoint, replicated: PlannedStep) -> str:
    full, other = point.full.playback.idle, replicated.playback.idle
    fits = "" if replicated.fits else " It does not fit there, however."
    return (
        f"From about {point.world:,} GPUs on, a replica on each host (HSDP) is faster. With full sharding every gather and every reduction "
        f"goes through all hosts, and a ring of {point.world:,} GPUs has as many hops: compute waits {_ms(full['gather'])} for gathers and "
        f"{_ms(full['reduction'])} for reductions. With replicas it waits {_ms(other['gather'])} and {_ms(other['reduction'])}: their "
        f"gathers stay within a host, and their reductions do but for an all-reduce of each shard.{fits}"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * max(0.0, seconds):,.3g} ms"
