"""Divergences of ranks with `FullyShardedDataParallel`."""

from __future__ import annotations

import contextlib

import torch

from fullshard import (
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    ShardingStrategy,
)
from fullshard.wrap import ModuleWrapPolicy
from tests.helpers.divergences import WRAPPER, Block, Net, Training, kind, wrap
from tests.helpers.rank_programs import Rank


@kind(api=WRAPPER, names=["layers.1"], ranks=3)
def a_wrapped_rank_skips_a_layer(me: Rank) -> None:
    run = Training(me, wrap(Net()))
    run.steps(2)
    if me.diverges():
        run.net.order.remove(1)
    run.go_on()


@kind(is_variant=True, api=WRAPPER, names=["layers.1", "layers.2"])
def a_wrapped_rank_calls_equal_layers_in_another_order(me: Rank) -> None:
    run = Training(me, wrap(Net(), use_orig_params=True))
    run.steps(2)
    if me.diverges():
        run.net.order = [0, 2, 1]
    run.go_on()


@kind(is_variant=True, api=WRAPPER, names=["layers.1"])
def a_wrapped_rank_has_another_shape(me: Rank) -> None:
    Training(me, wrap(Net(width=5 if me.diverges() else 4))).go_on()


@kind(api=WRAPPER, names=["layers.0", "layers"])
def a_wrapped_rank_has_another_wrap_policy(me: Rank) -> None:
    policy = ModuleWrapPolicy({torch.nn.Linear if me.diverges() else Block})
    Training(me, wrap(Net(), auto_wrap_policy=policy)).go_on()


@kind(is_variant=True, api=WRAPPER, names=["layers", "sharding_strategy", "reshard_after_forward"])
def a_wrapped_rank_has_another_strategy(me: Rank) -> None:
    strategy = ShardingStrategy.SHARD_GRAD_OP if me.diverges() else ShardingStrategy.FULL_SHARD
    Training(me, wrap(Net(), sharding_strategy=strategy)).go_on()


@kind(is_variant=True, api=WRAPPER, names=["layers", "mixed_precision"])
def a_wrapped_rank_has_another_precision(me: Rank) -> None:
    precision = MixedPrecision(reduce_dtype=torch.bfloat16) if me.diverges() else None
    Training(me, wrap(Net(), mixed_precision=precision)).go_on()


@kind(is_variant=True, api=WRAPPER, names=["layers.1"])
def a_wrapped_rank_freezes_a_parameter(me: Rank) -> None:
    net = Net()
    layer = net.layers[1]
    (layer.second if me.diverges() else layer.first).weight.requires_grad_(False)
    Training(me, wrap(net, use_orig_params=True)).go_on()


@kind(is_variant=True, api=WRAPPER, names=["layers", "use_orig_params"])
def a_wrapped_rank_uses_original_parameters(me: Rank) -> None:
    Training(me, wrap(Net(), use_orig_params=me.diverges())).go_on()


@kind(api=WRAPPER, names=["summon_full_params", "full parameters"], odd=0)
def a_wrapped_rank_summons_full_parameters_alone(me: Rank) -> None:
    run = Training(me, wrap(Net()))
    run.steps(2)
    if me.diverges():
        with FSDP.summon_full_params(run.model):
            pass
    run.go_on()


@kind(is_variant=True, api=WRAPPER, names=["state_dict", "state dict"], odd=0)
def a_wrapped_rank_asks_for_a_state_dict(me: Rank) -> None:
    run = Training(me, wrap(Net()))
    run.steps(2)
    if me.diverges():
        run.model.state_dict()
    run.go_on()


@kind(api=WRAPPER, names=["optim_state_dict", "optimizer state"])
def a_wrapped_rank_asks_for_an_optimizer_state_dict(me: Rank) -> None:
    run = Training(me, wrap(Net()))
    run.steps(2)
    if me.diverges():
        FSDP.optim_state_dict(run.model, run.optimizer)
    run.go_on()


@kind(api=WRAPPER, names=["clip_grad_norm_", "norm"])
def a_wrapped_rank_clips_alone(me: Rank) -> None:
    run = Training(me, wrap(Net()))
    run.steps(2)
    run.loss().backward()
    if me.diverges():
        run.model.clip_grad_norm_(1.0)
    run.update()
    run.go_on()


@kind(api=WRAPPER, odd_ends="DivergenceError or LifecycleError", names=["layers", "root"])
def a_wrapped_rank_does_not_sync(me: Rank) -> None:
    run = Training(me, wrap(Net()))
    run.steps(2)
    with run.model.no_sync() if me.diverges() else contextlib.nullcontext():
        run.loss().backward()
    run.update()
    run.go_on()


@kind(is_variant=True, api=WRAPPER, names=["step"])
def a_wrapped_rank_does_not_update(me: Rank) -> None:
    run = Training(me, wrap(Net()))
    run.steps(2)
    run.loss().backward()
    if not me.diverges():
        run.update()
    run.go_on()


@kind(is_variant=True, api=WRAPPER, names=["(model 2)"])
def a_wrapped_rank_runs_equal_models_in_another_order(me: Rank) -> None:
    runs = [Training(me, wrap(Net())), Training(me, wrap(Net()))]
    for run in runs:
        run.steps(1)
    for run in reversed(runs) if me.diverges() else runs:
        run.steps(1)
    runs[0].go_on()
