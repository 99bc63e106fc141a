"""Changes of a configuration: how it is sharded, recomputed, accumulated and compiled.

A change is written as `--set` takes it. Most do not change what is learned. Those in `TRAINS_OTHERWISE` do: a larger batch, the
optimizer with state in 8 bits, weights and their state in bfloat16. With `compute.wire` gradients are rounded on the wire.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from fullshard.programs.plan_tool.machine import Machine
from fullshard.programs.plan_tool.question import BATCH as BATCH, RECOMPUTE as RECOMPUTE, Question
from fullshard.programs.train.config import Grouping, Recomputation, RunConfig
from fullshard.programs.train.config_file import toml_value

MAX_REPLICA_SIZES = 3
"""Most sizes of replicas that are tried: one host, and larger ones."""

REPLICAS = "sharding.replicas"
DIVIDED_STATE = "optimizer.shard_over_replicas"
RESHARD = "sharding.reshard_after_forward"
ACCUMULATE = "train.accumulate"
GROUPS = "sharding.groups"
WIRE = "compute.wire"
OFFLOAD = "sharding.offload"
COMPILE = "compute.compile"
FUSE = "compute.fuse_gradients"
OPTIMIZER = "optimizer.name"

WEIGHTS = "model.dtype"

TRAINS_OTHERWISE = {BATCH, OPTIMIZER, WEIGHTS}
"""Fields whose values change what is learned."""

LARGER = (2, 4)
"""Factors of larger numbers of windows that are tried."""

SENDING = ("muon", "adamw8bit")
"""Optimizers that send tensors, which with offload are in host memory: such a step has no plan."""

RECOMPUTED: tuple[str, ...] = get_args(Recomputation)
"""Choices of recomputation, from the most activations kept to the fewest."""


@dataclass(frozen=True, slots=True)
class Change:
    """Other values of some fields."""

    values: tuple[tuple[str, Any], ...]
    saves_memory: bool = False
    """It takes longer by itself, and is of use only where memory is short."""

    @property
    def axis(self) -> str:
        """The field that it is about. A configuration has at most one change of it."""
        return self.values[0][0]

    @property
    def settings(self) -> str:
        """Its values as `--set` takes them."""
        return ", ".join(f"{name}={_shown(value)}" for name, value in self.values)

    @property
    def trains_otherwise(self) -> bool:
        """Whether it changes what is learned."""
        return any(name in TRAINS_OTHERWISE for name, _ in self.values)

    def of(self, config: RunConfig) -> RunConfig:
        """Return the changed configuration."""
        return changed(config, dict(self.values))


def combined(changes: tuple[Change, ...]) -> Change:
    """Return all of them as one."""
    return Change(
        tuple(value for change in changes for value in change.values),
        saves_memory=all(change.saves_memory for change in changes),
    )


def changed(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return a configuration with other values of some fields."""
    for full_name, value in values.items():
        section, _, name = full_name.partition(".")
        other = replace(getattr(config, section), **{name: value})
        config = replace(config, **{section: other})
    return config


def _shown(value: object) -> str:
    return value if isinstance(value, str) else toml_value(value)


def single_changes(question: Question) -> list[Change]:
    """Return all changes of one field that are possible."""
    config = question.config
    found = [
        *_replicas(question),
        *_accumulations(question),
        *_recomputations(config),
        Change(
            ((RESHARD, not config.sharding.reshard_after_forward),),
            saves_memory=not config.sharding.reshard_after_forward,
        ),
        *(
            Change(((GROUPS, each),))
            for each in get_args(Grouping)
            if each != config.sharding.groups
        ),
    ]
    if config.compute.wire == "fp32" and config.compute.precision == "bf16":
        found.append(Change(((WIRE, "bf16"),)))
    if config.sharding.offload:
        found.append(Change(((OFFLOAD, False),)))
    if config.compute.compile == "none":
        found.append(Change(((COMPILE, "blocks"),)))
    if not config.compute.fuses_gradients("cuda"):
        found.append(Change(((FUSE, True),)))
    if config.optimizer.name in ("adam", "adamw"):
        found.append(Change(((OPTIMIZER, "adamw8bit"),), saves_memory=True))
    if config.model.dtype == "fp32" and config.compute.precision == "bf16":
        found.append(Change(((WEIGHTS, "bf16"),), saves_memory=True))
    return [change for change in found if is_possible(question, change)]


def is_possible(question: Question, change: Change) -> bool:
    """Say whether the changed configuration goes together, and with the number of ranks."""
    config = change.of(question.config)
    return not any((*config.problems(), *config.world_problems(question.world)))


def replica_sizes(world: int, machine: Machine) -> list[int]:
    """Return how many ranks of a replica are worth a try: whole hosts, as links within a host are faster; fewer than all."""
    sizes, size = [], machine.links.devices_per_host
    while size < world:
        if world % size == 0:
            sizes.append(size)
        size *= 2
    step = max(1, len(sizes) // MAX_REPLICA_SIZES)
    return sizes[::step][:MAX_REPLICA_SIZES]


def _replicas(question: Question) -> Iterator[Change]:
    now = question.config.sharding.replicas
    if now > 1:
        values: tuple[tuple[str, Any], ...] = ((REPLICAS, 1),)
        if question.config.optimizer.shard_over_replicas:
            values += ((DIVIDED_STATE, False),)
        yield Change(values, saves_memory=True)
    for size in replica_sizes(question.world, question.machine):
        replicas = question.world // size
        if replicas != now:
            yield Change(((REPLICAS, replicas),), saves_memory=replicas < now)


def with_divided_state(question: Question, change: Change) -> Change | None:
    """Return a change to replicas that divide the optimizer's state among them; None if that is not possible."""
    other = Change((*change.values, (DIVIDED_STATE, True)))
    replicas = other.of(question.config).sharding.replicas
    if change.axis != REPLICAS or replicas == 1 or not is_possible(question, other):
        return None
    return other


def offloads(question: Question) -> list[Change]:
    """Return changes that move shards to host memory, alone and with what else saves the most; none if that has no plan."""
    config = question.config
    has_plan = config.optimizer.name not in SENDING and not config.optimizer.shard_over_replicas
    if config.sharding.offload or not has_plan:
        return []
    values: list[tuple[str, Any]] = [(OFFLOAD, True)]
    found = [Change(tuple(values), saves_memory=True)]
    if config.compute.checkpoint_activations != RECOMPUTED[-1]:
        values.append((RECOMPUTE, RECOMPUTED[-1]))
        found.append(Change(tuple(values), saves_memory=True))
    rows = config.train.batch // question.world
    if config.train.accumulate != rows:
        values.append((ACCUMULATE, rows))
        found.append(Change(tuple(values), saves_memory=True))
    return [change for change in found if is_possible(question, change)]


def larger_batches(question: Question, change: Change | None) -> list[Change]:
    """Return a change, or the question as it is, with more windows: in larger microbatches, in more of them, with less that is kept."""
    values = {} if change is None else dict(change.values)
    train = question.config.train if change is None else change.of(question.config).train
    found: list[dict[str, Any]] = [{BATCH: train.batch * times} for times in LARGER]
    most = found[-1]
    found.append({**most, ACCUMULATE: train.accumulate * LARGER[-1]})
    found.append({**most, RECOMPUTE: RECOMPUTED[-1]})
    changes = [Change(tuple({**values, **each}.items())) for each in found]
    # Some say the same: what is recomputed already, for one.
    different = {repr(each.of(question.config)): each for each in reversed(changes)}
    return [each for each in reversed(different.values()) if is_possible(question, each)]


def accumulations(question: Question) -> list[Change]:
    """Return all numbers of microbatches into which the windows of a GPU can be divided, the fewest first."""
    now = question.config.train.accumulate
    rows = question.config.train.batch // question.world
    return [
        Change(((ACCUMULATE, count),), saves_memory=count > now)
        for count in range(1, rows + 1)
        if rows % count == 0 and count != now
    ]


def _accumulations(question: Question) -> list[Change]:
    """Return those that are always worth a try: none, half, twice as many, and one window each."""
    now = question.config.train.accumulate
    rows = question.config.train.batch // question.world
    tried = {1, now // 2, now * 2, rows}
    return [each for each in accumulations(question) if each.values[0][1] in tried]


def _recomputations(config: RunConfig) -> Iterator[Change]:
    now = config.compute.checkpoint_activations
    for each in RECOMPUTED:
        if each != now:
            saves = RECOMPUTED.index(each) > RECOMPUTED.index(now)
            yield Change(((RECOMPUTE, each),), saves_memory=saves)
