"""What ranks hold, put together by its shardings, is the model: with both APIs, over any ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fullshard import (
    CheckpointError,
    ConfigurationError,
    FullyShardedDataParallel,
    LifecycleError,
    MixedPrecision,
    fully_shard,
)
from fullshard.checkpoint.state.local_state import LocalModelState
from fullshard.layout.param_shardings import dtensor_sharding
from fullshard.mesh.axes import ProcessGroupAxes, ranks_by_replica
from tests.helpers.checkpoints import Snapshot, snapshot, source_of
from tests.helpers.compare import assert_equal
from tests.helpers.fake import fake_world
from tests.helpers.groups import alone
from tests.helpers.odd_nets import (
    APIS,
    APIS_OF_FOUR,
    make_odd_net,
    odd_loss,
    odd_net_behind,
    wrapped_odd_net,
)

CASES = [
    *((api, ranks) for api in APIS for ranks in (1, 3)),
    *((api, 4) for api in ("fully_shard", "wrapper", "flat wrapper", *APIS_OF_FOUR)),
]


def local_state(model: nn.Module) -> LocalModelState:
    return LocalModelState(model, "save")


def held_behind(api: str) -> Snapshot:
    return snapshot(odd_net_behind(api))


@pytest.mark.parametrize(("api", "ranks"), CASES)
def test_what_ranks_hold_is_the_model(world, api: str, ranks: int) -> None:
    source = source_of(world(ranks).run(held_behind, api))
    assert source.tied == {
        "alias.weight": "norm.weight",
        "alias.bias": "norm.bias",
        "tail.weight": "head.weight",
    }
    found = dict(source.whole)
    expected = make_odd_net().state_dict()
    extra = bytes(found.pop("model/middle._extra_state").tolist())
    assert b'"seed": 0' in extra and expected.pop("middle._extra_state")
    assert found.keys() == {f"model/{name}" for name in expected if name not in source.tied}
    assert_equal(found, {key: expected[key.removeprefix("model/")] for key in found})


def test_local_tensors_are_the_memory_itself() -> None:
    for api in ("none", "fully_shard", "wrapper", "flat wrapper"):
        with alone():
            model = odd_net_behind(api)
            before = {tensor.key: tensor.local for tensor in local_state(model).tensors}
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(1.0)
            weight = make_odd_net().pixels.weight + 1
            assert torch.equal(before["model/pixels.weight"], weight), api


def test_parts_are_blocks_of_the_model_s_tensor_and_views() -> None:
    weight = make_odd_net().pixels.weight.data
    for rank in range(3):
        with fake_world(3, rank):
            model = odd_net_behind("wrapper")
            (tensor,) = (
                each for each in local_state(model).tensors if each.key == "model/pixels.weight"
            )
            assert tensor.sharding.order == (0, 2, 3, 1)
            for block, view in tensor.parts():
                place = tuple(slice(a, b) for a, b in zip(block.start, block.stop, strict=True))
                assert torch.equal(view, weight[place])
                assert tensor.local is not None
                assert (
                    view.untyped_storage().data_ptr() == tensor.local.untyped_storage().data_ptr()
                )


# --- shardings -----------------------------------------------------------------------------------------


def test_thousands_of_ranks_cost_no_more_than_their_number() -> None:
    with fake_world(4096, 4095):
        model = nn.Linear(8192, 4, bias=False)
        fully_shard(model)
        (tensor,) = local_state(model).tensors
        assert tensor.sharding.cuts == ((0,), (0,)) or isinstance(tensor.sharding.cuts[0], range)
        assert tensor.local is None  # 4 rows, 4096 ranks
        wrapped = FullyShardedDataParallel(nn.Linear(8192, 4), device_id=torch.device("cpu"))
        weight, bias = local_state(wrapped).tensors
        assert weight.sharding.cuts == (range(0, 32768, 9),)
        assert bias.sharding.cuts == (range(-32768, 4, 9),)
        assert weight.sharding.holders is bias.sharding.holders


def test_axes_that_cut_one_dimension_cut_one_after_the_other() -> None:
    """The tensor-parallel axis first, and then what a rank has there is sharded."""
    for rank in range(6):
        with fake_world(6, rank):
            mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
            for rows in (0, 1, 5, 7, 8, 12):
                whole = torch.arange(float(rows))
                model = nn.LayerNorm(1, bias=False)
                model.weight = nn.Parameter(
                    distribute_tensor(whole, mesh["tp"], [Shard(0)], src_data_rank=None)
                )
                fully_shard(model, mesh=mesh["dp"])
                (tensor,) = local_state(model).tensors
                mine = whole.tensor_split([-(-rows // 2)])[rank % 2]
                size = -(-len(mine) // 3)
                expected = mine[rank // 2 * size :][:size]
                assert_equal(torch.cat([torch.zeros(0), *dict(tensor.parts()).values()]), expected)
                for block, view in tensor.parts():
                    assert_equal(view, whole[block.start[0] : block.stop[0]])


def test_a_grid_is_numbered_by_its_cells() -> None:
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 2, 2))
        sharding = dtensor_sharding((5, 3), (Shard(1), Replicate(), Shard(0)), mesh)
        assert sharding.cuts == (range(0, 5, 3), range(0, 3, 2))
        assert sharding.holders == ((0, 4, 1, 5), (2, 6, 3, 7))


def test_uneven_groups_are_refused(world) -> None:
    assert all(world(4).run(uneven_groups))


def uneven_groups() -> bool:
    import torch.distributed as dist

    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    axes = ProcessGroupAxes(shard=rows[rank // 2], replicate=columns[rank in (1, 2)])
    try:
        ranks_by_replica(axes)
    except ConfigurationError as error:
        return "evenly spaced" in str(error)
    return rank in (1, 2)  # which cannot know


# --- other tensors -----------------------------------------------------------------------------------


def test_buffers_are_held_in_the_dtype_they_had() -> None:
    with alone():
        net = make_odd_net()
        shift = net.middle.shift.clone()
        model = wrapped_odd_net(net, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
        odd_loss(model, 0)
        assert net.middle.shift.dtype == torch.bfloat16
        found = local_state(model)
        tensors = {tensor.key: tensor.local for tensor in found.tensors}
        assert_equal(tensors["model/middle.shift"], shift)
        assert found.copied["model/middle.shift"] is net.middle.shift


def test_names_know_nothing_of_compilers() -> None:
    compiled = nn.Module()
    compiled.add_module("_orig_mod", nn.Linear(2, 2))  # as torch.compile does
    keys = {tensor.key for tensor in local_state(nn.Sequential(compiled)).tensors}
    assert keys == {"model/0.weight", "model/0.bias"}


def test_one_name_is_of_one_tensor() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(1))
    model.add_module("_orig_mod", nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match=r"each of these names:\n  weight\n"):
        local_state(model)


def test_dtensor_buffers_are_sharded() -> None:
    with fake_world(2, 1):
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Module()
        local = torch.ones(2)
        model.register_buffer("shared", DTensor.from_local(local, mesh, [Shard(0)]))
        (tensor,) = local_state(model).tensors
        assert tensor.sharding.cuts == (range(0, 4, 2),)
        assert torch.equal(tensor.local, local)


# --- refusals ----------------------------------------------------------------------------------------


class Strange(Tensor):
    pass


def test_what_cannot_be_saved_is_named() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        model = make_odd_net()
        model.pixels.to("meta")
        model.head.weight = nn.Parameter(torch.ones(2).as_subclass(Strange))
        summands = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        model.register_buffer("summands", summands)
        model.middle.seen = object()
        with pytest.raises(CheckpointError) as error:
            local_state(model)
        for line in (
            "pixels.bias\n  pixels.weight\nMaterialise",
            "summands: (Partial(sum),)",
            "head.weight: Strange",
            "middle._extra_state: builtins.object",
        ):
            assert line in str(error.value)


def test_models_must_rest() -> None:
    with alone():
        model: Any = odd_net_behind("fully_shard")
        model.middle.register_forward_hook(lambda *_: local_state(model))
        with pytest.raises(LifecycleError, match="save was called within forward"):
            odd_loss(model, 0)
        wrapped: Any = odd_net_behind("wrapper")
        with FullyShardedDataParallel.summon_full_params(wrapped):
            with pytest.raises(LifecycleError, match="within summon_full_params"):
                local_state(wrapped)


def is_the_same_after_forward(api: str) -> bool:
    model = odd_net_behind(api)
    before = snapshot(model)[0].digest()
    odd_loss(model, 0)  # the root stays gathered for a backward
    return snapshot(model)[0].digest() == before


@pytest.mark.parametrize("api", ["fully_shard", "wrapper", "flat wrapper"])
def test_gathered_models_come_to_rest(world, api: str) -> None:
    assert world(2).run(is_the_same_after_forward, api) == [True, True]
