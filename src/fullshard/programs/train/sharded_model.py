"""The model that a run trains, sharded by either API.

    1. build          parameters on the meta device: no memory yet
    2. recompute      replaces the forward of blocks. It comes before sharding, so that recomputing runs the forward
                      alone and gathers nothing again
    3. compile        compiles that forward. A block's hooks run outside of compiled code, and so do collectives
    4. shard          gives each rank memory for its shards. The wrapper materialises and shards group by group;
                      `fully_shard` shards first, and then only the shards get memory

Starting weights or a checkpoint fill the memory later. They see a `ShardedModel` and do not know which API was used.
"""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fullshard import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    balanced_placement,
    clip_grad_norm_,
    fully_shard,
    plan_groups,
    torch_border,
)
from fullshard.errors import ConfigurationError
from fullshard.layout.names import clean_name
from fullshard.mesh.axes import cap_timeout, default_group
from fullshard.programs.train.config import (
    ComputeSection,
    ModelSection,
    Recomputation,
    RunConfig,
)
from fullshard.programs.train.model_source import ModelSource
from fullshard.programs.train.weights import materialise
from fullshard.wrap import CustomPolicy

STRATEGIES = {
    # has replicas, gives parameters back after forward
    (False, True): ShardingStrategy.FULL_SHARD,
    (False, False): ShardingStrategy.SHARD_GRAD_OP,
    (True, True): ShardingStrategy.HYBRID_SHARD,
    (True, False): ShardingStrategy._HYBRID_SHARD_ZERO2,
}


@dataclass(frozen=True, slots=True)
class UnshardedModel:
    """Facts about a model that are lost when it is sharded."""

    num_elements: int
    num_bytes: int
    matrices: frozenset[str]
    """Names of the parameters with more than one dimension."""


class ShardedModel(ABC):
    """A sharded model, from its sharding to the end of the run."""

    def __init__(self, module: nn.Module, unsharded: UnshardedModel) -> None:
        self.module = module
        """The root module: it is called, saved and exported."""
        self.unsharded = unsharded

    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters that this rank updates: matrices, and all others.

        Told apart by the shapes of the unsharded model: the wrapper's shards are all flat.
        """
        both: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                both[clean_name(name) not in self.unsharded.matrices].append(parameter)
        return both

    def bytes_at_rest(self) -> int:
        """Return how many bytes of parameters this rank holds between steps."""
        local = (p.to_local() if isinstance(p, DTensor) else p for p in self.module.parameters())
        return sum(shard.numel() * shard.element_size() for shard in local)

    @abstractmethod
    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulate gradients on this rank within the block, without reducing them."""

    @abstractmethod
    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale the gradients down to a norm, and return their norm before: one number, the same on all ranks."""


class FullyShardModel(ShardedModel):
    """Sharded by `fully_shard`."""

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Do as `ShardedModel` says."""
        assert isinstance(self.module, FSDPModule), "fully_shard makes it one"
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Do as `ShardedModel` says."""
        return clip_grad_norm_(self.module, max_norm)


class WrappedModel(ShardedModel):
    """Sharded by `FullyShardedDataParallel`."""

    module: FullyShardedDataParallel

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Do as `ShardedModel` says."""
        with self.module.no_sync():
            yield

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Do as `ShardedModel` says."""
        return self.module.clip_grad_norm_(max_norm)


def build_model(
    config: RunConfig,
    source: ModelSource,
    device: torch.device,
    *,
    allocate: Callable[[nn.Module, torch.device], None] = materialise,
) -> ShardedModel:
    """Return the sharded model with memory for this rank's shards, which is not filled yet. All ranks call it.

    Args:
        config: The run.
        source: Its model.
        device: Device that computes.
        allocate: Gives the shards of `fully_shard` their memory.

    Raises:
        ConfigurationError: the configuration does not go together, or not with this number of ranks.
    """
    config.check(dist.get_world_size())
    mesh = make_mesh(config.sharding.replicas, device)
    model = configured(source.build(), config.model)
    unsharded = UnshardedModel(
        sum(parameter.numel() for parameter in model.parameters()),
        sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        frozenset(name for name, p in model.named_parameters() if p.ndim > 1),
    )
    blocks = source.blocks(model)
    for block in blocks:
        recompute(block, config.compute.checkpoint_activations)
    if config.compute.compile == "blocks":
        for block in blocks:
            # On the CPU inductor needs a C++ compiler, which not every machine has.
            block.compile(backend="inductor" if device.type == "cuda" else "aot_eager")
    sharded: ShardedModel
    if config.sharding.api == "fsdp1":
        sharded = WrappedModel(wrap(model, blocks, mesh, device, config), unsharded)
    else:
        sharded = FullyShardModel(shard(model, blocks, mesh, device, config, allocate), unsharded)
    return sharded


def configured(model: nn.Module, section: ModelSection) -> nn.Module:
    """Return a model on the meta device with the dtype and the frozen parameters that its section says."""
    if section.dtype == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)  # ties stay
    if section.trainable is not None:
        freeze_others(model, section.trainable)
    return model


_MATRIX_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def recompute(block: nn.Module, what: Recomputation) -> None:
    """Let a block's backward recompute activations instead of keeping them."""
    if what == "none":
        return
    options: dict[str, Any] = {}
    if what == "selective":
        options["context_fn"] = keep_expensive_results
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


def keep_expensive_results() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for a forward and its recomputation that keep results of attention and of every second product.

    These take the longest to compute. To keep all products would take most of the memory that recomputing saves.
    """
    counts = {False: 0, True: 0}
    """Numbers of matrix products, in forward and in its recomputation: both must decide alike."""

    def policy(context: Any, operation: Any, *_: object, **__: object) -> CheckpointPolicy:
        if operation in _MATRIX_PRODUCTS:
            counts[context.is_recompute] += 1
            keeps = counts[context.is_recompute] % 2 == 1
        else:
            keeps = operation in torch_border.ATTENTION_OPERATORS
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[AbstractContextManager[None], AbstractContextManager[None]]
    contexts = create_selective_checkpoint_contexts(policy)
    return contexts


def freeze_others(model: nn.Module, patterns: str) -> None:
    """Freeze the parameters whose names match none of the patterns, which are separated by spaces.

    Raises:
        ConfigurationError: a pattern matches no parameter.
    """
    wanted = patterns.split()
    names = [name for name, _ in model.named_parameters()]
    useless = [each for each in wanted if not fnmatch.filter(names, each)] or (
        [] if wanted else [""]
    )
    if useless:
        raise ConfigurationError(
            f"Each pattern of model.trainable must match names of parameters; {', '.join(map(repr, useless))} matches none. "
            f"Names are like {', '.join(names[:3])}; * stands for any characters."
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(fnmatch.fnmatchcase(name, each) for each in wanted))


def make_mesh(replicas: int, device: torch.device) -> DeviceMesh:
    """Return the ranks as (shard,), or with replicas as (replicate, shard)."""
    world = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    shape = (replicas, world // replicas)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    for axis in mesh.get_all_groups():
        cap_timeout(axis, default_group())  # run.timeout
    return mesh


def shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    device: torch.device,
    config: RunConfig,
    allocate: Callable[[nn.Module, torch.device], None],
) -> nn.Module:
    """Shard a model with `fully_shard`, and allocate this rank's shards."""
    section, policy = config.sharding, precision_policy(config.compute)
    offload = CPUOffloadPolicy() if section.offload else OffloadPolicy()
    groups = [[block] for block in blocks]
    if section.groups == "plan":
        planned = plan_groups(model, mp_policy=policy).groups[1:]
        groups = [[model.get_submodule(name) for name in group.modules] for group in planned]
    # With None the root keeps its parameters after forward, since backward needs them first.
    release = None if section.reshard_after_forward else False
    # The innermost first: a group takes the parameters that no other has taken.
    for modules in [*reversed(groups), [model]]:
        fully_shard(
            modules,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=release,
            shard_placement_fn=balanced_placement,
            fuse_gradients=config.compute.fuses_gradients(device.type),
        )
    if section.prefetch != 1:  # the engine's own depth
        set_prefetch([model, *(modules[0] for modules in groups)], section.prefetch)
    allocate(model, torch.device("cpu") if section.offload else device)
    return model


def set_prefetch(modules: Sequence[nn.Module], depth: int) -> None:
    """Let each group prefetch this many groups, in forward and in backward.

    The root comes first in both: forward goes from it to the first group, backward to the last.
    """
    order: list[FSDPModule] = [each for each in modules if isinstance(each, FSDPModule)]
    for index, module in enumerate(order):
        module.set_modules_to_forward_prefetch(order[index + 1 : index + 1 + depth])
        before = order[1:index] if index else order[1:]
        module.set_modules_to_backward_prefetch(before[::-1][:depth])


def wrap(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    device: torch.device,
    config: RunConfig,
) -> FullyShardedDataParallel:
    """Shard a model with `FullyShardedDataParallel`, in the same groups."""
    section, policy = config.sharding, precision_policy(config.compute)
    wrap_policy = CustomPolicy(set(blocks).__contains__)
    if section.groups == "plan":
        wrap_policy = plan_groups(model, mp_policy=policy).wrap_policy()
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        sharding_strategy=STRATEGIES[mesh.ndim == 2, section.reshard_after_forward],
        auto_wrap_policy=wrap_policy,
        mixed_precision=MixedPrecision(
            param_dtype=policy.param_dtype,
            reduce_dtype=policy.reduce_dtype,
            wire_dtype=policy.wire_dtype,
        ),
        cpu_offload=CPUOffload(offload_params=section.offload),
        param_init_fn=partial(materialise, device=device, recurse=False),
        device_id=device,
        use_orig_params=True,
        fuse_gradients=config.compute.fuses_gradients(device.type),
    )


def precision_policy(section: ComputeSection) -> MixedPrecisionPolicy:
    """Return the dtypes of compute and of gradients on the wire. Gradients are always summed in float32."""
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if section.precision == "bf16" else None,
        reduce_dtype=torch.float32,
        wire_dtype=torch.bfloat16 if section.wire == "bf16" else None,
    )
