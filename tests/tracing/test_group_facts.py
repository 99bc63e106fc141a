"""What is said about groups is what they are: bytes as counted on the wire and in memory, for every API and mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard.layout.segments
from fullshard import (
    ConfigurationError,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    plan_groups,
    replicate,
)
from fullshard.tracing.group_facts import facts_of_groups, group_facts
from fullshard.tracing.planned_facts import planned_facts
from fullshard.tracing.schema import GroupFacts
from fullshard.transport.comm_objects import DefaultAllGather, DefaultReduceScatter
from fullshard.wrap import ModuleWrapPolicy
from tests.helpers.fake import fake_world
from tests.helpers.models import Block, ModelOptions, make_decoder, tokens_for
from tests.helpers.traffic import ALL_REDUCE, EXCHANGE, GATHER, REDUCE_SCATTER, Traffic

BF16, FP32 = torch.bfloat16, torch.float32
ODD = ModelOptions(width=5, hidden=7, scalar=True, frozen=("norm.bias",))


def functional(model: Any, replicas: int = 1, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (4,))
    if replicas > 1:
        shape = replicas, 4 // replicas
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def narrow(model: Any) -> nn.Module:
    return functional(model, mp_policy=MixedPrecisionPolicy(BF16, FP32, wire_dtype=BF16))


def mixed(model: Any) -> nn.Module:
    return functional(model, mp_policy=MixedPrecisionPolicy(BF16, FP32))


def hybrid(model: Any) -> nn.Module:
    return functional(model, replicas=2, mp_policy=MixedPrecisionPolicy(BF16))


def comm_objects(model: Any) -> nn.Module:
    functional(model)
    for module in (model, *model.blocks):
        module.set_custom_all_gather(DefaultAllGather())
        module.set_custom_reduce_scatter(DefaultReduceScatter())
    return model  # type: ignore[no-any-return]


def wrapper(model: Any, **options: Any) -> nn.Module:
    policy = ModuleWrapPolicy({Block})
    options = {"use_orig_params": True, **options}
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)


def wrapper_mixed(model: Any) -> nn.Module:
    return wrapper(model, mixed_precision=MixedPrecision(BF16, FP32))


def wrapper_unsharded(model: Any) -> nn.Module:
    return wrapper(model, sharding_strategy=ShardingStrategy.NO_SHARD)


def replicas_only(model: Any) -> nn.Module:
    for block in model.blocks:
        replicate(block)
    return replicate(model)


APIS: list[Callable[[Any], nn.Module]] = [
    functional,
    narrow,
    mixed,
    hybrid,
    comm_objects,
    wrapper,
    wrapper_mixed,
    wrapper_unsharded,
    replicas_only,
]


def sent(sizes: Counter[int], ranks: int, share: Callable[[int, int], int]) -> int:
    return sum(share(nbytes, ranks) * count for nbytes, count in sizes.items())


def of_others(nbytes: int, ranks: int) -> int:
    return nbytes - nbytes // ranks


def there_and_back(nbytes: int, ranks: int) -> int:
    return 2 * (ranks - 1) * nbytes // ranks


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("options", [ModelOptions(), ODD], ids=["even", "odd"])
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.__name__)
def test_bytes_are_those_on_the_wire_and_in_memory(
    monkeypatch: pytest.MonkeyPatch,
    api: Callable[[Any], nn.Module],
    options: ModelOptions,
    in_place: bool,
) -> None:
    monkeypatch.setattr(fullshard.layout.segments, "IN_PLACE_FROM", 0 if in_place else 1 << 40)
    with fake_world(4):
        model: Any = api(make_decoder(options))
        facts = group_facts(model)
        loss = model(tokens_for(0, 2))
        with Traffic() as forward:
            model(tokens_for(0, 2))
        with Traffic() as backward:
            loss.backward()
        pairs = facts_of_groups(model)
    assert [after for _, after in pairs] == list(facts), "they are known before anything runs"
    assert len(facts) == 4
    ranks, copies = facts[0].world, facts[0].replicas
    received = sum(each.gather_bytes for each in facts)
    assert received == sent(forward.sizes(GATHER), ranks, of_others)
    reductions = backward.sizes(REDUCE_SCATTER) + backward.sizes(EXCHANGE)
    assert sum(each.reduce_bytes for each in facts) == sent(reductions, ranks, of_others)
    all_reductions = sent(backward.sizes(ALL_REDUCE), copies, there_and_back)
    assert sum(each.all_reduce_bytes for each in facts) == all_reductions
    assert received or ranks == 1
    for group, each in pairs:
        assert each.gathered_bytes == group.routes.from_shards.codec.nbytes
        assert each.shard_bytes == group.shards.buffer.nbytes
        assert each.numel == sum(param.shape.numel() for param in originals(each, options))


def originals(facts: GroupFacts, options: ModelOptions) -> list[nn.Parameter]:
    """The parameters that a group should have, of the model before it was sharded."""
    model = make_decoder(options)
    if facts.name != "root":
        return list(model.get_submodule(facts.name).parameters())
    return [p for name, p in model.named_parameters() if not name.startswith("blocks")]


def test_a_model_without_memory_has_the_same_facts() -> None:
    with fake_world(4):
        real = group_facts(mixed(make_decoder(ODD)))
        with torch.device("meta"):
            model = make_decoder(ODD)
        assert group_facts(mixed(model)) == real


def test_one_block_by_hand() -> None:
    """up: (13, 6) and 13; down: (6, 13) and 6; norm: 6 and 6, over 4 ranks."""
    with fake_world(4):
        block = group_facts(mixed(make_decoder()))[1]
    row = 4 * 6 + 4 + 2 * 13 + 2 + 2 + 2  # up, its bias, down, its bias, norm
    aligned = 24 + 8 + 32 + 8 + 8 + 8
    assert block == GroupFacts(
        name="blocks.0",
        modules=("blocks.0",),
        parameters=6,
        numel=13 * 6 + 13 + 6 * 13 + 6 + 6 + 6,
        padded_numel=4 * row,
        shard_bytes=4 * aligned,
        gathered_bytes=block.gathered_bytes,
        gather_bytes=3 * 2 * aligned,
        reduce_bytes=3 * 4 * aligned,
        all_reduce_bytes=0,
        param_dtype="float32",
        compute_dtype="bfloat16",
        reduce_dtype="float32",
        wire_dtype="float32",
        world=4,
        replicas=1,
        division="rows",
        flat_padded_numel=188,  # 187 elements, over 4 ranks
        # Both matrices along the dimension of 13: 4 on each rank.
        balanced_padded_numel=4 * (4 * 6 + 4 + 6 * 4 + 2 + 2 + 2),
        halved_padded_numel=2 * (7 * 6 + 7 + 3 * 13 + 3 + 3 + 3),
    )


def test_dtypes_say_how_gradients_travel_and_are_summed() -> None:
    with fake_world(4):
        block = group_facts(narrow(make_decoder()))[1]
    assert (block.compute_dtype, block.reduce_dtype, block.wire_dtype) == (
        "bfloat16",
        "float32",
        "bfloat16",
    )
    with fake_world(4):
        frozen = group_facts(functional(make_decoder(replace(ODD, frozen=("",)))))[1]
        some = group_facts(functional(make_decoder(replace(ODD, frozen=("norm.bias",)))))[1]
    assert (frozen.reduce_bytes, frozen.reduce_dtype, frozen.wire_dtype) == (0, "", "")
    assert frozen.trained_share == 0
    assert some.trained_share == 1 - ODD.width / some.numel


def test_groups_are_in_the_order_of_forward_once_it_is_known() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](self.layers[1](x))  # type: ignore[no-any-return]

    with fake_world(2):
        model = Backwards()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        assert [each.name for each in group_facts(model)] == ["layers.0", "layers.1"]
        model(torch.ones(1, 4))
        assert [each.name for each in group_facts(model)] == ["layers.1", "layers.0"]


def test_modules_of_one_group_are_named_together() -> None:
    with fake_world(2):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        fully_shard([model[0], model[1]])
        fully_shard(model)
        root, both = group_facts(model)
    assert (root.modules, both.name, both.modules) == (("",), "0, 1", ("0", "1"))


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="nothing in this Linear is"):
        group_facts(nn.Linear(2, 2))


class Tied(nn.Module):
    """A model whose head may have the embedding's weight."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        layers = (nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(6))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(16, 50, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Nobody calls it, but a plan is for modules that have one."""
        return tokens


def by_layers(model: Tied) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def wrapped(model: Tied) -> nn.Module:
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_sharded_model_has_the_plan_of_the_model_before(is_tied: bool) -> None:
    with fake_world(4):
        plan = plan_groups(Tied(is_tied=is_tied))
        expected = [(group.modules, group.num_bytes) for group in plan.groups]
        assert (("embed",) in dict(expected)) != is_tied
        for shard in (by_layers, wrapped, lambda model: plan_groups(model).apply()):
            facts = planned_facts(shard(Tied(is_tied=is_tied)))
            assert [(each.modules, each.gathered_bytes) for each in facts] == expected
