"""Whatever the options of the wrapper, and their combination: training equals torch's FSDP1.

Each configuration is drawn from its seed, and a failure prints it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.models import Block, ModelOptions, make_decoder
from tests.helpers.training import FULLSHARD, TORCH
from tests.helpers.wrapping import CPU, Case, train

NUM_CONFIGURATIONS = 8
NUM_FUSED = 4
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A model, how it is wrapped, and how it is trained; a value, so that it travels to the ranks."""

    ranks: int
    strategy: str
    use_orig_params: bool
    model: ModelOptions
    policy: str
    prefetch: str | None
    forward_prefetch: bool
    limit_all_gathers: bool
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    microbatches: int
    sync_every_microbatch: bool
    clip: tuple[float, float] | None
    sync_module_states: bool
    fuse_gradients: bool = False
    """Only fullshard has it. Gradients of several calls are summed in the reduce dtype."""

    @property
    def bit_for_bit(self) -> bool:
        """Sums of two, once or twice; not of norms, which torch adds up in the order of a set."""
        again = self.strategy == "NO_SHARD" and self.microbatches > 1
        return self.ranks != 3 and self.clip is None and not again and not self.fuse_gradients

    @property
    def low(self) -> torch.dtype | None:
        return (None if self.fuse_gradients else self.reduce_dtype) or self.param_dtype


def draw_configuration(seed: int) -> Configuration:
    draw = Random(seed)
    ranks = (2, 4, 3, 2)[seed % 4]
    strategies = ["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    hybrid = ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
    use_orig_params = draw.random() < 0.5
    param_dtype, reduce_dtype = draw.choice(
        [(None, None), (None, None), (BF16, FP32), (BF16, None), (BF16, BF16)]
    )
    checkpointing = draw.choice(["none", "reentrant", "non_reentrant"])
    low = param_dtype is not None
    strategy = draw.choice(hybrid if ranks == 4 else strategies)
    return Configuration(
        ranks=ranks,
        strategy=strategy,
        use_orig_params=use_orig_params,
        model=ModelOptions(
            width=draw.choice([3, 5, 7]),
            hidden=draw.choice([5, 11, 13]),
            depth=draw.randint(1, 4),
            tied=draw.random() < 0.4,
            checkpointing=checkpointing,
            # torch is off from one process where a reentrant checkpoint meets a second call.
            repeat=1 if checkpointing == "reentrant" else draw.choice([1, 1, 2]),
        ),
        # ... and fails where a reentrant checkpoint is not just around a wrapper.
        policy=draw.choice(
            ["blocks"]
            if checkpointing == "reentrant"
            else ["blocks", "blocks", "linears", "size", "none"]
        ),
        prefetch=draw.choice(["BACKWARD_PRE", "BACKWARD_POST", None]),
        forward_prefetch=draw.random() < 0.5,
        limit_all_gathers=draw.random() < 0.5,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        # Without shards, torch sums what it has summed before once more: the same but for rounding.
        microbatches=draw.choice([1, 2]) if strategy != "NO_SHARD" or not low else 1,
        # Without reduction torch accumulates in the dtype of compute, ours in that of reduction.
        sync_every_microbatch=low or draw.random() < 0.5,
        clip=draw.choice([None, None, (0.3, 2.0), (0.1, float("inf")), (1.0, 1.0)]),
        sync_module_states=draw.random() < 0.3,
    )


def case_of(configuration: Configuration) -> Case:
    low = configuration.param_dtype is not None
    return Case(
        build=functools.partial(make_decoder, configuration.model),
        wrap=functools.partial(_wrap, configuration),
        microbatches=configuration.microbatches,
        sync_every_microbatch=configuration.sync_every_microbatch,
        # Adam's first steps are as long for a small gradient as for a large one.
        optimizer="SGD"
        if low and (configuration.ranks > 2 or configuration.fuse_gradients)
        else "AdamW",
        clip=configuration.clip,
    )


def _wrap(configuration: Configuration, lib: Any, model: nn.Module, **options: Any) -> Any:
    policies = {
        "blocks": lib.ModuleWrapPolicy({Block}),
        "linears": lib.ModuleWrapPolicy({nn.Linear} if not configuration.model.tied else {Block}),
        "size": functools.partial(lib.size_based_auto_wrap_policy, min_num_params=60),
        "none": None,
    }
    if configuration.model.tied:
        policies["size"] = policies["blocks"]  # a tied parameter is in one wrapper
    if configuration.ranks == 4:
        options["device_mesh"] = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("replicate", "shard")
        )
    synchronises = configuration.sync_module_states and lib.api == FULLSHARD  # torch cannot on CPU
    if synchronises and dist.get_rank():
        for param in model.parameters():
            param.detach().fill_(dist.get_rank())
    prefetch = configuration.prefetch
    if configuration.fuse_gradients and lib.api == FULLSHARD:
        options["fuse_gradients"] = True
    return lib.FSDP(
        model,
        device_id=CPU,
        sharding_strategy=getattr(lib.ShardingStrategy, configuration.strategy),
        auto_wrap_policy=policies[configuration.policy],
        backward_prefetch=None if prefetch is None else getattr(lib.BackwardPrefetch, prefetch),
        forward_prefetch=configuration.forward_prefetch,
        limit_all_gathers=configuration.limit_all_gathers,
        sync_module_states=synchronises,
        mixed_precision=lib.MixedPrecision(
            param_dtype=configuration.param_dtype, reduce_dtype=configuration.reduce_dtype
        ),
        **options,
    )


@pytest.mark.parametrize("seed", range(NUM_CONFIGURATIONS))
def test_a_random_configuration_trains_as_with_torch(world, seed: int) -> None:
    run(world, seed, draw_configuration(seed))


@pytest.mark.parametrize("seed", range(200, 200 + NUM_FUSED))
def test_so_does_one_whose_gradients_are_written_once(world, seed: int) -> None:
    run(world, seed, replace(draw_configuration(seed), fuse_gradients=True))


def run(world: Any, seed: int, configuration: Configuration) -> None:
    try:
        world(configuration.ranks).run(train_both_and_compare, configuration)
    except AssertionError as error:
        error.add_note(f"seed {seed}: {configuration}")
        raise


def train_both_and_compare(configuration: Configuration) -> None:
    case, use_orig_params = case_of(configuration), configuration.use_orig_params
    ours, theirs = (train(api, case, use_orig_params=use_orig_params) for api in (FULLSHARD, TORCH))
    for what in ("losses", "norms", "gradients", "params", "wholes"):
        pair = getattr(ours, what), getattr(theirs, what)
        if not configuration.bit_for_bit:
            eps = 1e-6 if configuration.low is None else torch.finfo(configuration.low).eps
            assert_close(*pair, rtol=1e-4, atol=eps)
        else:
            assert_equal(*pair)
