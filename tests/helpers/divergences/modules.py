"""Ranks whose models or options are not equal: found before their first collective."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import fullshard
from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, replicate
from tests.helpers.divergences import Block, Net, Training, device_type, kind, shard
from tests.helpers.rank_programs import Rank

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@kind(ranks=3, names=["layers.1.first.weight"])
def a_rank_has_another_shape(me: Rank) -> None:
    Training(me, shard(Net(width=5 if me.diverges() else 4))).go_on()


@kind(is_variant=True, names=["layers.1.first.weight"])
def a_rank_has_another_shape_of_equal_size(me: Rank) -> None:
    net = Net()
    if me.diverges():
        net.layers[1].first.weight = nn.Parameter(torch.ones(2, 8))
    Training(me, shard(net)).go_on()


@kind(names=["layers.2"])
def a_rank_has_another_dtype(me: Rank) -> None:
    net = Net()
    if me.diverges():
        net.layers[2].double()
    Training(me, shard(net)).go_on()


@kind(names=["layers.0", "mp_policy"])
def a_rank_has_another_policy(me: Rank) -> None:
    Training(me, shard(Net(), mp_policy=HALF if me.diverges() else MixedPrecisionPolicy())).go_on()


@kind(is_variant=True, names=["layers.0", "reduce_dtype"], ranks=3, odd=0)
def a_rank_reduces_in_another_dtype_of_equal_size(me: Rank) -> None:
    dtype = torch.float16 if me.diverges() else torch.bfloat16
    Training(me, shard(Net(), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))).go_on()


@kind(names=["layers.1"])
def a_rank_freezes_a_parameter(me: Rank) -> None:
    net = Net()
    if me.diverges():
        net.layers[1].first.weight.requires_grad_(False)
    Training(me, shard(net)).go_on()


@kind(names=["layers.1"])
def a_rank_freezes_another_parameter_of_equal_size(me: Rank) -> None:
    net = Net()
    layer = net.layers[1]
    (layer.second if me.diverges() else layer.first).weight.requires_grad_(False)
    Training(me, shard(net)).go_on()


@kind(names=["layers.1"])
def a_rank_freezes_another_parameter_of_equal_size_later(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    layer = run.net.layers[1]
    (layer.second if me.diverges() else layer.first).weight.requires_grad_(False)
    run.go_on()


class Swapped(Block):
    """A block that registers its parameters the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self._modules = dict(reversed(self._modules.items()))


@kind(names=["layers.1"])
def a_rank_registers_parameters_in_another_order(me: Rank) -> None:
    net = Net()
    if me.diverges():
        net.layers[1] = Swapped()
    Training(me, shard(net)).go_on()


@kind(names=["layers", "root"])
def a_rank_has_another_placement(me: Rank) -> None:
    options: dict[str, Any] = {}
    if me.diverges():
        options["shard_placement_fn"] = lambda param: Shard(param.ndim - 1)
    Training(me, shard(Net(), **options)).go_on()


@kind(is_variant=True, names=["layers.1"])
def a_rank_has_other_groups(me: Rank) -> None:
    net = Net()
    skipped = net.layers[1] if me.diverges() else None
    for module in [*net.layers, net.branch]:
        if module is not skipped:
            fully_shard(module)
    fully_shard(net)
    Training(me, net).go_on()


@kind(is_variant=True, names=["layers.1"])
def a_rank_ignores_a_parameter(me: Rank) -> None:
    net = Net()
    ignored = {net.layers[1].first.weight} if me.diverges() else set()
    Training(me, shard(net, ignored_params=ignored)).go_on()


@kind(is_variant=True, names=["extra"])
def a_rank_has_one_more_module(me: Rank) -> None:
    net = Net()
    if me.diverges():
        net.head.extra = nn.Linear(3, 3)
    Training(me, shard(net)).go_on()


@kind(is_variant=True, names=["layers", "reshard_after_forward"])
def a_rank_keeps_parameters_after_forward(me: Rank) -> None:
    Training(me, shard(Net(), reshard_after_forward=not me.diverges())).go_on()


@kind(is_variant=True, names=["offload_policy of layers.1"])
def a_rank_offloads_to_the_host(me: Rank) -> None:
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if me.diverges() else {}
    Training(me, shard(Net(), **options)).go_on()


@kind(is_variant=True, names=["layers.1", "layers.0", "replicate"])
def a_rank_replicates_instead(me: Rank) -> None:
    net = Net()
    apply = replicate if me.diverges() else fully_shard
    for module in [*net.layers, net.branch, net]:
        apply(module)
    Training(me, net).go_on()


@kind(is_variant=True, names=["layers.1", "divide"])
def a_rank_divides_gradients_by_another_factor(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        run.net.layers[1].set_gradient_divide_factor(7.0)
    run.go_on()


@kind(names=["version", "fullshard"], ranks=3)
def a_rank_has_another_version(me: Rank) -> None:
    if me.diverges():
        fullshard.__version__ = "0.0.9"
    Training(me).go_on()


@kind(names=["layers", "mesh"], ranks=4, odd=2)
def a_rank_shards_over_fewer_ranks(me: Rank) -> None:
    everyone = dist.init_device_mesh(device_type(), (4,))
    pairs = dist.init_device_mesh(device_type(), (2, 2), mesh_dim_names=("outer", "inner"))
    Training(me, shard(Net(), mesh=pairs["inner"] if me.diverges() else everyone)).go_on()


@kind(is_variant=True, names=["layers.0", "prefetch"])
def a_rank_prefetches_other_modules(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        layers = run.net.layers
        layers[0].set_modules_to_forward_prefetch([layers[2], layers[1]])
    run.go_on()


@kind(names=["layers", "root"])
def a_rank_casts_its_model_later(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    if me.diverges():
        run.model.to(torch.bfloat16)
        run.batch = lambda rows=2: torch.randn(rows, 4, dtype=torch.bfloat16)  # type: ignore[method-assign]
    run.go_on()
