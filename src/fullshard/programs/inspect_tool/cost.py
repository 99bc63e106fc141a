"""Cost of a model for each rank, from the layout of its groups alone.

The model is built on the meta device and sharded as `fullshard train` would shard it, as one rank of a `fake` process
group. No parameter has memory, and nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Protocol

import torch
from torch import Tensor, nn

from fullshard.features.padding import padding_text
from fullshard.layout.segments import IN_PLACE_FROM
from fullshard.optim.fused_shards import local_of
from fullshard.optim.matrices.muon import hidden_matrices
from fullshard.programs.console.tables import counted
from fullshard.programs.inspect_tool.activations import kept_bytes
from fullshard.programs.train.config import OptimizerSection, RunConfig
from fullshard.programs.train.evaluation import window_losses
from fullshard.programs.train.model_source import ModelSource, open_model
from fullshard.programs.train.sharded_model import (
    configured,
    make_mesh,
    precision_policy,
    shard,
    wrap,
)
from fullshard.programs.train.weights import materialise
from fullshard.torch_border import fake_process_group
from fullshard.tracing.group_facts import group_facts, states_in
from fullshard.tracing.schema import GroupFacts

OTHER_STATES = 2
"""Numbers that Adam keeps for each element: mean and mean square. Muon keeps one of hidden matrices, and two of others."""

BYTES_8BIT = 2 + Fraction(12, 256)
"""Bytes that AdamW8bit keeps for each element: two codes, and for each block two scales and a number. Parts of blocks at the edges of
shards are not counted."""


class InspectedModel(Protocol):
    """Interface of an inspected model: a `ModelSource` has it, and so have models of users."""

    description: str

    def build(self) -> nn.Module:
        """Return the model on the meta device."""

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return its layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one rank, or of a model that is not sharded."""

    parameters: int
    gradients: int
    optimizer: int
    """Its state."""
    gathered: int
    """Most unsharded parameters that have memory at the same time."""
    activations: int | None
    """Tensors that forward keeps for backward; None if they are not known."""

    @property
    def total(self) -> int:
        """The sum, at the worst moment."""
        held = self.parameters + self.gradients + self.optimizer + self.gathered
        return held + (self.activations or 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes on the wire of one rank, in one optimizer step."""

    gathers: int
    reductions: int
    all_reductions: int
    updates: int
    """Received from other replicas that have updated their parts of the shards; 0 if each updates all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedPlan:
    """Sharding of a model, for rank 0, which holds the most."""

    description: str
    world: int
    replicas: int
    groups: tuple[GroupFacts, ...]
    padding: str | None
    """Sentence about the groups that are padded a lot, and why, if there are any."""
    optimizer: str
    """Its name, for people."""
    about_activations: str
    """The batch that they are of, or the reason why they are not known."""
    rank: Memory
    unsharded: Memory
    traffic: Traffic


def measure(
    config: RunConfig,
    world: int,
    source: InspectedModel | None = None,
    inputs: Sequence[Tensor] = (),
) -> ShardedPlan:
    """Return how a model would be sharded over so many ranks, which the configuration's replicas divide.

    Args:
        config: A run.
        world: Ranks.
        source: The model, if it is not that of the run.
        inputs: Arguments of such a model, on the meta device. Without them activations are not known.

    Raises:
        ConfigurationError: there is no such model.
    """
    # Only sizes are wanted, which do not depend on where shards are kept.
    config = replace(config, sharding=replace(config.sharding, offload=False))
    about, activations = (
        _activations_of_run(config, open_model(config), world)
        if source is None
        else _activations_of_inputs(config, source, inputs)
    )
    source = source or open_model(config)
    model = _built(config, source)
    unsharded, numel = _sizes(config, model), sum(p.numel() for p in model.parameters())
    with fake_process_group(world):
        model = _sharded(config, source, model)
        groups = group_facts(model)
        padding = padding_text(((state, name) for state, name, _ in states_in(model)), least=0)
        sharded = _sizes(config, model).with_padding(sum(group.shard_bytes for group in groups))
    itemsize = Fraction(unsharded.parameters, numel or 1)
    states, averages, optimizer = _optimizer_states(config.optimizer, itemsize)

    def memory(sizes: _Sizes, gathered: int, keepers: int = 1) -> Memory:
        state = states * sizes.trained - sizes.with_momentum_only
        return Memory(
            parameters=sizes.parameters,
            gradients=sizes.trained,
            optimizer=int(-(-state // keepers)) + averages * sizes.trained,
            gathered=gathered,
            activations=activations,
        )

    return ShardedPlan(
        description=source.description,
        world=world,
        replicas=config.sharding.replicas,
        groups=groups,
        padding=padding,
        optimizer=optimizer,
        about_activations=about,
        rank=memory(sharded, _gathered_at_most(groups, config), _keepers(config)),
        unsharded=memory(unsharded, 0),
        traffic=_traffic(groups, config),
    )


def _built(config: RunConfig, source: InspectedModel) -> nn.Module:
    """Return the model on the meta device, as the run trains it."""
    return configured(source.build(), config.model)


def _sharded(config: RunConfig, source: InspectedModel, model: nn.Module) -> nn.Module:
    """Return the model as the run shards it, on the meta device."""
    mesh, device = make_mesh(config.sharding.replicas, torch.device("cpu")), torch.device("meta")
    blocks = source.blocks(model) if config.sharding.groups == "blocks" else []
    if config.sharding.api == "fsdp1":
        return wrap(model, blocks, mesh, device, config)
    return shard(model, blocks, mesh, device, config, materialise)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """Bytes of parameters: of one rank, or of a model that is not sharded."""

    parameters: int
    frozen: int
    with_momentum_only: int
    """Bytes of those for which the optimizer keeps one number for each element, where it keeps two for others."""

    @property
    def trained(self) -> int:
        """All that are not frozen."""
        return self.parameters - self.frozen

    def with_padding(self, parameters: int) -> _Sizes:
        """Return the sizes with padding up to so many bytes, of which frozen parameters have their share."""
        frozen = self.frozen * parameters // max(1, self.parameters)
        return replace(self, parameters=parameters, frozen=frozen)


def _sizes(config: RunConfig, model: nn.Module) -> _Sizes:
    """Return how large the parameters are that this rank holds."""
    params = list(model.parameters())
    return _Sizes(
        parameters=_held_bytes(params),
        frozen=_held_bytes(param for param in params if not param.requires_grad),
        with_momentum_only=(
            _held_bytes(hidden_matrices(model)) if config.optimizer.name == "muon" else 0
        ),
    )


def _held_bytes(params: Iterable[nn.Parameter]) -> int:
    return sum(local_of(param).nbytes for param in params)


def _optimizer_states(
    section: OptimizerSection, itemsize: Fraction
) -> tuple[Fraction | int, int, str]:
    """Return how many numbers of ``itemsize`` bytes an optimizer and averages keep for each element, and the names of both."""
    by_name: dict[str, Fraction | int] = {
        "sgd": int(section.momentum > 0),
        "adagrad": 1,
        "adamw8bit": BYTES_8BIT / (itemsize or 4),
    }
    states = by_name.get(section.name, OTHER_STATES)
    if section.ema is None:
        return states, 0, section.name
    return states, 1, f"{section.name}, EMA"


def _keepers(config: RunConfig) -> int:
    """Return how many replicas keep the optimizer's state of a shard together."""
    return config.sharding.replicas if config.optimizer.shard_over_replicas else 1


def _activations_of_run(
    config: RunConfig, source: ModelSource, world: int
) -> tuple[str, int | None]:
    """Return a description of a rank's microbatch, and the bytes that its forward keeps."""
    rows = max(1, config.train.batch // (world * config.train.accumulate))
    context = config.data.context
    tokens = torch.empty(rows, context + 1, dtype=torch.int64, device="meta")
    model = _built(config, source).to("meta")
    about = f"{counted(rows, 'window')} of {context:,} tokens"
    return _kept(
        config, model, source.blocks(model), lambda: window_losses(source, model, tokens), about
    )


def _activations_of_inputs(
    config: RunConfig, source: InspectedModel, inputs: Sequence[Tensor]
) -> tuple[str, int | None]:
    """Return a description of a user's inputs, and the bytes that the model's forward keeps."""
    if not inputs:
        return "give the sizes of one rank's input, such as --input 8x1024:int64", None
    model = _built(config, source)
    recomputes = config.compute.checkpoint_activations == "blocks"
    blocks = source.blocks(model) if recomputes else []
    sizes = ", ".join("x".join(map(str, tensor.shape)) for tensor in inputs)
    dtype = precision_policy(config.compute).param_dtype
    cast = [t.to(dtype) if dtype and t.is_floating_point() else t for t in inputs]
    return _kept(config, model, blocks, lambda: model(*cast), f"an input of {sizes}")


def _kept(
    config: RunConfig,
    model: nn.Module,
    blocks: Sequence[nn.Module],
    forward: Callable[[], object],
    about: str,
) -> tuple[str, int | None]:
    if config.compute.checkpoint_activations == "selective":
        about += ", as if nothing were recomputed (`fullshard plan` counts what selective leaves)"
    try:
        return about, kept_bytes(
            model,
            blocks,
            forward,
            dtype=precision_policy(config.compute).param_dtype,
            recomputes=config.compute.checkpoint_activations == "blocks",
        )
    except Exception as error:  # whatever a model does that tensors without values do not allow
        first_line = (str(error).splitlines() or [""])[0].rstrip(".")
        return f"forward raised {type(error).__name__} without values: {first_line}", None


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
    if group.division == "flat":
        return 0
    return group.gathered_bytes if piece < IN_PLACE_FROM * group.parameters else 0


def _traffic(groups: tuple[GroupFacts, ...], config: RunConfig) -> Traffic:
    """Return the bytes of the gathers of each microbatch's forward and backward, and of one reduction."""
    again = config.sharding.reshard_after_forward
    shards = sum(group.shard_bytes for group in groups)
    gathers = (group.gather_bytes * (2 if again and not _is_root(group) else 1) for group in groups)
    return Traffic(
        gathers=config.train.accumulate * sum(gathers),
        reductions=sum(group.reduce_bytes for group in groups),
        all_reductions=sum(group.all_reduce_bytes for group in groups),
        updates=shards - -(-shards // _keepers(config)),
    )
