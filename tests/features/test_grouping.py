"""Plans of groups: what is merged, what is apart, what stays with the root, and why.

Models are on the meta device where nothing runs; sizes are in bytes of float32 unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import (
    ConfigurationError,
    GroupPlan,
    LifecycleError,
    MixedPrecisionPolicy,
    fully_shard,
    plan_groups,
)
from fullshard.engine.state import state_of
from tests.helpers.fake import fake_world
from tests.helpers.module_trees import Bag, Custom, Leaf, Net, layers


def names(plan: GroupPlan) -> list[tuple[str, ...]]:
    """Modules of all groups but the root's."""
    return [group.modules for group in plan.groups[1:]]


@pytest.fixture(autouse=True)
def on_meta() -> Iterator[None]:
    with torch.device("meta"):
        yield


# --- what forms a group ---------------------------------------------------------------------------


def test_small_layers_are_merged_into_groups_of_an_eighth() -> None:
    plan = plan_groups(Net(layers=layers(48, 400)))
    assert names(plan) == [tuple(f"layers.{6 * i + j}" for j in range(6)) for i in range(8)]
    assert {group.num_bytes for group in plan.groups[1:]} == {2400}
    assert plan.peak_bytes == 4800


def test_merging_ends_at_min_bytes_in_large_models() -> None:
    plan = plan_groups(Net(layers=layers(48, 400)), min_bytes=800)
    assert [len(modules) for modules in names(plan)] == [2] * 24


def test_layers_of_enough_bytes_stand_alone_and_so_do_large_embeddings_and_heads() -> None:
    model = Net(embed=Leaf(400), layers=layers(4, 100), norm=Leaf(8), head=Leaf(400))
    plan = plan_groups(model, min_bytes=64)
    expected = [("embed",), *[(f"layers.{i}",) for i in range(4)], ("head",)]
    assert names(plan) == expected
    assert plan.groups[0].modules == ("",) and plan.groups[0].num_bytes == 8
    assert plan.peak_bytes == 8 + 400 + 100


def test_groups_of_unequal_layers_all_reach_the_target() -> None:
    sizes = [120, 120, 140, 130, 800, 20]  # cut evenly, the fourth would stand alone
    model = Net(layers=nn.ModuleList(Net(leaf=Leaf(size)) for size in sizes))
    assert [len(modules) for modules in names(plan_groups(model, min_bytes=200))] == [2, 2, 2]


def test_what_remains_of_a_run_joins_its_last_group_or_stays_with_the_root() -> None:
    plan = plan_groups(Net(layers=layers(9, 100), tail=nn.Sequential(Leaf(40))), min_bytes=300)
    assert [len(modules) for modules in names(plan)] == [2, 2, 2, 2, 2]
    assert names(plan)[-1] == ("layers.8", "tail.0"), "containers of one module are neighbours"
    apart = Net(body=Net(layers=layers(9, 100)), end=Net(tail=nn.Sequential(Leaf(40))))
    plan = plan_groups(apart, min_bytes=300)
    assert plan.groups[0].num_bytes == 40


def test_modules_around_a_trunk_are_no_neighbours() -> None:
    model = Net(
        before=Net(leaf=Leaf(80)), trunk=Net(layers=layers(4, 200)), after=Net(leaf=Leaf(80))
    )
    assert names(plan_groups(model)) == [(f"trunk.layers.{i}",) for i in range(4)]


def test_attributes_are_merged_like_entries() -> None:
    model = Net(**{f"block{i}": Net(leaf=Leaf(40)) for i in range(24)})
    assert [len(modules) for modules in names(plan_groups(model))] == [3] * 8


def test_a_dict_of_one_class_has_layers_and_another_is_a_namespace() -> None:
    same = Net(layers=nn.ModuleDict({str(i): Leaf(40) for i in range(16)}))
    assert [len(modules) for modules in names(plan_groups(same))] == [2] * 8
    mixed = nn.ModuleDict({"embed": Leaf(20), "h": layers(16, 40), "norm": nn.LayerNorm(1)})
    plan = plan_groups(Net(transformer=mixed))
    assert plan.groups[0].num_bytes == 20 + 8
    assert names(plan)[0] == ("transformer.h.0", "transformer.h.1", "transformer.h.2")


def test_modules_without_a_forward_and_containers_never_have_a_group() -> None:
    bag = Bag(layers=layers(3, 800), other=Net(leaf=Leaf(800)))
    nested = nn.ModuleList([nn.ModuleList([Net(leaf=Leaf(800))]), nn.Sequential(Leaf(800))])
    plan = plan_groups(Net(bag=bag, nested=nested))
    assert names(plan) == [
        ("bag.layers.0",),
        ("bag.layers.1",),
        ("bag.layers.2",),
        ("bag.other",),
        ("nested.0.0",),
        ("nested.1.0",),
    ]


def test_a_sequential_with_a_forward_of_its_own_is_an_ordinary_module() -> None:
    model = Net(parts=nn.ModuleList(Custom(Leaf(40), Leaf(40)) for _ in range(4)))
    assert names(plan_groups(model)) == [(f"parts.{i}",) for i in range(4)]


def test_the_root_may_be_a_sequential() -> None:
    model = nn.Sequential(*[Leaf(40) for _ in range(16)])
    assert names(plan_groups(model)) == [(f"{i}", f"{i + 1}") for i in range(0, 16, 2)]


# --- what is too large ----------------------------------------------------------------------------


def moe_layer() -> Net:
    experts = nn.ModuleList(Leaf(1000) for _ in range(4))
    return Net(norm=Leaf(8), attention=Leaf(600), moe=Net(router=Leaf(40), experts=experts))


def test_a_layer_larger_than_max_bytes_is_divided_but_lists_in_it_are_not() -> None:
    plan = plan_groups(
        Net(layers=nn.ModuleList([moe_layer(), moe_layer()])), min_bytes=400, max_bytes=4000
    )
    first = [("layers.0",), ("layers.0.attention",), ("layers.0.moe",)]
    assert names(plan)[:3] == first
    sizes = [group.num_bytes for group in plan.groups[1:4]]
    assert sizes == [8, 600, 4040]
    rest, part, whole = (group.reason for group in plan.groups[1:4])
    assert rest == "larger than 3.91 KiB: what is left of it"
    assert part == "part of a module larger than 3.91 KiB"
    assert whole == "larger than 3.91 KiB, but nothing in it is safe to split off"
    assert plan.peak_bytes == 8 + 4040 + 8 + 600, "in backward, the second gives way to the first"


def test_a_divided_layer_without_a_remainder_has_no_group() -> None:
    whole = Net(a=Leaf(400), b=Leaf(400))
    plan = plan_groups(Net(layers=nn.ModuleList([whole])), min_bytes=80, max_bytes=500)
    assert names(plan) == [("layers.0.a",), ("layers.0.b",)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.MultiheadAttention(8, 2),
        lambda: nn.TransformerEncoderLayer(8, 2, 16),
        lambda: nn.TransformerDecoderLayer(8, 2, 16),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8, device="cpu")),
        lambda: type("MyAttention", (nn.MultiheadAttention,), {})(8, 2),
    ],
)
def test_nothing_inside_of_torch_s_own_layers_has_a_group(make: Any) -> None:
    layer = make()
    assert names(plan_groups(layer, min_bytes=1, max_bytes=1)) == []
    inner = Net(layers=nn.ModuleList([Net(norm=Leaf(8), inner=layer)]))
    plan = plan_groups(inner, min_bytes=1, max_bytes=1)
    assert names(plan) == [("layers.0.norm",), ("layers.0.inner",)]


def test_torch_s_transformers_are_looked_into() -> None:
    plan = plan_groups(nn.Transformer(8, 2, 4, 4, 16, batch_first=True))
    assert {name.rpartition(".")[0] for modules in names(plan) for name in modules} == {
        "encoder.layers",
        "decoder.layers",
    }


# --- shared, ignored and sharded parameters -------------------------------------------------------


def test_tied_embeddings_stay_with_the_root() -> None:
    model: Any = Net(embed=Leaf(400), layers=layers(4, 100), head=Leaf(400))
    model.head.weight = model.embed.weight
    plan = plan_groups(model)
    assert names(plan) == [(f"layers.{i}",) for i in range(4)]
    assert plan.groups[0].num_params == 1 and plan.groups[0].num_bytes == 400
    assert plan.groups[0].reason == "what is left; embed, head: embed.weight is shared"


def test_layers_that_share_a_module_stay_with_the_root() -> None:
    model: Any = Net(layers=layers(6, 100))
    model.layers[4].extra = model.layers[1].extra = Leaf(40)
    plan = plan_groups(model)
    assert names(plan) == [(f"layers.{i}",) for i in (0, 2, 3, 5)]
    assert "layers.1, layers.4: layers.1.extra.weight is shared" in plan.groups[0].reason


def test_a_layer_that_is_also_inside_of_another_stays_with_the_root() -> None:
    model: Any = Net(layers=layers(6, 100), shared=nn.ModuleList([Leaf(100)]))
    model.layers[2].extra = model.shared[0]
    assert names(plan_groups(model)) == [(f"layers.{i}",) for i in (0, 1, 3, 4, 5)]


def test_a_layer_that_is_used_several_times_is_one_layer() -> None:
    layer = Net(leaf=Leaf(400))
    model = Net(layers=nn.ModuleList([layer] * 12), others=layers(4, 400))
    expected = [("layers.0",), *[(f"others.{i}",) for i in range(4)]]
    assert names(plan_groups(model)) == expected


def test_parts_of_a_divided_layer_that_share_go_back_to_that_layer() -> None:
    part: Any = Net(a=Leaf(400), b=Leaf(400), c=Leaf(400))
    part.b.weight = part.a.weight
    plan = plan_groups(Net(layers=nn.ModuleList([part])), min_bytes=80, max_bytes=500)
    assert names(plan) == [("layers.0",), ("layers.0.c",)]
    assert plan.groups[1].reason.endswith("; layers.0.a, layers.0.b: layers.0.a.weight is shared")


def test_kept_modules_and_their_insides_have_no_groups() -> None:
    experts = nn.ModuleList(Net(leaf=Leaf(400)) for _ in range(4))
    model: Any = Net(moe=Net(router=Leaf(40), experts=experts), head=Leaf(400))
    assert len(names(plan_groups(model))) == 5
    by_object = plan_groups(model, keep_with_parent=[experts])
    assert names(by_object) == [("head",)]
    assert names(plan_groups(model, keep_with_parent=[Leaf])) == [
        (f"moe.experts.{i}",) for i in range(4)
    ]


def test_ignored_parameters_do_not_count() -> None:
    model: Any = Net(embed=Leaf(400), layers=layers(4, 100))
    plan = plan_groups(model, ignored_params=[model.embed.weight])
    assert names(plan) == [(f"layers.{i}",) for i in range(4)]
    assert plan.num_bytes == 400


def test_modules_that_are_sharded_already_are_left_alone() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        model: Any = Net(tower=Net(leaf=Leaf(400)), layers=layers(17, 100))
        fully_shard(model.tower, mesh=mesh)
        fully_shard(model.layers[0], mesh=mesh)
        plan = plan_groups(model)
        assert names(plan) == [(f"layers.{i}", f"layers.{i + 1}") for i in range(1, 17, 2)]
        assert plan.num_bytes == 1600
        plan.apply(mesh=mesh)


# --- sizes ----------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_compute_dtype() -> None:
    model: Any = Net(layers=layers(4, 400), other=Leaf(40))
    model.other.counts = nn.Parameter(torch.empty(5, dtype=torch.int64), requires_grad=False)
    plan = plan_groups(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    assert [group.num_bytes for group in plan.groups] == [20 + 40, *[200] * 4]
    assert [group.num_elements for group in plan.groups] == [10 + 5, *[100] * 4]


# --- text and errors ------------------------------------------------------------------------------

EXPLANATION = """\
Net has 2.87 KiB of parameters in 6 groups; at most 1.58 KiB are gathered at a time.

groups  modules  elements  gathered                        why
   1 x        1       185     740 B  (root)                what is left; embed, head: embed.weight is shared
   5 x        2       110     440 B  layers.0 to layers.9  merged to reach 368 B (1/8 of the model)

Smaller than 400 B, so that latency counts: 0 of 6.
Merged modules stay gathered from the first to the last of them; if one does not run, to the end of forward."""


def test_the_explanation_says_what_and_why() -> None:
    model: Any = Net(embed=Leaf(700), layers=layers(10, 220), norm=Leaf(40), head=Leaf(700))
    model.head.weight = model.embed.weight
    assert str(plan_groups(model, min_bytes=400)) == EXPLANATION


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"min_bytes": 0}, "1 <= min_bytes <= max_bytes, got 0 and"),
        ({"min_bytes": 9, "max_bytes": 8}, "got 9 and 8"),
        ({"min_bytes": 1.5}, "got 1.5"),
        (
            {"mp_policy": torch.bfloat16},
            "must be an instance of fullshard.MixedPrecisionPolicy, got torch.bf",
        ),
        ({"keep_with_parent": [int]}, "modules that the model contains, .* got \\['int'\\]"),
        ({"keep_with_parent": [Leaf(4)]}, "got \\['a Leaf'\\]"),
    ],
)
def test_wrong_arguments_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan_groups(Net(leaf=Leaf(40)), **kwargs)


@pytest.mark.parametrize("model", [nn.ModuleList([nn.Linear(2, 2)]), Leaf, 3])
def test_only_modules_with_a_forward_are_planned(model: Any) -> None:
    with pytest.raises(ConfigurationError, match="must have a forward, got"):
        plan_groups(model)


def test_without_parameters_there_is_nothing_to_plan() -> None:
    with pytest.raises(ConfigurationError, match="needs parameters to shard, but Net has none"):
        plan_groups(Net(act=nn.ReLU()))
    leaf = Leaf(40)
    with pytest.raises(ConfigurationError, match="needs parameters to shard"):
        plan_groups(Net(leaf=leaf), ignored_params=[leaf.weight])


def test_a_plan_is_applied_once_and_to_the_model_it_was_made_for() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        model: Any = Net(layers=layers(4, 100))
        plan, other = plan_groups(model), plan_groups(model)
        model.layers.append(Leaf(400))
        with pytest.raises(LifecycleError, match="have changed or are sharded now"):
            plan.apply(mesh=mesh)
        assert not any(state_of(module) for module in model.modules())
        del model.layers[-1]
        assert plan.apply(mesh=mesh) is model
        with pytest.raises(LifecycleError, match="have changed or are sharded now"):
            other.apply(mesh=mesh)
        with pytest.raises(ConfigurationError, match="needs parameters to shard"):
            plan_groups(model)
