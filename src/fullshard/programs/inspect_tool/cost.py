"""What a model would cost each rank, from the layout of its groups alone.

The model is built on the meta device and sharded as `fullshard train` would shard it, as one rank of a `fake` process
group. No parameter has memory, and nothing is communicated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fullshard.plan.layout import IN_PLACE_FROM
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.model_source import open_model
from fullshard.programs.train.sharded_model import make_mesh, shard
from fullshard.torch_border import fake_process_group
from fullshard.tracing.group_facts import group_facts
from fullshard.tracing.schema import GroupFacts

ADAM_STATES = 2
"""Mean and mean square, each as large as the parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one rank, or of a model that is not sharded."""

    parameters: int
    gradients: int
    optimizer: int
    """Of Adam."""
    gathered: int
    """Most unsharded parameters that have memory at the same time."""

    @property
    def total(self) -> int:
        """The sum, at the worst moment."""
        return self.parameters + self.gradients + self.optimizer + self.gathered


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes on the wire of one rank, in one optimizer step."""

    gathers: int
    reductions: int
    all_reductions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedPlan:
    """How a model would be sharded, for rank 0, which holds the most."""

    description: str
    is_wrapped: bool
    """The run uses the wrapper. Its groups are the same; the sizes are those of `fully_shard`."""
    world: int
    replicas: int
    groups: tuple[GroupFacts, ...]
    rank: Memory
    unsharded: Memory
    traffic: Traffic


def measure(config: RunConfig, world: int) -> ShardedPlan:
    """Return how the model of a configuration would be sharded over so many ranks, which its replicas divide.

    Raises:
        ConfigurationError: there is no such model.
    """
    is_wrapped = config.sharding.door == "wrapper"
    # Only sizes are wanted. They do not depend on where shards are kept, and the wrapper has the same groups but
    # cannot be built without memory.
    config = replace(config, sharding=replace(config.sharding, offload=False, door="fully_shard"))
    source = open_model(config)
    model = source.build()
    whole = sum(param.numel() * param.element_size() for param in model.parameters())
    with fake_process_group(world):
        mesh = make_mesh(config.sharding.replicas, torch.device("cpu"))
        shard(model, source.blocks(model), mesh, torch.device("meta"), config)
        groups = group_facts(model)
    at_rest = sum(group.shard_bytes for group in groups)
    return ShardedPlan(
        description=source.description,
        is_wrapped=is_wrapped,
        world=world,
        replicas=config.sharding.replicas,
        groups=groups,
        rank=_memory(at_rest, gathered=_gathered_at_most(groups, config)),
        unsharded=_memory(whole, gathered=0),
        traffic=_traffic(groups, config),
    )


def _memory(parameters: int, *, gathered: int) -> Memory:
    return Memory(
        parameters=parameters,
        gradients=parameters,
        optimizer=ADAM_STATES * parameters,
        gathered=gathered,
    )


def _is_root(group: GroupFacts) -> bool:
    return "" in group.modules


def _gathered_at_most(groups: tuple[GroupFacts, ...], config: RunConfig) -> int:
    """Return the bytes of the root, which stays unsharded, and of the groups that are gathered while one computes."""
    root = sum(group.gathered_bytes for group in groups if _is_root(group))
    others = [group for group in groups if not _is_root(group)]
    sizes = [group.gathered_bytes for group in others]
    if not config.sharding.reshard_after_forward:
        return root + sum(sizes) + max(map(_message_bytes, others), default=0)
    # One computes while those ahead of it are gathered; without prefetch a group is released when the
    # next one has its memory.
    together = 1 + max(1, config.sharding.prefetch)
    windows = [sizes[i : i + together] for i in range(max(1, len(sizes) - together + 1))]
    return root + max(map(sum, windows), default=0)


def _message_bytes(group: GroupFacts) -> int:
    """Return the bytes of a group of small parameters as it arrives, before it is distributed; large ones arrive in place."""
    piece = group.gathered_bytes // group.world
    return group.gathered_bytes if piece < IN_PLACE_FROM * group.parameters else 0


def _traffic(groups: tuple[GroupFacts, ...], config: RunConfig) -> Traffic:
    """Return the bytes of the gathers of each microbatch's forward and backward, and of one reduction."""
    again = config.sharding.reshard_after_forward
    gathers = (group.gather_bytes * (2 if again and not _is_root(group) else 1) for group in groups)
    return Traffic(
        gathers=config.train.accumulate * sum(gathers),
        reductions=sum(group.reduce_bytes for group in groups),
        all_reductions=sum(group.all_reduce_bytes for group in groups),
    )
